import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from files_cases import WRONG, changed_anywhere
from nets import TinyMobileNet, TinyResNet, images, seeded, values
from ompq import lab
from ompq.allocation.infeasibility import reachable
from ompq.allocation.problem import Allocation
from ompq.costs import overhead_bytes, unit_bytes
from ompq.errors import PlanError
from ompq.network.units import Choice, Skipped


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def plan(network):
    return ompq.plan(network, images(16), "3.5bits")


def test_totals_are_sums_over_units(plan):
    size = sum(unit_bytes(u, plan.allocation[u.name]).total for u in plan.graph.units)
    size += overhead_bytes(plan.graph, plan.choices)
    assert plan.totals["bytes"] == size == sum(plan.bytes_by_item.values())
    ops = sum(
        u.macs * plan.allocation[u.name].weight * plan.allocation[u.name].activation
        for u in plan.graph.units
    )
    assert plan.totals["bit_ops"] == ops
    row = plan.graph.names.index("stem")
    column = plan.choices.index(plan.allocation["stem"])
    assert plan.columns[row] == column
    assert plan.damage == pytest.approx(
        sum(d[c] for d, c in zip(plan.scores.damage, plan.columns, strict=True))
    )


def test_saved_plan_is_the_same_plan(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = ompq.Plan.load(path)
    assert loaded.hash == plan.hash
    assert loaded.allocation == plan.allocation
    assert loaded.totals == plan.totals
    np.testing.assert_array_equal(loaded.scores.orm, plan.scores.orm)
    smaller = loaded.with_budget("3bits")
    assert smaller.allocation == plan.with_budget("3bits").allocation
    assert smaller.totals["average_bits"] <= 3


def test_what_stays_float_is_saved_and_old_plans_are_read(tmp_path):
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    plan = ompq.plan(seeded(nn.Sequential(*layers)), values(8, 4), "4bits")
    path = tmp_path / "plan.json"
    plan.save(path)
    assert ompq.Plan.load(path).graph.skipped == plan.graph.skipped
    data = json.loads(path.read_text())
    (norm,) = data["graph"]["skipped"]
    assert (norm.pop("kind"), norm.pop("parameters")) == ("LayerNorm", 16)
    path.write_text(json.dumps(data))
    assert ompq.Plan.load(path).graph.skipped == (Skipped(**norm),)
    old = ompq.Plan.load(path)
    old.save(path)  # nothing is added that was not known
    assert json.loads(path.read_text())["graph"] == data["graph"]


def test_pareto_falls_and_agrees_with_single_budgets(plan):
    curve = plan.pareto(points=8)
    assert all(a.damage > b.damage for a, b in pairwise(curve))
    middle = curve[len(curve) // 2]
    low, high = reachable(plan.problem, "bytes")
    assert low <= middle.cost <= high
    again = plan.with_budget(ompq.Budget(size_mib=middle.limit / 2**20))
    assert again.damage == pytest.approx(middle.damage)


@pytest.mark.parametrize("cost", ["bytes", "bit_ops", "milliseconds"])
def test_medium_limits_lie_between_w4a4_and_w8a8_everywhere(network, cost):
    four, eight = Choice(4, 4), Choice(8, 8)
    names = ompq.trace(network, images(16)).names
    latency = {name: {"W4A4": 1.0, "W8A8": 2.5} for name in names}
    config = ompq.PlanConfig(
        choices=((4, 4), (8, 8)), score="weight_noise", latency=latency
    )
    plan = ompq.plan(network, images(16), "32bits", config).halfway(cost)
    ends = [
        plan.problem.total(cost, Allocation(dict.fromkeys(names, choice)))
        for choice in (four, eight)
    ]
    used = plan.totals[cost]
    limit = plan.budget.limits(plan.problem.costs)[cost]
    assert ends[0] < used <= limit == pytest.approx(sum(ends) / 2)
    assert set(plan.allocation.values()) == {four, eight}
    with pytest.raises(ValueError, match="cost='joules' is unknown"):
        plan.halfway("joules")


def test_explanation_names_the_unit(plan):
    assert "block1.conv1" in str(plan.explain("block1.conv1"))


def test_plan_of_another_network_says_what_differs(plan):
    other = ompq.trace(seeded(TinyMobileNet()), images())
    with pytest.raises(PlanError, match=r"made for another network: 1\d units differ"):
        plan.check_network(other)
    plan.check_network(plan.graph)


def test_files_that_are_no_plans_are_refused(plan, tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="is not a plan: there is no such file. Give"):
        ompq.Plan.load(path)
    for text, words in [
        ("{", "is not a plan: it is not JSON"),
        ("[" * 100_000, "is not a plan: it is nested too deeply"),
        ('{"format": "other"}', r"is not a plan\. Give"),
        ('{"format": ["ompq-plan/1"]}', r"is not a plan\. Give"),
        ('{"format": "ompq-plan/2"}', "is a damaged plan: plan lacks graph"),
    ]:
        path.write_text(text)
        with pytest.raises(PlanError, match=words):
            ompq.Plan.load(path)


def test_a_plan_of_a_newer_version_says_which(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"format": "ompq-plan/7", "written_by": "3.1.4"}')
    with pytest.raises(
        PlanError,
        match="has the format ompq-plan/7, written by ompq 3.1.4; this is ompq .*"
        "reads ompq-plan/2. Install that version, or plan again",
    ):
        ompq.Plan.load(path)
    path.write_text('{"format": "ompq-plan/0"}')
    with pytest.raises(PlanError, match="written by ompq of an unknown version"):
        ompq.Plan.load(path)


HUGE = int("9" * 400)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("damage",), None, "damage must be a list"),
        (("damage",), [[1.0]], "length at least 7, not a list of 1"),
        (("damage", 3), [1.0], r"damage\[3\] must be a list of length at least 6"),
        (("damage", 3, 2), "1", r"damage\[3\]\[2\] must be a finite number, not '1'"),
        (("damage", 3, 2), HUGE, r"damage\[3\]\[2\]: Number out of range"),
        (
            ("damage", 3, 2),
            float("nan"),
            r"it is not JSON \(invalid character at line",
        ),
        (("allowed", 0), [[1]] * 6, r"allowed\[0\]\[0\] must be a finite number"),
        (("allowed", 0), [0] * 6, "contradictory pins"),
        (("gamma",), [1.0] * 3, "gamma must be a list of length at least 7"),
        (("orm",), {"float32": "AAAA"}, "buffer size"),
        (("orm",), {"float32": "AAAAAA=="}, "orm must be finite numbers for"),
        (("orm",), {"float32": 5}, "float32 must be base64, not 5"),
        (("orm",), [[0.5]], "orm must be an object"),
        (("orm_labels",), "abc", "orm_labels must be a list"),
        (("choices",), [], "choices must be a list of length at least 1"),
        (("choices",), [[4, 8]] * 6, "choices must be different pairs"),
        (("choices",), [[4]] * 6, "choices must be a list of length 2 to 3"),
        (
            ("choices", 0),
            [4, 8, 2.5],
            "rate=2.5 with 4-bit weights: a rate must be above 0",
        ),
        (
            ("choices", 0),
            [8, 8, -1],
            "rate=-1 with 8-bit weights: a rate must be above 0",
        ),
        (
            ("choices", 0),
            [2**40, 8],
            r"choices\[0\] must be a whole number of at most 32",
        ),
        (("choices",), [[4, 8]] * 300, "choices must be a list of length at most 256"),
        (("budget",), 3, "budget must be text, not 3"),
        (("budget",), "3", "has no unit"),
        (("method",), 7, "method must be text"),
        (("accounting",), "free", "accounting='free' is unknown; use packed or paper"),
        (("score",), [], "score must be text"),
        (("latency",), {"stem": 3}, "stem must be an object, not 3"),
        (("latency",), {"stem": {"W2A8": -1}}, "stem W2A8 takes -1 ms"),
        (("gap",), "none", "gap must be a finite number"),
        (("target",), 4, "target must be an object or null, not 4"),
        (("graph",), [], "graph must be an object"),
        (
            ("graph", "units", 0, "macs"),
            2.5,
            r"units\[0\]\.macs must be a whole number, not 2",
        ),
        (("graph", "units", 0, "kind"), None, "kind must be text, not None"),
        (
            ("graph", "units", 0, "weight_shape"),
            ["a" * 20_000, 6_000_000],
            r"weight_shape\[0\] must be a whole number, not 'aaaa",
        ),
        (
            ("allocation", "stem"),
            {"weight": 7, "activation": 8},
            "stem are not among the 6",
        ),
        (("allocation", "more"), {"weight": 4, "activation": 8}, "bits for more"),
        (("allocation",), {"stem": {"weight": 4, "activation": 8}}, "no bits for 6 of"),
    ],
)
def test_hostile_plans_end_in_one_clear_error(plan, tmp_path, place, value, words):
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(data))
    with pytest.raises(
        PlanError, match=f"is (a damaged|not a) plan: .*{words}"
    ) as caught:
        ompq.Plan.load(path)
    assert len(str(caught.value)) < 600


