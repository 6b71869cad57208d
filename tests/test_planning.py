import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from nets import TinyMobileNet, TinyResNet, images, seeded, tokens
from ompq import planning
from ompq.allocation import exact_search
from ompq.costs import unit_bytes
from ompq.errors import (
    BudgetError,
    InfeasibleBudgetError,
    PatternError,
    PlanError,
    ScoreError,
    TraceError,
)
from ompq.network.units import Choice


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def plan(network):
    return ompq.plan(network, images(16), "3.5bits")


def test_budget_is_met_and_nearly_used(plan):
    assert 3.2 < plan.totals["average_bits"] <= 3.5
    weights = sum(u.weights for u in plan.graph.units)
    used = sum(u.weights * plan.allocation[u.name].weight for u in plan.graph.units)
    assert plan.totals["average_bits"] == pytest.approx(used / weights)


def test_tied_units_share_their_bits(plan):
    bits = plan.allocation
    assert bits["block2.conv2"] == bits["block2.downsample.0"]


def test_several_budgets_hold_at_once(network):
    both = ompq.plan(network, images(16), "4.0bits,4.2MBOPs")
    assert both.totals["average_bits"] <= 4.0
    assert both.totals["bit_ops"] <= 4.2e6
    alone = ompq.plan(network, images(16), "4.0bits")
    assert both.damage >= alone.damage


