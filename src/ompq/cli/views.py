"""How plans, evaluations and costs are shown: as text, and as columns of a table."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from rich.text import Text

from ompq.amounts import digits, in_bytes, seconds as duration, short_count
from ompq.cli.console import Column, Shown, View, facts
from ompq.cost_tables import PURPOSES, readable
from ompq.errors import shorten
from ompq.evaluation_result import Evaluation
from ompq.network.units import Skipped
from ompq.plans import Plan, refinement_summary, unit_rows


def size_budgets(sizes: Sequence[float]) -> list[str]:
    """Return sizes as budgets, all in the unit that suits the largest."""
    unit, factor = ("MiB", 2**20) if max(sizes) >= 2**20 else ("KiB", 2**10)
    return [as_budget(size / factor, unit) for size in sizes]


def operation_budgets(numbers: Sequence[float]) -> list[str]:
    """Return bit operations as budgets, all in the unit that suits the largest."""
    unit, factor = ("GBOPs", 1e9) if max(numbers) >= 1e9 else ("MBOPs", 1e6)
    return [as_budget(number / factor, unit) for number in numbers]


def cost_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return size, percentage of float, average bits and BOPs, each a valid budget."""
    shares = [as_budget(row["percent"], "%") for row in rows]
    averages = [as_budget(row["average_bits"], "bits") for row in rows]
    operations = [row["bit_ops"] for row in rows]
    return [
        Column("size", size_budgets([row["bytes"] for row in rows])),
        Column("of float", shares, rank=2),
        Column("average", averages),
        Column("BOPs", operation_budgets(operations), rank=1),
    ]


def as_budget(value: float, unit: str) -> str:
    """Return a budget of four digits, rounded up so that ``value`` meets it."""
    if value <= 0:
        return f"0{unit}"
    digits = max(0, 3 - floor(log10(value)))
    scaled = value * 10**digits
    return f"{ceil(scaled - 1e-9) / 10**digits:.{digits}f}{unit}"


def time_line(seconds: Mapping[str, float]) -> str:
    """Return the total time and the time of each stage."""
    stages = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    return f"{duration(sum(seconds.values()))} ({stages})"


def top1_text(result: Evaluation) -> str:
    """Return top-1 with its interval, as in ``71.39 % (69.58 to 73.13)``."""
    if result.top1 is None or result.interval is None:
        return "-"
    low, high = (100 * limit for limit in result.interval)
    return f"{100 * result.top1:.2f} % ({low:.2f} to {high:.2f})"


def quality_rows(result: Evaluation | None) -> list[tuple[str, str]]:
    """Return the accuracy of a network, next to the float one's if it was measured."""
    if result is None:
        return []
    samples = f"{result.count:,} samples"
    rows = []
    if result.top1 is not None:
        rows.append(("top-1", f"{top1_text(result)} of {samples} (95 % interval)"))
    if result.top5 is not None:
        rows.append(("top-5", f"{100 * result.top5:.2f} %"))
    if result.top1 is not None and result.drop is not None:
        rows.append(("float", f"top-1 {100 * (result.top1 + result.drop):.2f} %"))
        low, high = (100 * limit for limit in result.drop_interval)
        text = f"{100 * result.drop:.2f} points ({low:.2f} to {high:.2f}, paired, 95 %)"
        rows.append(("drop", text))
    for name, value in result.metrics.items():
        reference = result.reference_metrics.get(name)
        compared = "" if reference is None else f", float {digits(reference, 5)}"
        rows.append((name, f"{digits(value, 5)}{compared}, on {samples}"))
    if result.likeness:
        rows.append(("as float", f"{result.likeness}, on {samples}"))
    if result.top1 is None and not result.metrics and result.output == "classes":
        rows.append(("accuracy", "not measured: give class labels, or --metric"))
    return rows


def quality_text(result: Evaluation) -> str:
    """Return the most important measure of a network's quality, for one line."""
    return "; ".join(" ".join(row) for row in quality_rows(result)[:1])


def warning(about: Mapping[str, Any], what: str) -> list[Shown]:
    """Return a warning if random weights or random data were used."""
    options = ["--weights none"] if about.get("weights") == "none (random)" else []
    options += ["--data random"] if about.get("data") == "random" else []
    text = f"{' and '.join(options)}: only the sizes are valid, not {what}"
    return [Text(text, style="bold yellow")] if options else []


def plan_view(
    plan: Plan,
    about: Mapping[str, Any],
    seconds: Mapping[str, float],
    file: Path | None = None,
) -> View:
    """Return a plan as ``ompq plan`` and ``ompq replan`` show it."""
    identity = plan.hash if file is None else f"{plan.hash}, saved to {file}"
    unusual = plan.output != "classes"
    data = {
        **about,
        "plan": None if file is None else str(file),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        **plan.to_dict(),
    }
    rows = [
        *totals(plan),
        ("plan", identity),
        *([("output", f"{plan.output} (--output-kind says otherwise)")] * unusual),
        *(("stays float", text) for text in reasons(plan.graph.skipped)),
        ("time", time_line(seconds)),
    ]
    line = f"{'; '.join(used(plan))}, {identity}"
    end = warning(about, "these bits")
    return View(data, line, [plan_columns(plan), "", facts(rows), *end])


