"""quantize, train and evaluate: runs that make a network, or measure one."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import typer
from torch import nn

from ompq.allocation.solver import Allocation, Budget
from ompq.cli.console import Console, View, muted, opened, render, say
from ompq.cli.options import (
    REQUIRED,
    OutputOptions,
    check_folder,
    check_resumed,
    flag,
    number,
    one_of,
    option,
    output_path,
)
from ompq.cli.settings import (
    NetworkOptions,
    RefineOptions,
    SourceOptions,
    provenance,
    read_samples,
    sample_count,
)
from ompq.cli.views import accuracy_text, facts, time_line, totals, used, warning
from ompq.costs import digits
from ompq.datasets.images import image_views
from ompq.datasets.sources import Data
from ompq.datasets.training_sets import training_data
from ompq.errors import BudgetError, PlanError
from ompq.evaluation import Evaluation
from ompq.evaluation import evaluate as measure
from ompq.integer.engine import IntegerNetwork
from ompq.models import NamedModel
from ompq.packing import load, save
from ompq.plans import Plan
from ompq.quantization import BlockError, quantization_of
from ompq.reconstruction import ReconstructConfig
from ompq.reconstruction.rounding import RoundingConfig
from ompq.samples import model_device
from ompq.training import train as learn
from ompq.training.batches import TrainingData, checked_length
from ompq.training.config import TRAIN_PROTOCOLS, TrainConfig
from ompq.training.run import check_installed
from ompq.userfiles import suggestion
from ompq.workflow import PLAN, Outcome, Workflow, made_folder, read_bits

CALIBRATION = 1024
_ENGINES = ("simulated", "integer")

_LIMIT = "Use only this many images, spread over the classes. Default: all."


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is done, and where it goes."""

    folder: Path = output_path(
        "Folder for the plan, network, result and report.", "DIR", REQUIRED
    )
    budget: str | None = option(
        None, "BUDGET", "As for ompq plan; not needed with --plan."
    )
    plan: Path | None = option(
        None,
        "FILE",
        "Use this plan, or bits copied from a report, instead of a new plan.",
    )
    samples: int | None = number(
        None, "Inputs for calibration.", f"{CALIBRATION}, or all", least=2
    )
    views: int = number(
        1,
        "Versions of each image to learn from: itself and mirrored, shifted "
        "copies. 8 to 16 help with fewer than 200 images.",
    )
    iterations: int | None = number(
        None, "Learning steps per block.", RoundingConfig.iterations
    )
    no_reconstruct: bool = flag("Round to nearest; learn nothing.", "--no-reconstruct")
    eval_data: str | None = option(
        None, "SOURCE", "Labelled images to measure accuracy on, as for ompq evaluate."
    )
    limit: int | None = number(None, _LIMIT)
    resume: bool = flag("Continue a run that was stopped.", "--resume")

    @property
    def checkpoint(self) -> Path:
        """Where a stopped reconstruction continues from."""
        return self.folder / "checkpoint.safetensors"

    @property
    def training(self) -> Path:
        """Where a stopped training continues from: a folder."""
        return self.folder / "training"

    @property
    def start(self) -> Path:
        """The packed network that a training starts from."""
        return self.folder / "start.ompq.safetensors"

    @property
    def started(self) -> Path | None:
        """What there is of a run that was stopped."""
        kept = (self.training, self.start, self.checkpoint)
        return next((path for path in kept if path.exists()), None)

    @property
    def steps(self) -> int:
        """Learning steps per block."""
        return (
            0 if self.no_reconstruct else self.iterations or RoundingConfig.iterations
        )

    def calibration_count(self, inputs: Data) -> int:
        """Return how many inputs calibrate."""
        return self.samples or min(CALIBRATION, len(inputs))

    def check(self, planning: RefineOptions) -> None:
        """Refuse options that contradict each other."""
        deciding = [*(["--budget"] if self.budget else []), *planning.typed()]
        if self.plan is not None and deciding:
            raise ValueError(
                f"--plan already decides the bits; leave out {', '.join(deciding)}"
            )
        if self.no_reconstruct and self.iterations is not None:
            raise ValueError(
                "--no-reconstruct and --iterations contradict each other; give one"
            )

    def check_unfinished(self) -> None:
        """Make sure that a stopped run is continued only if that is wanted."""
        check_resumed(self.started, "run", resume=self.resume)

    def check_budget(self, plan: Plan, begun: Path) -> None:
        """Make sure that the budget typed, if any, is that of the bits in ``begun``."""
        wanted = None if self.budget is None else Budget.of(self.budget)
        if wanted is not None and str(wanted) != str(plan.budget):
            raise BudgetError(
                f"{begun} was started with the budget {plan.budget}, not {wanted}; "
                "give that budget, or start again in another folder"
            )

    def bits_source(self) -> Plan | Allocation | Budget:
        """Return what decides on the bits: a plan, bits, or a budget to plan for."""
        self.check_unfinished()
        if self.plan is not None:
            return read_bits(self.plan)
        if self.started:
            plan = Plan.load(self.folder / PLAN)
            self.check_budget(plan, self.folder)
            return plan
        if self.budget is None:
            raise BudgetError("no budget: give --budget, for example 4.0MiB, or --plan")
        return Budget.of(self.budget)


