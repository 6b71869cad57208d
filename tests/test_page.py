import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from ompq.allocation.allocator import ParetoPoint
from ompq.allocation.problem import Allocation
from ompq.amounts import in_bytes
from ompq.budgets import Budget
from ompq.network.units import Choice, Skipped
from ompq.plans import Measurement, Plan
from ompq.report.explorer import STEPS, explorer_data, solution
from ompq.report.page import render_report, without_folders, write_report
from ompq.report_sections import Accuracy, AgreementSection, Remark, Versions
from ompq.score_tables import ScoreTable
from reports import CLOSING, HOSTILE, big_plan, every_section, hostile_plan, toy_plan


class Page(HTMLParser):
    """What a browser would make of the page: tags, text and the embedded data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.data, self.scripts = "", 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        self.scripts += tag == "script" and "type" not in dict(attrs)

    def handle_data(self, data):
        if self.tags and self.attributes[-1][1].get("id") == "data":
            self.data = self.data or data
        self.texts.append(data)

    @property
    def ids(self):
        return {a["id"] for _, a in self.attributes if "id" in a}


@pytest.fixture(scope="module")
def plan():
    return toy_plan()


@pytest.fixture(scope="module")
def html(plan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ompq.report.page.STEPS", STEPS)
        return render_report(plan, every_section(), "A toy")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_every_section_has_a_link_in_the_same_order(page):
    sections = [a["id"] for tag, a in page.attributes if tag == "section"]
    links = [a["href"][1:] for tag, a in page.attributes if tag == "a"]
    parts = [name for name in links if name in sections]
    # The summary is what a reader sees first.
    assert parts == [name for name in sections if name != "summary"]


def test_the_file_is_written_whole_and_always_the_same(
    plan, html, tmp_path, monkeypatch
):
    monkeypatch.setattr("ompq.report.page.STEPS", STEPS)
    path = tmp_path / "deep" / "a.html"
    written = write_report(path, plan, results=every_section(), title="A toy")
    assert written == path
    assert path.read_text(encoding="utf-8") == html
    assert html.startswith("<!doctype html>")
    assert [p.name for p in path.parent.iterdir()] == ["a.html"]


def test_nothing_is_fetched(html):
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", html)
    assert addresses
    assert all(a.startswith(("#", "data:")) for a in addresses)
    assert "default-src 'none'" in html


def test_every_part_appears_only_with_its_data(plan, page):
    parts = {"accuracy", "blocks", "histograms", "times", "agreement", "skipped"}
    assert parts < page.ids
    bare = Page(render_report(plan))
    assert not parts & bare.ids
    assert {"summary", "explorer", "orm", "layers"} < bare.ids
    unmeasured = replace(plan, scores=ScoreTable(plan.scores.damage))
    assert "orm" not in Page(render_report(unmeasured)).ids


def test_skipped_layers_are_listed_with_their_reasons(plan):
    graph = replace(plan.graph, skipped=(Skipped("norm", "stands alone"),))
    texts = Page(render_report(replace(plan, graph=graph))).texts
    assert "norm" in texts
    assert "stands alone" in texts


def test_the_header_tells_budget_and_use(plan, page):
    text = " ".join(" ".join(page.texts).split())
    assert "A toy" in text
    assert plan.hash in text
    assert f"{plan.totals['bytes']:,.0f} bytes" in text
    assert f"{in_bytes(plan.totals['bytes'])} of 3.90 KiB" in text
    left = 3.9 * 1024 - plan.totals["bytes"]
    assert f"{left:.0f} B left" in text


def test_settings_are_a_list_of_names_and_values(html):
    (found,) = re.findall(r'<dl class="settings.*?</dl>', html, re.S)
    pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", found)
    assert pairs == [("torch conv1", "2.15"), ("seed", "0")]


def test_the_table_of_layers_has_every_unit_and_its_numbers(plan, html):
    rows = re.findall(r'<tr><td class="n wide">.*?</tr>', html, re.S)
    assert len(rows) == len(plan.graph)
    for unit, row in zip(plan.graph.units, rows, strict=True):
        assert f'scope="row">{unit.name}<' in row
        assert "×".join(map(str, unit.weight_shape)) in row
        assert f'data-v="{unit.macs}"' in row
        assert row.count("chosen") == 1


def test_the_embedded_solutions_are_those_of_the_plan(plan, page):
    data = json.loads(page.data)
    axis, bits = data["axes"]
    assert [axis["cost"], bits["cost"]] == ["bytes", "weight_bits"]
    assert len(bits["limits"]) >= 100
    assert len(axis["limits"]) >= 100
    assert axis["limits"] == sorted(axis["limits"])
    assert axis["solutions"][axis["plan"]] == data["plan"]
    assert axis["limits"][axis["plan"]] == 3.9 * 1024
    for step in (0, 40, axis["plan"], len(axis["limits"]) - 1):
        solved = plan.with_budget(f"{axis['limits'][step] / 1024!r}KiB")
        chosen = [Choice(*data["choices"][int(c)]) for c in axis["solutions"][step]]
        assert dict(zip(data["names"], chosen, strict=True)) == dict(solved.allocation)


@pytest.mark.parametrize("method", ["exact", "relax-round"])
@pytest.mark.parametrize("cost", ["bytes", "bit_ops", "weight_bits"])
def test_every_step_is_what_with_budget_gives(method, cost):
    text = {"bytes": "3.9KiB", "bit_ops": "2MBOPs", "weight_bits": "4bits"}[cost]
    own = toy_plan(text, method=method)
    axis = explorer_data(own, steps=12)["axes"][0]
    assert axis["cost"] == cost
    assert len(axis["limits"]) == 13
    reference = own.problem.costs[cost].reference
    for limit, columns in zip(axis["limits"], axis["solutions"], strict=True):
        if cost == "bytes":
            expected = own.with_budget(Budget(size_mib=limit / 2**20))
        elif cost == "bit_ops":
            expected = own.with_budget(Budget(bit_ops=limit))
        else:
            bits = limit / reference * (1 + 1e-12)
            expected = own.with_budget(Budget(average_bits=bits))
        assert columns == solution(expected)


def test_hostile_names_are_text():
    html = render_report(hostile_plan(), every_section(HOSTILE), HOSTILE)
    page = Page(html)
    images = [a for tag, a in page.attributes if tag == "img"]
    assert len(images) == 1  # the matrix
    assert images[0]["src"].startswith("data:")
    assert page.scripts == 1
    assert not any(key.startswith("on") for _, a in page.attributes for key in a)
    assert json.loads(page.data)["names"] == [HOSTILE, CLOSING]
    assert HOSTILE not in html
    assert CLOSING not in html
    assert HOSTILE in page.texts


def test_only_the_pages_own_script_may_run(html):
    script = re.search(r"<script>(.*)</script>", html, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html


def test_a_thousand_units_stay_under_two_megabytes(monkeypatch):
    network = big_plan(1000)
    rng = np.random.default_rng(1)
    curve = [
        ParetoPoint(
            limit=float(cost),
            cost=float(cost),
            damage=1 / cost,
            allocation=Allocation(
                {name: network.choices[rng.integers(7)] for name in network.graph.names}
            ),
        )
        for cost in np.linspace(1e6, 9e6, 128)
    ]
    monkeypatch.setattr(Plan, "pareto", lambda *_, **__: curve)
    html = render_report(network, every_section())
    assert len(html.encode()) < 2_000_000
    assert "each row and column is the mean of 3" in " ".join(Page(html).texts)


def test_a_result_of_another_kind_is_refused(plan):
    with pytest.raises(TypeError, match="results hold a dict; a report shows Accuracy"):
        render_report(plan, [{"name": "x"}])


def test_units_that_may_have_one_choice_are_marked_as_pinned():
    pinned = toy_plan("4.4KiB", pinned={"@first": 8, "@last": 32})
    html = render_report(pinned)
    assert html.count('<abbr title="pinned') == 2
    data = explorer_data(pinned, steps=2)
    assert [row.count("1") for row in data["allowed"]][:: len(data["names"]) - 1] == [
        1,
        1,
    ]


def test_what_was_not_compared_is_left_empty(plan):
    scores = replace(plan.scores, gamma=None, importance=None)
    html = render_report(
        replace(plan, scores=scores), [AgreementSection("net.onnx", 1.0, 8)]
    )
    assert "100.00%" in html
    assert "step<" not in html
    assert 'class="strip"' not in html


def test_average_bits_are_a_budget_like_the_others():
    text = " ".join(" ".join(Page(render_report(toy_plan("4bits"))).texts).split())
    assert "Average bits budget" in text
    assert " of 4 bits" in text


def test_choices_are_named_by_both_widths_where_inputs_have_several():
    html = render_report(toy_plan(activation_choices=(4, 8)))
    assert "W4A8" in html
    assert "inputs have" not in html


def test_the_papers_accounting_has_no_items():
    text = " ".join(Page(render_report(toy_plan(accounting="paper"))).texts)
    assert "zero points" not in text


def test_latency_is_a_budget_like_the_others():
    graph = toy_plan().graph
    table = {
        u.name: {f"W{b}A8": b / 10 for b in (2, 3, 4, 5, 6, 8)} for u in graph.units
    }
    timed = toy_plan("4ms", latency=table)
    text = " ".join(" ".join(Page(render_report(timed)).texts).split())
    assert "Latency budget" in text
    assert f"{timed.totals['milliseconds']:.2f} ms of 4.00 ms" in text


@pytest.mark.parametrize(("units", "budgets"), [(3, 128), (400, 64), (5000, 24)])
def test_large_networks_get_fewer_budgets_in_the_explorer(monkeypatch, units, budgets):
    asked = []

    def explorer(plan, steps, progress):
        asked.append(steps)
        raise InterruptedError

    monkeypatch.setattr("ompq.report.page.explorer_data", explorer)
    monkeypatch.setattr("ompq.report.page.STEPS", STEPS)
    with pytest.raises(InterruptedError):
        render_report(big_plan(units))
    assert asked == [budgets]


def test_a_refinement_is_drawn_in_its_order(plan):
    assert "refinement" not in Page(render_report(plan)).ids
    found = [("weight_noise", 0.4), ("<b>mine</b>", 0.1), ("refit 2", 0.2)]
    known = [Measurement("old", plan.allocation, 0.01, "another judge")]
    measured = [Measurement(n, plan.allocation, v, "judge") for n, v in found]
    html = render_report(replace(plan, measured=(*known, *measured)))
    page = Page(html)
    assert "refinement" in page.ids
    text = "3 allocations measured: divergence 0.4 at first, 0.1 at best (<b>mine</b>)"
    assert text in page.texts
    # From left to right; the largest is at the top, y = 0, and the least at the bottom.
    paths = [a.get("d") for tag, a in page.attributes if tag == "path"]
    assert "M16.7 0.0L50.0 100.0L83.3 100.0" in paths
    circles = [a for tag, a in page.attributes if tag == "circle"]
    assert [(a["cx"], a["cy"]) for a in circles[:3]] == [
        ("16.7", "0.0"),
        ("50.0", "100.0"),
        ("83.3", "66.7"),
    ]


def test_the_accuracy_that_was_lost_comes_first(plan):
    two = [Accuracy("float", 0.8, 0.7, 0.9, 400), Accuracy("W4", 0.7825, 0.7, 0.9, 400)]
    for results, wanted in (
        (two, ["Accuracy lost", "1.75 points", "78.25% top-1, 80.00% as float"]),
        (two[:1], ["Accuracy", "80.00%", "top-1 of 400 images"]),
        (
            [replace(two[1], answers=True)],
            ["Same answers as float", "78.25%", "of 400 inputs"],
        ),
    ):
        tiles = render_report(plan, results).partition('<dl class="tiles">')[2]
        first = re.findall(r"<d[dt][^>]*>([^<]*)<", tiles)[:3]
        assert first == wanted
    assert "Expected damage</dt>" not in render_report(plan, two)


def test_no_folder_of_the_machine_is_on_the_page(plan):
    sections = [
        Remark("file", "see /home/ada/net.py:make, C:\\Users\\ada\\a.txt"),
        Versions({"data": "~/ada/images, 10 images", "budget": "1.5MiB/2"}),
    ]
    html = render_report(plan, sections, "/home/ada/work/net.py:make")
    assert "/ada" not in html and "ada\\" not in html
    for kept in ("net.py:make", "a.txt", "images, 10 images", "1.5MiB/2"):
        assert kept in html
    assert without_folders("relative/data and http://x.org/y") == (
        "relative/data and http://x.org/y"
    )


def test_layers_that_stay_float_are_listed(plan):
    name = plan.graph.names[0]
    bits = Allocation({**plan.allocation, name: Choice(32, 8)})
    choices = (*plan.choices, Choice(32, 8))
    scores = ScoreTable(np.zeros((len(plan.graph), len(choices))))
    allowed = np.ones(scores.damage.shape, bool)
    kept = replace(
        plan, choices=choices, scores=scores, allowed=allowed, allocation=bits
    )
    html = render_report(kept)
    assert "its weights stay float: it has 32 bits in the plan" in html
