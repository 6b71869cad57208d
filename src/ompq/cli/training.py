"""train: from a float network to a small one that was trained with its bits."""

import json
import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from ompq.cli.making import (
    Given,
    bits_source,
    check_budget,
    finish,
    labelled_batches,
    plan_for,
    quantized_network,
    read_bits,
)
from ompq.cli.options import (
    DataOptions,
    NetworkOptions,
    OutputOptions,
    PlanOptions,
    option,
)
from ompq.cli.runs import RunOptions, calibration_count, check_unfinished, run_folder
from ompq.cli.screen import Screen, opened
from ompq.cli.settings import (
    check_folder,
    load_inputs,
    load_network,
    plan_config,
    read_samples,
    sample_count,
)
from ompq.datasets.sources import Data
from ompq.datasets.training_sets import training_data
from ompq.errors import PlanError
from ompq.models import NamedModel
from ompq.packing import load, save
from ompq.plans import Plan
from ompq.quantization import quantization_of
from ompq.samples import model_device
from ompq.training import train as learn
from ompq.training.batches import TrainingData
from ompq.training.config import TRAIN_PROTOCOLS, TrainConfig
from ompq.training.run import check_installed, checked_length
from ompq.userfiles import suggestion

_TRAINING = "How it is trained"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How the network is trained."""

    start: Annotated[
        Path | None,
        option(
            "--from",
            metavar="FILE",
            text="Start from this packed network instead of quantizing one.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    validation: Annotated[
        str | None,
        option(
            metavar="SOURCE",
            text="Labelled images that decide which epoch is kept. Without them it "
            "is the last.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    epochs: Annotated[
        int | None,
        option(
            min=1,
            metavar="NUMBER",
            text=f"Passes over the data. Default: {TrainConfig.epochs}.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        option(
            min=1,
            metavar="NUMBER",
            text=f"Images a step, over all processes. "
            f"Default: {TrainConfig.batch_size}.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        option(
            metavar="NUMBER",
            text=f"At the start. Default: {TrainConfig.learning_rate:g}.",
            rich_help_panel=_TRAINING,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            metavar="NAME=VALUE",
            text="Any other field of ompq.TrainConfig: distill=0.5, compile=true, "
            "activations=clip. Repeatable.",
            rich_help_panel=_TRAINING,
        ),
    ] = None


def train(
    network: NetworkOptions,
    data: DataOptions,
    run: RunOptions,
    training: TrainOptions,
    planning: PlanOptions,
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

    Ctrl-C, or whatever stops it, keeps what is done: the same command with --resume
    continues. torchrun and accelerate launch run it on several GPUs and machines.
    """
    check_folder(run.folder)
    main = os.environ.get("RANK", "0") == "0"
    output = output if main else replace(output, json=False, quiet=True)
    with opened(output) as screen, run_folder(run, screen):
        config = train_config(training, planning.protocol, data.seed)
        if main:  # the others may come when there is something already
            check_unfinished(run)
        _take_gpu()
        model = load_network(network, screen)
        inputs = load_inputs(data, model, "train")
        # Before the work: what cannot be trained with should not cost an hour.
        images = _images(inputs, config, screen)
        samples = read_samples(inputs, min(256, calibration_count(run, inputs)), screen)
        judged = labelled_batches(run.eval_data, data, model, limit=run.limit)
        validation = labelled_batches(training.validation, data, model)
        if main and training.start is None:
            _prepare(model, inputs, run, planning, screen)
        plan, start = _begin(training, run, model)
        with screen.stage("training") as progress:
            made = learn(
                start,
                images,
                config,
                teacher=model.module,
                validation=validation,
                checkpoint=run.training,
                progress=progress,
            )
        if not main:
            return
        given = Given(model, inputs, samples, judged)
        finish(made, plan, given, run, screen, epochs=config.epochs)


def train_config(options: TrainOptions, protocol: str | None, seed: int) -> TrainConfig:
    """Return the settings of a training: the protocol's, and what was typed besides.

    Raises:
        ValueError: There is no such setting, or it cannot have that value.
    """
    base = TRAIN_PROTOCOLS.get(protocol or "", TrainConfig())
    given: dict[str, Any] = {
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
    }
    given = {name: value for name, value in given.items() if value is not None}
    known = [field.name for field in fields(TrainConfig) if field.name != "seed"]
    for text in options.settings or ():
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


def _take_gpu() -> None:
    """Let each process of a machine use a GPU of its own."""
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _images(inputs: Data, config: TrainConfig, screen: Screen) -> TrainingData:
    """Return what is trained with, once it is sure that it can be."""
    device = model_device(inputs.model.module)
    with screen.stage("reading images") as progress:
        images = training_data(inputs, device=device, progress=progress)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    checked_length(images, config, processes, device)
    check_installed(config)
    return images


def _prepare(
    model: NamedModel,
    inputs: Data,
    run: RunOptions,
    planning: PlanOptions,
    screen: Screen,
) -> None:
    """Quantize, and write what all processes, and a resumed run, start from."""
    source, config = bits_source(run), plan_config(planning)
    if run.start.exists():
        return
    samples = read_samples(inputs, calibration_count(run, inputs), screen)
    few = samples[: sample_count(model.name, None, planning.protocol)]
    plan = plan_for(model.module, few, source, config, screen)
    made = quantized_network(model.module, plan, samples, run, inputs.seed, screen)
    plan.save(run.folder / "plan.json")
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
    record, beside = quantization_of(network), path.parent / "plan.json"
    if run.plan is None and not beside.exists():
        raise PlanError(
            f"there is no {beside} beside {path}; give the plan of that network with "
            "--plan FILE"
        )
    found = read_bits(run.plan or beside)
    plan = found if isinstance(found, Plan) else Plan.load(beside)
    check_budget(plan, run, path)
    plan.check_network(record.graph)
    bits = found.allocation if isinstance(found, Plan) else found
    if dict(bits) != dict(record.allocation):
        raise PlanError(
            f"{run.plan or beside} gives other bits than {path} has; "
            "give the plan of that network"
        )
    return plan, network