@contextmanager
def run_folder(run: RunOptions, console: Console) -> Iterator[None]:
    """Make the folder at once; if stopped, say how to continue."""
    try:
        with made_folder(run.folder):
            yield
    except KeyboardInterrupt:
        if run.started is None:
            raise
        if _is_main():
            # A process of torchrun does not know what started it.
            again = "the command that started all processes, with --resume added"
            if "RANK" not in os.environ:
                typed = [word for word in sys.argv[1:] if word != "--resume"]
                again = shlex.join(["ompq", *typed, "--resume"])
            say(console.err, f"stopped; progress is kept in {run.started}")
            say(console.err, f"continue with: {again}")
        raise typer.Exit(130) from None


def _is_main() -> bool:
    """Return whether this is the first of the processes that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def quantize(
    sources: SourceOptions,
    run: RunOptions,
    planning: RefineOptions,
    output: OutputOptions,
) -> None:
    """Plan, quantize, reconstruct, evaluate and save, in one command.

    Examples:
      ompq quantize torchvision:resnet18 --data train/ --budget 4.0MiB -o out/
      ompq quantize timm:resnet18 --data train/ --eval-data val/ --budget 3.2bits
        --iterations 2000 -o out/
      ompq quantize net.py:make --data digits --plan plan.json -o out/
      ompq quantize ompq:demo --data digits --budget 36KiB -o out/

    Ctrl-C keeps what is done: the same command with --resume continues.
    """
    check_folder(run.folder)
    with opened(output) as console, run_folder(run, console):
        run.check(planning)
        source = run.bits_source()
        # Wrong options should not wait for the network.
        _ = planning.config(), planning.refinement(sources.seed)
        model = sources.load(console)
        inputs = sources.inputs(model)
        # Before the work: labels that do not fit should not cost an hour.
        judged = sources.labelled(run.eval_data, model, run.limit)
        samples = read_samples(inputs, run.calibration_count(inputs), console)
        work = Workflow(model.module, samples, console.stages)
        plan, made = _quantized(work, source, inputs, run, planning)
        more = {"samples": len(samples), "iterations": run.steps}
        about = provenance(inputs, eval_data=run.eval_data, **more)
        _finish(work.outcome(made, plan, judged, about), run, console)
        run.checkpoint.unlink(missing_ok=True)


def _quantized(
    work: Workflow,
    source: Plan | Allocation | Budget,
    inputs: Data,
    run: RunOptions,
    planning: RefineOptions,
) -> tuple[Plan, nn.Module]:
    """Plan, quantize and, unless the options say otherwise, reconstruct."""
    seed, count = inputs.seed, sample_count(inputs.model.name, None, planning.protocol)
    refinement = planning.refinement(seed)
    plan = work.plan(source, planning.config(), count=count, refinement=refinement)
    work = replace(work, samples=image_views(work.samples, run.views, seed=seed))
    rounded = work.quantize(plan)
    if run.no_reconstruct:
        return plan, rounded
    plan.save(run.folder / PLAN)  # a run that is stopped continues with it
    rounding = RoundingConfig(iterations=run.steps)
    config = ReconstructConfig(rounding=rounding, seed=seed)
    return plan, work.reconstruct(rounded, config, checkpoint=run.checkpoint)


def _finish(outcome: Outcome, run: RunOptions, console: Console) -> None:
    with console.stage("writing files") as progress:
        files = outcome.write(run.folder, progress)
    render(outcome_view(outcome, run.folder, files), console)


def outcome_view(made: Outcome, folder: Path, files: Sequence[str]) -> View:
    """Return a quantized network, how it does, and its files."""
    found = made.evaluation
    rows = [
        *totals(made.plan),
        *_error_rows(made.errors),
        *_accuracy_rows(found),
        ("arithmetic", made.about["arithmetic"]),
        ("time", time_line(made.seconds)),
        ("files", ", ".join(str(folder / name) for name in files)),
    ]
    data = {**made.to_json(), "folder": str(folder), "files": files}
    accuracy = "" if found is None else f", top-1 {accuracy_text(found)}"
    line = f"{folder}: {'; '.join(used(made.plan))}{accuracy}"
    shown = [facts(rows), *warning(made.about, "the results")]
    return View(data, line, lambda _width: shown)


def _error_rows(errors: Sequence[BlockError]) -> list[tuple[str, str]]:
    if not errors:
        return []
    kept = [error.block for error in errors if not error.improved]
    worst = sorted(errors, key=lambda error: -error.after)[:3]
    texts = [f"{e.block} {digits(e.before)} → {digits(e.after)}" for e in worst]
    better = f"{len(errors) - len(kept)} of {len(errors)} improved"
    return [
        ("blocks", f"{better}; the others keep their rounding" if kept else better),
        ("worst", f"{', '.join(texts)} (relative squared error)"),
    ]


def _accuracy_rows(found: Evaluation | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    assert found.drop is not None and found.drop_error is not None
    assert found.agreement is not None
    return [
        ("float", f"top-1 {100 * (found.top1 + found.drop):.2f} %"),
        ("quantized", f"top-1 {accuracy_text(found)}"),
        (
            "drop",
            f"{100 * found.drop:.2f} ± {100 * found.drop_error:.2f} points; "
            f"the same answer on {100 * found.agreement:.1f} % of the images",
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How the network is trained."""

    PANEL: ClassVar[str] = "How it is trained"

    start: Path | None = option(
        None,
        "FILE",
        "Start from this packed network instead of quantizing one.",
        "--from",
    )
    validation: str | None = option(
        None,
        "SOURCE",
        "Labelled images that decide which epoch is kept. Default: keep the last.",
    )
    epochs: int | None = number(None, "Passes over the data.", TrainConfig.epochs)
    batch_size: int | None = number(
        None, "Images per step, over all processes.", TrainConfig.batch_size
    )
    learning_rate: float | None = number(
        None, "Initial learning rate.", TrainConfig.learning_rate, least=None
    )
    settings: list[str] | None = option(
        None,
        "NAME=VALUE",
        "Any other field of ompq.TrainConfig: distill=0.5, compile=true, "
        "activations=clip. Repeatable.",
        "--set",
    )

    def config(self, protocol: str | None, seed: int) -> TrainConfig:
        """Return the settings of a training: the protocol's, and what was typed."""
        base = TRAIN_PROTOCOLS.get(protocol or "", TrainConfig())
        names = ("epochs", "batch_size", "learning_rate")
        given = {k: v for k in names if (v := getattr(self, k)) is not None}
        known = [field.name for field in fields(TrainConfig) if field.name != "seed"]
        for text in self.settings or ():
            name, equals, value = text.partition("=")
            if not equals or name not in known:
                meant = "" if name in known else suggestion(name, known)
                raise ValueError(
                    f"--set {text}: write NAME=VALUE with a field of ompq.TrainConfig"
                    f"{meant}; the seed is --seed"
                )
            try:
                given[name] = json.loads(value)
            except ValueError:  # a word
                given[name] = value
        return replace(base, **given, seed=seed)


