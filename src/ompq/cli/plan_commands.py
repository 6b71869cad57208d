"""plan, budget and scores: commands that choose bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from ompq.allocation.infeasibility import reachable
from ompq.allocation.problem import Problem
from ompq.amounts import digits, in_bytes
from ompq.bit_widths import FLOAT_BITS
from ompq.budgets import Budget
from ompq.cli.console import Column, Console, View, mute_warnings, say
from ompq.cli.loading import (
    check_score,
    find_data,
    load_network,
    plan_count,
    provenance,
    read_samples,
)
from ompq.cli.option_groups import (
    REFINE_SAMPLES,
    CacheOptions,
    NetworkOptions,
    RefineOptions,
    ScoreOptions,
    SourceOptions,
)
from ompq.cli.options import check_writable
from ompq.cli.views import as_budget, cost_columns, plan_view, size_budgets
from ompq.datasets.named_data import load_data
from ompq.models.named_models import blank_input, output_count
from ompq.network.units import Choice
from ompq.planning import unscored_problem
from ompq.runtimes.onnx.onnx_sizes import file_costs
from ompq.samples import Samples
from ompq.scores.catalogue import SCORES
from ompq.workflow import Workflow


def run_plan(
    sources: SourceOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
    budget: str,
    file: Path | None,
    samples: int | None,
) -> View:
    """Choose a bit width for every layer within a budget."""
    check_writable(file)
    limits, config, cache = Budget.of(budget), planning.config(), caching.folder()
    check_score(config, planning.of_orm)
    refinement = planning.refinement(sources.seed)
    model = load_network(sources, console)
    inputs = find_data(sources, model)
    few = count = samples or plan_count(planning.protocol, sources.network)
    if refinement is not None and samples is None:
        count = max(few, min(REFINE_SAMPLES, len(inputs)))
    read = read_samples(inputs, count, console)
    work = Workflow(model.module, read, console.stages, cache)
    with _unfinished(file, console) as checkpoint:
        result = work.plan(
            limits, config, count=few, refinement=refinement, checkpoint=checkpoint
        )
        if file is not None:
            result.save(file)
    about = provenance(inputs, samples=count)
    return plan_view(result, about, console.stages.seconds, file)


@contextmanager
def _unfinished(file: Path | None, console: Console) -> Iterator[Path | None]:
    """Yield the file next to the plan's that keeps measurements of a refinement."""
    path = None if file is None else file.with_suffix(".unfinished.json")
    try:
        yield path
    except KeyboardInterrupt:
        if path is None or not path.exists():
            raise
        text = f"stopped; measurements are kept in {path}"
        say(console.err, f"{text}; repeat the command to continue")
        raise typer.Exit(130) from None
    if path is not None:
        path.unlink(missing_ok=True)


def run_budget(
    network: NetworkOptions,
    planning: ScoreOptions,
    console: Console,
    data: str | None,
    onnx: bool,
) -> View:
    """Show which budgets a network can meet."""
    config = planning.config()
    check_score(config, planning.of_orm)
    with mute_warnings():  # sizes do not depend on the weights, which may be random
        model = load_network(
            replace(network, weights=network.weights or "none"), console
        )
    if data is None:
        output_count(model)  # explains what to do if the input shape does not fit
        samples = blank_input(model)
    else:
        samples = load_data(data, model, split="train").samples(1)
    with console.stage("observing the network"):
        graph, _, problem = unscored_problem(model.module, samples, config, memory=True)
    if onnx:
        with console.stage("writing ONNX files"):
            one = Samples.of(samples)
            (size,) = file_costs(model.module, one, graph, problem, ["onnx_bytes"])
        problem = replace(problem, costs={**problem.costs, size.name: size})
    return budget_view(model.name, problem)