def test_plan_is_deterministic_to_the_byte(network, plan, tmp_path):
    again = ompq.plan(network, images(16), "3.5bits")
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for each, path in zip((plan, again), paths, strict=True):
        each.save(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert plan.hash == again.hash
    assert plan.with_budget("3.6bits").hash != plan.hash


def test_pins_hold_and_later_ones_win(network):
    config = ompq.PlanConfig(pinned={"*": 4, "@first": 8, "@last": (6, 4)})
    plan = ompq.plan(network, images(16), "8bits", config)
    assert plan.allocation["stem"] == Choice(8, 8)
    assert plan.allocation["head"] == Choice(6, 4)
    assert plan.allocation["block1.conv1"] == Choice(4, 8)


def by_rate(given):
    choices, units = given.choices, given.graph.units
    return [[u.weights * 4.0**-c.bits for c in choices] for u in units]


@pytest.fixture(scope="module")
def coded(network):
    config = ompq.PlanConfig(
        score=by_rate,
        storage="coded",
        choices=(4, 8),
        rates=(1.5, 2.5, 4.5),
        pinned={"stem": 4},
    )
    return ompq.plan(network, images(4), "3bits", config)


def test_rates_and_widths_are_choices_of_one_plan(coded):
    assert [str(c) for c in coded.choices] == [
        *("C1.5A8", "C2.5A8", "W4A8", "C4.5A8", "W8A8")
    ]
    assert coded.allocation["stem"] == Choice(4, 8)
    given = {choice.rate for choice in coded.allocation.values()}
    assert given - {0.0} and given <= {0.0, 1.5, 2.5, 4.5}
    assert 2.5 < coded.totals["average_bits"] <= 3
    ops = sum(u.macs * coded.allocation[u.name].weight * 8 for u in coded.graph.units)
    assert coded.totals["bit_ops"] == ops  # bytes are what is multiplied
    assert sum(coded.bytes_by_item.values()) == coded.totals["bytes"]


def test_coded_plans_are_saved_solved_again_and_explained(coded, tmp_path):
    path = tmp_path / "plan.json"
    coded.save(path)
    assert json.loads(path.read_text())["choices"][1:3] == [[8, 8, 2.5], [4, 8]]
    again = ompq.Plan.load(path)
    assert again.allocation == coded.allocation and again.hash == coded.hash
    smaller = again.with_budget("2.9bits")
    assert smaller.totals["bytes"] < again.totals["bytes"]
    assert smaller.damage > again.damage
    points = again.pareto("bytes", 20)
    assert all(a.damage > b.damage for a, b in pairwise(points))
    unit = next(name for name, c in again.allocation.items() if c.rate)
    assert f"> {again.allocation[unit]}" in str(again.explain(unit))


def test_a_rate_can_be_pinned(network):
    config = ompq.PlanConfig(score=by_rate, pinned={"stem": Choice(8, 8, 2.5)})
    made = ompq.plan(network, images(4), "4bits", config)
    assert made.allocation["stem"] == (8, 8, 2.5)
    with pytest.raises(ValueError, match="'pinned' of PlanConfig must be patterns"):
        ompq.PlanConfig(pinned={"stem": (8, 8, 9)})


def test_a_rate_that_a_unit_cannot_have_is_refused(network):
    config = ompq.PlanConfig(score=by_rate, pinned={"stem": (8, 8, 0.5)})
    graph = ompq.trace(network, images(2))
    least = 8 * 63 / graph["stem"].weights  # 64 bytes are the shortest stream
    words = (
        f"stem: its {graph['stem'].weights} weights are too few to be coded at 0.5 "
        f"bits; give it a rate above {least:.3g}, or a width"
    )
    with pytest.raises(PlanError, match=re.escape(words)):
        ompq.plan(network, images(4), "4bits", config)
    config = replace(config, pinned={"stem": (8, 8, 1.01 * least)})
    assert ompq.plan(network, images(4), "4bits", config).allocation["stem"].rate


def test_rates_that_few_units_can_have_are_named(network, caplog):
    units = ompq.trace(network, images(2)).units
    without = [unit.name for unit in units if unit.weights * 0.02 / 8 <= 63]
    assert len(units) / 2 < len(without) < 10
    config = ompq.PlanConfig(score=by_rate, storage="coded", rates=(0.02, 4.0))
    plan = ompq.plan(network, images(4), "4bits", config)
    assert all(plan.allocation[name].rate != 0.02 for name in without)
    (record,) = caplog.records
    expected = f"{len(without)} of {len(units)} layers have too few weights to be coded"
    assert record.getMessage().startswith(f"{expected} at 0.02 bits")
    assert without[0] in record.getMessage()
    caplog.clear()
    ompq.plan(network, images(4), "4bits", replace(config, rates=ompq.PlanConfig.rates))
    assert not caplog.records  # the defaults suit networks of any size


def test_float_units_cost_four_bytes_a_weight(network):
    config = ompq.PlanConfig(pinned={"head": 32})
    plan = ompq.plan(network, images(16), "90%", config)
    assert plan.allocation["head"].weight == 32
    head = plan.graph["head"]
    assert unit_bytes(head, plan.allocation["head"]).total == 4 * (head.weights + 5) + 8


def test_activation_bits_can_be_chosen(network):
    config = ompq.PlanConfig(choices=(4, 8), activation_choices=(4, 6, 8))
    loose = ompq.plan(network, images(16), "90%", config)
    assert {c.activation for c in loose.allocation.values()} == {8}
    tight = ompq.plan(network, images(16), "90%,5MBOPs", config)
    assert min(c.activation for c in tight.allocation.values()) < 8
    assert tight.totals["bit_ops"] <= 5e6


def test_latency_budget_needs_and_uses_a_table(network):
    with pytest.raises(BudgetError, match="latency"):
        ompq.plan(network, images(16), "1ms")
    names = ompq.trace(network, images()).names
    table = {n: {f"W{b}A8": 0.1 * b for b in (2, 3, 4, 5, 6, 8)} for n in names}
    config = ompq.PlanConfig(latency=table)
    plan = ompq.plan(network, images(16), "2.5ms", config)
    assert plan.totals["milliseconds"] <= 2.5


@pytest.mark.parametrize("name", ["paper-ptq", "paper-qat"])
def test_protocols_follow_the_paper(network, name):
    config = ompq.PlanConfig.from_protocol(name)
    budget = "3bits" if name == "paper-ptq" else "6bits"
    plan = ompq.plan(network, images(16), budget, config)
    bits = [choice.weight for choice in plan.allocation.values()]
    assert plan.accounting == "paper"
    if name == "paper-ptq":
        assert set(bits) <= {2, 3, 4}
    else:
        assert bits[0] == bits[-1] == 8
        assert set(bits) <= {4, 5, 6, 7, 8}
        assert plan.scores.importance[0] == 0


def test_impossible_budget_fails_before_the_samples_are_scored(network):
    def score(*_):
        raise AssertionError("not reached")

    config = ompq.PlanConfig(score=score)
    with pytest.raises(InfeasibleBudgetError, match="cannot be met") as caught:
        ompq.plan(network, images(16), "1bits", config)
    assert caught.value.smallest > caught.value.limit
    assert caught.value.units


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"choices": ()}, "The 'choices' of PlanConfig must be weight bits"),
        ({"choices": (1, 4)}, "must be weight bits from 2 to 8"),
        (
            {"activation_choices": (9,)},
            "'activation_choices' of PlanConfig must be bits",
        ),
        ({"storage": "zip"}, "must be one of 'fixed', 'coded'"),
        ({"rates": (2.5, 9)}, "must be values that are each above 0 and at m"),
    ],
)
def test_wrong_choices_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ompq.PlanConfig(**options)


