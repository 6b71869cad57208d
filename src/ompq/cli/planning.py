"""plan, budget and replan: how many bits each layer gets."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from ompq.allocation.solver import Budget, reachable
from ompq.cli.options import (
    SAMPLES,
    BudgetOption,
    DataOptions,
    NetworkOptions,
    OutputOptions,
    PlanFile,
    PlanOptions,
    option,
)
from ompq.cli.ranges import range_rows, range_table, shape_problem, size_budgets
from ompq.cli.screen import Screen, muted, opened
from ompq.cli.settings import (
    check_writable,
    load_inputs,
    load_network,
    plan_config,
    read_samples,
    reporting,
    sample_count,
)
from ompq.cli.shown import (
    MEANS_NOTHING,
    meaningless,
    plan_json,
    plan_table,
    skipped_lines,
    time_line,
    totals,
    used,
    warning_text,
)
from ompq.cli.tables import facts
from ompq.costs import in_bytes
from ompq.plans import Plan, PlanConfig
from ompq.plans import plan as make_plan
from ompq.samples import SamplesLike
from ompq.scores import score_name

PlanOutput = Annotated[
    Path | None, option("--output", "-o", metavar="FILE", text="Save the plan.")
]


def plan(
    network: NetworkOptions,
    data: DataOptions,
    planning: PlanOptions,
    output: OutputOptions,
    budget: BudgetOption,
    file: PlanOutput = None,
    samples: Annotated[
        int | None,
        option(
            min=2,
            metavar="NUMBER",
            text=f"How many inputs are looked at. Default: {SAMPLES}; with "
            "--protocol the paper's number.",
        ),
    ] = None,
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
    with opened(output) as screen:
        check_writable(file)
        wanted, config = Budget.of(budget), plan_config(planning)
        model = load_network(network, screen)
        inputs = load_inputs(data, model, "train")
        count = sample_count(network.network, samples, planning.protocol)
        tensor = read_samples(inputs, count, screen)
        made = planned(model.module, tensor, wanted, config, screen)
        if file is not None:
            made.save(file)
        show_plan(
            made,
            screen,
            about={
                "network": model.name,
                "weights": model.weights,
                "data": inputs.name,
                "samples": count,
                "seed": data.seed,
                "device": str(tensor.device),
            },
            file=file,
        )


def planned(
    module: torch.nn.Module,
    samples: SamplesLike,
    budget: Budget,
    config: PlanConfig,
    screen: Screen,
) -> Plan:
    """Make a plan, showing its progress."""
    with screen.stages("planning") as (progress, within):
        told = reporting(config, within)
        made = make_plan(module, samples, budget, told, progress=progress)
    return replace(made, score_name=score_name(config.score))


def show_plan(
    plan: Plan, screen: Screen, about: dict[str, Any], file: Path | None
) -> None:
    """Print a plan as the options want it."""
    if screen.json:
        saved = None if file is None else str(file)
        seconds = {name: round(value, 4) for name, value in screen.seconds.items()}
        screen.show_json(
            {**about, "plan": saved, "seconds": seconds, **plan_json(plan)}
        )
        return
    where = "" if file is None else f", saved to {file}"
    if screen.quiet:
        screen.show(f"{'; '.join(used(plan))}, {plan.hash}{where}")
        return
    rows = [*totals(plan), ("plan", f"{plan.hash}{where}")]
    rows += [("stays float", line) for line in skipped_lines(plan.graph.skipped)]
    rows.append(("time", time_line(screen.seconds)))
    screen.show(plan_table(plan, screen.out.width), "", facts(rows))
    nothing = meaningless(about)
    if nothing:
        screen.show(warning_text(f"{nothing}: these bits {MEANS_NOTHING}"))


def replan(
    file: PlanFile,
    output: OutputOptions,
    budget: BudgetOption,
    target: PlanOutput = None,
) -> None:
    """Solve a saved plan again for another budget; needs no network and no data.

    Examples:
      ompq replan plan.json --budget 3.5MiB
      ompq replan plan.json --budget 3.2bits,75GBOPs -o smaller.json

    Choices, pins and score stay as they were when the plan was made.
    """
    with opened(output) as screen:
        check_writable(target)
        wanted = Budget.of(budget)
        with screen.stage("reading the plan"):
            saved = Plan.load(file)
        with screen.stage("solving for the budget"):
            made = saved.with_budget(wanted)
        if target is not None:
            made.save(target)
        show_plan(made, screen, about={"from": str(file)}, file=target)


def budget(
    network: NetworkOptions,
    planning: PlanOptions,
    output: OutputOptions,
    data: Annotated[
        str | None,
        option(metavar="SOURCE", text="Not needed: shapes alone decide on sizes."),
    ] = None,
) -> None:
    """Tell which budgets a network can meet, before one is chosen.

    Examples:
      ompq budget torchvision:resnet18
      ompq budget torchvision:mobilenet_v2 --choices 2,3,4 --accounting paper
      ompq budget net.py:make --pin @first=8 --pin @last=8 --activation-bits 4,8

    Every entry of the table can be given to ompq plan --budget. Shapes alone decide
    on sizes, so neither weights nor data are needed.
    """
    with opened(output) as screen:
        config = plan_config(planning)
        with muted():  # random weights are no reason to warn here
            named = replace(network, weights=network.weights or "none")
            model = load_network(named, screen)
        samples = torch.zeros(1, *model.input_shape)
        if data is not None:
            samples = load_inputs(DataOptions(data=data), model, "train").samples(1)
        with screen.stage("observing the network"):
            problem = shape_problem(model.module, samples, config)
        if screen.json:
            screen.show_json({"network": model.name, "rows": range_rows(problem)})
            return
        reference = in_bytes(problem.costs["bytes"].reference)
        low, high = size_budgets(reachable(problem, "bytes"))
        screen.show(
            f"{model.name}: {len(problem.names)} layers, {reference} as float; "
            f"{low} to {high} can be met"
        )
        if not screen.quiet:
            screen.show("", range_table(problem, screen.out.width))
