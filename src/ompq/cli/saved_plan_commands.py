"""replan, explain, pareto, compare, report, unpack: commands that need only a file.

torch is not imported here until a report is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from ompq.amounts import digits, in_bytes, short_count
from ompq.budgets import Budget
from ompq.cli.console import Column, Console, Shown, View
from ompq.cli.options import check_writable
from ompq.cli.views import cost_columns, plan_view, top1_text
from ompq.cost_tables import FILES
from ompq.errors import PlanError, shorten
from ompq.evaluation_result import Evaluation
from ompq.files import PLAN, RESULT
from ompq.network.units import Choice, select
from ompq.packed.embedded_graph import unpack as unpack_file
from ompq.plans import Plan
from ompq.progress import Progress
from ompq.report_sections import Accuracy, Section, sections_from_json
from ompq.untrusted_json import convert_json, read_json, record_type

# Cost → the column that its curve is sorted by.
_COSTS = {
    "bytes": "bytes",
    "weight_bits": "average_bits",
    "bit_ops": "bit_ops",
    "milliseconds": "milliseconds",
    **{name: name for name in FILES},
}


def run_replan(file: Path, console: Console, budget: str, target: Path | None) -> View:
    """Solve a saved plan for another budget, without the network."""
    check_writable(target)
    limits = Budget.of(budget)
    with console.stage("reading the plan"):
        saved = Plan.load(file)
    with console.stage("solving for the budget"):
        plan = saved.with_budget(limits)
    if target is not None:
        plan.save(target)
    return plan_view(plan, {"from": str(file)}, console.stages.seconds, target)


def run_explain(file: Path, unit: str) -> View:
    """Explain why a layer got its bits."""
    plan = Plan.load(file)
    explanations = [plan.explain(name) for name in select(plan.graph.names, unit)]
    data = [asdict(one, dict_factory=_plain_fields) for one in explanations]
    line = "\n".join(f"{one.unit}: {one.choice}" for one in explanations)
    text = "\n\n".join(str(one) for one in explanations)
    return View(data, line, [text])


def _plain_fields(items: list[tuple[str, Any]]) -> dict[str, Any]:
    # Choices as W4A8 rather than lists, and without the text for people.
    return {k: str(v) if isinstance(v, Choice) else v for k, v in items if k != "text"}


def run_pareto(file: Path, console: Console, points: int, cost: str) -> View:
    """Show the trade-off between size and damage."""
    plan = Plan.load(file)
    if cost not in plan.problem.costs:
        raise PlanError(
            f"{file} has no latency table, so no cost {cost}; plan with --latency"
            if cost == "milliseconds"
            else f"{file} has no cost {cost}; plan again with a budget that limits it"
        )
    with console.stage("solving") as progress:
        curve = plan.pareto(cost, points, progress=progress)
    steps = [replace(plan, allocation=point.allocation) for point in curve]
    rows = [*map(pareto_row, steps), {**pareto_row(plan), "this": True}]
    rows.sort(key=lambda row: (row[_COSTS[cost]], row["this"]))
    return pareto_view(cost, rows)


def pareto_row(plan: Plan) -> dict[str, Any]:
    """Return one point of the curve as plain data."""
    reference = plan.problem.costs["bytes"].reference
    return {
        **plan.totals,
        "percent": 100 * plan.totals["bytes"] / reference,
        "damage": plan.damage,
        "this": False,
        "allocation": plan.allocation.to_json(),
    }


def pareto_view(cost: str, rows: Sequence[Mapping[str, Any]]) -> View:
    """Return the curve, with bars on a logarithmic scale of damage."""
    low, high = (f(row["damage"] for row in rows) for f in (min, max))
    damages = [digits(row["damage"]) for row in rows]
    columns = [
        *cost_columns(rows),
        Column("damage", damages),
        Column("", [_bar(row["damage"], low, high) for row in rows], "left", rank=3),
        Column("", ["this plan" if row["this"] else "" for row in rows], "left"),
    ]
    sizes = columns[0].cells
    line = f"{sizes[0]} to {sizes[-1]}: damage {damages[0]} to {damages[-1]}"
    data = {"cost": cost, "points": rows}
    return View(data, line, [columns])


def _bar(damage: float, low: float, high: float) -> str:
    if low <= 0 or high <= low:  # a score may be negative
        fraction = (damage - low) / max(high - low, 1e-30)
    else:
        fraction = log(damage / low) / log(high / low)
    return "▬" * (1 + round(19 * fraction))


def run_compare(sources: list[Path], console: Console, page: Path | None) -> View:
    """Compare plans or results: size, damage, accuracy, bits that differ."""
    if len(sources) < 2:
        raise ValueError("compare needs two or more plans; one was given")
    check_writable(page)
    entries = [Entry.read(source) for source in sources]
    for entry in entries[1:]:
        differing = entry.plan.graph.differing(entries[0].plan.graph)
        if differing:
            raise PlanError(
                f"{entries[0].name} and {entry.name} are of different networks: "
                f"{len(differing)} units differ ({shorten(differing)})"
            )
    if page is not None:
        with console.stage("writing the report") as progress:
            write_comparison(page, entries, progress)
    return comparison_view(entries, page)


@dataclass(frozen=True)
class Entry:
    """One of the plans compared, and its network's evaluation if there is one."""

    name: str
    plan: Plan
    evaluation: Evaluation | None = None

    @classmethod
    def read(cls, source: Path) -> "Entry":
        """Read a plan file, or the plan and the result in a folder."""
        if not source.is_dir():
            return cls(str(source), Plan.load(source))
        if not (source / PLAN).exists():
            raise PlanError(f"{source} has no {PLAN}; give a folder of ompq quantize")
        plan, result = Plan.load(source / PLAN), source / RESULT
        try:
            if not result.exists():
                return cls(str(source), plan)
            kind = record_type(evaluation=Evaluation | None)
            given = convert_json(read_json(result), kind, "it")
        except ValueError as error:
            raise PlanError(
                f"{result} cannot be read as a result: {error}. Run ompq quantize "
                "again, or remove the file"
            ) from error
        return cls(str(source), plan, given.evaluation)

    def damage_by(self, judge: "Entry") -> float | None:
        """Return the damage of these bits by another's score; None if it lacks them."""
        try:
            columns = judge.plan.problem.columns(self.plan.allocation)
        except PlanError:
            return None
        return float(judge.plan.scores.damage[np.arange(len(columns)), columns].sum())

    def to_json(self, judges: Sequence["Entry"]) -> dict[str, Any]:
        """Return plain data, with the damage by each judge's score."""
        return {
            "name": self.name,
            "hash": self.plan.hash,
            "budget": str(self.plan.budget),
            "score": self.plan.score_name,
            "totals": self.plan.totals,
            "damage": [self.damage_by(judge) for judge in judges],
            "evaluation": self.evaluation and self.evaluation.to_json(),
        }