def test_wrong_pins_are_refused(network):
    with pytest.raises(PatternError, match="'nothing' matches no unit"):
        ompq.plan(network, images(), "8bits", ompq.PlanConfig(pinned={"nothing": 4}))
    for wrong in (12, "A8", 4.5, None, (4,), ("4", 8), (4, None)):
        with pytest.raises(ValueError, match="'pinned' of PlanConfig must be patterns"):
            ompq.PlanConfig(pinned={"stem": wrong})
    pins = {"block2.conv2": 4, "block2.downsample.0": 6}
    with pytest.raises(PlanError, match="block2"):
        ompq.plan(network, images(), "8bits", ompq.PlanConfig(pinned=pins))


def test_strict_makes_leftovers_an_error():
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    samples = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(TraceError, match="strict: not everything can be planned: 1 "):
        ompq.plan(seeded(network), samples, "4bits", ompq.PlanConfig(strict=True))


def test_broken_score_is_refused(network):
    config = ompq.PlanConfig(score=lambda *_: [[1.0]])
    with pytest.raises(ScoreError, match="the score returned shape"):
        ompq.plan(network, images(), "4bits", config)


def test_progress_is_told(network):
    seen = []
    ompq.plan(network, images(), "4bits", progress=lambda *step: seen.append(step[:2]))
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)


def chain(units):
    """Return a plan like that of a chain of many small layers."""
    one = ompq.trace(seeded(nn.Sequential(nn.Linear(4, 4))), torch.zeros(1, 4))["0"]
    names = [f"layers.{number}.linear" for number in range(units)]
    every = tuple(replace(one, name=name, group=name, block=name) for name in names)
    generator = np.random.default_rng(0)
    choices = tuple(Choice(bits, 8) for bits in (2, 3, 4, 5, 6, 8))
    damage = generator.random((units, 1)) * 4.0 ** -np.arange(2.0, 8.0)
    orm = generator.random((units, units))
    return ompq.Plan(
        graph=ompq.LayerGraph(every),
        choices=choices,
        scores=ompq.scores.ScoreTable(
            damage, orm, tuple(names), damage[:, 0], damage[:, 0]
        ),
        allowed=np.ones(damage.shape, dtype=bool),
        budget=ompq.Budget.parse("4bits"),
        allocation=ompq.Allocation(dict.fromkeys(names, Choice(4, 8))),
    )


def test_three_thousand_units_are_planned_saved_and_read(tmp_path):
    made = chain(3000).with_budget("3.9bits")
    assert made.totals["average_bits"] <= 3.9
    made.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_size < 5e6
    loaded = ompq.Plan.load(tmp_path / "plan.json")
    assert loaded.allocation == made.allocation
    assert loaded.scores.orm is None
    assert len(loaded.pareto(points=4)) == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_plan_on_cuda_equals_the_one_on_cpu(network, plan):
    import copy

    there = copy.deepcopy(network).cuda()
    first = ompq.plan(there, images(16), "3.5bits")
    assert first.allocation == plan.allocation
    assert ompq.plan(there, images(16), "3.5bits").hash == first.hash


def test_few_frames_lie_between_plan_and_the_solvers_loop(network):
    source = str(Path(ompq.__file__).parent)
    between = []

    def profiler(frame, event, _):
        if event == "call" and frame.f_code is exact_search._search.__code__:
            count = -1  # the loop's own frame
            while frame.f_code is not planning.plan.__code__:
                count += frame.f_code.co_filename.startswith(source)
                frame = frame.f_back
            between.append(count)

    sys.setprofile(profiler)
    try:
        ompq.plan(network, images(16), "3.5bits")
    finally:
        sys.setprofile(None)
    assert 0 < max(between) <= 5


def test_a_pair_fixes_weight_and_activation_bits_together(network):
    config = ompq.PlanConfig(choices=((4, 4), (8, 8)), activation_choices=(6,))
    plan = ompq.plan(network, images(8), "6bits", config)
    assert plan.choices == (Choice(4, 4), Choice(8, 8))
    assert set(plan.allocation.values()) == {Choice(4, 4), Choice(8, 8)}
    with pytest.raises(ValueError, match="must be weight bits from 2 to 8"):
        ompq.PlanConfig(choices=((9, 4),))


@pytest.mark.parametrize("granularity", ["block", "stage", "net"])
def test_coarse_granularity_gives_one_width_to_each_part(granularity):
    network = seeded(TinyMobileNet())
    score = ompq.scores.Orm(ompq.scores.OrmSettings(granularity=granularity))
    config = ompq.PlanConfig(score=score, pinned={"@first": 8})
    plan = ompq.plan(network, images(8), "4.5bits", config)
    widths: dict = {}
    for unit in plan.graph.units:
        if unit.name != plan.graph.names[0]:
            key = getattr(unit, granularity, None)
            widths.setdefault(key, set()).add(plan.allocation[unit.name].weight)
    assert all(len(found) == 1 for found in widths.values())
    assert len(widths) == {"block": 4, "stage": 3, "net": 1}[granularity]
    assert plan.allocation[plan.graph.names[0]].weight == 8