def train(
    sources: SourceOptions,
    run: RunOptions,
    training: TrainOptions,
    planning: RefineOptions,
    output: OutputOptions,
) -> None:
    """Plan, quantize, reconstruct, train, evaluate and save, in one command.

    Examples:
      ompq train torchvision:resnet18 --data imagenet/ --eval-data imagenet/
        --protocol paper-qat --budget 6.7MiB -o out/
      ompq train cifar:resnet20 --weights r20.safetensors --data cifar10/
        --budget 3bits --epochs 20 --set batch_norm=fold-and-train -o out/
      ompq train ompq:demo --data digits --from out/network.ompq.safetensors
        -o more/

    Ctrl-C, or anything else that stops it, keeps what is done: the same command with
    --resume continues. torchrun and accelerate launch run it on several GPUs and
    machines.
    """
    check_folder(run.folder)
    output = output if _is_main() else replace(output, json=False, quiet=True)
    with opened(output) as console, run_folder(run, console):
        run.check(planning)
        config = training.config(planning.protocol, sources.seed)
        if config.start == "float":  # training would discard what is reconstructed
            run = replace(run, no_reconstruct=True)
        if _is_main():  # the others may come when there is something already
            run.check_unfinished()
        _take_gpu()
        model = sources.load(console)
        inputs = sources.inputs(model)
        # Before the work: what cannot be trained with should not cost an hour.
        images = _images(inputs, config, console)
        count = run.calibration_count(inputs)
        samples = read_samples(inputs, min(256, count), console)
        judged = sources.labelled(run.eval_data, model, run.limit)
        validation = sources.labelled(training.validation, model)
        if _is_main() and training.start is None:
            _prepare(inputs, run, planning, console)
        plan, start = _begin(training, run, model)
        with console.stage("training") as progress:
            made = learn(
                start,
                images,
                config,
                teacher=model.module,
                validation=validation,
                checkpoint=run.training,
                progress=progress,
            )
        if _is_main():
            work = Workflow(model.module, samples, console.stages)
            about = provenance(inputs, eval_data=run.eval_data, epochs=config.epochs)
            _finish(work.outcome(made, plan, judged, about), run, console)


