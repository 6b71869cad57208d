"""explain, pareto, report and compare, run as the program runs them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli_tools import network_file, run, run_json
from ompq.cli.saved_plan_commands import pareto_view
from ompq.evaluation_result import Evaluation
from ompq.plans import Plan
from ompq.report_sections import StageTime, sections_to_json


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    net = (network_file(folder), "--data", "random", "--samples", "8")
    run("plan", *net, "--budget", "60%", "-o", folder / "plan.json")
    return folder / "plan.json"


def test_explain_tells_what_the_plan_tells(plan_file):
    plan = Plan.load(plan_file)
    result = run("explain", plan_file, "block.conv1")
    assert result.stdout == f"{plan.explain('block.conv1')}\n"
    quiet = run("explain", plan_file, "block.*", "--quiet")
    assert quiet.stdout.splitlines() == [
        f"{name}: {plan.allocation[name]}" for name in plan.graph.names[1:4]
    ]


def test_a_folder_stands_for_the_plan_in_it(plan_file):
    named = run("explain", plan_file, "@last")
    assert run("explain", plan_file.parent, "@last").stdout == named.stdout
    empty = run("explain", plan_file.parent / "nowhere", "@last")
    assert empty.exit_code == 2
    assert "nowhere is not a plan: there is no such file" in empty.stderr


def test_explain_as_json_names_choices(plan_file):
    plan = Plan.load(plan_file)
    [data] = json.loads(run("explain", plan_file, "@last", "--json").stdout)
    assert data["unit"] == "fc"
    assert data["choice"] == str(plan.allocation["fc"])
    row = plan.scores.damage[plan.graph.names.index("fc")]
    assert [option["damage"] for option in data["options"]] == row.tolist()
    assert [o["choice"] for o in data["options"]] == [str(c) for c in plan.choices]


def test_explain_says_which_layers_there_are(plan_file):
    result = run("explain", plan_file, "conv7")
    assert result.exit_code == 2
    assert "'conv7' matches no unit; the 5 units are stem" in result.stderr


def test_pareto_is_the_plans_curve_with_the_plan_in_it(plan_file):
    plan = Plan.load(plan_file)
    data = run_json("pareto", plan_file, "--points", "7")
    assert data["cost"] == "bytes"
    points = [row for row in data["points"] if not row["this"]]
    expected = plan.pareto("bytes", 7)
    assert [row["damage"] for row in points] == pytest.approx(
        [point.damage for point in expected]
    )
    sizes = [row["bytes"] for row in data["points"]]
    assert sizes == sorted(sizes)
    [own] = [row for row in data["points"] if row["this"]]
    assert own["damage"] == plan.damage
    assert own["allocation"] == plan.allocation.to_json()


def test_the_curve_can_follow_another_cost(plan_file):
    data = run_json("pareto", plan_file, "--points", "4", "--cost", "bit_ops")
    operations = [row["bit_ops"] for row in data["points"]]
    assert operations == sorted(operations)
    missing = run("pareto", plan_file, "--cost", "milliseconds")
    assert missing.exit_code == 2
    assert "has no latency table, so no cost milliseconds" in missing.stderr
    unknown = run("pareto", plan_file, "--cost", "onnx_bytes")
    assert "has no cost onnx_bytes; plan again with a budget" in unknown.stderr


def test_the_curve_is_a_table_that_marks_the_plan(plan_file):
    result = run("pareto", plan_file, "--points", "5", env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert len(lines) == 2 + 5 + 1
    assert sum(line.endswith("this plan") for line in lines) == 1
    assert max(map(len, lines)) <= 80


def test_the_curve_is_one_line_if_quiet(plan_file):
    quiet = run("pareto", plan_file, "--points", "3", "--quiet")
    ends = run_json("pareto", plan_file, "--points", "3")["points"]
    first, last = (f"{ends[at]['damage']:.3g}" for at in (0, -1))
    assert quiet.stdout.endswith(f": damage {first} to {last}\n")
    assert quiet.stdout.count("\n") == 1


def test_a_score_that_is_negative_has_bars_too():
    row = {"bytes": 1024.0, "percent": 1.0, "average_bits": 2.0, "bit_ops": 1e9}
    rows = [{**row, "damage": d, "this": False} for d in (-1.0, -2.0, -3.0)]
    [columns] = pareto_view("bytes", rows).body
    cells = [column.cells for column in columns]
    # evenly spaced damage, evenly spaced bars of 1 to 20
    assert ["▬" * 20, "▬" * 11, "▬"] in cells


def test_report_writes_a_page_with_results(plan_file, tmp_path):
    sections = sections_to_json([StageTime("a stage of some sort", 2.5)])
    (tmp_path / "result.json").write_text(json.dumps({"sections": sections}))
    result = run(
        *("report", plan_file, "-o", tmp_path / "net.html", "--title", "My <net>"),
        *("--results", tmp_path / "result.json"),
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'net.html'}\n"
    page = (tmp_path / "net.html").read_text()
    assert "My &lt;net&gt;" in page
    assert "a stage of some sort" in page


def test_report_writes_figures(plan_file, tmp_path):
    data = run_json("report", plan_file, "--figures", tmp_path / "figures")
    assert data["written"]
    assert all(Path(name).stat().st_size for name in data["written"])


def test_report_says_what_is_wrong(plan_file, tmp_path):
    nothing = run("report", plan_file)
    assert nothing.exit_code == 2
    assert "nothing to write: give -o FILE, --figures DIR or both" in nothing.stderr
    page = tmp_path / "net.html"
    wrong = run("report", plan_file, "-o", page, "--results", plan_file)
    assert wrong.exit_code == 2
    assert "plan.json is not a result" in wrong.stderr
    missing = run("report", tmp_path / "no.json", "-o", page)
    assert "no.json is not a plan" in missing.stderr
    assert not page.exists()


def test_figures_need_a_folder(plan_file, tmp_path):
    (tmp_path / "a.txt").write_text("")
    result = run("report", plan_file, "--figures", tmp_path / "a.txt")
    assert result.exit_code == 2
    expected = f"error: --figures {tmp_path / 'a.txt'} is a file; give a folder\n"
    assert result.stderr == expected
    below = run("report", plan_file, "--figures", tmp_path / "a.txt" / "b")
    assert "a.txt is not a writable folder" in below.stderr


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> Path:
    """Three plans of one network, a plan of another, and two results."""
    made = tmp_path_factory.mktemp("plans")
    network = (network_file(made), "--data", "random", "--samples", "8")
    run("plan", *network, "--budget", "60%", "-o", made / "a.json")
    run("replan", made / "a.json", "--budget", "70%", "-o", made / "b.json")
    noise = ("--score", "weight_noise", "--choices", "2,3,4,5,6,7,8")
    run("plan", *network, "--budget", "70%", *noise, "-o", made / "c.json")
    other = ("ompq:demo", "--data", "digits", "--samples", "8")
    run("plan", *other, "--budget", "3bits", "-o", made / "other.json")
    for name, right in (("one", [1, 1, 0, 0]), ("two", [1, 1, 1, 0])):
        (made / name).mkdir()
        (made / name / "plan.json").write_text((made / "a.json").read_text())
        result = {"evaluation": evaluation(right).to_json()}
        (made / name / "result.json").write_text(json.dumps(result))
    return made


def evaluation(right: list[int]) -> Evaluation:
    packed = np.packbits(np.array(right, dtype=bool)).tobytes()
    share = sum(right) / len(right)
    return Evaluation(share, None, 4, (0.1, 0.9), 1.0, correct=packed, fingerprint="x")


def test_totals_and_differing_bits_are_those_of_the_plans(plans):
    data = run_json("compare", plans / "a.json", plans / "b.json")
    first, second = (Plan.load(plans / name) for name in ("a.json", "b.json"))
    assert [one["totals"] for one in data["plans"]] == [first.totals, second.totals]
    assert [one["hash"] for one in data["plans"]] == [first.hash, second.hash]
    expected = {
        name: [str(first.allocation[name]), str(second.allocation[name])]
        for name in first.graph.names
        if first.allocation[name] != second.allocation[name]
    }
    assert data["differing"] == expected
    assert expected


def test_each_plan_is_judged_by_every_score(plans):
    data = run_json("compare", plans / "b.json", plans / "c.json")
    plans = [Plan.load(plans / name) for name in ("b.json", "c.json")]
    sevens = [c for c in plans[1].allocation.values() if c.weight == 7]
    table = [one["damage"] for one in data["plans"]]
    assert table[0][0] == pytest.approx(plans[0].damage)
    assert table[1][1] == pytest.approx(plans[1].damage)
    by_hand = sum(
        plans[1].scores.damage[row, plans[1].choices.index(plans[0].allocation[name])]
        for row, name in enumerate(plans[1].graph.names)
    )
    assert table[0][1] == pytest.approx(by_hand)
    assert table[0][1] >= table[1][1] or sevens  # each is best by its own score
    # the first score knows nothing of 7 bits
    assert (table[1][0] is None) == bool(sevens)


def test_the_table_shows_what_differs(plans):
    words = ("compare", plans / "a.json", plans / "b.json", plans / "b.json")
    result = run(*words, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    first, second = (Plan.load(plans / name) for name in ("a.json", "b.json"))
    count = sum(first.allocation[n] != second.allocation[n] for n in first.graph.names)
    assert lines[-1] == f"{count} of 5 layers differ in bits"
    for name in first.graph.names:
        [*row] = [line for line in lines if line.split()[:1] == [name]]
        bits = [first.allocation[name].weight, *[second.allocation[name].weight] * 2]
        expected = [bits] if bits[0] != bits[1] else []
        assert [list(map(int, line.split()[-3:])) for line in row] == expected
    quiet = run("compare", plans / "a.json", plans / "a.json", "--quiet")
    assert quiet.stdout.startswith("0 of 5 layers differ in bits; ")
    assert quiet.stdout.count("\n") == 1


def test_results_add_accuracy_and_its_paired_difference(plans):
    result = run("compare", plans / "one", plans / "two")
    assert "50.00 % (10.00 to 90.00)" in result.stdout
    # one of four images: a quarter, with sqrt(1/4 - 1/16) / 2 or so of error
    assert "+25.00 ± " in result.stdout


def test_the_page_has_the_others_to_compare_with(plans, tmp_path):
    page = tmp_path / "both.html"
    words = ("compare", plans / "one", plans / "b.json", "-o", page)
    assert str(page) in run(*words).stdout
    text = page.read_text()
    assert "50.00%" in text
    _, _, embedded = text.partition('id="data">')
    data = json.loads(embedded.partition("</script>")[0])
    [(name, digits)] = data["others"].items()
    assert name == str(plans / "b.json")
    bits = [data["choices"][int(digit)] for digit in digits]
    plan = Plan.load(plans / "b.json")
    assert bits == [plan.allocation[unit].to_json() for unit in data["names"]]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a.json",), "compare needs two or more plans; one was given"),
        (("a.json", "other.json"), "other.json are of different networks: "),
        (("a.json", "."), "has no plan.json; give a folder of ompq quantize"),
        (("a.json", "missing.json"), "missing.json"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(plans, names, words):
    result = run("compare", *(plans / name for name in names))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_broken_result_is_named(plans, tmp_path):
    (tmp_path / "plan.json").write_text((plans / "a.json").read_text())
    (tmp_path / "result.json").write_text('{"evaluation": {"top1": 1}}')
    result = run("compare", plans / "a.json", tmp_path)
    assert result.exit_code == 2
    assert "cannot be read as a result: it.evaluation lacks top5" in result.stderr


WITHOUT_TORCH = """
import sys
from ompq.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end.code
assert "torch" not in sys.modules
"""


def test_saved_plans_need_no_torch(plan_file, tmp_path):
    for words in (
        ("explain", plan_file, "@last"),
        ("replan", plan_file, "--budget", "5bits", "-o", tmp_path / "other.json"),
        ("pareto", plan_file, "--points", "3"),
        ("compare", plan_file, tmp_path / "other.json"),
    ):
        command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_scores_that_agree_have_one_column_of_damage(plans):
    same = run("compare", plans / "a.json", plans / "b.json").stdout
    assert "damage by" not in same and same.splitlines()[0].endswith(" damage")
    other = run("compare", *(plans / f"{name}.json" for name in "abc")).stdout
    title = other.splitlines()[0]
    assert "damage by 1 and 2" in title and "damage by 3" in title
