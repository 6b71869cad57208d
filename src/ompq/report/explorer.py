"""The data behind the explorer: tables, and curves of solutions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.solver import Allocation, Budget
from ompq.costs import FILES, Cost
from ompq.plans import Plan
from ompq.samples import Progress

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def explorer_data(
    plan: Plan, steps: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the explorer's data for ``steps`` budgets, plain enough for JSON.

    A solution is a string with one character a unit: the digit of its choice, in base
    62, so that a hundred solutions of a large network stay small.
    """
    units = plan.graph.units
    problem = plan.problem
    groups = {name: number for number, name in enumerate(plan.graph.groups)}
    offered = sorted({0, *problem.inputs.values()})
    return {
        "names": list(plan.graph.names),
        "kinds": [unit.kind for unit in units],
        "shapes": ["×".join(map(str, unit.weight_shape)) for unit in units],
        "stages": [unit.stage for unit in units],
        "groups": [groups[unit.group] for unit in units],
        "choices": [choice.to_json() for choice in plan.choices],
        # As an allocation's file has them, for what the page copies.
        "saved": {bits: _saved(plan, bits) for bits in offered},
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
            if _shown(cost)
        },
        "plan": solution(plan),
        "axes": [_axis(plan, cost, steps, progress) for cost in axis_costs(plan)],
    }


def _saved(plan: Plan, bits: int) -> list[Any]:
    """Return the choices as an allocation's file has them, with these input bits."""
    with_bits = [choice.with_input(bits) for choice in plan.choices]
    return [Allocation({"unit": choice}).to_json()["unit"] for choice in with_bits]


def limits(plan: Plan) -> dict[str, float]:
    """Return what the plan's budget allows, by cost."""
    costs = plan.problem.costs
    found = plan.budget.limits(costs)
    return {name: limit for name, limit in found.items() if _shown(costs[name])}


def _shown(cost: Cost) -> bool:
    # The page adds up tables; the peak of what is alive at once is not a sum, nor is
    # what weights share in an ONNX file.
    return cost.memory is None and cost.name not in FILES


def axis_costs(plan: Plan) -> list[str]:
    """Return the costs that have a slider: what the budget limits, size, and bits."""
    return list(dict.fromkeys([*limits(plan), "bytes", "weight_bits"]))


def solution(plan: Plan) -> str:
    """Return the plan's own allocation as a string of digits."""
    return "".join(_DIGITS[column] for column in plan.columns)


def _axis(
    plan: Plan, cost: str, steps: int, progress: Progress | None
) -> dict[str, Any]:
    found = [
        (limit, "".join(_DIGITS[column] for column in plan.problem.columns(allocation)))
        for limit, allocation in _solutions(plan, cost, steps, progress)
    ]
    own = limits(plan)
    at = -1
    if list(own) == [cost]:
        # The plan itself stands on the curve: the slider starts there.
        at = sum(limit < own[cost] for limit, _ in found)
        found.insert(at, (own[cost], solution(plan)))
    return {
        "cost": cost,
        "plan": at,
        "limits": [limit for limit, _ in found],
        "solutions": [columns for _, columns in found],
    }


def _solutions(
    plan: Plan, cost: str, steps: int, progress: Progress | None
) -> list[tuple[float, Allocation]]:
    """Return limits, evenly spaced, and what ``plan.with_budget`` gives for each."""
    curve = plan.pareto(cost, steps, progress=progress)
    even = np.linspace(curve[0].cost, curve[-1].cost, steps)
    costs = plan.problem.costs
    budgets = [_budget(cost, limit, costs[cost].reference) for limit in even.tolist()]
    reached = [budget.limits(costs)[cost] for budget in budgets]
    if plan.method != "exact":
        return [
            (limit, plan.with_budget(budget).allocation)
            for limit, budget in zip(reached, budgets, strict=True)
        ]
    # The curve leaves out limits whose answer it has: a point holds from cost to limit.
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
    # A last bit more, since dividing may have taken one away.
    return Budget(average_bits=float(np.nextafter(limit / reference, np.inf)))


def _numbers(table: NDArray[np.float64]) -> list[list[float]]:
    """Return whole numbers without their ``.0``: half the table's characters."""
    whole = bool((table == np.round(table)).all()) and np.abs(table).max() < 2**53
    rows: list[list[float]] = (table.astype(np.int64) if whole else table).tolist()
    return rows
