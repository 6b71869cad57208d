"""allocate(): the bits of least damage within a budget, and the Pareto curve."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
from ompq.allocation.program import EPSILON, Allocation, Columns, Problem, Program
from ompq.allocation.relaxations import floor_or_ceiling, rounded
from ompq.allocation.search import PASSES, minimum
from ompq.costs import Budget
from ompq.samples import Progress

__all__ = [
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

CURVE_PASSES = 3  # a curve of many points does without the search's last, long pass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParetoPoint:
    """The best allocation under one limit.

    Attributes:
        limit: The limit.
        cost: What the allocation costs; at most the limit.
        damage: Its expected damage.
        allocation: Its bits.
    """

    limit: float
    cost: float
    damage: float
    allocation: Allocation


def allocate(
    problem: Problem, budget: Budget | str, *, method: Method = "exact"
) -> Allocation:
    """Return the allocation of least damage that keeps to a budget.

    Args:
        problem: Units, choices, damage and costs.
        budget: What may not be exceeded.
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
    if method not in get_args(Method):
        known = ", ".join(get_args(Method))
        raise ValueError(f"method={method!r} is unknown; use one of {known}")
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    allocation = _within(problem, limits, partial(_solve, method=method))
    if allocation is None:
        raise conflict(problem, limits)
    return allocation


def _within(
    problem: Problem,
    limits: Mapping[str, float],
    solve: Callable[[Program], Columns | None],
) -> Allocation | None:
    """Solve; the sums over all units, correctly rounded, are within the limits."""
    program = problem.program(limits)
    # A sum over groups may differ in the last bits from the sum over units, which
    # counts: begin with that much more room, and take it back if it is used.
    room = program.limits + 4 * EPSILON * np.abs(program.limits)
    while (columns := solve(replace(program, limits=room))) is not None:
        allocation = problem.allocation(columns)
        used = np.array([problem.total(name, allocation) for name in limits])
        over = used - program.limits
        if (over <= 0).all():
            return allocation
        room = np.where(over > 0, np.nextafter(room - over, -np.inf), room)
    return None


def _solve(program: Program, method: Method) -> Columns | None:
    if method == "relax-round" and (columns := rounded(program)) is not None:
        return columns
    if method == "relax-dfs" and (found := minimum(floor_or_ceiling(program))):
        return found.columns
    return _exact(program, PASSES)


def _exact(program: Program, passes: int) -> Columns | None:
    optimum = minimum(program, passes=passes)
    if optimum is None:
        return None
    if optimum.gap > 0:
        logger.info("not proved optimal: at most %g less damage", optimum.gap)
    return optimum.columns


def pareto(
    problem: Problem,
    cost: str = "bytes",
    points: int = 100,
    *,
    progress: Progress | None = None,
) -> tuple[ParetoPoint, ...]:
    """Return the curve of damage against one cost, from the smallest to the largest.

    Args:
        problem: Units, choices, damage and costs.
        cost: The cost that is limited; the others are free.
        points: Limits to try, evenly spaced from the least that any allocation costs
            to what the allocation of least damage costs. Limits with the same answer
            give one point, so fewer may be returned.
        progress: Called after each limit.

    Raises:
        ValueError: The cost is unknown, or there are fewer than two points.
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
    exact = partial(_exact, passes=CURVE_PASSES)
    while (allocation := _within(problem, {cost: limit}, exact)) is None:
        limit = float(np.nextafter(limit, np.inf))  # the least cost, less a last bit
    used = problem.total(cost, allocation)
    return ParetoPoint(limit, used, problem.damage_of(allocation), allocation)
