"""The best bits within a budget, and why."""

import time
from dataclasses import replace
from math import fsum

import numpy as np
import pytest

from ompq.allocation import exact_search
from ompq.allocation.allocator import allocate, pareto
from ompq.allocation.explanation import explain
from ompq.allocation.infeasibility import check_budget, reachable
from ompq.allocation.problem import Problem
from ompq.budgets import Budget
from ompq.cost_tables import Cost
from ompq.errors import BudgetError, InfeasibleBudgetError, PatternError, PlanError
from ompq.network.units import Choice
from tables import exhaustive, fixture, network, problem

METHODS = ("exact", "relax-round", "relax-dfs", "genetic")


def weights_of(allocation):
    return [choice.weight for choice in allocation.values()]


def test_the_example_of_the_documentation():
    two = (Choice(2, 8), Choice(4, 8))
    size = Cost("bytes", np.array([[25.0, 50.0], [25.0, 50.0]]))
    it = Problem(
        names=("a", "b"),
        choices=two,
        damage=np.array([[3.0, 1.0], [9.0, 1.0]]),
        costs={"bytes": size},
        allowed=np.ones((2, 2), dtype=bool),
        groups=np.arange(2),
    )
    assert dict(allocate(it, "80B")) == {"a": two[0], "b": two[1]}


def test_exact_equals_exhaustive_search_with_ties_pins_and_several_budgets():
    generator = np.random.default_rng(5)
    for _ in range(25):
        units = int(generator.integers(2, 6))
        allowed = generator.random((units, 3)) < 0.8
        allowed[:, generator.integers(3)] = True  # so that no pins contradict
        it = problem(
            generator.normal(size=(units, 3)) * 10.0 ** generator.uniform(-12, 0),
            weights=generator.integers(1, 100, units) * 8,
            macs=generator.integers(1, 10**6, units),
            allowed=allowed,
            groups=generator.integers(0, units, units),
        )
        share = generator.uniform(0.2, 1, 2)
        low, high = np.array([reachable(it, c) for c in ("bytes", "bit_ops")]).T
        size, bit_ops = low + share * (high - low)
        budget = Budget(size_mib=size / 2**20, bit_ops=bit_ops)
        expected = exhaustive(it.program(budget.limits(it.costs)))
        if expected is None:
            with pytest.raises(InfeasibleBudgetError, match="cannot be met with"):
                allocate(it, budget)
        else:
            allocation = allocate(it, budget)
            assert allocation == it.allocation(np.array(expected[-1]))
            for group in set(it.groups.tolist()):
                tied = [
                    n for n, g in zip(it.names, it.groups, strict=True) if g == group
                ]
                assert len({allocation[name] for name in tied}) == 1


def test_published_budgets_in_their_own_units():
    # ResNet-18 in the paper's accounting: 4.0 MiB for all layers, 2 to 4 bits.
    for case in fixture("alloc_arch.json")["cases"]:
        if (case["model"], case["qt"]) != ("resnet18", "PTQ") or not case["exact_bits"]:
            continue
        arch = fixture("alloc_arch.json")["arch"]["resnet18_PTQ"]
        gamma = np.array(fixture("alloc_arch.json")["gamma"]["resnet18_PTQ"])
        theta = np.exp(-float(case["beta"].split("=")[-1]) * (gamma - gamma.min()))
        scores = np.cumsum(theta[::-1])[::-1] / np.arange(len(theta), 0, -1)
        it = problem(
            -scores[:, None] * np.array([2, 3, 4]),
            weights=arch["official_params_per_layer"],
        )
        allocation = allocate(it, f"{case['T']}MiB")
        assert weights_of(allocation) == case["exact_bits"]
        assert it.total("bytes", allocation) / 2**20 == case["exact_size"]
        assert it.total("bytes", allocation) <= case["T"] * 2**20


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", ["3.2bits", "12%, 12GBOPs", "0.4MiB, 0.41MB"])
def test_no_method_exceeds_a_budget_or_beats_the_exact_one(method, budget):
    it = network(40)
    allocation = allocate(it, budget, method=method)
    for name, limit in Budget.parse(budget).limits(it.costs).items():
        rows = np.arange(len(it.names))
        columns = it.columns(allocation)
        assert fsum(it.costs[name].table[rows, columns]) <= limit
    best = it.damage_of(allocate(it, budget))
    worst = 2 if method == "genetic" else 1.1
    assert best <= it.damage_of(allocation) <= worst * best


