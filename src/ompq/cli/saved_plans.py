"""replan, explain, pareto, compare and report: what needs a plan file alone."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import RenderableType

from ompq.allocation.solver import Budget
from ompq.cli.console import View, opened, render
from ompq.cli.options import (
    BudgetOption,
    OutputOptions,
    PlanFile,
    argument,
    check_folder,
    check_writable,
    one_of,
    option,
)
from ompq.cli.views import (
    Column,
    as_budget,
    fitted,
    operation_budgets,
    plan_view,
    size_budgets,
)
from ompq.costs import counted, digits, in_bytes
from ompq.errors import PlanError
from ompq.evaluation import Evaluation
from ompq.files import read_json
from ompq.graph import Choice, select
from ompq.plans import Plan
from ompq.report import (
    Accuracy,
    Section,
    sections_from_json,
    write_figures,
    write_report,
)
from ompq.samples import Progress

# A cost → what its curve is sorted by; average bits follow the sum of bits.
_COSTS = {
    "bytes": "bytes",
    "weight_bits": "average_bits",
    "bit_ops": "bit_ops",
    "milliseconds": "milliseconds",
}


def replan(
    file: PlanFile,
    output: OutputOptions,
    budget: BudgetOption,
    target: Path | None = option(None, "FILE", "Save the plan.", "--output", "-o"),
) -> None:
    """Solve a saved plan for another budget, without the network.

    Examples:
      ompq replan plan.json --budget 3.5MiB
      ompq replan plan.json --budget 3.2bits,75GBOPs -o smaller.json

    Choices, pins and score stay as they were when the plan was made.
    """
    with opened(output) as console:
        check_writable(target)
        wanted = Budget.of(budget)
        with console.stage("reading the plan"):
            saved = Plan.load(file)
        with console.stage("solving for the budget"):
            made = saved.with_budget(wanted)
        if target is not None:
            made.save(target)
        seconds = console.stages.seconds
        render(plan_view(made, {"from": str(file)}, seconds, target), console)


def explain(
    file: PlanFile,
    unit: Annotated[
        str, argument("UNIT", "A layer's name, a glob, re:REGEX, @first or @last.")
    ],
    output: OutputOptions,
) -> None:
    """Explain why a layer got its bits.

    Examples:
      ompq explain plan.json layer1.0.conv1
      ompq explain plan.json @last
      ompq explain plan.json 'layer4.*' --json

    Shows every choice with its damage and cost, what one more byte would save, and
    the exchange with another layer that came closest to being better.
    """
    with opened(output) as console:
        plan = Plan.load(file)
        found = [plan.explain(name) for name in select(plan.graph.names, unit)]
        rows = [asdict(one, dict_factory=_with_names) for one in found]
        data = [{k: v for k, v in row.items() if k != "text"} for row in rows]
        line = "\n".join(f"{one.unit}: {one.choice}" for one in found)
        text = "\n\n".join(str(one) for one in found)
        render(View(data, line, lambda _width: [text]), console)


def _with_names(items: list[tuple[str, Any]]) -> dict[str, Any]:
    # A choice would become a list; its name says more.
    return {k: str(v) if isinstance(v, Choice) else v for k, v in items}


def pareto(
    file: PlanFile,
    output: OutputOptions,
    points: int = option(20, "NUMBER", "How many steps. Default: 20.", min=2),
    cost: str = one_of("bytes", _COSTS, "what is limited. Default: bytes."),
) -> None:
    """Show damage against size, step by step.

    Examples:
      ompq pareto plan.json
      ompq pareto plan.json --points 100 --json
      ompq pareto plan.json --cost bit_ops

    Every step is solved anew from the saved plan; each can be used as a budget.
    """
    with opened(output) as console:
        plan = Plan.load(file)
        if cost not in plan.problem.costs:
            raise PlanError(
                f"{file} has no latency table, so no cost {cost}; plan with --latency"
            )
        with console.stage("solving") as progress:
            curve = plan.pareto(cost, points, progress=progress)
        steps = [replace(plan, allocation=point.allocation) for point in curve]
        rows = [*map(pareto_row, steps), {**pareto_row(plan), "this": True}]
        rows.sort(key=lambda row: (row[_COSTS[cost]], row["this"]))
        render(pareto_view(cost, rows), console)


def pareto_row(plan: Plan) -> dict[str, Any]:
    """Return one step of the curve as plain data."""
    reference = plan.problem.costs["bytes"].reference
    return {
        **plan.totals,
        "percent": 100 * plan.totals["bytes"] / reference,
        "damage": plan.damage,
        "this": False,
        "allocation": plan.allocation.to_json(),
    }


def pareto_view(cost: str, rows: Sequence[Mapping[str, Any]]) -> View:
    """Return the curve; its bars grow with the logarithm of the damage."""
    low, high = (f(row["damage"] for row in rows) for f in (min, max))
    sizes = size_budgets([row["bytes"] for row in rows])
    damages = [digits(row["damage"]) for row in rows]
    columns = [
        Column("size", sizes),
        Column("of float", [as_budget(row["percent"], "%") for row in rows], rank=2),
        Column("average", [as_budget(row["average_bits"], "bits") for row in rows]),
        Column("BOPs", operation_budgets([row["bit_ops"] for row in rows]), rank=1),
        Column("damage", damages),
        Column("", [_bar(row["damage"], low, high) for row in rows], "left", rank=3),
        Column("", ["this plan" if row["this"] else "" for row in rows], "left"),
    ]
    line = f"{sizes[0]} to {sizes[-1]}: damage {damages[0]} to {damages[-1]}"
    data = {"cost": cost, "points": rows}
    return View(data, line, lambda width: [fitted(columns, width)])


def _bar(damage: float, low: float, high: float) -> str:
    if low <= 0 or high <= low:  # a score that may be negative
        share = (damage - low) / max(high - low, 1e-30)
    else:
        share = log(damage / low) / log(high / low)
    return "▬" * (1 + round(19 * share))


def compare(
    sources: Annotated[
        list[Path], argument("PLAN", "Two or more plans, or folders of ompq quantize.")
    ],
    output: OutputOptions,
    page: Path | None = option(
        None,
        "FILE",
        "Write the first plan's report, with the others to compare with.",
        "--output",
        "-o",
    ),
) -> None:
    """Compare plans or results: size, damage, accuracy, bits that differ.

    Examples:
      ompq compare plan.json smaller.json
      ompq compare out-4MiB/ out-3MiB/ -o both.html
      ompq compare a.json b.json c.json --json

    A folder of ompq quantize adds the accuracy that was measured there. Each plan is
    judged by every plan's score: two scores need not agree on which is better.
    """
    if len(sources) < 2:
        raise ValueError("compare needs two or more plans; one was given")
    check_writable(page)
    with opened(output) as console:
        entries = [Entry.read(source) for source in sources]
        for entry in entries[1:]:
            entry.plan.check_network(entries[0].plan.graph)
        view = Comparison(entries, page)
        if page is not None:
            with console.stage("writing the report") as progress:
                view.write(page, progress)
        render(View(view.data(), view.line(), view.tables), console)


@dataclass(frozen=True)
class Entry:
    """One of the things compared.

    Attributes:
        name: What it is called in the table.
        plan: Its bits, and the scores they were chosen by.
        evaluation: How its network does, where it was measured.
    """

    name: str
    plan: Plan
    evaluation: Evaluation | None = None

    @classmethod
    def read(cls, source: Path) -> "Entry":
        """Read a plan file, or the plan and the result in a folder.

        Raises:
            PlanError: There is no plan, or the result cannot be read.
        """
        if not source.is_dir():
            return cls(str(source), Plan.load(source))
        plan, result = source / "plan.json", source / "result.json"
        if not plan.exists():
            raise PlanError(
                f"{source} has no plan.json; name a folder of ompq quantize"
            )
        loaded = Plan.load(plan)
        if not result.exists():
            return cls(str(source), loaded)
        try:
            found = read_json(result)["evaluation"]
            evaluation = None if found is None else Evaluation.from_json(found)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"{result} cannot be read as a result: {error!r}. Run ompq quantize "
                "again, or remove the file"
            ) from error
        return cls(str(source), loaded, evaluation)

    def damage_by(self, judge: "Entry") -> float | None:
        """Return the damage of these bits by another's score, if it knows them."""
        bits, known = self.plan.allocation, judge.plan.choices
        if any(choice not in known for choice in bits.values()):
            return None
        names = judge.plan.graph.names
        columns = [known.index(bits[name]) for name in names]
        return float(judge.plan.scores.damage[np.arange(len(names)), columns].sum())


