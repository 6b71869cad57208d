"""quantize: from a float network to a small one, in one command."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from ompq.allocation.solving import Allocation, Budget
from ompq.cli.options import (
    DataOptions,
    NetworkOptions,
    OutputOptions,
    PlanOptions,
)
from ompq.cli.planning import planned
from ompq.cli.results import Outcome, show_outcome, write_files
from ompq.cli.runs import CALIBRATION, RunOptions, check_unfinished, run_folder
from ompq.cli.screen import Screen, opened
from ompq.cli.settings import (
    check_folder,
    load_inputs,
    load_network,
    plan_config,
    read_samples,
    sample_count,
)
from ompq.cli.settling import settled
from ompq.datasets.inputs import Batches
from ompq.errors import BudgetError, CheckpointError, PlanError
from ompq.evaluation import Evaluation
from ompq.evaluation import evaluate as measure
from ompq.files import read_json
from ompq.models.naming import NamedModel
from ompq.pipeline import Pin, PlanConfig
from ompq.plans import Plan
from ompq.quantization.quantizing import quantize as round_weights
from ompq.reconstruction.reconstructing import ReconstructConfig, reconstruct
from ompq.reconstruction.settings import RoundingConfig
from ompq.report import worst_histograms

_ANYTHING = "32bits"  # a budget that bits fixed beforehand always meet


def quantize(
    network: NetworkOptions,
    data: DataOptions,
    run: RunOptions,
    planning: PlanOptions,
    output: OutputOptions,
) -> None:
    """Plan, quantize, reconstruct, evaluate and save, in one command.

    Examples:
      ompq quantize torchvision:resnet18 --data train/ --budget 4.0MiB -o out/
      ompq quantize timm:resnet18 --data train/ --eval-data val/ --budget 3.2bits
        --iterations 2000 -o out/
      ompq quantize net.py:make --data digits --plan plan.json -o out/
      ompq quantize ompq:demo --data digits --eval-data digits --budget 36KiB -o out/

    Ctrl-C keeps what is done: the same command with --resume continues.
    """
    check_folder(run.folder)
    with opened(output) as screen, run_folder(run, screen):
        config = plan_config(planning)
        source = bits_source(run)
        model = load_network(network, screen)
        inputs = load_inputs(data, model, "train")
        # Before the work: labels that do not fit should not cost an hour.
        judged = labelled_batches(run, data, model)
        count = run.samples or min(CALIBRATION, len(inputs))
        samples = read_samples(inputs, count, screen)
        few = samples[: sample_count(network.network, None, planning.protocol)]
        plan = plan_for(model.module, few, source, config, screen)
        made = quantized_network(model.module, plan, samples, run, data.seed, screen)
        made, arithmetic = settled(made, samples, screen)
        outcome = Outcome(
            about={
                "network": model.name,
                "weights": model.weights,
                "data": inputs.name,
                "eval_data": run.eval_data,
                "samples": count,
                "iterations": 0 if run.no_reconstruct else run.iterations,
                "seed": data.seed,
                "device": str(network.torch_device()),
                "arithmetic": arithmetic,
            },
            plan=plan,
            network=made,
            evaluation=evaluated(made, model.module, judged, screen),
            seconds=screen.seconds,
            histograms=worst_histograms(made, model.module, plan, samples),
        )
        with screen.stage("writing files") as progress:
            written = write_files(run.folder, outcome, progress)
        run.checkpoint.unlink(missing_ok=True)
        show_outcome(outcome, screen, run.folder, written)


def bits_source(run: RunOptions) -> Plan | Allocation | Budget:
    """Return what decides on the bits: a plan, bits, or a budget to plan for."""
    check_unfinished(run)
    wanted = None if run.budget is None else Budget.of(run.budget)
    if run.started and run.plan is None:
        plan = Plan.load(run.folder / "plan.json")
        if wanted is not None and str(wanted) != str(plan.budget):
            raise CheckpointError(
                f"{run.folder} was begun with the budget {plan.budget}, not {wanted}; "
                "give that one, or another folder"
            )
        return plan
    if run.plan is not None:
        return read_bits(run.plan)
    if wanted is None:
        raise BudgetError("no budget: give --budget, for example 4.0MiB, or --plan")
    return wanted


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
    run: RunOptions, data: DataOptions, model: NamedModel
) -> Batches | None:
    """Return the images that accuracy is measured on, if there are any."""
    if run.eval_data is None:
        return None
    options = replace(data, data=run.eval_data)
    return load_inputs(options, model, "test").batches(limit=run.limit)


def quantized_network(
    module: nn.Module,
    plan: Plan,
    samples: Tensor,
    run: RunOptions,
    seed: int,
    screen: Screen,
) -> nn.Module:
    """Quantize and, unless the options say otherwise, reconstruct."""
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


def evaluated(
    quantized: nn.Module, module: nn.Module, judged: Batches | None, screen: Screen
) -> Evaluation | None:
    """Measure the network beside the float one, if there is something to do it on."""
    if judged is None:
        return None
    with screen.stage("evaluating") as progress:
        return measure(quantized, judged, reference=module, progress=progress)