def comparison_view(entries: Sequence[Entry], page: Path | None) -> View:
    """Return costs and quality of each entry, and the bits that differ."""
    names, bits = entries[0].plan.graph.names, [e.plan.allocation for e in entries]
    differing = {
        name: [one[name] for one in bits]
        for name in names
        if len({one[name] for one in bits}) > 1
    }
    verdict = f"{len(differing)} of {len(names)} layers differ in bits"
    sizes = [f"{one.name} {in_bytes(one.plan.totals['bytes'])}" for one in entries]
    data = {
        "plans": [entry.to_json(entries) for entry in entries],
        "differing": {name: [*map(str, row)] for name, row in differing.items()},
        "written": None if page is None else str(page),
    }
    body: list[Shown] = [_totals_columns(entries), ""]
    body += [_bits_columns(entries[0], differing), ""] if differing else []
    body += [verdict] if page is None else [verdict, f"{page}: open it in a browser"]
    return View(data, f"{verdict}; {', '.join(sizes)}", body)


def _totals_columns(entries: Sequence[Entry]) -> list[Column]:
    plans = [entry.plan for entry in entries]
    columns = [
        Column("", [str(number) for number in range(1, len(entries) + 1)]),
        Column("plan", [entry.name for entry in entries], "left", shorten=True),
        Column("budget", [str(plan.budget) for plan in plans], rank=3),
        Column("size", [in_bytes(plan.totals["bytes"]) for plan in plans]),
        Column("bits", [f"{plan.totals['average_bits']:.3f}" for plan in plans]),
        Column("BOPs", [short_count(plan.totals["bit_ops"]) for plan in plans], rank=2),
    ]
    columns += _damage_columns(entries)
    if any(entry.evaluation for entry in entries):
        top1 = [one.evaluation and top1_text(one.evaluation) for one in entries]
        columns.append(Column("top-1", [text or "-" for text in top1]))
        cells = [_against(entry, entries[0]) for entry in entries]
        columns.append(Column("against 1 (± standard error)", cells, rank=4))
    return columns


