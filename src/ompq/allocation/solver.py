"""allocate(): the bits of least damage within a budget, and the Pareto curve."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

import numpy as np

from ompq.allocation.explanation import (
    Explanation,
    check_budget,
    check_each,
    conflict,
    explain,
    reachable,
)
from ompq.allocation.program import Allocation, Problem, Program
from ompq.allocation.relaxations import floor_or_ceiling, relaxation, rounded
from ompq.allocation.search import NODES, Optimum, minimum
from ompq.costs import Budget
from ompq.samples import Progress

__all__ = [
    "METHODS",
    "Allocation",
    "Budget",
    "Explanation",
    "Method",
    "ParetoPoint",
    "Problem",
    "allocate",
    "check_budget",
    "explain",
    "pareto",
    "reachable",
]

Method = Literal["exact", "relax-round", "relax-dfs"]
METHODS: tuple[str, ...] = get_args(Method)

CURVE_GAP = 1e-5  # of a point of a curve: far less than a line's width


@dataclass(frozen=True)
class ParetoPoint:
    """The best allocation under one limit."""

    limit: float
    cost: float  # what the allocation costs; at most the limit
    damage: float
    allocation: Allocation


def allocate(
    problem: Problem, budget: Budget | str, *, method: Method = "exact"
) -> Allocation:
    """Return the allocation of least damage that keeps to a budget.

    Its ``gap`` is what is not proved.

    Args:
        method: ``exact``; or the paper's ways, which keep to the budget too:
            ``relax-round`` rounds the linear relaxation, ``relax-dfs`` searches its
            floors and ceilings. Where these find nothing within budgets that pull in
            opposite directions, the exact allocation is returned.

    Raises:
        BudgetError: The budget cannot be read, or limits a cost that is not there.
        InfeasibleBudgetError: No allocation meets the budget.

    Example:
        A 4-bit unit of 100 weights takes 50 bytes, a 2-bit one 25:

        >>> two = (Choice(2, 8), Choice(4, 8))
        >>> size = Cost("bytes", np.array([[25.0, 50.0], [25.0, 50.0]]))
        >>> problem = Problem(
        ...     names=("a", "b"),
        ...     choices=two,
        ...     damage=np.array([[3.0, 1.0], [9.0, 1.0]]),
        ...     costs={"bytes": size},
        ...     allowed=np.ones((2, 2), dtype=bool),
        ...     groups=np.arange(2),
        ... )
        >>> dict(allocate(problem, "80B"))
        {'a': Choice(weight=2, activation=8), 'b': Choice(weight=4, activation=8)}
    """
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise ValueError(f"method={method!r} is unknown; use one of {known}")
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    allocation = _within(problem, limits, method)
    if allocation is None:
        raise conflict(problem, limits)
    return allocation


def _within(
    problem: Problem,
    limits: Mapping[str, float],
    method: Method = "exact",
    *,
    quickly: bool = False,
) -> Allocation | None:
    """Return the best allocation whose totals keep to the limits."""
    nodes, enough = (0, CURVE_GAP) if quickly else (NODES, 0.0)
    # Costs that are not short decimals are rounded to steps. Begin with the room that
    # this may take away, and take it back where it was used.
    exact = all(problem.costs[name].scale is not None for name in limits)
    for slack in (0.0,) if exact else (0.5, 0.0, -0.5):
        program = problem.program(limits, slack)
        found = _rough(program, method) or minimum(program, nodes=nodes, enough=enough)
        if found.columns is None:
            if found.gap > 0:
                raise conflict(problem, limits, proved=False)
            return None
        allocation = replace(problem.allocation(found.columns), gap=found.gap)
        if all(problem.total(name, allocation) <= limits[name] for name in limits):
            return allocation
    return None


def _rough(program: Program, method: Method) -> Optimum | None:
    """Solve by one of the paper's methods, if that is asked for and finds something."""
    columns = None
    if method == "relax-round":
        columns = rounded(program)
    elif method == "relax-dfs":
        columns = minimum(floor_or_ceiling(program)).columns
    if columns is None:
        return None
    shares = relaxation(program).shares
    bound = -inf if shares is None else float((shares * program.damage).sum())
    return Optimum(columns, max(program.value(columns) - bound, 0.0))


def pareto(
    problem: Problem,
    cost: str = "bytes",
    points: int = 100,
    *,
    progress: Progress | None = None,
) -> tuple[ParetoPoint, ...]:
    """Return the curve of damage against one cost, from the smallest to the largest.

    Args:
        points: Limits to try, evenly spaced from the least that any allocation costs
            to what the allocation of least damage costs. Limits with the same answer
            give one point, so fewer may be returned.
    """
    if points < 2:
        raise ValueError(f"points={points} is too few for a curve; use at least 2")
    smallest, largest = reachable(problem, cost)
    found = [_best_under(problem, cost, largest)]
    limits = np.linspace(smallest, found[0].cost, points)[-2::-1].tolist()
    for done, limit in enumerate(limits, 2):
        if limit < found[-1].cost:  # otherwise the last point is the answer here, too
            point = _best_under(problem, cost, limit)
            found = [p for p in found if p.damage < point.damage] + [point]
        if progress is not None:
            progress(done, points, f"solving for {cost}")
    return tuple(found[::-1])


def _best_under(problem: Problem, cost: str, limit: float) -> ParetoPoint:
    while (allocation := _within(problem, {cost: limit}, quickly=True)) is None:
        limit = float(np.nextafter(limit, np.inf))  # the least cost, less a last bit
    used = problem.total(cost, allocation)
    return ParetoPoint(limit, used, problem.damage_of(allocation), allocation)
