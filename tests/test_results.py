"""What notebooks show, and data frames."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import ompq
from nets import Chain, images, seeded
from ompq.errors import MissingExtraError
from ompq.lab.audit_command import audit_sections
from ompq.report.page import render_report
from ompq.sections import (
    Accuracy,
    BlockErrorSection,
    Histogram,
    sections_from_json,
    sections_to_json,
)
from ompq.tabular import data_frame, html_table
from reports import every_section, toy_audit, toy_plan

MODEL = seeded(Chain())
PLAN = ompq.plan(MODEL, images(), "4bits", ompq.PlanConfig(score="weight_noise"))


def test_values_are_escaped_and_long_tables_are_cut():
    rows = [{"layer": f"<b>{n}</b>", "bits": n} for n in range(120)]
    text = html_table("a & b", rows)
    assert text.startswith("<b>a &amp; b</b>")
    assert "&lt;b&gt;7&lt;/b&gt;" in text and "<b>7" not in text
    assert text.count("<tr>") == 101 and "and 20 more" in text
    assert html_table("none", []) == "<b>none</b><table><tr></tr></table>"


def test_plans_evaluations_and_networks_show_themselves():
    network = ompq.quantize(MODEL, PLAN, images())
    found = ompq.evaluate(network, ompq.Samples.of(images()), reference=MODEL)
    record = ompq.quantization_of(network)
    for one in (PLAN, found, record):
        assert one._repr_html_().startswith("<b>")
        assert "<td>" in one._repr_html_()
        assert len(repr(one)) < 200 and "\n" not in repr(one)
    assert "conv" in PLAN._repr_html_() and "conv" in record._repr_html_()
    assert repr(found).endswith("8 images)") and "agreement" in repr(found)
    assert PLAN.to_dict()["totals"] == PLAN.totals
    assert found.to_dict()["agreement"] == found.agreement
    sizes = [row["bytes"] for row in record.to_dict()]
    assert sizes == [row["bytes"] for row in PLAN.to_dict()["units"]]


def test_reprs_are_one_line_that_says_how_much_there_is(tmp_path):
    path = tmp_path / "chain.ompq.safetensors"
    ompq.save(ompq.quantize(MODEL, PLAN, images()), path)
    units, weights = len(PLAN.graph), sum(unit.weights for unit in PLAN.graph.units)
    blocks = len({unit.block for unit in PLAN.graph.units})
    expected = f"LayerGraph({units} units in {blocks} blocks, {weights:,} weights, 0 "
    assert repr(PLAN.graph).startswith(expected)
    choices = len(PLAN.choices)
    assert repr(PLAN.scores) == f"ScoreTable({units} units × {choices} choices)"
    bits = sum(
        c.weight * u.weights
        for c, u in zip(PLAN.allocation.values(), PLAN.graph.units, strict=True)
    )
    assert repr(ompq.inspect_file(path)) == (
        f"Account({path.name}: {path.stat().st_size:,} bytes, {units} units, "
        f"{bits / weights:.2f} bits a weight)"
    )
    both = ompq.Samples.of([images(), images()[:2, :, :4]])
    shapes = [str(tuple(x.shape[1:])) for x in (images(), images()[:2, :, :4])]
    assert repr(both) == f"Samples({len(images()) + 2} of {', '.join(sorted(shapes))})"


def test_data_frames_need_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[notebook\]'"):
        PLAN.to_dataframe()
    # Stands for pandas, which is not needed to test what it is given.
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert [row["name"] for row in PLAN.to_dataframe()] == ["conv", "head"]
    network = ompq.quantize(MODEL, PLAN, images())
    assert len(ompq.quantization_of(network).to_dataframe()) == 2
    found = ompq.evaluate(network, ompq.Samples.of(images()), reference=MODEL)
    assert found.to_dataframe()[0]["count"] == 8
    assert data_frame([{"a": 1}]) == [{"a": 1}]


def test_bits_may_be_a_file_or_patterns(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    expected = ompq.quantize(MODEL, PLAN, images())(images())
    for given in (str(tmp_path / "plan.json"), tmp_path / "plan.json"):
        assert torch.equal(ompq.quantize(MODEL, given, images())(images()), expected)
    mixed = ompq.quantize(MODEL, {"*": 4, "head": (8, 6)}, images())
    bits = ompq.quantization_of(mixed).allocation
    assert dict(bits) == {"conv": ompq.Choice(4, 8), "head": ompq.Choice(8, 6)}
    with pytest.raises(
        ompq.errors.QuantizationError, match=r"no bits for conv; give them, or"
    ):
        ompq.quantize(MODEL, {"head": 4}, images())


def test_a_quantized_network_is_not_quantized_again():
    network = ompq.quantize(MODEL, PLAN, images())
    for again in (
        lambda: ompq.quantize(network, PLAN, images()),
        lambda: ompq.plan(network, images(), "4bits"),
        lambda: ompq.trace(network, images()),
        lambda: ompq.reconstruct(network, network, images()),
        lambda: ompq.refine(PLAN, network, images(64)),
    ):
        with pytest.raises(
            ompq.errors.QuantizationError, match="Chain is already quantized"
        ):
            again()


def test_sections_survive_json():
    sections = every_section()
    text = json.dumps(sections_to_json(sections))
    assert sections_from_json(json.loads(text)) == sections


def test_kinds_of_sections_keep_their_names_in_files():
    kinds = {entry["section"] for entry in sections_to_json(every_section())}
    assert kinds >= {"Accuracy", "Agreement", "BlockError", "Histogram", "StageTime"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"section": "Chart"}, "section='Chart' is unknown; use Accuracy"),
        ({"name": "x"}, "section=None is unknown"),
        (
            {"section": "StageTime", "name": "x"},
            "an invalid StageTime section: .*seconds",
        ),
    ],
)
def test_what_is_no_section_is_named(entry, words):
    with pytest.raises(ValueError, match=words):
        sections_from_json([entry])


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="float: top1=80.0 .* must be ascending"):
        Accuracy("float", 80.0, 75.0, 84.0, 10)
    with pytest.raises(ValueError, match="b1: errors nan and 1.0 must be finite"):
        BlockErrorSection("b1", math.nan, 1.0)
    with pytest.raises(ValueError, match="w: 2 counts and 2 edges; .* one edge more"):
        Histogram("w", (0.0, 1.0), (1, 2))
    with pytest.raises(ValueError, match="w: the edges must be ascending"):
        Histogram("w", (0.0, 1.0, 1.0), (1, 2))


def test_an_audit_shows_its_scores_and_what_chance_gives():
    found = audit_sections(toy_audit())
    kinds = [(type(one).__name__, one.name) for one in found]
    assert kinds == [
        ("AuditedBits", "published"),
        ("AuditedBits", "wrong"),
        ("AuditedRanks", "wrong"),
        ("AuditedRanks", "chance"),
        ("AuditedRanks", "divergence by orthogonality"),
    ]
    published, wrong, ranks, chance, claim = found
    assert ranks.points == ((1.0, 0.3), (2.0, 0.1))
    assert wrong.spearman == wrong.kendall == (-1.0, -1.0, -1.0)
    assert wrong.regret == pytest.approx(2.0) and wrong.fits
    assert published.spearman is published.seconds is None and not published.fits
    assert chance.text == "Spearman 0.40 ± 0.10 (standard deviation) by random scores"
    assert claim.points == ((0.5, 0.3), (0.4, 0.1))
    assert sections_from_json(sections_to_json(found)) == found
    page = render_report(toy_plan(), found)
    assert "Audit of scores" in page
    assert page.count("-1.00 (-1.00 to -1.00)</td>") == 2
    assert '50.00%</td><td class="n">7.5</td>' in page  # top-1 and a metric
    assert "20 B (over the budget)" in page
    assert "Spearman 1.00 (1.00 to 1.00), Kendall 1.00 (1.00 to 1.00)</p>" in page
    assert '<circle cx="0.0" cy="0.0" r="2"/>' in page  # least predicted, worst true
    assert '<circle cx="100.0" cy="100.0" r="2"/>' in page