def _damage_columns(entries: Sequence[Entry]) -> list[Column]:
    """Return the damage by the score of each plan; equal columns are shown once."""
    found: dict[tuple[str, ...], list[str]] = {}
    for place, judge in enumerate(entries, 1):
        damages = [entry.damage_by(judge) for entry in entries]
        cells = tuple("-" if one is None else digits(one) for one in damages)
        found.setdefault(cells, []).append(str(place))
    if len(found) == 1:
        [cells] = found
        return [Column("damage", cells, rank=1)]
    return [
        Column(f"damage by {' and '.join(places)}", cells, rank=1)
        for cells, places in found.items()
    ]


def _bits_columns(
    first: Entry, differing: Mapping[str, Sequence[Choice]]
) -> list[Column]:
    units = [first.plan.graph[name] for name in differing]
    every = [choice for row in differing.values() for choice in row]
    one_width = len({choice.activation for choice in every}) == 1
    columns = [
        Column("layer", list(differing), "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=2),
        Column("weights", [short_count(unit.weights) for unit in units], rank=1),
    ]
    for place, column in enumerate(zip(*differing.values(), strict=True), 1):
        cells = [bits.weight_text if one_width else str(bits) for bits in column]
        columns.append(Column(f"bits of {place}", cells))
    return columns


def write_comparison(page: Path, entries: Sequence[Entry], progress: Progress) -> None:
    """Write the first plan's report, in which the others can be compared with it."""
    from ompq.report.page import write_report

    first, *rest = entries
    sections = [
        Accuracy.of(one.name, one.evaluation, one.plan.totals["bytes"])
        for one in entries
        if one.evaluation is not None and one.evaluation.top1 is not None
    ]
    others = {
        one.name: replace(first.plan, allocation=one.plan.allocation)
        for one in rest
        if one.damage_by(first) is not None
    }
    write_report(
        page,
        first.plan,
        results=sections,
        title=" and ".join(entry.name for entry in entries),
        others=others,
        progress=progress,
    )


def _against(entry: Entry, first: Entry) -> str:
    if entry is first or entry.evaluation is None or first.evaluation is None:
        return ""
    if entry.evaluation.fingerprint != first.evaluation.fingerprint:
        return "other images"
    drop, error = entry.evaluation.drop_from(first.evaluation)
    return f"{-100 * drop:+.2f} ± {100 * error:.2f}"


def run_report(
    file: Path,
    console: Console,
    page: Path | None,
    figures: Path | None,
    results: Path | None,
    title: str | None,
) -> View:
    """Write a plan as one HTML page that works offline."""
    from ompq.report.figures import write_figures
    from ompq.report.page import write_report

    if page is None and figures is None:
        raise ValueError("nothing to write: give -o FILE, --figures DIR or both")
    check_writable(page)
    check_writable(figures, "--figures", folder=True)
    plan = Plan.load(file)
    sections = [] if results is None else read_sections(results)
    written: list[Path] = []
    with console.stage("writing the report") as progress:
        if page is not None:
            write_report(page, plan, results=sections, title=title, progress=progress)
            written.append(page)
        if figures is not None:
            written += write_figures(figures, plan, sections)
    files = [str(path) for path in written]
    return View({"written": files}, "\n".join(files))


def read_sections(path: Path) -> list[Section]:
    """Read the sections that a report shows besides the plan."""
    try:
        given = convert_json(read_json(path), record_type(sections=list), "it")
        return sections_from_json(given.sections)
    except ValueError as error:
        raise PlanError(
            f"{path} is not a result: {error}. Give a result.json of ompq quantize"
        ) from error


def run_unpack(file: Path, target: Path | None) -> View:
    """Write the ONNX file inside a packed network, without PyTorch."""
    target = target or file.with_name(f"{file.name.partition('.')[0]}.onnx")
    check_writable(target)
    size, packed = unpack_file(file, target), file.stat().st_size
    data = {"file": str(target), "bytes": size, "packed_bytes": packed}
    return View(data, f"{target}: {size:,} bytes, from {packed:,}")
