"""The explorer: plans for other budgets, computed ahead for the page."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.problem import Allocation
from ompq.budgets import Budget
from ompq.cost_tables import FILES, Cost
from ompq.plans import Plan
from ompq.progress import Progress

# Budgets on each curve of the explorer: enough for a smooth slider, and solved in
# seconds. Networks with more units than _LARGE get fewer, since each takes longer.
STEPS = 128

# A solution has one of these characters per unit, for the index of its choice.
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def explorer_data(
    plan: Plan, steps: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the explorer's data for ``steps`` budgets, as plain data for JSON.

    A solution is a string with one character per unit, the index of its choice as a
    digit of base 62, so that a hundred solutions of a large network stay small.
    """
    units, choices, problem = plan.graph.units, plan.choices, plan.problem
    groups = {name: number for number, name in enumerate(plan.graph.groups)}
    return {
        "names": list(plan.graph.names),
        "kinds": [unit.kind for unit in units],
        "shapes": ["×".join(map(str, unit.weight_shape)) for unit in units],
        "stages": [unit.stage for unit in units],
        "groups": [groups[unit.group] for unit in units],
        "choices": [choice.to_json() for choice in choices],
        # By pinned input bits, as in an allocation file, for the page's copy button.
        "saved": {
            bits: [Allocation({"": c.with_input(bits)}).to_json()[""] for c in choices]
            for bits in sorted({0, *problem.inputs.values()})
        },
        "inputs": [problem.inputs.get(name, 0) for name in plan.graph.names],  # pinned
        "allowed": ["".join(map(str, row)) for row in plan.allowed.astype(int)],
        "damage": plan.scores.damage.tolist(),
        "gamma": None if plan.scores.gamma is None else plan.scores.gamma.tolist(),
        "costs": {
            name: {
                "table": _numbers(cost.table),
                "constant": cost.constant,
                "reference": cost.reference,
            }
            for name, cost in problem.costs.items()
            if _is_sum(cost)
        },
        "plan": solution(plan),
        "axes": [_axis(plan, cost, steps, progress) for cost in axis_costs(plan)],
    }


def limits(plan: Plan) -> dict[str, float]:
    """Return the limits of the plan's budget by cost, for costs that are sums."""
    costs = plan.problem.costs
    every = plan.budget.limits(costs)
    return {name: limit for name, limit in every.items() if _is_sum(costs[name])}


def _is_sum(cost: Cost) -> bool:
    # The page can only add up tables. Peak memory is not a sum over units, and neither
    # is the size of an ONNX file, in which units share data.
    return cost.memory is None and cost.name not in FILES


def axis_costs(plan: Plan) -> list[str]:
    """Return the costs that have a slider: those the budget limits, size and bits."""
    return list(dict.fromkeys([*limits(plan), "bytes", "weight_bits"]))


def solution(plan: Plan) -> str:
    """Return the plan's allocation as a string of digits."""
    return "".join(_DIGITS[column] for column in plan.columns)


def _axis(
    plan: Plan, cost: str, steps: int, progress: Progress | None
) -> dict[str, Any]:
    points = [
        (limit, "".join(_DIGITS[column] for column in plan.problem.columns(allocation)))
        for limit, allocation in _solutions(plan, cost, steps, progress)
    ]
    own = limits(plan)
    at = -1
    if list(own) == [cost]:
        # The plan itself is a point of the curve, where the slider starts.
        at = sum(limit < own[cost] for limit, _ in points)
        points.insert(at, (own[cost], solution(plan)))
    return {
        "cost": cost,
        "plan": at,
        "limits": [limit for limit, _ in points],
        "solutions": [text for _, text in points],
    }


def _solutions(
    plan: Plan, cost: str, steps: int, progress: Progress | None
) -> list[tuple[float, Allocation]]:
    """Return evenly spaced limits and the allocation ``plan.with_budget`` finds."""
    curve = plan.pareto(cost, steps, progress=progress)
    spaced = np.linspace(curve[0].cost, curve[-1].cost, steps)
    costs = plan.problem.costs
    budgets = [_budget(cost, limit, costs[cost].reference) for limit in spaced.tolist()]
    reached = [budget.limits(costs)[cost] for budget in budgets]
    if plan.method != "exact":
        return [
            (limit, plan.with_budget(budget).allocation)
            for limit, budget in zip(reached, budgets, strict=True)
        ]
    # Each point of the curve is optimal for all limits from its cost to its limit.
    used = np.array([point.cost for point in curve])
    places = np.maximum(np.searchsorted(used, reached, side="right") - 1, 0)
    return [
        (min(limit, curve[place].limit), curve[place].allocation)
        for limit, place in zip(reached, places.tolist(), strict=True)
    ]


def _budget(cost: str, limit: float, reference: float) -> Budget:
    if cost == "bytes":
        return Budget(size_mib=limit / 2**20)
    if cost == "bit_ops":
        return Budget(bit_ops=limit)
    if cost == "milliseconds":
        return Budget(latency_ms=limit)
    # The next larger number, because the division may have rounded down.
    return Budget(average_bits=float(np.nextafter(limit / reference, np.inf)))


def _numbers(table: NDArray[np.float64]) -> Any:
    """Return whole numbers without their ``.0``, which halves the text."""
    whole = bool((table == np.round(table)).all()) and np.abs(table).max() < 2**53
    return (table.astype(np.int64) if whole else table).tolist()
