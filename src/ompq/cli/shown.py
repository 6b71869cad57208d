"""A plan for people and for programs: tables, totals, JSON."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from ompq.cli.tables import Column, fitted
from ompq.costs import counted, in_bytes, paper_bytes, readable, unit_bytes
from ompq.costs import seconds as duration
from ompq.errors import shortened
from ompq.evaluation import Evaluation
from ompq.graph import Choice, Skipped, Unit
from ompq.plans import Plan

MEANS_NOTHING = "mean nothing; only sizes are real"
_STAYS_FLOAT = re.compile(r"(?P<kind>\w+) stays float: (?P<count>[\d,]+) parameters")


def plan_table(plan: Plan, width: int) -> RenderableType:
    """Return the units and their bits as a table no wider than ``width``."""
    units, gamma = plan.graph.units, plan.scores.gamma
    several = len({choice.activation for choice in plan.allocation.values()}) > 1
    bits = [plan.allocation[unit.name] for unit in units]
    columns = [
        Column("layer", [unit.name for unit in units], "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=4),
        Column("weight", ["×".join(map(str, u.weight_shape)) for u in units], rank=6),
        Column("params", [counted(unit.weights) for unit in units], rank=2),
        Column("MACs", [counted(unit.macs) for unit in units], rank=3),
    ]
    if gamma is not None:
        columns.append(Column("gamma", [f"{value:.2f}" for value in gamma], rank=5))
    columns += [
        Column("score", [f"{row['damage']:.2e}" for row in unit_rows(plan)], rank=1),
        Column("bits", [str(b) if several else str(b.weight) for b in bits]),
        Column("bytes", [in_bytes(row["bytes"]) for row in unit_rows(plan)]),
        Column("", ["▬" * b.weight for b in bits], "left", rank=8),
        Column("", [_remark(plan, i) for i in range(len(units))], "left", rank=7),
    ]
    return fitted(columns, width)


def unit_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return what there is to know about each unit, as plain data."""
    count_bytes = paper_bytes if plan.accounting == "paper" else _packed_bytes
    return [
        {
            "name": unit.name,
            "kind": unit.kind,
            "shape": list(unit.weight_shape),
            "parameters": unit.weights,
            "macs": unit.macs,
            "block": unit.block,
            "group": unit.group,
            "gamma": _at(plan.scores.gamma, i),
            "importance": _at(plan.scores.importance, i),
            "damage": float(plan.scores.damage[i, plan.columns[i]]),
            "weight_bits": plan.allocation[unit.name].weight,
            "activation_bits": plan.allocation[unit.name].activation,
            "pinned": is_pinned(plan, i),
            "bytes": count_bytes(unit, plan.allocation[unit.name]),
        }
        for i, unit in enumerate(plan.graph.units)
    ]


def totals(plan: Plan) -> list[tuple[str, str]]:
    """Return what the plan comes to, as names and texts."""
    found = plan.totals
    items = [
        f"{name.replace('_', ' ')} {in_bytes(value)}"
        for name, value in plan.bytes_by_item.items()
        if value
    ]
    if plan.accounting == "paper":
        items = ["counted as in the paper, without scales"]
    widths = sorted({choice.activation for choice in plan.allocation.values()})
    rows = [
        ("budget", "; ".join(used(plan))),
        ("size", f"{in_bytes(found['bytes'])}, {_ratio(plan)}"),
        ("", ", ".join(items)),
        (
            "bits",
            f"{found['average_bits']:.3f} a weight on average, "
            f"activations {', '.join(map(str, widths))}",
        ),
        ("BOPs", counted(found["bit_ops"])),
        ("damage", f"{plan.damage:.4g} by {plan.score_name}"),
    ]
    if "milliseconds" in found:
        rows.append(("latency", f"{found['milliseconds']:.3g} ms"))
    if plan.target is not None:
        slow = skipped_lines(plan.no_speed_up)
        rows += [("target", plan.target.name), *(("no faster", text) for text in slow)]
    return rows