def test_a_gap_is_saved_shown_and_read(plan, tmp_path):
    open_plan = replace(plan, allocation=replace(plan.allocation, gap=0.25))
    open_plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["gap"] == 0.25
    assert ompq.Plan.load(tmp_path / "plan.json").gap == 0.25
    assert "damage within 0.25 of the least)" in repr(open_plan)
    assert plan.gap == 0
    size = f"{plan.totals['average_bits']:.2f} bits a weight)"
    assert repr(plan).startswith(f"Plan({len(plan.graph)} units, 3.5bits: ")
    assert repr(plan).endswith(size)


def test_bits_are_told_over_weights_and_over_all_parameters():
    layers = nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)
    made = ompq.plan(seeded(nn.Sequential(*layers)), values(8, 4), "4bits")
    weights = 4 * 4 + 4 * 2
    used = 16 * made.allocation["0"].weight + 8 * made.allocation["2"].weight
    assert made.totals["average_bits"] == used / weights
    norm = 8  # weight and bias, float
    expected = 8 * made.totals["bytes"] / (weights + norm)
    assert made.totals["bits_per_parameter"] == expected > made.totals["average_bits"]


def test_edited_allocation_is_taken(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    data["allocation"]["stem"]["weight"] = 2
    path.write_text(json.dumps(data))
    assert ompq.Plan.load(path).allocation["stem"] == Choice(2, 8)


@pytest.mark.parametrize(
    "verb",
    [
        lambda network, wrong: ompq.refine(wrong, network, images(16)),
        lambda network, wrong: lab.reinforce(wrong, network, images(16)),
        lambda network, wrong: ompq.find_smallest(
            wrong, network, images(16), ompq.Goal(max_divergence=1)
        ),
        lambda network, wrong: ompq.save(
            ompq.quantize(network, {"*": 8}, images()), "net.safetensors", plan=wrong
        ),
        lambda network, wrong: ompq.report.layer_histograms(
            network, network, wrong, images()
        ),
        lambda _, wrong: ompq.report.write_figures("figures", wrong),
        lambda _, wrong: ompq.write_report("report.html", wrong),
    ],
)
def test_what_is_no_plan_is_named(network, verb):
    words = "plan is of type TinyResNet, not a plan; give what ompq.plan returned, or"
    with pytest.raises(TypeError, match=words):
        verb(network, network)


@pytest.mark.parametrize(
    "verb",
    [
        lambda wrong, _: ompq.plan(wrong, images(), "3bits"),
        lambda wrong, _: ompq.trace(wrong, images()),
        lambda wrong, plan: ompq.quantize(wrong, plan, images()),
        lambda wrong, plan: ompq.refine(plan, wrong, images()),
        lambda wrong, _: ompq.evaluate(wrong, [(images(), torch.zeros(8))]),
        lambda wrong, _: ompq.datasets.distilled_samples(wrong, (3, 8, 8)),
    ],
)
def test_what_is_no_network_is_named(plan, verb):
    words = r"model is of type function, not a network; give a torch.nn.Module"
    with pytest.raises(TypeError, match=words):
        verb(lambda x: x, plan)
    words = "model is of type NamedModel, not a network; give its module"
    with pytest.raises(TypeError, match=words):
        verb(ompq.load_model("ompq:demo"), plan)


def test_errors_of_plans_hold_no_characters_that_control_a_terminal(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["graph"]["units"][0]["\u202e\x1b[2J"] = 1
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(
        PlanError, match=r"units\[0\] has no field \\u202e\\x1b\[2J. Undo"
    ):
        ompq.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_at_any_place_of_a_plan_is_one_clear_error(plan, value, tmp_path):
    path, refused = tmp_path / "plan.json", 0
    plan.save(path)
    for data in changed_anywhere(json.loads(path.read_text()), value):
        path.write_text(json.dumps(data))
        try:
            _ = ompq.Plan.load(path).totals
        except PlanError as error:
            refused += 1
            assert str(error).isprintable()
    assert refused > 50


def test_a_plan_names_at_once_the_layers_that_get_no_faster(network):
    plan = ompq.plan(
        network, images(16), "3.5bits", ompq.PlanConfig(activation_choices=(32,))
    )
    assert [one.name for one in plan.no_speed_up] == [*plan.graph.names]
    assert "runtimes compute in float" in plan.no_speed_up[0].reason
    eight = ompq.plan(network, images(16), "3.5bits")
    assert eight.no_speed_up == ()
