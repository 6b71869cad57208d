"""quantize, train and evaluate: commands that make or measure a network."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from math import nan
from pathlib import Path
from shutil import rmtree
from typing import Any, ClassVar

import torch
import typer
from torch import nn

from ompq.allocation.problem import Allocation
from ompq.amounts import digits, in_bytes
from ompq.budgets import Budget
from ompq.cli.console import Console, View, facts, in_first_process, muted, say
from ompq.cli.options import (
    REQUIRED,
    check_needed,
    check_resumed,
    check_writable,
    flag,
    number,
    one_of,
    option,
    output_path,
    typed_toml,
)
from ompq.cli.settings import (
    CacheOptions,
    RefineOptions,
    SourceOptions,
    decoder_metrics,
    metric_option,
    provenance,
    read_samples,
    user_metrics,
)
from ompq.cli.views import quality_rows, quality_text, time_line, totals, used, warning
from ompq.configs import (
    QUANTIZE_PROTOCOLS,
    TRAIN_PROTOCOLS,
    Goal,
    QuantizeConfig,
    ReconstructConfig,
    RoundingConfig,
    TrainConfig,
    TuningConfig,
)
from ompq.datasets.images import image_views
from ompq.datasets.named_data import Data
from ompq.datasets.training_sets import HeldSet, training_data
from ompq.errors import BudgetError, DataError, PlanError, suggestion
from ompq.evaluation import Metric, evaluate as measure
from ompq.files import (
    CONFIG,
    GGUF,
    ONNX,
    PACKED,
    PLAN,
    REPORT,
    RESULT,
    locked_folder,
    remove_unfinished,
)
from ompq.integer.engine import IntegerNetwork
from ompq.models.named_models import NamedModel
from ompq.packed.packed_files import load, save
from ompq.parallel import main_has
from ompq.plans import Plan, read_bits
from ompq.quantization.record import BlockError, quantization_of
from ompq.samples import model_device
from ompq.schema import read_json
from ompq.sections import Remark
from ompq.smallest_network import Smallest
from ompq.training.step import Loss
from ompq.training.training_batches import TrainingData, checked_length, labelled
from ompq.training.training_loop import train as learn
from ompq.training.training_run import check_installed
from ompq.user_functions import is_user_function, user_function
from ompq.workflow import (
    ANYTHING,
    CALIBRATION_SAMPLES,
    Outcome,
    Workflow,
    learning_config,
    made_folder,
)

_ENGINES = ("simulated", "integer")
# What a stopped run resumes from; training and search are folders.
_TRAINING, _START = "training", "start.ompq.safetensors"
_CHECKPOINT, _SEARCH = "checkpoint.safetensors", "search"
_STARTED = (_TRAINING, _START, _CHECKPOINT, _SEARCH)

_LIMIT = "Use only this many images, spread over the classes. Default: all."


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for what is done and where the files go."""

    folder: Path = output_path(
        "Folder for the plan, network, result and report.", "DIR", REQUIRED
    )
    budget: str | None = option("BUDGET", "As for ompq plan, unless --plan is given.")
    plan: Path | None = option(
        "FILE", "Use this plan, or bits copied from a report, instead of a new plan."
    )
    samples: int | None = number(
        "Inputs for calibration.", shown=f"{CALIBRATION_SAMPLES}, or all", least=2
    )
    views: int = number(
        "Augment: learn from this many versions of each image, mirrored and shifted. "
        "8 to 16 help with fewer than 200 images.",
        default=1,
    )
    iterations: int | None = number(
        "Reconstruction steps per block.",
        shown=f"{RoundingConfig.iterations}, or the protocol's",
    )
    merge_blocks: int = number(
        "Reconstruct up to this many neighbouring blocks together. 2 helps "
        "transformers with low-bit activations.",
        default=ReconstructConfig.merge,
    )
    tune_epochs: int | None = number(
        "Epochs of whole-network tuning after reconstruction; 0 turns it off.",
        shown=f"{TuningConfig.epochs} with activations below 8 bits, else 0",
        least=0,
    )
    no_reconstruct: bool = flag("Round only, without reconstruction.")
    eval_data: str | None = option(
        "SOURCE", "Labelled images to measure accuracy on, as for ompq evaluate."
    )
    limit: int | None = number(_LIMIT)
    metric: str | None = metric_option(" of --eval-data", "; higher is better")
    measure_layers: int = option(
        "NUMBER",
        "For the report: measure this many of the layers with the most expected "
        "damage, each as the only quantized and as the only float layer. Default: 0.",
        default=0,
        min=0,
    )
    resume: bool = flag("Continue a run that was stopped.")
    overwrite: bool = flag("Replace what an earlier run left in the folder.")

    @property
    def started(self) -> Path | None:
        """The checkpoint of a stopped run, if there is one."""
        paths = (self.folder / name for name in _STARTED)
        return next((path for path in paths if path.exists()), None)

    def reconstruction(
        self, inputs: Data, protocol: str | None
    ) -> ReconstructConfig | None:
        """Return the settings of reconstruction, or None if there is none."""
        if self.no_reconstruct:
            return None
        name, seed = inputs.model.name, inputs.seed
        config = learning_config(protocol, name, iterations=self.iterations, seed=seed)
        tuning, epochs = config.tuning, self.tune_epochs
        if epochs is not None:
            if not isinstance(config.rounding, RoundingConfig):
                raise ValueError(
                    f"--protocol {protocol} does not tune networks; omit --tune-epochs"
                )
            tuning = TuningConfig(epochs=epochs, always=True) if epochs else None
        return replace(config, merge=self.merge_blocks, tuning=tuning)

    def calibration_count(self, inputs: Data) -> int:
        """Return the number of inputs used for calibration."""
        return self.samples or min(CALIBRATION_SAMPLES, len(inputs))

    def learning(self) -> list[str]:
        """Return the given options of reconstruction, as typed."""
        given = {
            "--iterations": self.iterations is not None,
            "--merge-blocks": self.merge_blocks != ReconstructConfig.merge,
            "--tune-epochs": self.tune_epochs is not None,
        }
        return [name for name, typed in given.items() if typed]

    def check(self, planning: RefineOptions) -> None:
        """Raise a ValueError for options that contradict each other."""
        deciding = [*(["--budget"] if self.budget else []), *planning.typed()]
        if self.plan is not None and deciding:
            raise ValueError(
                f"--plan already decides the bits; omit {', '.join(deciding)}"
            )
        if self.resume and self.overwrite:
            raise ValueError("--resume and --overwrite cannot be combined; use one")
        if self.no_reconstruct and self.learning():
            named = " and ".join(self.learning())
            raise ValueError(
                f"--no-reconstruct and {named} cannot be combined; use one"
            )
        check_needed(
            "--eval-data", self.eval_data, limit=self.limit, metric=self.metric
        )

    def finished(self) -> View | None:
        """Return the result if the run to resume is finished.

        Raises:
            ValueError: The finished run had other options.
        """
        result, config = self.folder / RESULT, self.folder / CONFIG
        if not self.resume or not result.exists():
            return None
        if not config.exists() or config.read_text(encoding="utf-8") != typed_toml():
            raise ValueError(
                f"{self.folder} holds a finished run with other options; give "
                "--overwrite instead of --resume to replace it, or use another folder"
            )
        line = f"{self.folder}: this run is finished; there is nothing to resume"
        return View(read_json(result), line)

    def check_unfinished(self) -> None:
        """Raise an error unless the options say what to do with an earlier run."""
        if self.overwrite:
            return
        if not self.resume and (self.folder / RESULT).exists():
            raise ValueError(
                f"{self.folder} holds a finished run; add --overwrite to replace it, "
                "or use another folder"
            )
        check_resumed(self.folder, self.started, "run", resume=self.resume)

    def clear(self, *kept: Path | None) -> None:
        """With ``--overwrite``, remove the files of an earlier run, except ``kept``."""
        needed = {path.resolve() for path in kept if path is not None}
        files = (PLAN, PACKED, ONNX, GGUF, REPORT, RESULT, CONFIG, *_STARTED)
        for path in map(self.folder.joinpath, files if self.overwrite else ()):
            if path.is_dir():
                rmtree(path, ignore_errors=True)
            elif path.resolve() not in needed:
                path.unlink(missing_ok=True)

    def check_budget(self, plan: Plan, place: Path) -> None:
        """Raise a BudgetError if ``--budget`` differs from the plan's budget."""
        wanted = None if self.budget is None else Budget.of(self.budget)
        if wanted is not None and plan.target is not None:
            wanted = wanted.of_file(plan.target.file)
        if wanted is not None and str(wanted) != str(plan.budget):
            raise BudgetError(
                f"{place} was started with the budget {plan.budget}, not {wanted}; "
                "use that budget, or start over in another folder"
            )

    def bits_source(self, goal: Goal | None = None) -> Plan | Allocation | Budget:
        """Return what decides the bits: a plan, an allocation or a budget."""
        self.check_unfinished()
        if goal is not None:
            return Budget.of(ANYTHING)
        if self.plan is not None:
            return read_bits(self.plan)
        if self.started and not self.overwrite:
            plan = Plan.load(self.folder / PLAN)
            self.check_budget(plan, self.folder)
            return plan
        if self.budget is None:
            raise BudgetError(
                "no budget: give --budget, for example 4.0MiB, or --plan, or a goal, "
                "for example --min-agreement 99%"
            )
        return Budget.of(self.budget)


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Options for a goal instead of a budget."""

    PANEL: ClassVar[str] = "A goal instead of a budget"

    max_drop: float | None = option(
        "POINTS",
        "Find the smallest network that loses at most this many points of top-1 on "
        "--eval-data.",
    )
    min_agreement: str | None = option(
        "SHARE",
        "Find the smallest network that gives the float network's answer to at least "
        "this share of the images, for example 99%. Needs no labels.",
    )
    max_divergence: float | None = option(
        "NATS",
        "Find the smallest network within this mean KL divergence from the float "
        "network, for example 0.05. Needs no labels.",
    )

    def goal(self, metrics: Mapping[str, Metric]) -> Goal | None:
        """Return the goal, or None if none was given."""
        if all(value is None for value in vars(self).values()):
            return None
        agreement = self.min_agreement and _share(self.min_agreement)
        return Goal(
            metric=next(iter(metrics.values()), None),
            max_drop=self.max_drop,
            min_agreement=agreement or None,
            max_divergence=self.max_divergence,
        )

    def check(self, run: RunOptions) -> None:
        """Raise a ValueError for a goal that contradicts or lacks other options."""
        decided = [o for o, v in (("--budget", run.budget), ("--plan", run.plan)) if v]
        goal = self.goal({})
        if goal is None:
            return
        if decided:
            raise ValueError(
                f"{decided[0]} and a goal ({goal}) both decide the size; give one"
            )
        if self.max_drop is not None and run.eval_data is None:
            raise ValueError("--max-drop needs labelled images: give --eval-data")
        if run.views > 1:
            raise ValueError(
                f"--views cannot be combined with a goal ({goal}); find the plan "
                "first, then quantize again with --plan and --views"
            )


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = nan
    value = value / 100 if text.endswith("%") else value
    if not 0 < value <= 1:
        raise ValueError(
            f"--min-agreement {text} is not a fraction; write for example 99% or 0.99"
        )
    return value


@contextmanager
def run_folder(run: RunOptions, console: Console) -> Iterator[None]:
    """Create and lock the folder; if stopped, say how to continue."""
    lock = locked_folder(run.folder) if in_first_process() else nullcontext()
    finished = run.folder / RESULT
    try:
        with made_folder(run.folder), lock:
            before = (run.folder / PLAN).exists()
            for name in (".", _TRAINING, _SEARCH):
                remove_unfinished(run.folder / name)
            try:
                yield
            finally:
                # A plan without a network made from it is of no use.
                if not before and run.started is None and not finished.exists():
                    (run.folder / PLAN).unlink(missing_ok=True)
    except KeyboardInterrupt:
        if run.started is None:
            raise
        if in_first_process():
            # Under torchrun, sys.argv does not show the command that was typed.
            again = "the command that started all processes, with --resume added"
            if "RANK" not in os.environ:
                typed = [word for word in sys.argv[1:] if word != "--resume"]
                again = shlex.join(["ompq", *typed, "--resume"])
            say(console.err, f"stopped; progress is kept in {run.started}")
            say(console.err, f"continue with: {again}")
        raise typer.Exit(130) from None


def quantize(
    sources: SourceOptions,
    run: RunOptions,
    goals: GoalOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
) -> View:
    r"""Plan, quantize, reconstruct, evaluate and save, in one command.

    Examples:
      ompq quantize torchvision:resnet18 --data train/ --budget 4.0MiB -o out/
      ompq quantize timm:resnet18 --data train/ --eval-data val/ \
        --budget 3.2bits --iterations 2000 -o out/
      ompq quantize transformers:FOLDER --data text.txt --eval-data other.txt \
        --budget 80MiB --target gguf --no-reconstruct -o out/
      ompq quantize net.py:make --data digits --plan plan.json -o out/
      ompq quantize ompq:demo --data digits --budget 36KiB -o out/
      ompq quantize timm:resnet18 --data train/ --eval-data val/ --max-drop 1 \
        -o out/
      ompq quantize net.py:make --data images/ --min-agreement 99% -o out/

    Instead of a budget, --max-drop, --min-agreement or --max-divergence set a goal.
    ompq then finds the smallest network that meets it on --eval-data or, without that,
    on half of the samples.

    After Ctrl-C, add --resume to the same command to continue.
    """
    check_writable(run.folder, folder=True)
    with run_folder(run, console):
        run.check(planning)
        goals.check(run)
        if done := run.finished():
            return done
        metrics = user_metrics(run.metric)
        source = run.bits_source(goal := goals.goal(metrics))
        # Report wrong options before the network is loaded.
        _ = planning.config(), planning.refinement(sources.seed), caching.folder()
        model = sources.load(console)
        inputs = sources.inputs(model)
        # Read now, so that unsuitable labels are not found after an hour of work.
        judged = sources.labelled(run.eval_data, model, run.limit)
        run.clear(run.plan)
        samples = read_samples(inputs, run.calibration_count(inputs), console)
        work = Workflow(model.module, samples, console.stages, caching.folder())
        learning = run.reconstruction(inputs, planning.protocol)
        search = None
        if goal is None:
            plan, network = _quantized(work, source, inputs, run, planning)
        else:
            plan = planning.plan(work, source, inputs)
            search = work.smallest(
                plan, goal, learning, batches=judged, folder=run.folder / _SEARCH
            )
            plan, network = search.plan, search.network
        steps = learning.rounding.iterations if learning else 0
        more = {"samples": len(samples), "iterations": steps}
        about = provenance(inputs, eval_data=run.eval_data, **more)
        outcome = work.outcome(
            network, plan, judged, about, metrics or decoder_metrics(model)
        )
        view = _finish(outcome, run, console, work, search)
        (run.folder / _CHECKPOINT).unlink(missing_ok=True)
        rmtree(run.folder / _SEARCH, ignore_errors=True)
    return view


def _quantized(
    work: Workflow,
    source: Plan | Allocation | Budget,
    inputs: Data,
    run: RunOptions,
    planning: RefineOptions,
) -> tuple[Plan, nn.Module]:
    """Plan, quantize and, unless the options say otherwise, reconstruct."""
    plan = planning.plan(work, source, inputs)
    if run.views > 1:
        images: Any = work.samples.first_batch(len(work.samples))
        views = image_views(images, run.views, seed=inputs.seed)
        work = replace(work, given=views)
    protocol = planning.protocol or "ours"
    rounded = work.quantize(plan, QUANTIZE_PROTOCOLS.get(protocol, QuantizeConfig()))
    config = run.reconstruction(inputs, planning.protocol)
    if config is None:
        return plan, rounded
    plan.save(run.folder / PLAN)  # a stopped run resumes with it
    return plan, work.reconstruct(rounded, config, checkpoint=run.folder / _CHECKPOINT)


def _finish(
    outcome: Outcome,
    run: RunOptions,
    console: Console,
    work: Workflow,
    search: Smallest | None = None,
) -> View:
    """Write the files, and return the network's sizes and quality."""
    if run.measure_layers:
        effects = work.layer_effects(outcome.plan, run.measure_layers)
        outcome = replace(outcome, remarks=effects)
    if search is not None:
        about = {**outcome.about, "search": search.to_json()}
        remarks = [Remark("tried", str(one)) for one in search.trials]
        outcome = replace(outcome, about=about, remarks=[*outcome.remarks, *remarks])
    with console.stage("writing files") as progress:
        files = outcome.write(run.folder, progress, typed_toml())
    folder, evaluation = run.folder, outcome.evaluation
    listed = [
        f"{folder / name}: {in_bytes(one.bytes)}"
        + ("" if one.planned is None else f", planned {in_bytes(one.planned)}")
        for name, one in files.items()
    ]
    searched = outcome.about.get("search", {"goal": [], "tried": []})
    rows = [
        *totals(outcome.plan),
        ("goal", searched["goal"]),
        ("tried", searched["tried"]),
        *_error_rows(outcome.errors),
        *([("tuned", outcome.tuned)] if outcome.tuned else []),
        *quality_rows(evaluation),
        ("arithmetic", outcome.about["arithmetic"]),
        ("time", time_line(outcome.seconds)),
        ("files", listed),
    ]
    sizes = {name: one._asdict() for name, one in files.items()}
    written = {"folder": str(folder), "files": [*files], "sizes": sizes}
    accuracy = "" if evaluation is None else f", {quality_text(evaluation)}"
    line = f"{folder}: {'; '.join(used(outcome.plan))}{accuracy}"
    body = [facts(rows), *warning(outcome.about, "the results")]
    return View({**outcome.to_json(), **written}, line, body)