def used(plan: Plan) -> list[str]:
    """Return what is used of each limit, in the budget's own unit."""
    found, costs, budget = plan.totals, plan.problem.costs, plan.budget
    size = found["bytes"]
    texts = []
    for part, amount, unit in (
        (budget.size_mb, size / 1e6, "MB"),
        (budget.percent, 100 * size / costs["bytes"].reference, "% of float"),
        (budget.average_bits, found["average_bits"], "bits"),
        (budget.latency_ms, found.get("milliseconds", 0.0), "ms"),
    ):
        if part is not None:
            texts.append(f"{amount:.5g} of {part:g} {unit} ({amount / part:.1%})")
    for part, name, scale in (
        (budget.size_mib, "bytes", 2**20),
        (budget.bit_ops, "bit_ops", 1),
    ):
        if part is not None:
            limit = part * scale
            amount_text, limit_text = readable(costs[name], found[name], limit)
            share = found[name] / limit
            texts.append(f"{amount_text} of {limit_text} ({share:.1%})")
    return texts


def skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """Return what stays float, one line a reason."""
    floats: dict[str, list[tuple[str, int]]] = {}
    others: dict[str, list[str]] = {}
    for entry in skipped:
        match = _STAYS_FLOAT.fullmatch(entry.reason)
        if match:
            number = int(match["count"].replace(",", ""))
            floats.setdefault(match["kind"], []).append((entry.name, number))
        else:
            others.setdefault(entry.reason, []).append(entry.name)
    lines = [
        f"{len(found)} {kind} {'stay' if len(found) > 1 else 'stays'} float: "
        f"{sum(number for _, number in found):,} parameters "
        f"({shortened([name for name, _ in found], 2)})"
        for kind, found in floats.items()
    ]
    return lines + [f"{shortened(names, 3)}: {why}" for why, names in others.items()]


def time_line(seconds: Mapping[str, float]) -> str:
    """Return the time of each stage, and of all."""
    stages = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    return f"{duration(sum(seconds.values()))} ({stages})"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan's results as plain data."""
    return {
        "hash": plan.hash,
        "budget": str(plan.budget),
        "limits": dict(plan.budget.limits(plan.problem.costs)),
        "totals": plan.totals,
        "bytes_by_item": plan.bytes_by_item,
        "float_bytes": plan.problem.costs["bytes"].reference,
        "damage": plan.damage,
        "score": plan.score_name,
        "method": plan.method,
        "accounting": plan.accounting,
        "allocation": plan.allocation.to_json(),
        "units": unit_rows(plan),
        "target": None if plan.target is None else plan.target.name,
        "no_speed_up": [
            {"name": one.name, "reason": one.reason} for one in plan.no_speed_up
        ],
        "skipped": [
            {"name": one.name, "reason": one.reason} for one in plan.graph.skipped
        ],
    }


def accuracy_text(result: Evaluation) -> str:
    """Return top-1 with its interval.

    Example:
        ``71.39 % (69.58 to 73.13) of 2,500 images``
    """
    low, high = (100 * limit for limit in result.interval)
    return (
        f"{100 * result.top1:.2f} % ({low:.2f} to {high:.2f}) "
        f"of {result.count:,} images"
    )


def meaningless(about: Mapping[str, Any]) -> str:
    """Return the options by which nothing real was looked at, or nothing."""
    found = [
        option
        for option, given in (
            ("--weights none", about.get("weights") == "none (random)"),
            ("--data random", about.get("data") == "random"),
        )
        if given
    ]
    return " and ".join(found)


def warning_text(text: str) -> RenderableType:
    """Return a warning that is not overlooked."""
    return Text(text, style="bold yellow")


def is_pinned(plan: Plan, position: int) -> bool:
    """Return whether a unit's weight bits were fixed while others were chosen."""
    row = zip(plan.choices, plan.allowed[position], strict=True)
    free = {choice.weight for choice, allowed in row if allowed}
    return len(free) == 1 and len({choice.weight for choice in plan.choices}) > 1


def _remark(plan: Plan, position: int) -> str:
    unit = plan.graph.units[position]
    if is_pinned(plan, position):
        return "pinned"
    if len(plan.graph.groups[unit.group]) > 1:
        return f"tied to {unit.group}" if unit.group != unit.name else "tied"
    return ""


def _ratio(plan: Plan) -> str:
    reference = plan.problem.costs["bytes"].reference
    times = reference / plan.totals["bytes"]
    return f"{times:.1f} times smaller than float ({in_bytes(reference)})"


def _packed_bytes(unit: Unit, choice: Choice) -> float:
    return unit_bytes(unit, choice).total


def _at(values: NDArray[np.float64] | None, position: int) -> float | None:
    return None if values is None else float(values[position])
