"""Allocate bits by any of the methods, and trace the curve of size and damage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TypeAlias

import numpy as np

from ompq.allocation.exact_search import NODES, Optimum, minimum
from ompq.allocation.infeasibility import check_each, conflict, reachable
from ompq.allocation.problem import Allocation, Columns, Problem, Program
from ompq.allocation.relaxation import floor_or_ceiling, relaxation, round_relaxation
from ompq.budgets import Budget
from ompq.cost_tables import Cost
from ompq.progress import Progress
from ompq.registry import Names

# Returns a choice for each group of units, (groups,), within the limits of a program;
# None if it finds none.
Solver: TypeAlias = Callable[[Program], Columns | None]
EXACT = "exact"
# The paper searches depth-first in small networks, such as ResNet-18, and rounds in
# those with more decisions than this, such as MobileNetV2 and ResNet-50.
DEPTH_FIRST = 32


def solve_exactly(program: Program) -> Columns | None:
    """Return the best choices; the search proves it, or bounds the gap."""
    return minimum(program).columns


def search_neighbours(program: Program) -> Columns | None:
    """Return the best of the choices just below and above the relaxation's shares."""
    return minimum(floor_or_ceiling(program)).columns


def relax(program: Program) -> Columns | None:
    """Solve as the paper does: small networks by search, large ones by rounding."""
    small = len(program.damage) <= DEPTH_FIRST
    return search_neighbours(program) if small else round_relaxation(program)


SOLVERS: Names[Solver] = Names(
    "solver",
    {
        EXACT: solve_exactly,
        "relax": relax,
        "relax-round": round_relaxation,
        "relax-dfs": search_neighbours,
    },
    field="method",
)


def solver_name(method: Solver | str) -> str:
    """Return the name that a solver goes by, or its own name."""
    if isinstance(method, str):
        return method
    names = (name for name, one in SOLVERS.items() if one == method)
    own = getattr(method, "__qualname__", type(method).__name__)
    return next(names, own)


CURVE_GAP = 1e-5  # relative gap that no one would see in a plotted Pareto curve


@dataclass(frozen=True)
class ParetoPoint:
    """The best allocation under one limit."""

    limit: float
    cost: float  # what the allocation costs; at most the limit
    damage: float
    allocation: Allocation


