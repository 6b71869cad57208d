"""compare, run as the program runs it."""

import json
from pathlib import Path

import numpy as np
import pytest

from cli_tools import network_file, run, run_json
from ompq.evaluation import Evaluation
from ompq.plans import Plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three plans of one network, a plan of another, and two result folders."""
    made = tmp_path_factory.mktemp("plans")
    network = (network_file(made), "--data", "random", "--samples", "8")
    run("plan", *network, "--budget", "30%", "-o", made / "a.json")
    run("replan", made / "a.json", "--budget", "40%", "-o", made / "b.json")
    noise = ("--score", "weight_noise", "--choices", "2,3,4,5,6,7,8")
    run("plan", *network, "--budget", "40%", *noise, "-o", made / "c.json")
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


def test_totals_and_differing_bits_are_those_of_the_plans(folder):
    data = run_json("compare", folder / "a.json", folder / "b.json")
    first, second = (Plan.load(folder / name) for name in ("a.json", "b.json"))
    assert [one["totals"] for one in data["plans"]] == [first.totals, second.totals]
    assert [one["hash"] for one in data["plans"]] == [first.hash, second.hash]
    expected = {
        name: [str(first.allocation[name]), str(second.allocation[name])]
        for name in first.graph.names
        if first.allocation[name] != second.allocation[name]
    }
    assert data["differing"] == expected
    assert expected


def test_each_plan_is_judged_by_every_score(folder):
    data = run_json("compare", folder / "b.json", folder / "c.json")
    plans = [Plan.load(folder / name) for name in ("b.json", "c.json")]
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


def test_the_table_shows_what_differs(folder):
    words = ("compare", folder / "a.json", folder / "b.json", folder / "b.json")
    result = run(*words, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    first, second = (Plan.load(folder / name) for name in ("a.json", "b.json"))
    count = sum(first.allocation[n] != second.allocation[n] for n in first.graph.names)
    assert lines[-1] == f"{count} of 5 layers differ in bits"
    for name in first.graph.names:
        [*row] = [line for line in lines if line.split()[:1] == [name]]
        bits = [first.allocation[name].weight, *[second.allocation[name].weight] * 2]
        expected = [bits] if bits[0] != bits[1] else []
        assert [list(map(int, line.split()[-3:])) for line in row] == expected
    quiet = run("compare", folder / "a.json", folder / "a.json", "--quiet")
    assert quiet.stdout.startswith("0 of 5 layers differ in bits; ")
    assert quiet.stdout.count("\n") == 1


def test_folders_add_accuracy_and_its_paired_difference(folder):
    result = run("compare", folder / "one", folder / "two")
    assert "50.00 % (10.00 to 90.00)" in result.stdout
    # one of four images: a quarter, with sqrt(1/4 - 1/16) / 2 or so of error
    assert "+25.00 ± " in result.stdout


def test_the_page_has_the_others_to_compare_with(folder, tmp_path):
    page = tmp_path / "both.html"
    words = ("compare", folder / "one", folder / "b.json", "-o", page)
    assert str(page) in run(*words).stdout
    text = page.read_text()
    assert "50.00%" in text
    _, _, embedded = text.partition('id="data">')
    data = json.loads(embedded.partition("</script>")[0])
    [(name, digits)] = data["others"].items()
    assert name == str(folder / "b.json")
    bits = [data["choices"][int(digit)] for digit in digits]
    plan = Plan.load(folder / "b.json")
    assert bits == [list(plan.allocation[unit]) for unit in data["names"]]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("a.json",), "one plan has nothing to be compared with; name two or more"),
        (("a.json", "other.json"), "the plan was made for another network"),
        (("a.json", "."), "has no plan.json; name a folder of ompq quantize"),
        (("a.json", "missing.json"), "missing.json"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(folder, names, words):
    result = run("compare", *(folder / name for name in names))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_broken_result_is_named(folder, tmp_path):
    (tmp_path / "plan.json").write_text((folder / "a.json").read_text())
    (tmp_path / "result.json").write_text('{"evaluation": {"top1": 1}}')
    result = run("compare", folder / "a.json", tmp_path)
    assert result.exit_code == 2
    assert "result.json holds no result: KeyError('interval')" in result.stderr
