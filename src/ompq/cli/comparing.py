"""compare: plans and results side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import RenderableType
from rich.text import Text

from ompq.cli.options import OutputOptions, option
from ompq.cli.screen import Screen, opened
from ompq.cli.settings import check_writable
from ompq.cli.tables import Column, fitted
from ompq.costs import counted, digits, in_bytes
from ompq.errors import PlanError
from ompq.evaluation import Evaluation
from ompq.files import read_json
from ompq.plans import Plan
from ompq.report import Accuracy, write_report
from ompq.samples import Progress

Sources = Annotated[
    list[Path],
    typer.Argument(
        metavar="PLAN",
        help="Two or more plans, or folders of ompq quantize.",
        show_default=False,
    ),
]


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


def compare(
    sources: Sources,
    output: OutputOptions,
    page: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            metavar="FILE",
            text="Write the first plan's report, with the others to compare with.",
        ),
    ] = None,
) -> None:
    """Show plans or results side by side: size, damage, accuracy, bits that differ.

    Examples:
      ompq compare plan.json smaller.json
      ompq compare out-4MiB/ out-3MiB/ -o both.html
      ompq compare a.json b.json c.json --json

    A folder of ompq quantize adds the accuracy that was measured there. Each plan is
    judged by every plan's score: two scores need not agree on which is better.
    """
    if len(sources) < 2:
        raise ValueError("one plan has nothing to be compared with; name two or more")
    check_writable(page)
    with opened(output) as screen:
        entries = [_read(source) for source in sources]
        for entry in entries[1:]:
            entry.plan.check_network(entries[0].plan.graph)
        if page is not None:
            with screen.stage("writing the report") as progress:
                _write_page(page, entries, progress)
        _show(entries, page, screen)


def _read(source: Path) -> Entry:
    """Read a plan file, or the plan and the result in a folder."""
    if not source.is_dir():
        return Entry(str(source), Plan.load(source))
    plan, result = source / "plan.json", source / "result.json"
    if not plan.exists():
        raise PlanError(f"{source} has no plan.json; name a folder of ompq quantize")
    evaluation = _evaluation(result) if result.exists() else None
    return Entry(str(source), Plan.load(plan), evaluation)


def _evaluation(path: Path) -> Evaluation | None:
    try:
        found = read_json(path)["evaluation"]
        return None if found is None else Evaluation.from_json(found)
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{path} holds no result: {error!r}. Run ompq quantize again, or remove it"
        ) from error


def damage_under(entry: Entry, judge: Entry) -> float | None:
    """Return the damage of one entry's bits by another's score, if it knows them."""
    allocation = entry.plan.allocation
    known = judge.plan.choices
    if any(choice not in known for choice in allocation.values()):
        return None
    names = judge.plan.graph.names
    columns = [known.index(allocation[name]) for name in names]
    return float(judge.plan.scores.damage[np.arange(len(names)), columns].sum())


def differing(entries: Sequence[Entry]) -> list[str]:
    """Return the units that do not have the same bits everywhere, in order."""
    return [
        name
        for name in entries[0].plan.graph.names
        if len({entry.plan.allocation[name] for entry in entries}) > 1
    ]


def _show(entries: Sequence[Entry], page: Path | None, screen: Screen) -> None:
    units = len(entries[0].plan.graph)
    names = differing(entries)
    verdict = f"{len(names)} of {units} layers differ in bits"
    if screen.json:
        screen.show_json(_plain(entries, names, page))
        return
    if screen.quiet:
        sizes = [f"{e.name} {in_bytes(e.plan.totals['bytes'])}" for e in entries]
        screen.show(f"{verdict}; {', '.join(sizes)}")
        return
    width = screen.out.width
    screen.show(totals_table(entries, width), "")
    if names:
        screen.show(bits_table(entries, names, width), "")
    screen.show(Text(verdict))
    if page is not None:
        screen.show(Text(f"{page}: open it in a browser"))


def totals_table(entries: Sequence[Entry], width: int) -> RenderableType:
    """Return a row for each entry: what it costs, and how good it is."""
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
        found = [damage_under(entry, judge) for entry in entries]
        cells = ["-" if one is None else digits(one) for one in found]
        columns.append(Column(f"damage by {number}", cells, rank=1))
    if any(entry.evaluation for entry in entries):
        cells = [_top1(entry.evaluation) for entry in entries]
        columns.append(Column("top-1", cells))
        cells = [_against(entry, entries[0]) for entry in entries]
        columns.append(Column("against 1", cells, rank=4))
    return fitted(columns, width)


def bits_table(
    entries: Sequence[Entry], names: Sequence[str], width: int
) -> RenderableType:
    """Return the bits of the named units, a column for each entry."""
    units = [entries[0].plan.graph[name] for name in names]
    bits = [[entry.plan.allocation[name] for name in names] for entry in entries]
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


def _plain(
    entries: Sequence[Entry], names: Sequence[str], page: Path | None
) -> dict[str, Any]:
    return {
        "plans": [
            {
                "name": entry.name,
                "hash": entry.plan.hash,
                "budget": str(entry.plan.budget),
                "score": entry.plan.score_name,
                "totals": entry.plan.totals,
                "damage": [damage_under(entry, judge) for judge in entries],
                "evaluation": entry.evaluation and entry.evaluation.to_json(),
            }
            for entry in entries
        ],
        "differing": {
            name: [str(entry.plan.allocation[name]) for entry in entries]
            for name in names
        },
        "written": None if page is None else str(page),
    }


def _write_page(page: Path, entries: Sequence[Entry], progress: Progress) -> None:
    sections = [
        Accuracy(
            entry.name,
            found.top1,
            *found.interval,
            found.count,
            entry.plan.totals["bytes"],
        )
        for entry in entries
        if (found := entry.evaluation) is not None
    ]
    first = entries[0].plan
    others = {
        entry.name: replace(first, allocation=entry.plan.allocation)
        for entry in entries[1:]
        if damage_under(entry, entries[0]) is not None
    }
    title = " and ".join(entry.name for entry in entries)
    write_report(
        page, first, results=sections, title=title, others=others, progress=progress
    )
