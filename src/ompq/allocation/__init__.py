"""allocate(): the bits of least damage within a budget, and the Pareto curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Literal, get_args

import numpy as np

from ompq.allocation.explanation import (
    Explanation,
    check_budget,
    check_each,
    conflict,
    explain,
    halfway,
    reachable,
)
from ompq.allocation.program import Allocation, Problem, Program
from ompq.allocation.relaxations import evolved, floor_or_ceiling, relaxation, rounded
from ompq.allocation.search import NODES, Optimum, minimum
from ompq.costs import Budget, Cost
from ompq.errors import check_known
from ompq.stages import Progress

__all__ = [
    "METHODS",
    "Allocation",
    "Explanation",
    "Method",
    "ParetoPoint",
    "Problem",
    "allocate",
    "check_budget",
    "explain",
    "halfway",
    "pareto",
    "reachable",
]

Method = Literal["exact", "relax", "relax-round", "relax-dfs", "genetic"]
METHODS: tuple[str, ...] = get_args(Method)

# The paper searches depth-first for small networks, such as ResNet-18, and rounds for
# large ones: those with more decisions than this, such as MobileNetV2 and ResNet-50.
DEPTH_FIRST = 32
CURVE_GAP = 1e-5  # of a point of a curve: far less than a line's width


@dataclass(frozen=True)
class ParetoPoint:
    """The best allocation under one limit."""

    limit: float
    cost: float  # what the allocation costs; at most the limit
    damage: float
    allocation: Allocation


def allocate(
    problem: Problem, budget: Budget | str, *, method: Method = "exact", seed: int = 0
) -> Allocation:
    """Return the allocation of least damage that keeps to a budget.

    Its ``gap`` is what is not proved.

    Args:
        method: ``exact``; or the paper's ways, which keep to the budget too:
            ``relax-round`` rounds the linear relaxation, ``relax-dfs`` searches its
            floors and ceilings, ``relax`` does the one for large networks and the other
            for small ones; or BRECQ's ``genetic`` search. Where these find nothing
            within budgets that pull in opposite directions, the exact allocation is
            returned.
        seed: Of the genetic search.

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
    check_known("method", method, METHODS)
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    solved = partial(_within, limits=limits, method=method, seed=seed)
    allocation = _least(problem, [*map(solved, problem.cases(limits))])
    if allocation is None:
        raise conflict(problem, limits)
    return allocation


def _least(problem: Problem, found: Sequence[Allocation | None]) -> Allocation | None:
    """Return the allocation of least damage among those of a problem's cases."""
    damages = [(problem.damage_of(one), one) for one in found if one is not None]
    if not damages:
        return None
    damage, best = min(damages, key=lambda pair: pair[0])
    bound = min(damage - one.gap for damage, one in damages)
    return replace(best, gap=max(damage - bound, 0.0))


def _within(
    problem: Problem,
    limits: Mapping[str, float],
    method: Method = "exact",
    *,
    seed: int = 0,
    quickly: bool = False,
) -> Allocation | None:
    """Return the best allocation whose totals keep to the limits.

    Memory is limited at every moment, but few moments matter: those that an allocation
    exceeds are added, until none is.
    """
    nodes, enough = (0, CURVE_GAP) if quickly else (NODES, 0.0)
    problem, limits = _with_moments(problem, limits)
    rows = {n: m for n, m in limits.items() if problem.costs[n].memory is None}
    # Costs that are not short decimals are rounded to steps. Begin with the room that
    # this may take away, and take it back where it was used.
    exact = all(problem.costs[name].scale is not None for name in rows)
    for slack in (0.0,) if exact else (0.5, 0.0, -0.5):
        program = problem.program(rows, slack)
        found = _rough(program, method, seed)
        found = found or minimum(program, nodes=nodes, enough=enough)
        if found.columns is None:
            if found.gap > 0:
                raise conflict(problem, rows, proved=False)
            return None
        allocation = replace(problem.allocation(found.columns), gap=found.gap)
        if all(problem.total(name, allocation) <= rows[name] for name in rows):
            more = _with_moments(problem, limits, allocation)
            if len(more[1]) == len(limits):
                return allocation
            return _within(*more, method, seed=seed, quickly=quickly)
    return None


def _with_moments(
    problem: Problem, limits: Mapping[str, float], given: Allocation | None = None
) -> tuple[Problem, Mapping[str, float]]:
    """Return the problem with a cost, and a limit, for one more moment of memory.

    That is the first, or the one at which a given allocation takes most, if that is
    more than the limit.
    """
    costs, found = dict(problem.costs), dict(limits)
    for name, limit in limits.items():
        cost, moment = problem.costs[name], None
        if cost.memory is None:
            continue
        if given is not None:
            columns = problem.columns(given)
            if cost.total(columns) <= limit:
                continue
            moment = cost.memory.peak(columns)[1]
        row = Cost.of_memory(name, cost.memory, cost.base, moment)
        costs[f"{name} {moment}"] = replace(row, memory=None)
        found[f"{name} {moment}"] = limit
    return (problem if found == limits else replace(problem, costs=costs)), found


def _rough(program: Program, method: Method, seed: int) -> Optimum | None:
    """Solve by a published method, if that is asked for and finds something."""
    columns = None
    if method == "relax":
        method = "relax-dfs" if len(program.damage) <= DEPTH_FIRST else "relax-round"
    if method == "relax-round":
        columns = rounded(program)
    elif method == "relax-dfs":
        columns = minimum(floor_or_ceiling(program)).columns
    elif method == "genetic":
        columns = evolved(program, seed=seed)
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
    def solved(limit: float) -> Allocation | None:
        each = partial(_within, limits={cost: limit}, quickly=True)
        return _least(problem, [*map(each, problem.cases([cost]))])

    while (allocation := solved(limit)) is None:
        limit = float(np.nextafter(limit, np.inf))  # the least cost, less a last bit
    used = problem.total(cost, allocation)
    return ParetoPoint(limit, used, problem.damage_of(allocation), allocation)