def test_budgets_that_exclude_each_other_are_refused_by_every_method():
    slow = Cost("milliseconds", np.array([[9.0, 5.0, 1.0]] * 2))
    it = problem(np.zeros((2, 3)), weights=[8, 8], milliseconds=slow)
    for method in METHODS:
        with pytest.raises(InfeasibleBudgetError, match=r"9\.00 ms .* with 6\.00 B"):
            allocate(it, "6B, 9ms", method=method)


def test_a_budget_is_not_exceeded_by_the_last_bit():
    generator = np.random.default_rng(4)
    for _ in range(20):
        slow = Cost("milliseconds", generator.random((6, 3)))
        it = problem(
            generator.random((6, 3)),
            weights=[8] * 6,
            groups=[0, 1, 0, 1, 2, 0],
            milliseconds=slow,
        )
        best = it.allocation(it.by_group(it.damage).argmin(1))
        almost = np.nextafter(it.total("milliseconds", best), 0)
        if almost < reachable(it, "milliseconds")[0]:
            continue
        allocation = allocate(it, Budget(latency_ms=float(almost)))
        assert it.total("milliseconds", allocation) <= almost
        assert allocation != best
        assert allocate(it, Budget(latency_ms=float(np.nextafter(almost, 1e9)))) == best


def test_decimals_are_compared_as_decimals():
    # In binary 3 x 0.1 is more than 0.3, and 0.7 + 0.1 less than 0.8.
    slow = Cost("milliseconds", np.array([[0.05, 0.1, 0.2]] * 3))
    it = problem([[9, 3, 1]] * 3, weights=[8] * 3, milliseconds=slow)
    allocation = allocate(it, "0.3ms")
    assert weights_of(allocation) == [3, 3, 3]
    assert it.total("milliseconds", allocation) == 0.3
    pair = Cost("milliseconds", np.array([[0.1, 0.7, 0.9]] * 2), 1e-12)
    it = problem([[9, 3, 1]] * 2, weights=[8] * 2, milliseconds=pair)
    assert sorted(weights_of(allocate(it, "0.800000000001ms"))) == [2, 3]
    assert weights_of(allocate(it, "0.8ms")) == [2, 2]


def test_budgets_of_decimals_are_met_exactly_with_others():
    generator = np.random.default_rng(6)
    for _ in range(20):
        slow = np.round(generator.uniform(0.01, 1.5, (8, 3)), 2)
        costs = {"milliseconds": Cost("milliseconds", slow)}
        it = problem(generator.random((8, 3)), weights=[8] * 8, **costs)
        some = it.allocation(generator.integers(0, 3, 8))
        hundredths = sum(round(100 * ms) for ms in slow[np.arange(8), it.columns(some)])
        limit = f"{hundredths // 100}.{hundredths % 100:02d}"
        allocation = allocate(it, f"{it.total('bytes', some):.0f}B, {limit}ms")
        assert it.total("milliseconds", allocation) <= float(limit)
        assert it.damage_of(allocation) <= it.damage_of(some)


def test_a_budget_of_many_digits_is_met_exactly():
    # In steps, both costs are rounded up and the limit is rounded down.
    least = np.array([[0.1387713657221611], [0.452434116262426]])
    slow = Cost("milliseconds", np.concatenate([least, least + 9, least + 9], 1))
    it = problem(np.zeros((2, 3)), weights=[8] * 2, milliseconds=slow)
    limit = fsum(least[:, 0])
    allocation = allocate(it, Budget(latency_ms=limit))
    assert it.total("milliseconds", allocation) == limit


def test_a_search_without_a_result_says_so(monkeypatch):
    def gives_up(program, **options):  # with both limits; the message needs one alone
        if len(program.limits) > 1:
            return exact_search.Optimum(None, np.inf)
        return exact_search.minimum(program, **options)

    monkeypatch.setattr("ompq.allocation.allocator.minimum", gives_up)
    slow = Cost("milliseconds", np.array([[9.0, 5.0, 1.0]] * 2))
    it = problem(np.zeros((2, 3)), weights=[8, 8], milliseconds=slow)
    with pytest.raises(
        InfeasibleBudgetError,
        match=r"10\.00 ms was not met within the search's limit with 6\.00 B",
    ):
        allocate(it, "6B, 10ms")


