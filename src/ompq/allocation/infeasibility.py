"""What budgets can be reached, and what stands in the way of those that cannot."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ompq.allocation.exact_search import minimum
from ompq.allocation.problem import Problem, least_allowed
from ompq.budgets import Budget
from ompq.cost_tables import PURPOSES, enough, readable
from ompq.errors import InfeasibleBudgetError, check_known, shorten

LEAST_BITS = 2  # fewest bits of a weight that is not coded
# Costs that coding the weights would reduce.
_WEIGHT_COSTS = ("bytes", "graph_bytes", "total_bytes", "weight_bits")
WORST = 5  # number of largest units to name, besides pinned ones


def reachable(problem: Problem, cost: str) -> tuple[float, float]:
    """Return the least and the most that any allocation costs."""
    check_known("cost", cost, problem.costs)
    table = problem.costs[cost].table
    if problem.costs[cost].memory is not None:
        # The table is that of one moment, where most units have the same cost at every
        # choice. Break these ties by the bits of the activations.
        table = table + 1e-3 * np.array([c.activation for c in problem.choices])
    table = problem.by_group(table)
    totals = []
    for case in problem.cases([cost]):
        least = np.where(case.group_allowed, table, np.inf).argmin(1)
        most = np.where(case.group_allowed, table, -np.inf).argmax(1)
        total = case.costs[cost].total
        totals += [total(columns[problem.group_of]) for columns in (least, most)]
    return min(totals), max(totals)


def halfway(problem: Problem, cost: str) -> float:
    """Return the mean of the least and the most that any allocation costs.

    With the choices W4A4 and W8A8 this is HAWQ-V3's medium limit.
    """
    return sum(reachable(problem, cost)) / 2


def check_budget(problem: Problem, budget: Budget | str) -> None:
    """Raise an InfeasibleBudgetError if a budget cannot be met."""
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    if len(limits) > 1:
        programs = (case.program(limits, slack=0.5) for case in problem.cases(limits))
        # Any allocation within the limits will do, whatever its damage.
        found = [minimum(replace(p, damage=np.zeros_like(p.damage))) for p in programs]
        if all(optimum.columns is None for optimum in found):
            proved = all(optimum.gap == 0 for optimum in found)
            raise conflict(problem, limits, proved=proved)


def check_each(problem: Problem, limits: Mapping[str, float]) -> None:
    """Raise an InfeasibleBudgetError if a limit cannot be met even on its own."""
    for name, limit in limits.items():
        smallest, _ = reachable(problem, name)
        if smallest > limit:
            raise _infeasible(problem, name, limit, smallest)


def conflict(
    problem: Problem, limits: Mapping[str, float], *, proved: bool = True
) -> InfeasibleBudgetError:
    """Return the error for limits that cannot be met together.

    It names one cost and its least value within the other limits.
    """
    for name, limit in reversed([*limits.items()]):
        others = {key: value for key, value in limits.items() if key != name}
        if not others:
            break
        table = problem.by_group(problem.costs[name].table)
        least = [
            minimum(replace(case.program(others), damage=table), nodes=0).columns
            for case in problem.cases(limits)
        ]
        totals = [
            problem.total(name, problem.allocation(columns))
            for columns in least
            if columns is not None
        ]
        if totals:
            smallest = min(totals)
            texts = [
                readable(problem.costs[other], amount)[0] + PURPOSES.get(other, "")
                for other, amount in others.items()
            ]
            together = f" with {' and '.join(texts)}"
            return _infeasible(problem, name, limit, smallest, together, proved=proved)
    name, limit = next(iter(limits.items()))
    together = " with the other limits" if len(limits) > 1 else ""
    smallest = reachable(problem, name)[0]
    return _infeasible(problem, name, limit, smallest, together, proved=proved)


def _infeasible(
    problem: Problem,
    name: str,
    limit: float,
    smallest: float,
    together: str = "",
    *,
    proved: bool = True,
) -> InfeasibleBudgetError:
    largest = reachable(problem, name)[1]
    texts = readable(problem.costs[name], limit, smallest, largest)
    units, described = _largest_units(problem, name)
    most = f"Most is taken by {described}. " if units else ""
    verdict = "cannot be met" if proved else "was not met within the search's limit"
    purpose = PURPOSES.get(name, "")
    return InfeasibleBudgetError(
        f"a budget of {texts[0]}{purpose} {verdict}{together}: allocations take from "
        f"{texts[1]} to {texts[2]}. {most}{_advice(problem, name, smallest)}",
        cost=name,
        limit=limit,
        smallest=smallest,
        largest=largest,
        units=units,
    )


def _advice(problem: Problem, name: str, smallest: float) -> str:
    """Return a sentence that says what would make a budget feasible."""
    cost, choices = problem.costs[name], problem.choices
    weights_count = name in _WEIGHT_COSTS
    ways = [f"Raise it to {enough(cost, smallest)} or more"]
    already_coded = any(choice.rate for choice in choices)
    if already_coded and weights_count:
        ways.append("allow lower rates")
    elif min(choice.weight for choice in choices) > LEAST_BITS or not weights_count:
        ways.append("allow fewer bits")
    # Units with few weights cannot have low rates, pinned or not.
    if not problem.allowed[:, [not choice.rate for choice in choices]].all():
        ways.append("remove pins")
    text = " or ".join(filter(None, [", ".join(ways[:-1]), ways[-1]]))
    if already_coded or not weights_count or "weight_bits" not in problem.costs:
        return text
    # A coded weight may take as little as one bit. Pinned units keep their bits.
    allowed = problem.group_allowed[problem.group_of]
    pinned = (allowed.sum(1) == 1) & (len(choices) > 1)
    bits = problem.costs["weight_bits"].table
    weights = bits[:, 0] / choices[0].bits
    excess = (least_allowed(bits, allowed) - weights)[~pinned]
    saved = excess.sum() / (1 if name == "weight_bits" else 8)
    if not saved:
        return text
    coded = readable(cost, max(smallest - saved, 0.0))[0]
    return (
        f'{text}. A plan with coded weights (--coded, storage="coded") may take about '
        f"{coded} or less"
    )


def _largest_units(problem: Problem, name: str) -> tuple[tuple[str, ...], str]:
    """Describe the units that cost most, and pinned ones, at their cheapest choices."""
    cost = problem.costs[name]
    if cost.memory is not None and cost.base is None:  # activations belong to no unit
        return (), ""
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
    named = [u for place, u in enumerate(ordered) if place < WORST or u in pinned]
    texts = [
        f"{problem.names[u]} ({readable(cost, least[u])[0]}{pinned.get(u, '')})"
        for u in named
    ]
    return tuple(problem.names[u] for u in named), shorten(texts)