def plan_columns(plan: Plan) -> list[Column]:
    """Return the table of units and their bits."""
    units, gamma = plan.graph.units, plan.scores.gamma
    several = len({choice.activation for choice in plan.allocation.values()}) > 1
    bits = [plan.allocation[unit.name] for unit in units]
    rows = unit_rows(plan)
    columns = [
        Column("layer", [unit.name for unit in units], "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=4),
        Column("shape", ["×".join(map(str, u.weight_shape)) for u in units], rank=6),
        Column("params", [short_count(unit.weights) for unit in units], rank=2),
        Column("MACs", [short_count(unit.macs) for unit in units], rank=3),
        Column("damage", [f"{row['damage']:.2e}" for row in rows], rank=1),
        Column("bits", [str(b) if several else b.weight_text for b in bits]),
        Column("bytes", [in_bytes(row["bytes"]) for row in rows]),
        Column("", ["▬" * round(b.bits) for b in bits], "left", rank=8),
        Column("", [_remark(plan, row) for row in rows], "left", rank=7),
    ]
    if gamma is not None:
        cells = [f"{value:.2f}" for value in gamma]
        columns.insert(5, Column("gamma", cells, rank=5))
    return columns


def _remark(plan: Plan, row: Mapping[str, Any]) -> str:
    if row["pinned"]:
        return "pinned"
    if len(plan.graph.groups[row["group"]]) > 1:
        return f"tied to {row['group']}" if row["group"] != row["name"] else "tied"
    return ""


def totals(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan's totals as names and texts."""
    sums, reference = plan.totals, plan.problem.costs["bytes"].reference
    ratio = reference / sums["bytes"]
    compared = f"{ratio:.1f} times smaller" if ratio > 1 else "no smaller"
    items = [
        f"{name.replace('_', ' ')} {in_bytes(value)}"
        for name, value in plan.bytes_by_item.items()
        if value
    ]
    if plan.accounting == "paper":
        items = ["counted as in the paper, without scales"]
    widths = sorted({choice.activation for choice in plan.allocation.values()})
    gap = f", at most {plan.gap:.2g} above the least possible" if plan.gap else ""
    rows = [
        ("budget", "; ".join(used(plan))),
        (
            "packed",
            f"{in_bytes(sums['bytes'])}, {compared} than float ({in_bytes(reference)})",
        ),
        ("", ", ".join(items)),
        (
            "bits",
            f"{sums['average_bits']:.3f} per weight on average, "
            f"{sums['bits_per_parameter']:.2f} per parameter of the whole network, "
            f"activations {', '.join(map(str, widths))}",
        ),
        ("BOPs", short_count(sums["bit_ops"])),
        ("damage", f"{plan.damage:.4g} by {plan.score_name}{gap}"),
    ]
    if plan.measured:
        rows.append(("refined", refinement_summary(plan)))
    if "activation_bytes" in sums:
        peak, total = in_bytes(sums["activation_bytes"]), sums["total_bytes"]
        text = f"{peak} of activations at once, {in_bytes(total)} with the weights"
        rows.append(("memory", text))
    if plan.files:
        words = {
            "onnx_bytes": "ONNX",
            "graph_bytes": "packed with its graph",
            "gguf_bytes": "GGUF",
        }
        sizes = [f"{words[one.name]} {in_bytes(sums[one.name])}" for one in plan.files]
        rows.append(("files", ", ".join(sizes)))
    if "milliseconds" in sums:
        rows.append(("latency", f"{sums['milliseconds']:.3g} ms"))
    if plan.target is not None:
        rows.append(("target", plan.target.name))
    return rows + [("no faster", text) for text in reasons(plan.no_speed_up)]


def used(plan: Plan) -> list[str]:
    """Return how much of each limit is used, in the budget's own unit."""
    sums, costs, budget = plan.totals, plan.problem.costs, plan.budget
    size = sums["bytes"]
    texts = []
    for limit, amount, unit in (
        (budget.size_mb, size / 1e6, "MB"),
        (budget.percent, 100 * size / costs["bytes"].reference, "% of float"),
        (budget.average_bits, sums["average_bits"], "bits"),
        (budget.latency_ms, sums.get("milliseconds", 0.0), "ms"),
    ):
        if limit is not None:
            texts.append(f"{amount:.5g} of {limit:g} {unit} ({amount / limit:.1%})")
    for limit, name in (
        (budget.size_mib, "bytes"),
        (budget.bit_ops, "bit_ops"),
        (budget.activations_mib, "activation_bytes"),
        (budget.total_mib, "total_bytes"),
        (budget.onnx_mib, "onnx_bytes"),
        (budget.graph_mib, "graph_bytes"),
        (budget.gguf_mib, "gguf_bytes"),
    ):
        if limit is not None:
            limit *= 1 if name == "bit_ops" else 2**20
            amount_text, limit_text = readable(costs[name], sums[name], limit)
            purpose, fraction = PURPOSES.get(name, ""), sums[name] / limit
            texts.append(f"{amount_text} of {limit_text}{purpose} ({fraction:.1%})")
    return texts


def reasons(skipped: Sequence[Skipped]) -> list[str]:
    """Return what was skipped and why, one line per reason."""
    floats: dict[str, list[tuple[str, int]]] = {}
    others: dict[str, list[str]] = {}
    for entry in skipped:
        if entry.kind:
            name = entry.name.strip("()")  # of "(network)"
            floats.setdefault(entry.kind, []).append((name, entry.parameters))
        else:
            others.setdefault(entry.reason, []).append(entry.name)
    lines = []
    for kind, entries in floats.items():
        names, numbers = zip(*entries, strict=True)
        verb, plural = "stay" if len(names) > 1 else "stays", "s" * (sum(numbers) > 1)
        what = f"{sum(numbers):,} parameter{plural} ({shorten(names, 2)})"
        lines.append(f"{len(names)} {kind} {verb} float: {what}")
    return lines + [f"{shorten(names, 3)}: {why}" for why, names in others.items()]