@dataclass(frozen=True)
class Comparison:
    """Plans and results side by side.

    Attributes:
        entries: What is compared.
        page: The report that was written, if any.
    """

    entries: Sequence[Entry]
    page: Path | None = None

    @property
    def differing(self) -> list[str]:
        """The units that do not have the same bits everywhere, in order."""
        return [
            name
            for name in self.entries[0].plan.graph.names
            if len({entry.plan.allocation[name] for entry in self.entries}) > 1
        ]

    @property
    def verdict(self) -> str:
        """How many layers differ."""
        units = len(self.entries[0].plan.graph)
        return f"{len(self.differing)} of {units} layers differ in bits"

    def data(self) -> dict[str, Any]:
        """Return plain data."""
        plans = [
            {
                "name": entry.name,
                "hash": entry.plan.hash,
                "budget": str(entry.plan.budget),
                "score": entry.plan.score_name,
                "totals": entry.plan.totals,
                "damage": [entry.damage_by(judge) for judge in self.entries],
                "evaluation": entry.evaluation and entry.evaluation.to_json(),
            }
            for entry in self.entries
        ]
        differing = {
            name: [str(entry.plan.allocation[name]) for entry in self.entries]
            for name in self.differing
        }
        written = None if self.page is None else str(self.page)
        return {"plans": plans, "differing": differing, "written": written}

    def line(self) -> str:
        """Return how many layers differ, and the sizes."""
        sizes = [f"{e.name} {in_bytes(e.plan.totals['bytes'])}" for e in self.entries]
        return f"{self.verdict}; {', '.join(sizes)}"

    def tables(self, width: int) -> list[RenderableType]:
        """Return costs and quality of each entry, then the bits that differ."""
        shown: list[RenderableType] = [self._totals(width), ""]
        if self.differing:
            shown += [self._bits(width), ""]
        shown.append(self.verdict)
        if self.page is not None:
            shown.append(f"{self.page}: open it in a browser")
        return shown

    def _totals(self, width: int) -> RenderableType:
        entries = self.entries
        plans = [entry.plan for entry in entries]
        columns = [
            Column("", [str(number) for number in range(1, len(entries) + 1)]),
            Column("plan", [entry.name for entry in entries], "left", shorten=True),
            Column("budget", [str(plan.budget) for plan in plans], rank=3),
            Column("size", [in_bytes(plan.totals["bytes"]) for plan in plans]),
            Column("bits", [f"{plan.totals['average_bits']:.3f}" for plan in plans]),
            Column("BOPs", [counted(plan.totals["bit_ops"]) for plan in plans], rank=2),
        ]
        for number, judge in enumerate(entries, 1):
            found = [entry.damage_by(judge) for entry in entries]
            cells = ["-" if one is None else digits(one) for one in found]
            columns.append(Column(f"damage by {number}", cells, rank=1))
        if any(entry.evaluation for entry in entries):
            columns.append(Column("top-1", [_top1(one.evaluation) for one in entries]))
            cells = [_against(entry, entries[0]) for entry in entries]
            columns.append(Column("against 1", cells, rank=4))
        return fitted(columns, width)

    def _bits(self, width: int) -> RenderableType:
        names = self.differing
        units = [self.entries[0].plan.graph[name] for name in names]
        bits = [[one.plan.allocation[name] for name in names] for one in self.entries]
        one_width = len({choice.activation for row in bits for choice in row}) == 1
        columns = [
            Column("layer", names, "left", shorten=True),
            Column("kind", [unit.kind for unit in units], "left", rank=2),
            Column("weights", [counted(unit.weights) for unit in units], rank=1),
        ]
        for number, row in enumerate(bits, 1):
            cells = [str(choice.weight) if one_width else str(choice) for choice in row]
            columns.append(Column(f"bits of {number}", cells))
        return fitted(columns, width)

    def write(self, page: Path, progress: Progress) -> None:
        """Write the first plan's report, with the others to compare with."""
        first, *rest = self.entries
        sections = [
            Accuracy(one.name, found.top1, *found.interval, found.count, size)
            for one in self.entries
            if (found := one.evaluation) and (size := one.plan.totals["bytes"])
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
            title=" and ".join(entry.name for entry in self.entries),
            others=others,
            progress=progress,
        )


