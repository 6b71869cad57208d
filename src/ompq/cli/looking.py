"""explain, pareto and report: what a plan says."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ompq.allocation.solver import Explanation
from ompq.cli.options import OutputOptions, PlanFile, one_of, option
from ompq.cli.ranges import as_budget, operation_budgets, size_budgets
from ompq.cli.screen import opened
from ompq.cli.settings import check_folder, check_writable
from ompq.cli.tables import Column, fitted
from ompq.costs import digits
from ompq.errors import PlanError
from ompq.files import read_json
from ompq.graph import Choice, select
from ompq.plans import Plan
from ompq.report import Section, sections_from_json, write_figures, write_report
from ompq.samples import Progress

# A cost → what it is sorted by; average bits follow the sum of bits.
_KEYS = {
    "bytes": "bytes",
    "weight_bits": "average_bits",
    "bit_ops": "bit_ops",
    "milliseconds": "milliseconds",
}


def explain(
    file: PlanFile,
    unit: Annotated[
        str,
        typer.Argument(
            metavar="UNIT", help="A layer's name, a glob, re:REGEX, @first or @last."
        ),
    ],
    output: OutputOptions,
) -> None:
    """Tell why a layer of a plan got its bits.

    Examples:
      ompq explain plan.json layer1.0.conv1
      ompq explain plan.json @last
      ompq explain plan.json 'layer4.*' --json

    Every choice with its damage and cost; what one more byte would save; and the
    exchange with another layer that was refused most narrowly.
    """
    with opened(output) as screen:
        plan = Plan.load(file)
        found = [plan.explain(name) for name in select(plan.graph.names, unit)]
        if screen.json:
            screen.show_json([_plain(explanation) for explanation in found])
        elif screen.quiet:
            screen.show(*(f"{one.unit}: {one.choice}" for one in found))
        else:
            screen.show("\n\n".join(str(explanation) for explanation in found))


def _plain(explanation: Explanation) -> dict[str, Any]:
    """Return an explanation as plain data, its words left out."""
    data = asdict(explanation, dict_factory=_without_tuples)
    del data["text"]
    return data


def _without_tuples(items: list[tuple[str, Any]]) -> dict[str, Any]:
    # A choice would become a list; its name says more.
    return {k: str(v) if isinstance(v, Choice) else v for k, v in items}


def pareto(
    file: PlanFile,
    output: OutputOptions,
    points: Annotated[
        int, option(min=2, metavar="NUMBER", text="How many steps. Default: 20.")
    ] = 20,
    cost: Annotated[
        str,
        one_of(
            ("bytes", "weight_bits", "bit_ops", "milliseconds"),
            text="what is limited. Default: bytes.",
        ),
    ] = "bytes",
) -> None:
    """Show what each size costs: damage against bytes, step by step.

    Examples:
      ompq pareto plan.json
      ompq pareto plan.json --points 100 --json
      ompq pareto plan.json --cost bit_ops

    Every step is solved anew from the saved plan; each can be a budget.
    """
    with opened(output) as screen:
        plan = Plan.load(file)
        if cost not in plan.problem.costs:
            raise PlanError(f"{file} has no latency table, so no cost {cost}")
        with screen.stage("solving") as progress:
            rows = pareto_rows(plan, cost, points, progress)
        if screen.json:
            screen.show_json({"cost": cost, "points": rows})
        elif screen.quiet:
            screen.show(_pareto_line(rows))
        else:
            screen.show(pareto_table(rows, screen.out.width))


def pareto_rows(
    plan: Plan, cost: str, points: int, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Return the curve as plain data, with the plan itself in its place."""
    rows = []
    for point in plan.pareto(cost, points, progress=progress):
        there = replace(plan, allocation=point.allocation)
        rows.append(_pareto_row(there))
    rows.append({**_pareto_row(plan), "this": True})
    return sorted(rows, key=lambda row: (row[_KEYS[cost]], row["this"]))


def _pareto_line(rows: Sequence[Mapping[str, Any]]) -> str:
    sizes = size_budgets([row["bytes"] for row in (rows[0], rows[-1])])
    damages = [digits(row["damage"]) for row in (rows[0], rows[-1])]
    return f"{sizes[0]} to {sizes[1]}: damage {damages[0]} to {damages[1]}"


def _pareto_row(plan: Plan) -> dict[str, Any]:
    reference = plan.problem.costs["bytes"].reference
    return {
        **plan.totals,
        "percent": 100 * plan.totals["bytes"] / reference,
        "damage": plan.damage,
        "this": False,
        "allocation": plan.allocation.to_json(),
    }


def pareto_table(rows: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """Return the curve as a table; the bars grow with the logarithm of the damage."""
    low, high = (f(row["damage"] for row in rows) for f in (min, max))
    columns = [
        Column("size", size_budgets([row["bytes"] for row in rows])),
        Column("of float", [as_budget(row["percent"], "%") for row in rows], rank=2),
        Column("average", [as_budget(row["average_bits"], "bits") for row in rows]),
        Column("BOPs", operation_budgets([row["bit_ops"] for row in rows]), rank=1),
        Column("damage", [digits(row["damage"]) for row in rows]),
        Column("", [_bar(row["damage"], low, high) for row in rows], "left", rank=3),
        Column("", ["this plan" if row["this"] else "" for row in rows], "left"),
    ]
    return fitted(columns, width)


def _bar(damage: float, low: float, high: float) -> str:
    if low <= 0 or high <= low:  # a score that is no positive distortion
        share = (damage - low) / max(high - low, 1e-30)
    else:
        share = log(damage / low) / log(high / low)
    return "▬" * (1 + round(19 * share))


def report(
    file: PlanFile,
    output: OutputOptions,
    page: Annotated[
        Path | None,
        option("--output", "-o", metavar="FILE", text="The HTML file to write."),
    ] = None,
    figures: Annotated[
        Path | None,
        option(metavar="DIR", text="Write the paper's figures as SVG and PNG as well."),
    ] = None,
    results: Annotated[
        Path | None,
        option(
            metavar="FILE",
            text="A result.json of ompq quantize: accuracy, errors and times.",
        ),
    ] = None,
    title: Annotated[
        str | None, option(metavar="TEXT", text="Heading of the page.")
    ] = None,
) -> None:
    """Write a plan as one HTML page that needs no network.

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
    with opened(output) as screen:
        plan = Plan.load(file)
        sections = [] if results is None else read_sections(results)
        written: list[str] = []
        with screen.stage("writing the report") as progress:
            if page is not None:
                write_report(
                    page, plan, results=sections, title=title, progress=progress
                )
                written.append(str(page))
            if figures is not None:
                written += [str(one) for one in write_figures(figures, plan, sections)]
        if screen.json:
            screen.show_json({"written": written})
        else:
            screen.show(*written)


def read_sections(path: Path) -> list[Section]:
    """Read what a report shows besides the plan.

    Raises:
        PlanError: The file is missing, or holds no results.
    """
    try:
        data = read_json(path)
        if not isinstance(data, dict) or "sections" not in data:
            raise ValueError("it has no sections")
        return sections_from_json(data["sections"])
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} holds no results: {error}. Give a result.json of ompq quantize"
        ) from error
