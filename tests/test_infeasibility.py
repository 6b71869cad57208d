import itertools

import numpy as np
import pytest

from ompq.allocation.allocator import allocate
from ompq.allocation.infeasibility import check_budget, conflict, reachable
from ompq.cost_tables import Cost
from ompq.errors import InfeasibleBudgetError
from tables import network, problem


@pytest.mark.parametrize("seed", range(6))
def test_what_is_shared_is_paid_once_and_only_if_used(seed):
    rng = np.random.default_rng(seed)
    table = rng.integers(1, 40, (4, 3)).astype(float)
    shared = ((30.0, (0,)), (25.0, (0, 2)))
    size = Cost("bytes", table, 5.0, shared=shared)
    it = problem(rng.random((4, 3)), weights=[1] * 4, bytes=size)
    totals = {}
    for columns in itertools.product(range(3), repeat=4):
        paid = 30 * (0 in columns) + 25 * (0 in columns or 2 in columns)
        totals[columns] = 5 + paid + sum(table[u, c] for u, c in enumerate(columns))
        assert size.total(np.array(columns)) == totals[columns]
    assert reachable(it, "bytes")[0] == min(totals.values())
    for limit in np.quantile([*totals.values()], [0.02, 0.2, 0.6]):
        limit = float(np.floor(limit))
        damages = [
            it.damage[range(4), list(columns)].sum()
            for columns, total in totals.items()
            if total <= limit
        ]
        found = allocate(it, f"{limit:.0f}B")
        assert it.damage_of(found) == pytest.approx(min(damages))
        assert it.total("bytes", found) <= limit
        assert found.gap == 0
        check_budget(it, f"{limit:.0f}B, 8bits")


def test_reachable_is_everything_smallest_and_everything_largest():
    it = problem(np.zeros((2, 3)), weights=[80, 800], bits=(2, 3, 8))
    assert reachable(it, "bytes") == (880 * 2 / 8, 880.0)
    assert reachable(it, "weight_bits") == (880 * 2, 880 * 8)


def test_reachable_knows_the_costs():
    with pytest.raises(ValueError, match="cost='joules' is unknown; use bytes"):
        reachable(network(3), "joules")


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


def test_one_limit_is_in_conflict_with_nothing_else():
    error = conflict(problem(np.zeros((1, 3)), weights=[8]), {"bytes": 1.0})
    assert str(error).startswith("a budget of 1.00 B cannot be met: allocations take")