def _error_rows(errors: Sequence[BlockError]) -> list[tuple[str, str]]:
    if not errors:
        return []
    improved = sum(error.improved for error in errors)
    worst = sorted(errors, key=lambda error: -error.after)[:3]
    texts = [f"{e.block} {digits(e.before)} → {digits(e.after)}" for e in worst]
    rest = "; the others keep their rounding" if improved < len(errors) else ""
    return [
        ("blocks", f"{improved} of {len(errors)} improved{rest}"),
        ("worst", f"{', '.join(texts)} (relative squared error)"),
    ]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options for training."""

    PANEL: ClassVar[str] = "How it is trained"

    start: Path | None = option(
        "FILE", "Start from this packed network instead of quantizing one.", "--from"
    )
    validation: str | None = option(
        "SOURCE",
        "Labelled images that select the epoch to keep. Default: keep the last.",
    )
    recipe: str | None = one_of(
        [name for name, one in TRAIN_PROTOCOLS.items() if one.keeps_plan],
        "how to train. Default: the protocol's way, or ours.",
    )
    epochs: int | None = number("Passes over the data.", shown=TrainConfig.epochs)
    batch_size: int | None = number(
        "Images per step, over all processes.", shown=TrainConfig.batch_size
    )
    learning_rate: float | None = number(
        "Initial learning rate.", shown=TrainConfig.learning_rate, least=None
    )
    loss: str | None = option(
        "FUNCTION",
        "FILE.py:FUNCTION, called with the network's outputs and the targets of a "
        "batch. It returns the mean loss, a tensor. Default: cross entropy of classes.",
    )
    logger: str | None = one_of(
        ("tensorboard", "wandb", "mlflow"),
        "log the training there, if it is installed.",
    )
    settings: list[str] | None = option(
        "NAME=VALUE",
        "Any other field of ompq.TrainConfig: distill=0.5, compile=true, "
        "activations=clip. Repeatable.",
        "--set",
    )

    def own_loss(self) -> Loss | None:
        """Return the user's own loss, or None if none was given."""
        if self.loss is None:
            return None
        if not is_user_function(self.loss):
            raise ValueError(f"--loss {self.loss}: write FILE.py:FUNCTION")
        return user_function(self.loss, DataError)

    def check(self, run: RunOptions, planning: RefineOptions) -> None:
        """Raise a ValueError for options that contradict each other or ``--from``."""
        run.check(planning)
        made = [*planning.typed(), *run.learning(), *(["--views"] * (run.views > 1))]
        if self.start is not None and made:
            raise ValueError(
                f"--from FILE is already quantized; omit {', '.join(made)}"
            )

    def config(self, protocol: str | None, seed: int, folder: Path) -> TrainConfig:
        """Return the settings of recipe or protocol with the changes from options."""
        base = TRAIN_PROTOCOLS.get(self.recipe or protocol or "", TrainConfig())
        names = ("epochs", "batch_size", "learning_rate")
        changes = {k: v for k in names if (v := getattr(self, k)) is not None}
        if self.logger == "tensorboard":
            changes["tensorboard"] = str(folder / "tensorboard")
        elif self.logger is not None:
            changes["logger"] = self.logger
        known = [field.name for field in fields(TrainConfig) if field.name != "seed"]
        for text in self.settings or ():
            name, equals, value = text.partition("=")
            if not equals or name not in known:
                similar = "" if name in known else suggestion(name, known)
                raise ValueError(
                    f"--set {text}: write NAME=VALUE with a field of ompq.TrainConfig"
                    f"{similar}; the seed is --seed"
                )
            try:
                changes[name] = json.loads(value)
            except ValueError:  # a plain word
                changes[name] = value
        config = replace(base, **changes, seed=seed)
        if not config.keeps_plan:
            raise ValueError(
                f"weights={config.weights} trains a network that no longer fits its "
                "plan; use ompq.train from Python"
            )
        return config