def _take_gpu() -> None:
    """Let each process of a machine use a GPU of its own."""
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _images(inputs: Data, config: TrainConfig, console: Console) -> TrainingData:
    """Return what is trained with, once it is sure that it can be."""
    device = model_device(inputs.model.module)
    with console.stage("reading images") as progress:
        images = training_data(inputs, device=device, progress=progress)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    checked_length(images, config, processes, device)
    check_installed(config)
    return images


def _prepare(
    inputs: Data,
    run: RunOptions,
    planning: RefineOptions,
    console: Console,
) -> None:
    """Quantize, and write what all processes, and a resumed run, start from."""
    source, model = run.bits_source(), inputs.model
    if run.start.exists():
        return
    samples = read_samples(inputs, run.calibration_count(inputs), console)
    work = Workflow(model.module, samples, console.stages)
    plan, made = _quantized(work, source, inputs, run, planning)
    plan.save(run.folder / PLAN)
    save(made, run.start, plan=plan, network=model.name)
    run.checkpoint.unlink(missing_ok=True)


def _begin(
    training: TrainOptions, run: RunOptions, model: NamedModel
) -> tuple[Plan, nn.Module]:
    """Return the plan and the network to start from, once they are there."""
    path = training.start or run.start
    while path == run.start and not path.exists():
        time.sleep(0.5)  # the first process is at it; if it fails, all are ended
    network = load(path, model.module)
    record, beside = quantization_of(network), path.parent / PLAN
    given = run.plan or beside
    if not given.exists():
        raise PlanError(
            f"{given}, the plan of {path}, does not exist; give it with --plan FILE"
        )
    found = read_bits(given)
    plan = found if isinstance(found, Plan) else Plan.load(beside)
    run.check_budget(plan, path)
    plan.check_network(record.graph)
    bits = found.allocation if isinstance(found, Plan) else found
    if dict(bits) != dict(record.allocation):
        raise PlanError(
            f"the bits in {given} differ from those of {path}; give that network's plan"
        )
    return plan, network


