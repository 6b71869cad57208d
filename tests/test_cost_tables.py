from math import fsum

import numpy as np
import pytest

from ompq.allocation.allocator import allocate
from ompq.allocation.infeasibility import check_budget, reachable
from ompq.allocation.problem import Problem
from ompq.budgets import Budget
from ompq.cost_tables import Cost, enough, readable
from ompq.errors import BudgetError, InfeasibleBudgetError
from problem_cases import parts
from tables import COSTS, problem

METHODS = ("exact", "relax-round", "relax-dfs", "genetic")


@pytest.mark.parametrize("method", METHODS)
def test_budgets_that_pull_apart_are_met_by_every_method(method):
    generator = np.random.default_rng(1)
    for _ in range(20):
        tables = generator.random((2, 5, 3))
        costs = {
            "milliseconds": Cost("milliseconds", tables[0]),
            "bit_ops": Cost("bit_ops", tables[1]),
        }
        it = problem(generator.random((5, 3)), weights=[8] * 5, **costs)
        some = generator.integers(0, 3, 5)
        limits = [fsum(t[np.arange(5), some]) for t in tables]  # exactly reachable
        budget = Budget(latency_ms=limits[0], bit_ops=limits[1])
        allocation = allocate(it, budget, method=method)
        assert it.total("milliseconds", allocation) <= limits[0]
        assert it.total("bit_ops", allocation) <= limits[1]


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


def test_a_relative_limit_needs_a_reference():
    costs = {"bytes": Cost("bytes", np.zeros((1, 1)))}
    with pytest.raises(
        BudgetError,
        match="percent=10 is relative, but the cost 'bytes' "
        "has no reference; give an absolute budget",
    ):
        Budget(percent=10).limits(costs)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("bytes", (2**20, 1.5 * 2**20), ("1.00 MiB", "1.50 MiB")),
        ("bytes", (2.0**20, 2.0**20 + 16), ("1.00000 MiB", "1.00002 MiB")),
        ("bytes", (1024, 3 * 2**20), ("1.00 KiB", "3072.00 KiB")),
        ("bytes", (0.0,), ("0.00 B",)),
        ("bytes", (3.0 * 2**30,), ("3.00 GiB",)),
        ("bit_ops", (75e9, 1e12), ("75.00 GBOPs", "1000.00 GBOPs")),
        ("weight_bits", (320.0,), ("3.20 bits",)),
        ("milliseconds", (0.5, 12.0), ("0.50 ms", "12.00 ms")),
    ],
)
def test_amounts_are_readable_and_told_apart(name, values, expected):
    assert readable(COSTS[name], *values) == expected


def test_costs_of_other_names_are_readable():
    assert readable(Cost("joules", np.zeros((1, 1))), 2.0) == ("2.00 joules",)


def test_enough_is_the_least_budget_of_two_decimals_that_allows_an_amount():
    generator = np.random.default_rng(0)
    for amount in (10.0 ** generator.uniform(0, 11, 300)).round().tolist():
        cost = COSTS["bytes"]
        text = enough(cost, amount)
        limit = Budget.parse(text).limits({"bytes": cost})["bytes"]
        assert limit >= amount
        assert limit <= max(amount * 1.01, amount + 1)
    assert enough(COSTS["weight_bits"], 212.4) == "2.13bits"
    assert enough(COSTS["bit_ops"], 74.4e9) == "74.4GBOPs"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"damage": np.zeros((3, 2))}, r"damage has shape \(3, 2\), not .* \(2, 3\)"),
        ({"allowed": np.ones((2, 2), dtype=bool)}, r"allowed has shape \(2, 2\)"),
        (
            {"costs": {"bytes": Cost("bytes", np.ones((1, 3)))}},
            r"cost 'bytes' has shape \(1, 3\)",
        ),
        (
            {"costs": {"bytes": Cost("bytes", np.full((2, 3), np.nan))}},
            "cost 'bytes' is not finite",
        ),
        (
            {"costs": {"bytes": Cost("bytes", np.ones((2, 3)), np.inf)}},
            "cost 'bytes' is not finite",
        ),
        ({"groups": np.arange(3)}, r"groups has shape \(3,\), not \(2,\)"),
        (
            {
                "names": (),
                "damage": np.zeros((0, 3)),
                "groups": np.arange(0),
                "allowed": np.ones((0, 3), dtype=bool),
                "costs": {},
            },
            "0 units and 3 choices: there must be at least one",
        ),
    ],
)
def test_tables_must_fit(changes, words):
    with pytest.raises(ValueError, match=words):
        Problem(**parts(**changes))