def train(
    sources: SourceOptions,
    run: RunOptions,
    training: TrainOptions,
    planning: RefineOptions,
    caching: CacheOptions,
    console: Console,
) -> View | None:
    r"""Plan, quantize, reconstruct, train, evaluate and save, in one command.

    Examples:
      ompq train torchvision:resnet18 --data imagenet/ --eval-data imagenet/ \
        --protocol paper-qat --budget 6.7MiB -o out/
      ompq train cifar:resnet20 --weights r20.safetensors --data cifar10/ \
        --budget 3bits --epochs 20 --set batch_norm=fold-and-train -o out/
      ompq train ompq:demo --data digits --from out/network.ompq.safetensors \
        -o more/
      ompq train net.py:make --data data.py:make --loss net.py:loss \
        --budget 4bits -o out/

    After Ctrl-C, add --resume to the same command to continue. Start it with torchrun
    or accelerate launch to use several GPUs or machines.
    """
    check_writable(run.folder, folder=True)
    with run_folder(run, console):
        training.check(run, planning)
        if done := run.finished():
            return done
        cache = caching.folder()
        config = training.config(planning.protocol, sources.seed, run.folder)
        if config.start == "float":  # training would discard the reconstruction
            run = replace(run, no_reconstruct=True)
        if in_first_process():  # others may start after it has written files
            run.check_unfinished()
        if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # one per process
        model = sources.load(console)
        inputs = sources.inputs(model)
        # Read now, so that unsuitable data is not found after an hour of work.
        loss = training.own_loss()
        images = _images(inputs, config, console, class_indices=loss is None)
        samples = read_samples(inputs, min(256, run.calibration_count(inputs)), console)
        judged = sources.labelled(run.eval_data, model, run.limit)
        validation = sources.labelled(training.validation, model)
        _clear(run, training)
        if in_first_process() and training.start is None:
            _prepare(inputs, run, planning, cache, console)
        plan, start = _starting_point(training, run, model)
        with console.stage("training") as progress:
            trained = learn(
                start,
                images,
                config,
                teacher=model.module,
                validation=validation,
                checkpoint=run.folder / _TRAINING,
                loss=loss,
                progress=progress,
            )
        if not in_first_process():
            return None
        work = Workflow(model.module, samples, console.stages)
        about = provenance(inputs, eval_data=run.eval_data, epochs=config.epochs)
        outcome = work.outcome(trained, plan, judged, about, user_metrics(run.metric))
        return _finish(outcome, run, console, work)