def budget_view(network: str, problem: Problem) -> View:
    """Return the budgets that a network can meet."""
    rows = budget_rows(problem)
    reference = in_bytes(problem.costs["bytes"].reference)
    low, high = size_budgets(reachable(problem, "bytes"))
    line = (
        f"{network}: {len(problem.names)} layers, {reference} as float; "
        f"{low} to {high} can be met"
    )
    # The smallest and largest are usually uniform: then they need no line of their own.
    costs = [{**row, "mark": ""} for row in rows[1:-1]]
    ends = [row for row in (rows[0], rows[-1]) if {**row, "mark": ""} not in costs]
    lines = sorted([*rows[1:-1], *ends], key=lambda row: row["bytes"])
    marks = Column("", [row["mark"] for row in lines], "left")
    sizes = size_budgets([row["activation_bytes"] for row in lines])
    cells = [f"activations:{size}" for size in sizes]
    columns = [marks, *cost_columns(lines), Column("activations", cells, rank=3)]
    if "onnx_bytes" in rows[0]:
        sizes = size_budgets([row["onnx_bytes"] for row in lines])
        columns.append(Column("ONNX", [f"onnx:{size}" for size in sizes]))
    if "milliseconds" in rows[0]:
        cells = [as_budget(row["milliseconds"], "ms") for row in lines]
        columns.append(Column("latency", cells))
    data = {"network": network, "rows": rows}
    return View(data, line, [line, "", columns])


def budget_rows(problem: Problem) -> list[dict[str, Any]]:
    """Return the smallest costs, those of uniform bits, and the largest.

    Two choices also have a row halfway between them: for W4A4 and W8A8, these are
    HAWQ-V3's medium limits. Each row holds its name (``mark``) and the costs that a
    budget may limit.
    """
    limits = {name: reachable(problem, name) for name in problem.costs}
    widths = [choice for choice in problem.choices if choice.weight < FLOAT_BITS]
    marks = {
        "smallest": {name: low for name, (low, _) in limits.items()},
        **{f"all {choice}": _uniform(problem, choice) for choice in widths},
    }
    if len(widths) == 2:
        marks["halfway"] = {name: sum(ends) / 2 for name, ends in limits.items()}
    marks["largest"] = {name: high for name, (_, high) in limits.items()}
    size, bits = (problem.costs[name].reference for name in ("bytes", "weight_bits"))
    rows = []
    for mark, costs in marks.items():
        average = costs.pop("weight_bits") / bits
        shares = {"percent": 100 * costs["bytes"] / size, "average_bits": average}
        rows.append({"mark": mark, **costs, **shares})
    return rows


def _uniform(problem: Problem, choice: Choice) -> dict[str, float]:
    """Return the costs if each unit gets the choice, or the nearest one allowed."""
    kinds = np.array([(c.rate > 0, c.bits, c.activation) for c in problem.choices])
    wanted = np.array((choice.rate > 0, choice.bits, choice.activation))
    distance = np.abs(kinds - wanted) @ (4096, 64, 1)
    columns = np.where(problem.allowed, distance, np.inf).argmin(axis=1)
    return {name: cost.total(columns) for name, cost in problem.costs.items()}


def run_scores() -> View:
    """List the scores that estimate the damage of low bit widths."""
    known: dict[str, Any] = dict(SCORES)
    rows = [
        {"name": name, **score.needs._asdict(), "summary": score.summary}
        for name, score in known.items()
    ]
    words = {"gradients": "gradients", "labels": "labels (optional)"}
    needs = [[text for k, text in words.items() if row[k]] for row in rows]
    passes = [row["passes"] for row in rows]
    columns = [
        Column("score", list(known), "left"),
        Column("needs", [", ".join(names) or "-" for names in needs], "left", rank=1),
        Column("seconds", [digits(row["seconds"], 4) for row in rows]),
        Column("forward passes", passes, "left", rank=2),
        Column("", [row["summary"] for row in rows], "left", rank=3),
    ]
    return View(rows, ", ".join(SCORES), [columns])