def evaluate(
    sources: SourceOptions,
    output: OutputOptions,
    packed: Path | None = option(
        None, "FILE", "Evaluate this packed network of ompq quantize or ompq train."
    ),
    engine: str = one_of(
        _ENGINES[0],
        _ENGINES,
        "what computes a packed network: PyTorch, or integers alone on the CPU, "
        "which is slow. Default: simulated.",
    ),
    limit: int | None = number(None, _LIMIT),
    batch_size: int = number(64, "Images per batch."),
) -> None:
    """Measure a network's accuracy, with its 95 % interval.

    Examples:
      ompq evaluate torchvision:resnet18 --data imagenet/val
      ompq evaluate torchvision:resnet18 --weights r18.pth --data imagenet/val
      ompq evaluate cifar:resnet20 --weights r20.safetensors --data cifar
        --limit 1000
      ompq evaluate ompq:demo --data digits --json
      ompq evaluate ompq:demo --packed out/network.ompq.safetensors --data digits
        --engine integer --limit 100

    The data has one folder per class; a folder with train and test (or val) inside is
    evaluated on test.
    """
    if engine == "integer" and packed is None:
        raise ValueError(
            "--engine integer computes packed networks; give one with --packed FILE"
        )
    with opened(output) as console:
        model = _loaded(sources, packed, console)
        inputs = sources.inputs(model, "test")
        batches = inputs.batches(batch_size=batch_size, limit=limit)
        judged = model.module
        if engine == "integer":
            judged = IntegerNetwork.from_quantized(judged.cpu(), inputs.samples(1))
        with console.stage("evaluating") as progress:
            result = measure(judged, batches, progress=progress)
        about = {"network": model.name, "weights": model.weights, "data": inputs.name}
        if packed is not None:
            about["engine"] = engine
        render(evaluation_view(result, about, console.stages.seconds), console)


def _loaded(
    options: NetworkOptions, packed: Path | None, console: Console
) -> NamedModel:
    if packed is None:
        return options.load(console)
    # The file holds all weights; those of the network it was made from do not matter.
    with muted():
        model = replace(options, weights="none").load(console)
    return replace(model, module=load(packed, model.module), weights=str(packed))


def evaluation_view(
    found: Evaluation, about: Mapping[str, Any], seconds: Mapping[str, float]
) -> View:
    """Return how well a network does."""
    rows = [
        ("network", f"{about['network']}, weights {about['weights']}"),
        ("data", about["data"]),
        *([("engine", about["engine"])] if "engine" in about else []),
        ("top-1", accuracy_text(found)),
        *([] if found.top5 is None else [("top-5", f"{100 * found.top5:.2f} %")]),
        ("speed", f"{found.images_per_second:,.0f} images a second"),
        ("time", time_line(seconds)),
    ]
    data = {**about, **found.to_json(), "seconds": seconds}
    shown = [facts(rows), *warning(about, "the numbers")]
    return View(data, accuracy_text(found), lambda _width: shown)