def _images(
    inputs: Data, config: TrainConfig, console: Console, *, class_indices: bool
) -> TrainingData:
    """Return the training images, checked before any work is done."""
    device = model_device(inputs.model.module)
    with console.stage("reading images") as progress:
        images = training_data(inputs, device=device, progress=progress)
    if isinstance(images, HeldSet):
        labelled((images.inputs, images.targets), class_indices=class_indices)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    checked_length(images, config, processes, device)
    check_installed(config)
    return images


def _clear(run: RunOptions, training: TrainOptions) -> None:
    """Remove an earlier run's files, before another process can load them."""
    if in_first_process():
        run.clear(run.plan, training.start)
    main_has("cleared")


def _prepare(
    inputs: Data,
    run: RunOptions,
    planning: RefineOptions,
    cache: Path | None,
    console: Console,
) -> None:
    """Quantize, and write the network that all processes and resumed runs load."""
    source, model, start = run.bits_source(), inputs.model, run.folder / _START
    if start.exists():
        return
    samples = read_samples(inputs, run.calibration_count(inputs), console)
    work = Workflow(model.module, samples, console.stages, cache)
    plan, network = _quantized(work, source, inputs, run, planning)
    plan.save(run.folder / PLAN)
    save(network, start, plan=plan, network=model.name)
    (run.folder / _CHECKPOINT).unlink(missing_ok=True)


