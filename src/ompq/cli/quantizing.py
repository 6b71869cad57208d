"""quantize: from a float network to a small one, in one command."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor, nn

from ompq.allocation.solving import Allocation, Budget
from ompq.cli.evaluating import LimitOption
from ompq.cli.options import (
    DataOptions,
    NetworkOptions,
    OutputOptions,
    PlanOptions,
    option,
)
from ompq.cli.planning import planned
from ompq.cli.results import Outcome, show_outcome, write_files
from ompq.cli.screen import Screen, opened, say
from ompq.cli.settings import (
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
from ompq.reconstruction.rounding import RoundingConfig
from ompq.report import worst_histograms

CALIBRATION = 1024
_ANYTHING = "32bits"  # a budget that bits fixed beforehand always meet


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is done, and where it goes."""

    folder: Annotated[
        Path,
        option(
            "--output",
            "-o",
            metavar="DIR",
            text="Where plan, network, result and report go.",
        ),
    ]
    budget: Annotated[
        str | None,
        option(metavar="BUDGET", text="As for ompq plan; not needed with --plan."),
    ] = None
    plan: Annotated[
        Path | None,
        option(
            metavar="FILE",
            text="Take this plan, or these bits copied from a report, instead of "
            "making a plan.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        option(
            min=2,
            metavar="NUMBER",
            text=f"How many inputs calibrate. Default: {CALIBRATION}, or all.",
        ),
    ] = None
    iterations: Annotated[
        int,
        option(
            min=1,
            metavar="NUMBER",
            text=f"Steps a block learns. Default: {RoundingConfig.iterations}.",
        ),
    ] = RoundingConfig.iterations
    no_reconstruct: Annotated[
        bool, option("--no-reconstruct", text="Round to nearest and learn nothing.")
    ] = False
    eval_data: Annotated[
        str | None,
        option(
            metavar="SOURCE",
            text="Labelled images to measure accuracy on, as for ompq evaluate.",
        ),
    ] = None
    limit: LimitOption = None
    resume: Annotated[
        bool, option("--resume", text="Continue a run that was stopped.")
    ] = False

    @property
    def checkpoint(self) -> Path:
        """Where a stopped run continues from."""
        return self.folder / "checkpoint.safetensors"


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
    with opened(output) as screen, _folder(run, screen):
        config = plan_config(planning)
        source = _source(run)
        model = load_network(network, screen)
        inputs = load_inputs(data, model, "train")
        # Before the work: labels that do not fit should not cost an hour.
        judged = _batches(run, data, model)
        count = run.samples or min(CALIBRATION, len(inputs))
        samples = read_samples(inputs, count, screen)
        few = samples[: sample_count(network.network, None, planning.protocol)]
        plan = _plan(model.module, few, source, config, screen)
        made = _quantized(model.module, plan, samples, run, data.seed, screen)
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
            evaluation=_evaluated(made, model.module, judged, screen),
            seconds=screen.seconds,
            histograms=worst_histograms(made, model.module, plan, samples),
        )
        with screen.stage("writing files"):
            written = write_files(run.folder, outcome)
        run.checkpoint.unlink(missing_ok=True)
        show_outcome(outcome, screen, run.folder, written)


@contextmanager
def _folder(run: RunOptions, screen: Screen) -> Iterator[None]:
    """Make the folder at once; leave none behind if nothing was written to it."""
    new = not run.folder.exists()
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except KeyboardInterrupt:
        if not run.checkpoint.exists():
            raise
        typed = [word for word in sys.argv[1:] if word != "--resume"]
        again = shlex.join(["ompq", *typed, "--resume"])
        say(screen.err, f"stopped; what is done is kept in {run.checkpoint}")
        say(screen.err, f"continue with: {again}")
        raise typer.Exit(130) from None
    finally:
        if new:
            with suppress(OSError):  # it holds something
                run.folder.rmdir()


def _source(run: RunOptions) -> Plan | Allocation | Budget:
    """Return what decides on the bits: a plan, bits, or a budget to plan for."""
    started = run.checkpoint.exists()
    if started and not run.resume:
        raise CheckpointError(
            f"{run.checkpoint} is left from a run that was stopped; "
            "add --resume to continue it, or remove it"
        )
    wanted = None if run.budget is None else Budget.of(run.budget)
    if started and run.plan is None:
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


def _plan(
    module: nn.Module,
    samples: Tensor,
    source: Plan | Allocation | Budget,
    config: PlanConfig,
    screen: Screen,
) -> Plan:
    if isinstance(source, Plan):
        return source
    if isinstance(source, Allocation):
        pins: dict[str, Pin] = {
            name: (choice.weight, choice.activation) for name, choice in source.items()
        }
        config = replace(config, pinned=pins)
        source = Budget.of(_ANYTHING)
    return planned(module, samples, source, config, screen)


def _batches(run: RunOptions, data: DataOptions, model: NamedModel) -> Batches | None:
    if run.eval_data is None:
        return None
    options = replace(data, data=run.eval_data)
    return load_inputs(options, model, "test").batches(limit=run.limit)


def _quantized(
    module: nn.Module,
    plan: Plan,
    samples: Tensor,
    run: RunOptions,
    seed: int,
    screen: Screen,
) -> nn.Module:
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


def _evaluated(
    quantized: nn.Module, module: nn.Module, judged: Batches | None, screen: Screen
) -> Evaluation | None:
    if judged is None:
        return None
    with screen.stage("evaluating") as progress:
        return measure(quantized, judged, reference=module, progress=progress)