@pytest.mark.parametrize("name", ["-log(x)", "-x", "-x^3", "-exp(x)"])
def test_every_decreasing_function_uses_the_budget_up(network, name):
    score = ompq.scores.Orm(ompq.scores.OrmSettings(decreasing=name))
    plan = ompq.plan(network, images(8), "4bits", ompq.PlanConfig(score=score))
    assert plan.totals["average_bits"] > 3.5
    assert plan.scores.importance.min() == 0  # raised until the least is 0


def test_an_input_can_be_fixed_alone_though_the_unit_is_tied():
    network = seeded(TinyResNet())
    pins = {"@first": (None, 32), "block1.conv1": (None, 8), "head": (6, 6)}
    config = ompq.PlanConfig(
        choices=(2, 4, 8),
        activation_choices=(4,),
        pinned=pins,
        tied=("re:stem|block1.conv2",),
        score="weight_noise",
    )
    plan = ompq.plan(network, images(8), "4bits, 4MBOPs", config)
    bits = plan.allocation
    assert bits["stem"].activation == 32
    assert bits["block1.conv1"].activation == 8
    assert bits["head"] == Choice(6, 6)
    assert bits["block2.conv1"].activation == bits["block1.conv2"].activation == 4
    assert bits["stem"].weight == bits["block1.conv2"].weight
    wanted = sum(
        u.macs * bits[u.name].weight * bits[u.name].activation for u in plan.graph.units
    )
    assert plan.totals["bit_ops"] == wanted <= 4e6
    assert f"stem: W{bits['stem'].weight}A32" in str(plan.explain("stem"))


def test_fixed_inputs_are_saved_and_later_pins_win(tmp_path):
    network = seeded(TinyResNet())
    pins = {"*": (None, 6), "head": (8, 8), "stem": 4}
    config = ompq.PlanConfig(choices=(4, 8), pinned=pins, score="weight_noise")
    plan = ompq.plan(network, images(8), "8bits", config)
    assert plan.allocation["head"] == Choice(8, 8)
    assert plan.allocation["stem"] == Choice(4, 6)
    plan.save(tmp_path / "plan.json")
    again = ompq.Plan.load(tmp_path / "plan.json")
    assert (again.hash, again.allocation) == (plan.hash, plan.allocation)
    smaller = again.with_budget("5bits").allocation
    assert {c.activation for n, c in smaller.items() if n != "head"} == {6}
    with pytest.raises(ValueError, match="must be patterns with their bits"):
        ompq.PlanConfig(pinned={"stem": (None, 9)})


def test_memory_counts_fixed_inputs():
    network = seeded(TinyResNet())
    pins = {"block1.conv1": (None, 32)}
    plans = [
        ompq.plan(
            network,
            images(8),
            "9bits, activations:1MiB",
            ompq.PlanConfig(score="weight_noise", pinned=given),
        )
        for given in ({}, pins)
    ]
    plain, fixed = (plan.totals["activation_bytes"] for plan in plans)
    assert fixed > plain


def test_a_plan_knows_the_groups_it_counts(tmp_path):
    model, samples = tokens(), images(8)
    found = ompq.plan(model, samples, "4bits", ompq.PlanConfig(group_size=32))
    plain = ompq.plan(model, samples, "4bits")
    # Zero points and scales of 2 or 3 groups, a byte each, instead of 1 a channel.
    groups, channels = 2 * (120 + 40 + 72) + 3 * 40, 120 + 40 + 72 + 40
    items, ungrouped = found.bytes_by_item, plain.bytes_by_item
    assert items["zero_points"] - ungrouped["zero_points"] == groups - channels
    assert items["scales"] - ungrouped["scales"] == groups + 4 * 4 - 4 * channels
    assert (found.scores.damage[3] < plain.scores.damage[3]).all()  # outliers
    assert (found.scores.damage[0] > 0).all()
    found.save(tmp_path / "plan.json")
    again = ompq.Plan.load(tmp_path / "plan.json")
    assert again.hash == found.hash and again.graph.group_size == 32
    assert again.with_budget("3bits").graph == found.graph


@pytest.mark.parametrize("config", [ompq.PlanConfig, ompq.QuantizeConfig])
def test_groups_have_known_sizes(config):
    with pytest.raises(ValueError, match="must be one of 32, 64, 128, or None"):
        config(group_size=48)