def test_the_smallest_reachable_value_is_a_budget():
    generator = np.random.default_rng(2)
    for _ in range(30):
        # Irregular numbers in tied groups beside a constant: every sum is rounded.
        slow = Cost("milliseconds", generator.random((7, 3)), generator.random())
        it = problem(
            generator.random((7, 3)),
            weights=[8] * 7,
            groups=[0, 1, 0, 2, 1, 3, 0],
            milliseconds=slow,
        )
        smallest, largest = reachable(it, "milliseconds")
        budget = Budget(latency_ms=smallest)
        assert it.total("milliseconds", allocate(it, budget)) <= smallest
        everything = allocate(it, Budget(latency_ms=largest))
        groups = it.by_group(it.damage)
        assert it.damage_of(everything) == pytest.approx(groups.min(1).sum())


def test_of_equal_damage_the_fewest_bytes_are_taken():
    it = problem(np.zeros((4, 3)), weights=[8, 16, 32, 8], macs=[1, 1, 1, 1])
    assert weights_of(allocate(it, "1KiB")) == [2, 2, 2, 2]
    # (2, 4, 3) and (2, 3, 4) are equally good and both fit: 18 and 19 bytes.
    flat = problem([[3, 2, 1]] * 3, weights=[32, 8, 16])
    assert weights_of(allocate(flat, "19B")) == [2, 4, 3]


def test_damage_may_rise_with_the_bits_and_be_negative():
    it = problem([[-5, 7, -4], [0, -1e-9, 1e9]], weights=[8, 8])
    assert weights_of(allocate(it, "1KiB")) == [2, 3]


def test_pins_and_ties_hold():
    allowed = np.ones((3, 3), dtype=bool)
    allowed[0] = [False, False, True]
    it = problem([[3, 2, 1]] * 3, weights=[8] * 3, allowed=allowed, groups=[0, 1, 1])
    assert weights_of(allocate(it, "8B")) == [4, 2, 2]
    assert weights_of(allocate(it, "10B")) == [4, 3, 3]


def test_wrong_arguments_say_what_would_be_right():
    it = network(4)
    with pytest.raises(ValueError, match="method='greedy' is unknown; use exact,"):
        allocate(it, "3bits", method="greedy")
    with pytest.raises(BudgetError, match="^'3' has no unit"):
        allocate(it, "3")
    with pytest.raises(
        BudgetError, match="latency_ms=3: this plan has no cost 'milliseconds'"
    ):
        allocate(it, "3ms")
    with pytest.raises(InfeasibleBudgetError, match=r"a budget of 1\.00 bits cannot"):
        allocate(it, "1bits")
    with pytest.raises(ValueError, match="points=1 is too few for a curve"):
        pareto(it, points=1)
    with pytest.raises(ValueError, match="cost='watts' is unknown; use bytes"):
        pareto(it, "watts")


def test_a_proof_given_up_is_told_by_the_gap(monkeypatch):
    monkeypatch.setattr(exact_search, "LABELS", 1)
    monkeypatch.setattr(exact_search, "NARROWEST", 2)
    monkeypatch.setattr(
        "ompq.allocation.allocator.minimum",
        lambda program, **_: exact_search.minimum(program, passes=1, nodes=0),
    )
    it = network(30)
    allocation = allocate(it, "3bits")
    assert it.total("weight_bits", allocation) <= 3 * it.costs["weight_bits"].reference
    monkeypatch.undo()
    best = allocate(it, "3bits")
    assert best.gap == 0
    assert "least damage" not in repr(best)
    assert it.damage_of(allocation) - it.damage_of(best) <= allocation.gap
    assert f"within {allocation.gap:.2g} of the least damage)" in repr(allocation)


@pytest.mark.parametrize("method", METHODS[1:])
def test_the_papers_methods_have_a_gap_too(method):
    it = network(30)
    allocation, best = allocate(it, "3bits", method=method), allocate(it, "3bits")
    assert it.damage_of(allocation) - it.damage_of(best) <= allocation.gap * 1.000001


@pytest.mark.parametrize(("units", "way"), [(32, "relax-dfs"), (33, "relax-round")])
def test_the_paper_searches_small_networks_and_rounds_large_ones(units, way):
    it = network(units)
    relaxed = allocate(it, "3bits", method="relax")
    assert relaxed == allocate(it, "3bits", method=way)


def test_allocation_leaves_the_problem_as_it_was():
    it = network(20)
    tables = [it.damage, it.allowed, it.groups, *(c.table for c in it.costs.values())]
    copies = [table.copy() for table in tables]
    allocate(it, "3bits")
    allocate(it, "3bits", method="relax-round")
    pareto(it, points=5)
    assert all((t == c).all() for t, c in zip(tables, copies, strict=True))


