"""pareto, explain and report, run as the program runs them."""

import json
from pathlib import Path

import pytest

from cli_tools import network_file, run, run_json
from ompq.cli.saved_plans import ParetoView
from ompq.plans import Plan
from ompq.report import StageTime, sections_to_json


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    net = (network_file(folder), "--data", "random", "--samples", "8")
    run("plan", *net, "--budget", "30%", "-o", folder / "plan.json")
    return folder / "plan.json"


def test_explain_tells_what_the_plan_tells(plan_file):
    plan = Plan.load(plan_file)
    result = run("explain", plan_file, "block.conv1")
    assert result.stdout == f"{plan.explain('block.conv1')}\n"
    quiet = run("explain", plan_file, "block.*", "--quiet")
    assert quiet.stdout.splitlines() == [
        f"{name}: {plan.allocation[name]}" for name in plan.graph.names[1:4]
    ]


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
    [table] = ParetoView("bytes", rows).tables(200)
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
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
    assert "no.json is no plan" in missing.stderr
    assert not page.exists()


def test_figures_need_a_folder(plan_file, tmp_path):
    (tmp_path / "a.txt").write_text("")
    result = run("report", plan_file, "--figures", tmp_path / "a.txt")
    assert result.exit_code == 2
    expected = f"error: --figures {tmp_path / 'a.txt'} is a file; name a folder\n"
    assert result.stderr == expected
    below = run("report", plan_file, "--figures", tmp_path / "a.txt" / "b")
    assert "a.txt is not a writable folder" in below.stderr