def _top1(found: Evaluation | None) -> str:
    if found is None:
        return "-"
    low, high = (100 * end for end in found.interval)
    return f"{100 * found.top1:.2f} % ({low:.2f} to {high:.2f})"


def _against(entry: Entry, first: Entry) -> str:
    if entry is first or entry.evaluation is None or first.evaluation is None:
        return ""
    if entry.evaluation.fingerprint != first.evaluation.fingerprint:
        return "other images"
    drop, error = entry.evaluation.drop_from(first.evaluation)
    return f"{-100 * drop:+.2f} ± {100 * error:.2f}"


def report(
    file: PlanFile,
    output: OutputOptions,
    page: Path | None = option(
        None, "FILE", "The HTML file to write.", "--output", "-o"
    ),
    figures: Path | None = option(
        None, "DIR", "Write the paper's figures as SVG and PNG as well."
    ),
    results: Path | None = option(
        None, "FILE", "A result.json of ompq quantize: adds accuracy, errors and times."
    ),
    title: str | None = option(None, "TEXT", "Heading of the page."),
) -> None:
    """Write a plan as one HTML page that works offline.

    Examples:
      ompq report plan.json -o net.html
      ompq report out/plan.json --results out/result.json -o net.html
      ompq report plan.json --figures figures/

    The page has a slider: what other budgets would give, without solving again.
    """
    if page is None and figures is None:
        raise ValueError("nothing to write: give -o FILE, --figures DIR or both")
    check_writable(page)
    check_folder(figures, "--figures")
    with opened(output) as console:
        plan = Plan.load(file)
        sections = [] if results is None else read_sections(results)
        written: list[Path] = []
        with console.stage("writing the report") as progress:
            if page is not None:
                write_report(
                    page, plan, results=sections, title=title, progress=progress
                )
                written.append(page)
            if figures is not None:
                written += write_figures(figures, plan, sections)
        files = [str(path) for path in written]
        text = "\n".join(files)
        render(View({"written": files}, text, lambda _width: [text]), console)


def read_sections(path: Path) -> list[Section]:
    """Read what a report shows besides the plan.

    Raises:
        PlanError: The file is missing, or is not a result.
    """
    try:
        data = read_json(path)
        if not isinstance(data, dict) or "sections" not in data:
            raise ValueError("it has no sections")
        return sections_from_json(data["sections"])
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} is not a result: {error}. Give a result.json of ompq quantize"
        ) from error
