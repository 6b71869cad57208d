import numpy as np
import pytest

from ompq.allocation.explanation import check_budget, conflict, reachable
from ompq.costs import Cost
from ompq.errors import BudgetError, InfeasibleBudgetError
from tables import network, problem


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
    with pytest.raises(
        ValueError, match="cost='joules' is unknown; the costs are bytes"
    ):
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
        "Raise it to 1.75MiB or more, allow fewer bits or remove pins"
    )
    assert error.cost == "bytes"
    assert error.limit == 1.5 * 2**20
    assert error.smallest == 1.75 * 2**20
    assert error.largest == 5.5 * 2**20
    assert error.units == ("unit1", "unit2", "unit0")


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
