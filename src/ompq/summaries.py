"""A plan as plain data: what commands, results and other programs read."""

from typing import Any

from ompq.costs import paper_bytes, unit_bytes
from ompq.graph import Skipped
from ompq.plans import Plan


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return budget, totals, bits and what stays float."""
    return {
        "hash": plan.hash,
        "budget": str(plan.budget),
        "limits": dict(plan.budget.limits(plan.problem.costs)),
        "totals": plan.totals,
        "bytes_by_item": plan.bytes_by_item,
        "float_bytes": plan.problem.costs["bytes"].reference,
        "damage": plan.damage,
        "gap": plan.gap,
        "score": plan.score_name,
        "method": plan.method,
        "accounting": plan.accounting,
        "allocation": plan.allocation.to_json(),
        "measured": [
            {"name": one.name, "divergence": one.divergence} for one in plan.measured
        ],
        "units": unit_rows(plan),
        "target": None if plan.target is None else plan.target.name,
        "no_speed_up": [_pair(one) for one in plan.no_speed_up],
        "skipped": [_pair(one) for one in plan.graph.skipped],
    }


def unit_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return what there is to know about each unit and its bits."""
    gamma, importance = plan.scores.gamma, plan.scores.importance
    widths = {choice.weight for choice in plan.choices}
    rows = []
    for i, unit in enumerate(plan.graph.units):
        bits = plan.allocation[unit.name]
        allowed = zip(plan.choices, plan.allowed[i], strict=True)
        free = {choice.weight for choice, may in allowed if may}
        paper = plan.accounting == "paper"
        row = {
            "name": unit.name,
            "kind": unit.kind,
            "shape": list(unit.weight_shape),
            "parameters": unit.weights,
            "macs": unit.macs,
            "block": unit.block,
            "group": unit.group,
            "gamma": None if gamma is None else float(gamma[i]),
            "importance": None if importance is None else float(importance[i]),
            "damage": float(plan.scores.damage[i, plan.columns[i]]),
            "weight_bits": bits.weight,
            "activation_bits": bits.activation,
            # Its weight bits were fixed while those of others were chosen.
            "pinned": len(free) == 1 and len(widths) > 1,
            "bytes": paper_bytes(unit, bits) if paper else unit_bytes(unit, bits).total,
        }
        rows.append(row)
    return rows


def _pair(one: Skipped) -> dict[str, str]:
    return {"name": one.name, "reason": one.reason}