def test_pareto_is_the_curve_of_exact_optima():
    it = problem([[9, 3, 1], [90, 40, 20], [5, 4, 1]], weights=[8, 8, 8])
    curve = pareto(it, points=100)
    assert [point.cost for point in curve] == [6, 7, 8, 9, 10, 11, 12]
    for point in curve:
        best = exhaustive(it.program({"bytes": point.cost}))
        assert point.damage == best[0]
        assert point.cost <= point.limit
        assert it.damage_of(point.allocation) == point.damage
    damages = [point.damage for point in curve]
    assert damages == sorted(set(damages), reverse=True)


def test_pareto_of_a_network_falls_strictly_and_takes_seconds():
    it = network(50)
    start = time.process_time()
    curve = pareto(it)
    assert time.process_time() - start < 10  # about 2 s on one quiet core
    assert 90 <= len(curve) <= 100
    costs = [point.cost for point in curve]
    damages = [point.damage for point in curve]
    assert costs == sorted(set(costs))
    assert damages == sorted(set(damages), reverse=True)
    smallest, largest = reachable(it, "bytes")
    assert (costs[0], costs[-1]) == (smallest, largest)
    assert weights_of(curve[0].allocation) == [2] * 50
    middle = curve[50]
    assert allocate(it, Budget(size_mib=middle.limit / 2**20)) == middle.allocation


def test_pareto_works_for_irregular_costs_and_ends_at_the_least_damage():
    generator = np.random.default_rng(3)
    slow = Cost("milliseconds", generator.random((8, 3)), generator.random())
    it = problem(
        generator.random((8, 3)),
        weights=[8] * 8,
        groups=[0, 1, 0, 2, 1, 3, 4, 4],
        milliseconds=slow,
    )
    curve = pareto(it, "milliseconds", points=20)
    assert curve[0].cost == pytest.approx(reachable(it, "milliseconds")[0])
    assert curve[-1].damage == pytest.approx(it.by_group(it.damage).min(1).sum())
    assert all(point.cost <= point.limit for point in curve)


