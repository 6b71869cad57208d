"""What commands that make a network share, from its bits to its files."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from ompq.allocation.solver import Allocation, Budget
from ompq.cli.finalizing import finalized
from ompq.cli.options import DataOptions
from ompq.cli.planning import planned
from ompq.cli.results import Outcome, show_outcome, write_files
from ompq.cli.runs import RunOptions, check_unfinished
from ompq.cli.screen import Screen
from ompq.cli.settings import load_inputs
from ompq.datasets.images import image_views
from ompq.datasets.sources import Batches, Data
from ompq.errors import BudgetError, PlanError
from ompq.evaluation import Evaluation
from ompq.evaluation import evaluate as measure
from ompq.files import read_json
from ompq.models import NamedModel
from ompq.plans import Pin, Plan, PlanConfig
from ompq.quantization import quantize as round_weights
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.reconstruction.rounding import RoundingConfig
from ompq.report import worst_histograms
from ompq.samples import model_device

_ANYTHING = "32bits"  # a budget that bits fixed beforehand always meet


def bits_source(run: RunOptions) -> Plan | Allocation | Budget:
    """Return what decides on the bits: a plan, bits, or a budget to plan for."""
    check_unfinished(run)
    wanted = None if run.budget is None else Budget.of(run.budget)
    if run.started and run.plan is None:
        plan = Plan.load(run.folder / "plan.json")
        check_budget(plan, run, run.folder)
        return plan
    if run.plan is not None:
        return read_bits(run.plan)
    if wanted is None:
        raise BudgetError("no budget: give --budget, for example 4.0MiB, or --plan")
    return wanted


def check_budget(plan: Plan, run: RunOptions, begun: Path) -> None:
    """Make sure that the budget typed, if any, is that of the bits that are there.

    Args:
        plan: Says which budget the bits were chosen for.
        run: The options.
        begun: What has these bits.

    Raises:
        BudgetError: It is another.
    """
    if run.budget is None or run.plan is not None:
        return
    wanted = Budget.of(run.budget)
    if str(wanted) != str(plan.budget):
        raise BudgetError(
            f"{begun} was begun with the budget {plan.budget}, not {wanted}; "
            "give that one, or begin anew in another folder"
        )


def read_bits(path: Path) -> Plan | Allocation:
    """Read a plan, or an allocation alone: unit → bits.

    Raises:
        PlanError: The file is neither.
    """
    try:
        data = read_json(path)
        if isinstance(data, dict) and "format" not in data:
            return Allocation.from_json(data)
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} is neither a plan nor bits: {error}. Give what ompq plan wrote, "
            "or what was copied from a report"
        ) from error
    return Plan.load(path)


def plan_for(
    module: nn.Module,
    samples: Tensor,
    source: Plan | Allocation | Budget,
    config: PlanConfig,
    screen: Screen,
) -> Plan:
    """Return the plan that was given, or one for the bits or the budget given."""
    if isinstance(source, Plan):
        return source
    if isinstance(source, Allocation):
        pins: dict[str, Pin] = {
            name: (choice.weight, choice.activation) for name, choice in source.items()
        }
        config = replace(config, pinned=pins)
        source = Budget.of(_ANYTHING)
    return planned(module, samples, source, config, screen)


def labelled_batches(
    source: str | None,
    data: DataOptions,
    model: NamedModel,
    *,
    limit: int | None = None,
) -> Batches | None:
    """Return the images that accuracy is measured on, if there are any.

    Args:
        source: Where they are.
        data: How they are read.
        model: What they are read for.
        limit: Take only so many.
    """
    if source is None:
        return None
    options = replace(data, data=source)
    return load_inputs(options, model, "test").batches(limit=limit)


def quantized_network(
    module: nn.Module,
    plan: Plan,
    samples: Tensor,
    run: RunOptions,
    seed: int,
    screen: Screen,
) -> nn.Module:
    """Quantize and, unless the options say otherwise, reconstruct."""
    samples = image_views(samples, run.views, seed=seed)
    with screen.stages("quantizing") as (progress, _):
        rounded = round_weights(module, plan, samples, progress=progress)
    if run.no_reconstruct:
        return rounded
    config = ReconstructConfig(
        rounding=replace(RoundingConfig(), iterations=run.iterations), seed=seed
    )
    plan.save(run.folder / "plan.json")  # a run that is stopped continues with it
    with screen.stage("reconstructing") as progress:
        return reconstruct(
            rounded,
            module,
            samples,
            config,
            checkpoint=run.checkpoint,
            progress=progress,
        )


@dataclass(frozen=True, eq=False)
class Given:
    """What a network is made from and judged on.

    Attributes:
        model: The float network.
        inputs: The data that it is quantized or trained with.
        samples: Some of them, (N, ...).
        judged: Labelled batches that accuracy is measured on, or None.
    """

    model: NamedModel
    inputs: Data
    samples: Tensor
    judged: Batches | None


def finish(
    made: nn.Module,
    plan: Plan,
    given: Given,
    run: RunOptions,
    screen: Screen,
    **more: int,
) -> None:
    """Settle and evaluate what was made, write its files and show it.

    Args:
        made: The quantized network.
        plan: Its bits.
        given: What it was made from.
        run: Where the files go.
        screen: What is shown.
        more: Numbers that the result names besides.
    """
    model = given.model
    made, arithmetic = finalized(made, given.samples, screen)
    outcome = Outcome(
        about={
            "network": model.name,
            "weights": model.weights,
            "data": given.inputs.name,
            "eval_data": run.eval_data,
            **more,
            "seed": given.inputs.seed,
            "device": str(model_device(model.module)),
            "arithmetic": arithmetic,
        },
        plan=plan,
        network=made,
        evaluation=_evaluated(made, given, screen),
        seconds=screen.seconds,
        histograms=worst_histograms(made, model.module, plan, given.samples),
    )
    with screen.stage("writing files") as progress:
        written = write_files(run.folder, outcome, progress)
    show_outcome(outcome, screen, run.folder, written)


def _evaluated(made: nn.Module, given: Given, screen: Screen) -> Evaluation | None:
    if given.judged is None:
        return None
    with screen.stage("evaluating") as progress:
        return measure(
            made, given.judged, reference=given.model.module, progress=progress
        )
