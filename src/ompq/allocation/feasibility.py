"""What a budget can reach, and who stands in its way."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ompq.allocation.budgets import Budget, enough, readable
from ompq.allocation.problems import Problem
from ompq.allocation.search import minimum
from ompq.errors import InfeasibleBudgetError, shortened

WORST = 5  # units named as standing in the way, besides pinned ones


def reachable(problem: Problem, cost: str) -> tuple[float, float]:
    """Return the least and the most that any allocation costs.

    Raises:
        ValueError: The cost is unknown.
    """
    if cost not in problem.costs:
        raise ValueError(
            f"cost={cost!r} is unknown; the costs are {', '.join(problem.costs)}"
        )
    table = problem.by_group(problem.costs[cost].table)
    least = np.where(problem.group_allowed, table, np.inf).argmin(1)
    most = np.where(problem.group_allowed, table, -np.inf).argmax(1)
    return (
        problem.total(cost, problem.allocation(least)),
        problem.total(cost, problem.allocation(most)),
    )


def check_budget(problem: Problem, budget: Budget | str) -> None:
    """Make sure that a budget can be met, whatever the damage.

    Raises:
        BudgetError: The budget cannot be read, or limits a cost that is not there.
        InfeasibleBudgetError: No allocation meets it.
    """
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    program = problem.program(limits)
    if len(limits) > 1:
        free = replace(program, damage=np.zeros_like(program.damage))
        if minimum(free) is None:
            raise conflict(problem, limits)


def check_each(problem: Problem, limits: Mapping[str, float]) -> None:
    """Make sure that each limit can be met if the others are ignored.

    Raises:
        InfeasibleBudgetError: One cannot.
    """
    for name, limit in limits.items():
        smallest, _ = reachable(problem, name)
        if smallest > limit:
            raise _infeasible(problem, name, limit, smallest, "")


def conflict(problem: Problem, limits: Mapping[str, float]) -> InfeasibleBudgetError:
    """Return the error that says how limits are in each other's way.

    It names one cost and the least of it that the other limits leave.
    """
    for name, limit in reversed([*limits.items()]):
        others = {key: value for key, value in limits.items() if key != name}
        if not others:
            break
        table = problem.by_group(problem.costs[name].table)
        least = minimum(replace(problem.program(others), damage=table))
        if least is not None:
            smallest = problem.total(name, problem.allocation(least.columns))
            texts = [readable(problem.costs[k], v)[0] for k, v in others.items()]
            together = f" with {' and '.join(texts)}"
            return _infeasible(problem, name, limit, smallest, together)
    name, limit = next(iter(limits.items()))
    together = " with the other limits" if len(limits) > 1 else ""
    return _infeasible(problem, name, limit, reachable(problem, name)[0], together)


def _infeasible(
    problem: Problem, name: str, limit: float, smallest: float, together: str
) -> InfeasibleBudgetError:
    largest = reachable(problem, name)[1]
    texts = readable(problem.costs[name], limit, smallest, largest)
    units, described = _in_the_way(problem, name)
    return InfeasibleBudgetError(
        f"a budget of {texts[0]} cannot be met{together}: allocations take from "
        f"{texts[1]} to {texts[2]}. Most is taken by {described}. "
        f"Raise it to {enough(problem.costs[name], smallest)} or more, allow fewer "
        "bits or remove pins",
        cost=name,
        limit=limit,
        smallest=smallest,
        largest=largest,
        units=units,
    )


def _in_the_way(problem: Problem, name: str) -> tuple[tuple[str, ...], str]:
    """Return the units that cost most at their least, and pins, most first."""
    cost = problem.costs[name]
    table = np.where(problem.group_allowed, problem.by_group(cost.table), np.inf)
    least: dict[int, float] = {}
    pinned: dict[int, str] = {}
    for members, group in zip(problem.members, table, strict=True):
        column = int(group.argmin())
        for unit in members:
            least[unit] = float(cost.table[unit, column])
            if np.isfinite(group).sum() == 1 and least[unit] > cost.table[unit].min():
                pinned[unit] = f", pinned to {problem.choices[column]}"
    ordered = sorted(least, key=lambda unit: -least[unit])
    shown = [u for place, u in enumerate(ordered) if place < WORST or u in pinned]
    texts = [
        f"{problem.names[u]} ({readable(cost, least[u])[0]}{pinned.get(u, '')})"
        for u in shown
    ]
    return tuple(problem.names[u] for u in shown), shortened(texts)
