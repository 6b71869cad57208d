"""plan and budget: how many bits each layer gets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ompq.allocation.solver import Budget, Problem, reachable
from ompq.cli.console import View, muted, opened, render
from ompq.cli.options import BudgetOption, OutputOptions, check_writable, option
from ompq.cli.settings import (
    SAMPLES,
    DataOptions,
    NetworkOptions,
    PlanOptions,
    read_samples,
    sample_count,
)
from ompq.cli.views import (
    Column,
    as_budget,
    fitted,
    operation_budgets,
    plan_view,
    size_budgets,
)
from ompq.costs import FLOAT_BITS, cost_tables, in_bytes
from ompq.graph import Choice, trace
from ompq.plans import PlanConfig, choice_table, make_problem
from ompq.samples import SamplesLike
from ompq.workflow import Workflow


def plan(
    network: NetworkOptions,
    data: DataOptions,
    planning: PlanOptions,
    output: OutputOptions,
    budget: BudgetOption,
    file: Path | None = option(None, "FILE", "Save the plan.", "--output", "-o"),
    samples: int | None = option(
        None,
        "NUMBER",
        f"How many inputs are used. Default: {SAMPLES}; with --protocol the "
        "paper's number.",
        min=2,
    ),
) -> None:
    """Choose bits for every layer so that a budget is met.

    Examples:
      ompq plan torchvision:resnet18 --data images/ --budget 4.0MiB -o plan.json
      ompq plan net.py:make --data digits --budget 3.2bits --pin fc=8
      ompq plan timm:resnet50 --data images/ --budget 16MiB,140GBOPs --choices 4,8
      ompq plan cifar:resnet20 --weights none --data random --budget 12.5%
      ompq plan timm:resnet18 --data images/ --budget 4MiB --protocol paper-ptq

    Run ompq budget first to see what can be met.
    """
    with opened(output) as console:
        check_writable(file)
        wanted, config = Budget.of(budget), planning.config()
        model = network.load(console)
        inputs = data.load(model, "train")
        count = sample_count(network.network, samples, planning.protocol)
        tensor = read_samples(inputs, count, console)
        work = Workflow(model.module, tensor, console.stages)
        made = work.plan(wanted, config, count=count)
        if file is not None:
            made.save(file)
        about = {
            "network": model.name,
            "weights": model.weights,
            "data": inputs.name,
            "samples": count,
            "seed": data.seed,
            "device": str(tensor.device),
        }
        render(plan_view(made, about, console.stages.seconds, file), console)


def budget(
    network: NetworkOptions,
    planning: PlanOptions,
    output: OutputOptions,
    data: str | None = option(
        None, "SOURCE", "Not needed: sizes follow from the shapes alone."
    ),
) -> None:
    """Show which budgets a network can meet.

    Examples:
      ompq budget torchvision:resnet18
      ompq budget torchvision:mobilenet_v2 --choices 2,3,4 --accounting paper
      ompq budget net.py:make --pin @first=8 --pin @last=8 --activation-bits 4,8

    Every entry of the table can be given to ompq plan --budget. Sizes follow from the
    shapes alone, so neither weights nor data are needed.
    """
    with opened(output) as console:
        config = planning.config()
        with muted():  # random weights are no reason to warn here
            named = replace(network, weights=network.weights or "none")
            model = named.load(console)
        samples = torch.zeros(1, *model.input_shape)
        if data is not None:
            samples = DataOptions(data=data).load(model, "train").samples(1)
        with console.stage("observing the network"):
            problem = shape_problem(model.module, samples, config)
        render(budget_view(model.name, problem), console)


def shape_problem(
    model: nn.Module, samples: SamplesLike, config: PlanConfig
) -> Problem:
    """Return the integer program of a network without any score."""
    graph = trace(model, samples, tie=config.tie).tie(config.tied)
    choices, allowed = choice_table(graph, config)
    costs = cost_tables(
        graph, choices, accounting=config.accounting, latency=config.latency
    )
    nothing = np.zeros((len(graph), len(choices)))
    return make_problem(graph, choices, nothing, allowed, costs)


def budget_view(network: str, problem: Problem) -> View:
    """Return the budgets that a network can meet; each entry can be given as one."""
    rows = budget_rows(problem)
    reference = in_bytes(problem.costs["bytes"].reference)
    low, high = size_budgets(reachable(problem, "bytes"))
    line = (
        f"{network}: {len(problem.names)} layers, {reference} as float; "
        f"{low} to {high} can be met"
    )
    # Uniform bits are mostly the ends themselves: those need no second line.
    costs = [{**row, "mark": ""} for row in rows[1:-1]]
    ends = [row for row in (rows[0], rows[-1]) if {**row, "mark": ""} not in costs]
    lines = sorted([*rows[1:-1], *ends], key=lambda row: row["bytes"])
    columns = [
        Column("", [row["mark"] for row in lines], "left"),
        Column("size", size_budgets([row["bytes"] for row in lines])),
        Column("of float", [as_budget(row["percent"], "%") for row in lines]),
        Column("average", [as_budget(row["average_bits"], "bits") for row in lines]),
        Column("BOPs", operation_budgets([row["bit_ops"] for row in lines])),
    ]
    if "milliseconds" in rows[0]:
        cells = [as_budget(row["milliseconds"], "ms") for row in lines]
        columns.append(Column("latency", cells))
    data = {"network": network, "rows": rows}
    return View(data, line, lambda width: [line, "", fitted(columns, width)])


def budget_rows(problem: Problem) -> list[dict[str, Any]]:
    """Return what is reachable, smallest first, with uniform bits in between.

    Each row holds its name (``mark``) and the costs that a budget may limit.
    """
    limits = {name: reachable(problem, name) for name in problem.costs}
    widths = [choice for choice in problem.choices if choice.weight < FLOAT_BITS]
    marks = {
        "smallest": {name: low for name, (low, _) in limits.items()},
        **{f"all {choice}": _uniform(problem, choice) for choice in widths},
        "largest": {name: high for name, (_, high) in limits.items()},
    }
    size, bits = (problem.costs[name].reference for name in ("bytes", "weight_bits"))
    rows = []
    for mark, found in marks.items():
        average = found.pop("weight_bits") / bits
        percent = 100 * found["bytes"] / size
        rows.append(
            {"mark": mark, **found, "percent": percent, "average_bits": average}
        )
    return rows


def _uniform(problem: Problem, wanted: Choice) -> dict[str, float]:
    """Return the costs when each unit gets one choice, or the nearest allowed."""
    distance = np.array(
        [
            64 * abs(choice.weight - wanted.weight)
            + abs(choice.activation - wanted.activation)
            for choice in problem.choices
        ]
    )
    far = np.iinfo(np.int64).max
    columns = np.where(problem.allowed, distance, far).argmin(axis=1)
    rows = np.arange(len(columns))
    return {
        name: cost.constant + float(cost.table[rows, columns].sum())
        for name, cost in problem.costs.items()
    }
