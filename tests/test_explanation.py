import numpy as np
import pytest

from ompq.allocation import allocate
from ompq.allocation.explanation import check_budget, conflict, explain, reachable
from ompq.costs import Cost
from ompq.errors import BudgetError, InfeasibleBudgetError, PatternError, PlanError
from ompq.units import Choice
from tables import network, problem


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
        "Exchange refused: W4A8 here and W3A8 instead of W4A8 for unit1: damage +0.",
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


def test_tied_units_are_explained_together():
    it = problem([[9, 3, 1]] * 3, weights=[8, 16, 8], groups=[0, 1, 0])
    found = explain(it, "12B", allocate(it, "12B"), "unit2")
    assert found.tied == ("unit0",)
    assert [option.damage for option in found.options] == [18, 6, 2]
    assert "shared with unit0" in str(found)


def test_an_edited_allocation_shows_what_would_help():
    it = problem([[9, 3, 1], [90, 40, 20]], weights=[8, 8])
    edited = {"unit0": Choice(4, 8), "unit1": Choice(2, 8)}
    found = explain(it, "6B", edited, "unit0")
    assert found.exchange.damage == pytest.approx((9 - 1) + (20 - 90))
    assert "Exchange that would help: W2A8 here" in str(found)
    roomy = explain(it, "8B", edited, "unit1")
    assert "W3A8 (damage -50, +1.00 B), and it would fit" in str(roomy)


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


def test_reachable_is_everything_smallest_and_everything_largest():
    it = problem(np.zeros((2, 3)), weights=[80, 800], bits=(2, 3, 8))
    assert reachable(it, "bytes") == (880 * 2 / 8, 880.0)
    assert reachable(it, "weight_bits") == (880 * 2, 880 * 8)


def test_reachable_minds_pins_ties_and_constants():
    allowed = np.array([[True, True, True], [False, True, True], [True, True, True]])
    extra = Cost("milliseconds", np.array([[1.0, 2, 3], [5, 1, 1], [3, 2, 1]]), 10.0)
    it = problem(
        np.zeros((3, 3)),
        weights=[8, 8, 8],
        allowed=allowed,
        groups=[0, 0, 1],
        milliseconds=extra,
    )
    # The tied pair takes 3 or 4, the third 1 to 3.
    assert reachable(it, "milliseconds") == (10 + 3 + 1, 10 + 4 + 3)


def test_reachable_knows_the_costs():
    with pytest.raises(ValueError, match="cost='joules' is unknown; use bytes"):
        reachable(network(3), "joules")


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
        'Coded weights (--coded, storage="coded") may take about 1.12 MiB or less'
    )
    assert error.cost == "bytes"
    assert error.limit == 1.5 * 2**20
    assert error.smallest == 1.75 * 2**20
    assert error.largest == 5.5 * 2**20
    assert error.units == ("unit1", "unit2", "unit0")


@pytest.mark.parametrize(
    ("bits", "budget", "words"),
    [
        ((3, 4, 8), "1B", "or more or allow fewer bits. Coded weights"),
        ((2, 4, 8), "1B", "or more. Coded weights .* about 200.00 B or less$"),
        ((2, 4, 8), "0.9bits", "or more. Coded weights .* about 1.00 bits or less$"),
        ((2, 4, 8), "1BOPs", "or more or allow fewer bits$"),
    ],
)
def test_advice_is_what_there_is_to_do(bits, budget, words):
    it = problem(np.zeros((2, 3)), weights=[800, 800], macs=[9, 9], bits=bits)
    with pytest.raises(InfeasibleBudgetError, match=words):
        check_budget(it, budget)


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


def test_budgets_that_can_only_be_met_alone_say_so():
    slow = Cost("milliseconds", np.array([[9.0, 5.0, 1.0]] * 2))  # fewer bits, slower
    it = problem(np.zeros((2, 3)), weights=[8, 8], milliseconds=slow)
    check_budget(it, "4B")
    check_budget(it, "2ms")
    check_budget(it, "6B, 10ms")
    # 6 bytes leave the bits (2, 4) or (3, 3): 10 ms both.
    with pytest.raises(InfeasibleBudgetError) as caught:
        check_budget(it, "6B, 9ms")
    assert str(caught.value).startswith(
        "a budget of 9.00 ms cannot be met with 6.00 B: "
        "allocations take from 10.00 ms to 18.00 ms."
    )
    assert caught.value.cost == "milliseconds"
    assert caught.value.smallest == 10.0


def test_three_budgets_in_pairwise_conflict_are_refused():
    # Any two exclude each other, so there is no least of the third to tell.
    costs = {
        "milliseconds": Cost("milliseconds", np.array([[9.0, 1.0, 9.0]])),
        "bit_ops": Cost("bit_ops", np.array([[9.0, 9.0, 1.0]])),
    }
    it = problem(np.zeros((1, 3)), weights=[8], **costs)
    with pytest.raises(
        InfeasibleBudgetError, match=r"2\.00 B cannot be met with the other limits"
    ):
        check_budget(it, "2B, 2ms, 2BOPs")


def test_one_limit_is_in_conflict_with_nothing_else():
    error = conflict(problem(np.zeros((1, 3)), weights=[8]), {"bytes": 1.0})
    assert str(error).startswith("a budget of 1.00 B cannot be met: allocations take")


def test_a_budget_on_a_missing_cost_is_no_infeasible_budget():
    with pytest.raises(BudgetError, match="latency_ms=5 limits milliseconds"):
        check_budget(network(3), "5ms")