def allocate(
    problem: Problem, budget: Budget | str, *, method: Solver | str = EXACT
) -> Allocation:
    """Return the allocation of least damage within a budget.

    Its ``gap`` bounds how much better another allocation could be; 0 proves it optimal.

    Args:
        method: ``exact``, or a published method. The paper's ``relax-round`` rounds the
            linear relaxation, ``relax-dfs`` searches its floors and ceilings, and
            ``relax`` picks the first for large networks, the second for small ones.
            A solver of your own takes a ``Program`` and returns a choice for each
            group of units. All of them keep to the budget; one that finds nothing,
            because limits conflict, falls back to ``exact``.

    Raises:
        BudgetError: The budget cannot be read, or limits a cost that is not there.
        InfeasibleBudgetError: No allocation meets the budget.
        ValueError: The method's name is unknown, or it returned what exceeds a limit.

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
    solver = SOLVERS.find(method, "a callable") if isinstance(method, str) else method
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    solve = partial(_solve, limits=limits, solver=solver)
    allocation = _best_of(problem, [*map(solve, problem.cases(limits))])
    if allocation is None:
        raise conflict(problem, limits)
    return allocation


def _best_of(problem: Problem, found: Sequence[Allocation | None]) -> Allocation | None:
    """Return the best allocation of all cases of a problem, with the overall gap."""
    damages = [(problem.damage_of(one), one) for one in found if one is not None]
    if not damages:
        return None
    damage, best = min(damages, key=lambda pair: pair[0])
    bound = min(damage - one.gap for damage, one in damages)
    return replace(best, gap=max(damage - bound, 0.0))


def _solve(
    problem: Problem,
    limits: Mapping[str, float],
    solver: Solver = solve_exactly,
    *,
    quick: bool = False,
) -> Allocation | None:
    """Return the best allocation within the limits, or None if there is none.

    A limit on memory holds at every moment of a forward pass, but few moments matter.
    Constraints are added only for those at which a solution exceeds the limit.
    """
    nodes, enough = (0, CURVE_GAP) if quick else (NODES, 0.0)
    problem, limits = _with_moments(problem, limits)
    linear = {n: m for n, m in limits.items() if problem.costs[n].memory is None}
    # Costs that are not short decimals are rounded to steps. Start with limits raised
    # by what rounding may have added; tighten them if the true total is too high.
    exact = all(problem.costs[name].scale is not None for name in linear)
    for slack in (0.0,) if exact else (0.5, 0.0, -0.5):
        program = problem.program(linear, slack)
        found = None if solver is solve_exactly else _found_by(solver, program)
        found = found or minimum(program, nodes=nodes, enough=enough)
        if found.columns is None:
            if found.gap > 0:
                raise conflict(problem, linear, proved=False)
            return None
        allocation = replace(problem.allocation(found.columns), gap=found.gap)
        if all(problem.total(name, allocation) <= linear[name] for name in linear):
            more = _with_moments(problem, limits, allocation)
            if len(more[1]) == len(limits):
                return allocation
            return _solve(*more, solver, quick=quick)
    return None


def _with_moments(
    problem: Problem, limits: Mapping[str, float], allocation: Allocation | None = None
) -> tuple[Problem, Mapping[str, float]]:
    """Add a linear cost and limit for one more moment of each limited memory.

    Without an allocation, that is the moment of the peak with the fewest bits. With
    one, it is the moment of its peak, and nothing is added if the peak fits.
    """
    costs, more_limits = dict(problem.costs), dict(limits)
    for name, limit in limits.items():
        cost, moment = problem.costs[name], None
        if cost.memory is None:
            continue
        if allocation is not None:
            columns = problem.columns(allocation)
            if cost.total(columns) <= limit:
                continue
            moment = cost.memory.peak(columns)[1]
        linear = Cost.of_memory(name, cost.memory, cost.base, moment)
        costs[f"{name} {moment}"] = replace(linear, memory=None)
        more_limits[f"{name} {moment}"] = limit
    if more_limits == limits:  # keeps what the problem has cached
        return problem, limits
    return replace(problem, costs=costs), more_limits


def _found_by(solver: Solver, program: Program) -> Optimum | None:
    """Return what a solver finds, with a bound by the relaxation; None if nothing."""
    columns = solver(program)
    if columns is None:
        return None
    _check_columns(solver, program, columns)
    shares = relaxation(program).shares
    bound = -inf if shares is None else float((shares * program.damage).sum())
    return Optimum(columns, max(program.value(columns) - bound, 0.0))


def _check_columns(solver: Solver, program: Program, columns: Columns) -> None:
    """Raise a ValueError if a solver's choices do not fit the program."""
    columns, (units, choices) = np.asarray(columns), program.damage.shape
    wrong = ""
    if columns.shape != (units,) or columns.dtype.kind not in "iu":
        wrong = f"{columns.dtype} of shape {columns.shape}, not a choice for each of "
        wrong += f"{units} groups of units"
    elif not ((columns >= 0) & (columns < choices)).all():
        wrong = f"choices beyond the {choices} that there are"
    elif not program.allowed[np.arange(units), columns].all():
        wrong = "choices that are not allowed"
    elif not (program.used(columns) <= program.limits).all():
        wrong = "choices that exceed a limit"
    if wrong:
        raise ValueError(f"the solver {solver_name(solver)} returned {wrong}")


def pareto(
    problem: Problem,
    cost: str = "bytes",
    points: int = 100,
    *,
    progress: Progress | None = None,
) -> tuple[ParetoPoint, ...]:
    """Return the least damage at increasing limits on one cost.

    Args:
        points: Number of limits, evenly spaced between the cheapest allocation and the
            one of least damage. Limits with the same solution share a point, so fewer
            points may be returned.
    """
    if points < 2:
        raise ValueError(f"points={points} is too few for a curve; use at least 2")
    smallest, largest = reachable(problem, cost)
    found = [_best_under(problem, cost, largest)]
    limits = np.linspace(smallest, found[0].cost, points)[-2::-1].tolist()
    for done, limit in enumerate(limits, 2):
        if limit < found[-1].cost:  # otherwise the last point solves this limit, too
            point = _best_under(problem, cost, limit)
            found = [p for p in found if p.damage < point.damage] + [point]
        if progress is not None:
            progress(done, points, f"solving for {cost}")
    return tuple(found[::-1])


def _best_under(problem: Problem, cost: str, limit: float) -> ParetoPoint:
    def solve(limit: float) -> Allocation | None:
        each = partial(_solve, limits={cost: limit}, quick=True)
        return _best_of(problem, [*map(each, problem.cases([cost]))])

    while (allocation := solve(limit)) is None:
        # Rounding put the lowest limit just below the cheapest allocation.
        limit = float(np.nextafter(limit, np.inf))
    used = problem.total(cost, allocation)
    return ParetoPoint(limit, used, problem.damage_of(allocation), allocation)