def test_pareto_gives_a_limit_the_last_bit_that_rounding_took(monkeypatch):
    it = problem([[9, 3, 1]], weights=[8])
    expected = [point.allocation for point in pareto(it, points=3)]
    calls = []

    def fails_at_first(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            return exact_search.Optimum(None, 0.0)
        return exact_search.minimum(*args, **options)

    monkeypatch.setattr("ompq.allocation.allocator.minimum", fails_at_first)
    curve = pareto(it, points=3)
    assert [point.allocation for point in curve] == expected
    assert curve[-1].limit == np.nextafter(4.0, 5.0)


def test_pareto_of_one_possibility_is_one_point():
    it = problem([[1.0]], weights=[8], bits=(4,))
    (point,) = pareto(it, points=10)
    assert (point.cost, point.damage) == (4.0, 1.0)


def test_a_curve_tells_its_progress():
    it = problem(np.array([[3.0, 1.0], [9.0, 1.0]]), weights=[80, 160], bits=(2, 4))
    told = []
    points = pareto(it, "bytes", 5, progress=lambda *what: told.append(what))
    assert [(done, total) for done, total, _ in told] == [(n, 5) for n in range(2, 6)]
    assert points == pareto(it, "bytes", 5)


def test_limits_between_the_costs_own_steps_are_no_harder(monkeypatch):
    # Every bit costs 8 bytes: a limit 5 bytes higher changes nothing.
    it = problem(
        np.random.default_rng(0).random((200, 1)) * 4.0 ** -np.arange(2.0, 9.0),
        weights=[64] * 200,
        bits=range(2, 9),
    )
    widths = []
    search_once = exact_search._search
    monkeypatch.setattr(
        exact_search, "_search", lambda *a: widths.append(a[-1]) or search_once(*a)
    )
    assert allocate(it, "6405B") == allocate(it, "6400B")
    assert len(widths) <= 4


def test_a_small_explanation_is_right_and_readable():
    # 8 weights take one byte a bit. 7 bytes: (4, 3) loses 1 + 4; (3, 4) loses 3 + 2.
    it = problem([[9, 3, 1], [9, 4, 2]], weights=[8, 8])
    allocation = allocate(it, "7B")
    assert [c.weight for c in allocation.values()] == [3, 4]
    found = explain(it, "7B", allocation, "unit0")
    assert found.choice == Choice(3, 8)
    assert [option.damage for option in found.options] == [9, 3, 1]
    assert [option.costs["bytes"] for option in found.options] == [2, 3, 4]
    assert found.better.choice == Choice(4, 8)
    assert found.better.over == {"bytes": 1.0}
    assert found.worse.choice == Choice(2, 8)
    assert found.worse.over == {}
    assert found.prices == {"bytes": pytest.approx(2.0)}
    assert found.exchange.unit == "unit1"
    assert (found.exchange.choice, found.exchange.after) == (Choice(4, 8), Choice(3, 8))
    assert found.exchange.damage == 0
    assert str(found).splitlines() == [
        "unit0: W3A8",
        "",
        "  W2A8    damage 9                     2.00 B",
        "> W3A8    damage 3                     3.00 B",
        "  W4A8    damage 1                     4.00 B",
        "",
        "bytes: 7.00 B of 7.00 B used; one KiB more would save about 2.05e+03 damage.",
        "Next better: W4A8 (damage -2, +1.00 B), 1.00 B too much.",
        "Next worse: W2A8 (damage +6, -1.00 B).",
        "Best exchange: W4A8 here, W3A8 instead of W4A8 for unit1: damage +0, no gain.",
    ]


def test_a_unit_at_its_best_under_a_loose_budget_has_nothing_better():
    it = problem([[9, 3, 1], [9, 4, 2]], weights=[8, 8])
    found = explain(it, "1KiB", allocate(it, "1KiB"), "unit1")
    assert found.better is None
    assert found.worse.choice == Choice(3, 8)
    assert found.prices == {"bytes": 0.0}
    assert "this limit is not binding" in str(found)
    assert "Next better" not in str(found)


def test_a_pinned_unit_alone_has_no_alternatives():
    allowed = np.array([[False, True, False]])
    it = problem([[9, 3, 1]], weights=[8], allowed=allowed)
    found = explain(it, "4B", allocate(it, "4B"), "unit0")
    assert (found.better, found.worse, found.exchange) == (None, None, None)
    assert str(found).count("not allowed") == 2


def test_a_unit_is_explained_by_its_name():
    it = problem([[9, 3, 1]], weights=[8])
    words = "unit is of type int, not a name; give for example 'unit0'"
    with pytest.raises(TypeError, match=words):
        explain(it, "4B", allocate(it, "4B"), 0)  # type: ignore[arg-type]


def test_tied_units_are_explained_together():
    it = problem([[9, 3, 1]] * 3, weights=[8, 16, 8], groups=[0, 1, 0])
    found = explain(it, "12B", allocate(it, "12B"), "unit2")
    assert found.tied == ("unit0",)
    assert [option.damage for option in found.options] == [18, 6, 2]
    assert "shared with unit0" in str(found)


def test_no_exchange_helps_an_optimal_allocation():
    it = network(30)
    budget = "12%, 12GBOPs"
    allocation = allocate(it, budget)
    for unit in it.names:
        found = explain(it, budget, allocation, unit)
        assert found.exchange.damage >= 0
        assert found.better is None or found.better.over


def test_every_cost_has_a_price_in_words():
    slow = Cost("milliseconds", np.array([[1.0, 2.0, 3.0]] * 2))
    other = problem([[9, 3, 1], [9, 4, 2]], weights=[8, 8], milliseconds=slow)
    assert "one ms more would save about 2 damage" in str(
        explain(other, "5ms", allocate(other, "5ms"), "unit0")
    )
    it = network(10)
    for budget, words in [("3bits", "one hundredth of a bit"), ("1GBOPs", "one GBOP")]:
        assert words in str(explain(it, budget, allocate(it, budget), "unit3"))


def test_unknown_units_and_foreign_allocations_are_refused():
    it = network(8)
    with pytest.raises(
        PatternError, match=r"'conv9' is not a unit; the 8 units are unit0"
    ):
        explain(it, "3bits", allocate(it, "3bits"), "conv9")
    with pytest.raises(PlanError, match="not among the 6 choices"):
        explain(it, "3bits", {"unit0": Choice(3, 8)}, "unit0")


def test_impossible_budget_says_what_would_do():
    allowed = np.ones((3, 3), dtype=bool)
    allowed[2] = [False, False, True]
    it = problem(
        np.zeros((3, 3)), weights=[2**20, 2**22, 2**19], bits=(2, 4, 8), allowed=allowed
    )
    with pytest.raises(InfeasibleBudgetError) as caught:
        check_budget(it, "1.5MiB")
    error = caught.value
    assert str(error) == (
        "a budget of 1.50 MiB cannot be met: allocations take from 1.75 MiB to "
        "5.50 MiB. Most is taken by unit1 (1.00 MiB), "
        "unit2 (512.00 KiB, pinned to W8A8), unit0 (256.00 KiB). "
        "Raise it to 1.75MiB or more or remove pins. "
        # One bit instead of two for all but the pinned unit: 5 * 2**20 / 8 bytes less.
        'A plan with coded weights (--coded, storage="coded") may take about 1.12 MiB '
        "or less"
    )
    assert error.cost == "bytes"
    assert error.limit == 1.5 * 2**20
    assert error.smallest == 1.75 * 2**20
    assert error.largest == 5.5 * 2**20
    assert error.units == ("unit1", "unit2", "unit0")


@pytest.mark.parametrize(
    ("bits", "budget", "words"),
    [
        ((3, 4, 8), "1B", "or more or allow fewer bits. A plan with coded weights"),
        (
            (2, 4, 8),
            "1B",
            "or more. A plan with coded weights .* about 200.00 B or less$",
        ),
        (
            (2, 4, 8),
            "0.9bits",
            "or more. A plan with coded weights .* about 1.00 bits or less$",
        ),
        ((2, 4, 8), "1BOPs", "or more or allow fewer bits$"),
        # One choice pins nothing: coded weights may take 1 bit of 4.
        (
            (4,),
            "1B",
            "allow fewer bits. A plan with coded weights .* about 200.00 B or less$",
        ),
    ],
)
def test_advice_is_what_there_is_to_do(bits, budget, words):
    damage = np.zeros((2, len(bits)))
    it = problem(damage, weights=[800, 800], macs=[9, 9], bits=bits)
    with pytest.raises(InfeasibleBudgetError, match=words):
        check_budget(it, budget)


def test_coded_plans_may_have_lower_rates():
    allowed = np.array([[True, True], [False, True]])  # the second has few weights
    it = problem(np.zeros((2, 2)), weights=[800, 80], bits=(4, 8), allowed=allowed)
    it = replace(it, choices=(Choice(8, 8, 1.5), Choice(8, 8)))
    with pytest.raises(InfeasibleBudgetError) as caught:
        check_budget(it, "1B")
    assert str(caught.value).endswith("Raise it to 480B or more or allow lower rates")


def test_units_tied_to_a_pinned_one_cannot_be_coded():
    allowed = np.array([[False, False, True], [True, True, True]])
    it = problem(np.zeros((2, 3)), weights=[8, 8], allowed=allowed, groups=[0, 0])
    with pytest.raises(InfeasibleBudgetError, match=r"8B or more or remove pins$"):
        check_budget(it, "1B")


def test_the_largest_five_and_all_pins_stand_in_the_way():
    allowed = np.ones((10, 3), dtype=bool)
    allowed[0] = [False, False, True]
    it = problem(
        np.zeros((10, 3)), weights=[1 + 8 * i for i in range(10)], allowed=allowed
    )
    with pytest.raises(
        InfeasibleBudgetError, match=r"unit5 .* and 1 more\. Raise"
    ) as e:
        check_budget(it, "1B")
    assert e.value.units == ("unit9", "unit8", "unit7", "unit6", "unit5", "unit0")


def test_numbers_that_look_the_same_get_more_digits():
    it = problem(np.zeros((1, 3)), weights=[2**22])
    with pytest.raises(InfeasibleBudgetError, match=r"0\.999999 MiB .* 1\.000000 MiB"):
        check_budget(it, f"{2**20 - 1}B")


def test_average_bits_and_bit_operations_are_told_in_their_units():
    it = network(20)
    with pytest.raises(
        InfeasibleBudgetError, match=r"^a budget of 1\.90 bits .* 2\.00 bits to 8\.00"
    ):
        check_budget(it, "1.9bits")
    with pytest.raises(
        InfeasibleBudgetError, match=r"^a budget of 0\.50 GBOPs cannot be met"
    ):
        check_budget(it, "0.5GBOPs")


def test_a_budget_on_a_missing_cost_is_no_infeasible_budget():
    with pytest.raises(
        BudgetError, match="latency_ms=5: this plan has no cost 'milliseconds'"
    ):
        check_budget(network(3), "5ms")