def _starting_point(
    training: TrainOptions, run: RunOptions, model: NamedModel
) -> tuple[Plan, nn.Module]:
    """Return the plan and the network to train, once the first process wrote them."""
    path = training.start or run.folder / _START
    while training.start is None and not path.exists():
        time.sleep(0.5)  # if the first process fails, the launcher stops all of them
    network = load(path, model.module)
    record, own_plan = quantization_of(network), path.parent / PLAN
    file = run.plan or own_plan
    if not file.exists():
        raise PlanError(
            f"{file}, the plan of {path}, does not exist; give it with --plan FILE"
        )
    source = read_bits(file)
    plan = source if isinstance(source, Plan) else Plan.load(own_plan)
    run.check_budget(plan, path)
    plan.check_network(record.graph)
    bits = source.allocation if isinstance(source, Plan) else source
    if dict(bits) != dict(record.allocation):
        raise PlanError(
            f"the bits in {file} differ from those of {path}; give that network's plan"
        )
    return plan, network


def evaluate(
    sources: SourceOptions,
    console: Console,
    packed: Path | None = option(
        "FILE", "Evaluate this packed network of ompq quantize or ompq train."
    ),
    engine: str = one_of(
        _ENGINES,
        "run a packed network in PyTorch, or with integer arithmetic alone on the CPU, "
        "which is slow. Default: simulated.",
        default=_ENGINES[0],
    ),
    limit: int | None = number(_LIMIT),
    batch_size: int = number("Images per batch.", default=64),
    metric: str | None = metric_option(),
) -> View:
    r"""Measure a network's accuracy, with a 95 % confidence interval.

    Examples:
      ompq evaluate torchvision:resnet18 --data imagenet/val
      ompq evaluate torchvision:resnet18 --weights r18.pth --data imagenet/val
      ompq evaluate cifar:resnet20 --weights r20.safetensors --data cifar \
        --limit 1000
      ompq evaluate ompq:demo --data digits --json
      ompq evaluate ompq:demo --packed out/network.ompq.safetensors \
        --data digits --engine integer --limit 100

    The data has one folder per class; a folder with train and test (or val) inside is
    evaluated on test.
    """
    if engine == "integer" and packed is None:
        raise ValueError(
            "--engine integer runs packed networks; give one with --packed FILE"
        )
    metrics = user_metrics(metric)
    if packed is None:
        model = sources.load(console)
    else:  # the packed file holds all weights; the float ones are not needed
        with muted():
            model = replace(sources, weights="none").load(console)
        module = load(packed, model.module)
        model = replace(model, module=module, weights=str(packed))
    metrics = metrics or decoder_metrics(model)
    inputs = sources.inputs(model, "test")
    batches = inputs.batches(batch_size=batch_size, limit=limit)
    network = model.module
    if engine == "integer":
        network = IntegerNetwork.from_quantized(network.cpu(), inputs.samples(1))
    with console.stage("evaluating") as progress:
        result = measure(network, batches, metrics=metrics, progress=progress)
    about = {"network": model.name, "weights": model.weights, "data": inputs.name}
    about |= {} if packed is None else {"engine": engine}
    rows = [
        ("network", f"{model.name}, weights {model.weights}"),
        ("data", inputs.name),
        *([] if packed is None else [("engine", engine)]),
        *quality_rows(result),
        ("speed", f"{result.images_per_second:,.0f} images per second"),
        ("time", time_line(console.stages.seconds)),
    ]
    data = {**about, **result.to_json(), "seconds": console.stages.seconds}
    end = warning(about, "the numbers")
    return View(data, quality_text(result), [facts(rows), *end])
