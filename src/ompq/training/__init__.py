"""Quantization-aware training: the training loop, its batches and checkpoints."""

import hashlib
import json
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.allocation import Allocation
from ompq.errors import DataError, MissingExtraError, TrainingError, shortened
from ompq.evaluation import targets_on
from ompq.files import read_checkpoint, run_identity, write_checkpoint, write_text
from ompq.layers import activation_quantizers, quantized_layers
from ompq.quantization import keep_rates, quantization_of, with_quantization
from ompq.recording import copied, tensors_in
from ompq.results import Progress
from ompq.samples import (
    Batch,
    batch_length,
    call,
    cudnn_kernels,
    evaluating,
    first_tensor,
    model_device,
)
from ompq.training.methods import (
    ActivationRanges,
    DoReFaWeights,
    FractionalWidths,
    LearnedLevels,
    OutlierWeights,
    Variances,
    WeightRanges,
    fold_norms,
    keep_norms,
    norm_factor,
    restore_float_weights,
)
from ompq.training.step import (
    CodePenalty,
    Gradients,
    Loss,
    Recorded,
    TrainConfig,
    make_trainable,
    may_leave_unused,
    memory_layout,
)

_LOG = logging.getLogger(__name__)
LAST, BEST = "last.safetensors", "best.safetensors"
_MODEL, _MOMENTUM, _COUNTS = "model/", "momentum/", "counts"
# Settings that may change when a run is resumed, because they do not affect its result.
_NOT_IN_IDENTITY = {"checkpoint_steps", "report_steps", "tensorboard", "logger"}

LabelledBatch: TypeAlias = tuple[Batch, Any]
Shard: TypeAlias = tuple[int, int]  # index of a process, and number of processes


@runtime_checkable
class TrainingData(Protocol):
    """Labelled images that are shuffled, augmented and batched epoch by epoch."""

    def __len__(self) -> int:
        """Return the number of images."""

    def epoch(
        self,
        number: int,
        *,
        batch_size: int,
        seed: int = 0,
        start: int = 0,
        shard: Shard = (0, 1),
    ) -> Iterator[LabelledBatch]:
        """Yield the batches of an epoch, all of the same size, from ``start`` on.

        Order and augmentation depend only on the epoch's number and the seed. Each
        process gets its part, ``shard``, of every batch.
        """


Batches: TypeAlias = TrainingData | Iterable[LabelledBatch]


def train(  # noqa: PLR0913
    quantized: nn.Module,
    batches: Batches,
    config: TrainConfig = TrainConfig(),
    *,
    teacher: nn.Module | None = None,
    validation: Iterable[LabelledBatch] | None = None,
    checkpoint: str | Path | None = None,
    loss: Loss | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Fine-tune a quantized network on labelled images and return the result.

    Weights are rounded in every forward pass, with straight-through gradients, and
    scales are learned with them. Under ``torchrun`` or ``accelerate launch`` the
    processes share every step, and all return the same network.

    Args:
        quantized: From :func:`ompq.quantize` or, better, :func:`ompq.reconstruct`.
        batches: Training data (:func:`ompq.training_data`), or an iterable of inputs
            and targets that can be read once per epoch, such as a ``DataLoader``.
        teacher: The float network, for distillation or to keep its norms.
        validation: Labelled batches; accuracy on them, or your own loss, decides which
            epoch is kept.
        checkpoint: Folder for ``last.safetensors`` and, with validation data,
            ``best.safetensors``. If they exist, the run resumes from them and gives
            the same network and the same files as an uninterrupted run.
        loss: Called with the network's output and the targets of a batch, which may be
            anything; returns the mean loss, a scalar. By default targets are class
            indices (N,), and the loss is the cross entropy of logits (N, classes).
        progress: Called with the steps done, the total number of steps and a message.

    Raises:
        DataError: There are too few batches, or targets are not class indices.
        QuantizationError: ``quantized`` is not quantized.
        TrainingError: The loss is not finite, or the rounding method does not support
            groups of weights.
        CheckpointError: The checkpoint belongs to another run.
        MissingExtraError: Accelerate is not installed.
    """
    quantization_of(quantized)
    if teacher is None and config.needs_float:
        raise ValueError(
            f"distill={config.distill:g}, batch_norm={config.batch_norm!r}, "
            f"start={config.start!r} need the float network; pass teacher=model"
        )
    layers = quantized_layers(quantized).items()
    grouped = [name for name, layer in layers if layer.group_size]
    if grouped and config.weights != "stored":
        raise TrainingError(
            f"weights={config.weights!r} needs one scale per channel, but there is one "
            f"for each group of weights in {shortened(grouped)}; train with "
            "weights='stored', or plan without group_size"
        )
    run = Run(quantized, batches, config, teacher=teacher, loss=loss)
    tracker = Tracker(
        run,
        run.identity(quantized),
        None if checkpoint is None else Path(checkpoint),
        validation=validation,
        progress=progress,
    )
    with _isolated(run), tracker.following():
        for epoch in range(run.step // run.epoch_steps, config.epochs):
            numbers = run.begin_epoch(epoch)
            loader = epoch_batches(batches, epoch, config, numbers, run.shard)
            for batch in loader:
                inputs, targets = labelled(batch, class_indices=loss is None)
                with run.engine.accumulate(run.prepared):
                    placed = run.gradients.placed(inputs)
                    run.compute(placed, targets_on(run.device, targets))
                    if run.engine.sync_gradients:
                        run.update()
                        tracker.after_step()
            tracker.end_epoch(epoch)
    result = copied(quantized)
    result.load_state_dict(run.result(tracker.chosen()))
    result = _with_learned_widths(result, run.model)
    keep_rates(result)
    return result


def _with_learned_widths(result: nn.Module, model: nn.Module) -> nn.Module:
    """Copy what a state dict does not hold: learned widths, rounding and outliers."""
    layers, record = quantized_layers(result), quantization_of(result)
    bits = dict(record.allocation)
    for name, layer in quantized_layers(model).items():
        layers[name].rounding, layers[name].bits = layer.rounding, layer.bits
        bits[name] = bits[name]._replace(weight=layer.bits)
    quantizers = activation_quantizers(result)
    for name, one in activation_quantizers(model).items():
        quantizers[name].outliers = one.outliers
    if bits == dict(record.allocation):
        return result
    return with_quantization(result, replace(record, allocation=Allocation(bits)))


@contextmanager
def _isolated(run: "Run") -> Iterator[None]:
    """Restore the global random generators and GPU settings afterwards."""
    with (
        torch.random.fork_rng([run.device] if run.device.type == "cuda" else []),
        cudnn_kernels(repeatable=run.config.deterministic),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # Warns if parameters could have been unused but none were.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        yield


def check_installed(config: TrainConfig) -> None:
    """Raise a MissingExtraError if a package that training needs is not installed."""
    needed = {"accelerate": "train"}
    if config.tensorboard is not None:
        needed["torch.utils.tensorboard"] = "tensorboard"
    if config.logger != "none":
        needed[config.logger] = config.logger
    for module, extra in needed.items():
        try:
            import_module(module)
        except ImportError as error:
            raise MissingExtraError(module.rpartition(".")[2], extra) from error


class Run:
    """The state of one training run in this process: model, optimizer and steps."""

    def __init__(
        self,
        quantized: nn.Module,
        batches: Batches,
        config: TrainConfig,
        *,
        teacher: nn.Module | None,
        loss: Loss | None = None,
    ) -> None:
        self.config, self.device = config, model_device(quantized)
        self.engine = _accelerator(quantized, config)
        processes = self.engine.num_processes
        if processes > 1:
            self.device = self.engine.device
        self.length = checked_length(batches, config, processes, self.device)
        self.step, self.epoch_steps = 0, self.length // config.accumulate
        self.steps = self.epoch_steps * config.epochs
        self.model = copied(quantized).to(self.device)
        if teacher is not None and config.start == "float":
            restore_float_weights(self.model, teacher)
        if teacher is not None and config.batch_norm == "fold-and-train":
            keep_norms(self.model, teacher)
        self.rule = _weight_rule(self.model, config)
        self.trainable = make_trainable(self.model, config)
        layout = memory_layout(config, self.device)
        self.model.to(memory_format=layout)
        self.optimizer = self.trainable.optimizer(config)
        self.prepared, self.stepping = self.engine.prepare(self.model, self.optimizer)
        self.variances = Variances(self.model)
        self.ranges = _running_ranges(self.model, config)
        if teacher is not None and config.distill:
            teacher = copied(teacher).to(self.device).eval()
            teacher.to(memory_format=layout)
        penalty = getattr(self.rule, "penalty", None)
        if config.code_penalty:
            penalty = CodePenalty(self.model, config.code_penalty)
        self.gradients = Gradients(
            torch.compile(self.prepared) if config.compile else self.prepared,
            teacher if config.distill else None,
            config,
            backward=self.engine.backward,
            device=self.device,
            penalty=penalty,
            own_loss=loss,
        )
        self.compute: Callable[..., None] = self.gradients

    @property
    def judged_by(self) -> str:
        """What epochs are judged by; higher is better."""
        own_loss = self.gradients.own_loss
        return "validation top-1" if own_loss is None else "minus validation loss"

    @property
    def shard(self) -> Shard:
        """Index of this process, and the number of processes."""
        return self.engine.process_index, self.engine.num_processes

    def identity(self, quantized: nn.Module) -> str:
        """Return a digest that a run and the checkpoint it resumes from must share."""
        settings = asdict(self.config)
        kept = {k: v for k, v in settings.items() if k not in _NOT_IN_IDENTITY}
        if (loss := self.gradients.own_loss) is not None:
            kept["loss"] = getattr(loss, "__name__", type(loss).__name__)
        return run_identity([kept, self.length], quantized.state_dict().values())

    def begin_epoch(self, number: int) -> range:
        """Set the modules' modes; return the numbers of the batches still to train."""
        self.model.train()
        if number >= self.config.freeze_norm_epoch:
            for module in self.model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        learned = isinstance(self.rule, FractionalWidths)
        if learned and number >= self.config.whole_epoch:
            self.rule.make_whole()
        if self.config.cuda_graph:
            # The recorded graph depends on the modes of the norms: record it again when
            # they are frozen.
            freezes = self.step == self.config.freeze_norm_epoch * self.epoch_steps
            if freezes or not isinstance(self.compute, Recorded):
                self.compute = Recorded(self.gradients, self.model)
        done = (self.step - number * self.epoch_steps) * self.config.accumulate
        return range(done, self.length)

    def update(self) -> None:
        """Take one optimizer step with the accumulated gradients."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        if self.config.gradient_norm:
            parameters = [*self.trainable.named.values()]
            # Accelerate's version removes the loss scale first under fp16.
            self.engine.clip_grad_norm_(parameters, self.config.gradient_norm)
        self.stepping.step()
        if not isinstance(self.compute, Recorded):
            self.stepping.zero_grad()
        self.trainable.keep_positive()
        self.variances.limit()
        if self.rule is not None:
            self.rule.update()
        self.step += 1

    def rate(self) -> float:
        """Return the next step's learning rate: linear warm-up, then cosine decay."""
        done, warmup = self.step, self.config.warmup
        if done < warmup:
            return self.config.learning_rate * (done + 1) / warmup
        share = (done - warmup) / max(1, self.steps - warmup)
        return self.config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))

    def counts(self) -> Tensor:
        """Return the epoch's sums so far: loss, correct, images; (processes, 3)."""
        gathered: Tensor = self.engine.gather(self.gradients.counts[None])
        return gathered.cpu()

    def quality(self, batches: Iterable[LabelledBatch]) -> float:
        """Return the top-1 accuracy, or minus the mean of the user's own loss.

        The processes share the batches.
        """
        own_loss = self.gradients.own_loss
        process, processes = self.shard
        counts = torch.zeros(2, device=self.device)
        with evaluating(self.model):
            for number, (inputs, targets) in enumerate(batches):
                if number % processes == process:
                    output = call(self.model, self.gradients.placed(inputs))
                    images, wanted = (
                        batch_length(inputs),
                        targets_on(self.device, targets),
                    )
                    if own_loss is not None:
                        counts[0] -= images * own_loss(output, wanted)
                    else:
                        counts[0] += (first_tensor(output).argmax(1) == wanted).sum()
                    counts[1] += images
        total, count = self.engine.reduce(counts).tolist()
        if not count:
            raise DataError(
                "validation yielded no images; it is read once before training and "
                "once per epoch, so pass a list or a DataLoader that is not empty"
            )
        return float(total / count)

    def result(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the state as that of an ordinary quantized network, norms folded."""
        self.model.load_state_dict(state)
        layers = [x for x in quantized_layers(self.model).values() if x.rounding]
        with torch.no_grad():
            factors = [norm_factor(layer) for layer in layers]
            pairs = zip(layers, factors, strict=True)
            weights = [layer.rounded_weight(factor) for layer, factor in pairs]
            fold_norms(self.model)
            for layer, factor, weight in zip(layers, factors, weights, strict=True):
                layer.weight.copy_(weight)
                assert self.rule is not None  # nothing else sets a rounding
                self.rule.finalize(layer, factor)
        if self.ranges is not None:
            self.ranges.detach()
        return self.model.state_dict()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: network, momentum, sums of the epoch."""
        state = {_MODEL + key: value for key, value in self.model.state_dict().items()}
        for name, parameter in self.trainable.named.items():
            buffer = self.optimizer.state[parameter].get("momentum_buffer")
            if buffer is not None:
                state[_MOMENTUM + name] = buffer
        return {**state, _COUNTS: self.counts()}

    def restore(self, state: Mapping[str, Tensor], step: int) -> None:
        """Continue after the step at which a checkpoint was written."""
        self.model.load_state_dict(_under(state, _MODEL))
        for name, tensor in _under(state, _MOMENTUM).items():
            parameter = self.trainable.named[name]
            buffer = torch.empty_like(parameter).copy_(tensor)
            self.optimizer.state[parameter]["momentum_buffer"] = buffer
        counts, (process, processes) = state[_COUNTS], self.shard
        if len(counts) != processes:  # then sums may differ in the last digit
            counts = counts.sum(0) * torch.eye(processes, 1, dtype=counts.dtype)
        self.gradients.counts.copy_(counts[process])
        self.step = step


def _weight_rule(model: nn.Module, config: TrainConfig) -> Any:
    """Install and return the rule that rounds weights; None for the stored grids."""
    if config.widths == "learned":
        return FractionalWidths(model, config.width_penalty)
    if config.weights == "outliers":
        return OutlierWeights(model, config.outlier_fraction)
    rules = {"minmax": WeightRanges, "dorefa": DoReFaWeights, "lq-nets": LearnedLevels}
    return rules[config.weights](model) if config.weights in rules else None


def _running_ranges(model: nn.Module, config: TrainConfig) -> ActivationRanges | None:
    """Return the running ranges of activations, if the settings ask for them."""
    if config.activations not in ("ema", "outliers"):
        return None
    fraction = config.outlier_fraction if config.activations == "outliers" else 0.0
    return ActivationRanges(model, config.range_momentum, fraction)


def _accelerator(quantized: nn.Module, config: TrainConfig) -> Any:
    check_installed(config)
    from accelerate import Accelerator, DistributedDataParallelKwargs

    # Otherwise processes would wait forever for gradients of unused parameters.
    unused = may_leave_unused(quantized)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return Accelerator(
        gradient_accumulation_steps=config.accumulate,
        log_with=None if config.logger == "none" else config.logger,
        device_placement=False,  # training runs where the network is
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
        # Several processes need it to communicate on CPUs. With one process it would
        # only prevent a later run on another device.
        cpu=several and model_device(quantized).type == "cpu",
    )


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


class Tracker:
    """Reports the progress of a run, keeps the best epoch and writes checkpoints."""

    def __init__(
        self,
        run: Run,
        identity: str,
        folder: Path | None,
        *,
        validation: Iterable[LabelledBatch] | None,
        progress: Progress | None,
    ) -> None:
        self.run, self.identity, self.folder = run, identity, folder
        self.validation, self.progress = validation, progress
        self.best: float | None = None
        self.best_model: Mapping[str, Tensor] | None = None
        self.best_step: int | None = None
        self.history: list[Mapping[str, Any]] = []
        self.saved: int | None = None
        self.reported, self.since = torch.zeros(3).double(), time.perf_counter()
        self.write: Callable[..., Any] = lambda *_: None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Start, or resume from the checkpoint; close the loggers in the end."""
        with _scalars(self.run) as self.write:
            if self.folder is not None and (self.folder / LAST).exists():
                self._resume(self.folder)
            elif self.validation is not None and self.run.config.keep == "best":
                self._judge(self.run.quality(self.validation))
            self.since = time.perf_counter()
            yield

    def _resume(self, folder: Path) -> None:
        same: Any = {"kind": "training", "identity": self.identity}
        state, text = read_checkpoint(folder / LAST, **same)
        self.saved = int(text["step"])
        self.run.restore(state, self.saved)
        self.reported = self.run.counts().sum(0)
        self.best, self.history = json.loads(text["best"]), json.loads(text["history"])
        if self.best is not None:
            best, text = read_checkpoint(folder / BEST, **same)
            self.best_model, self.best_step = _under(best, _MODEL), int(text["step"])
        _LOG.info("resuming after step %d of %d", self.saved, self.run.steps)

    def after_step(self) -> None:
        """Report progress and write a checkpoint whenever one is due."""
        run, config = self.run, self.run.config
        ended = run.step % run.epoch_steps == 0
        due = config.checkpoint_steps and run.step % config.checkpoint_steps == 0
        if ended or due or run.step % config.report_steps == 0:
            self._report()
        if due and not ended:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """Measure the accuracy, keep the best epoch and write a checkpoint."""
        run = self.run
        loss, correct, count = run.counts().sum(0).tolist()
        entry = {"epoch": epoch + 1, "loss": loss / count}
        if run.gradients.own_loss is None:
            entry["top1"] = correct / count
        run.gradients.counts.zero_()
        self.reported.zero_()
        if self.validation is not None:
            entry["validation"] = run.quality(self.validation)
            self.write(run.judged_by, entry["validation"], run.step)
        self.history.append(entry)
        _LOG.info("epoch %s", ", ".join(f"{k} {v:.4g}" for k, v in entry.items()))
        if "validation" in entry and run.config.keep == "best":
            self._judge(entry["validation"])
        self._save()
        self.since = time.perf_counter()

    def _judge(self, accuracy: float) -> None:
        if self.best is not None and accuracy <= self.best:
            return
        self.best, self.best_step = accuracy, self.run.step
        model = self.run.model.state_dict()
        self.best_model = {key: value.detach().clone() for key, value in model.items()}
        self._write(BEST)

    def _report(self) -> None:
        run, sums = self.run, self.run.counts().sum(0)
        new, self.reported = sums - self.reported, sums
        loss, correct, count = new.tolist()
        loss, correct = loss / count, correct / count
        now = time.perf_counter()
        speed, self.since = count / max(now - self.since, 1e-9), now
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {run.step} of {run.steps}; "
                f"{self._kept()}. Lower learning_rate={run.config.learning_rate:g}, "
                "or set gradient_norm"
            )
        known = {"loss": loss, "top-1": correct, "rate": run.rate()}
        right = f", top-1 {correct:.1%}"
        if run.gradients.own_loss is not None:
            right = ""
            del known["top-1"]
        for name, value in known.items():
            self.write(name, value, run.step)
        if self.progress is not None:
            epoch = -(-run.step // run.epoch_steps)
            self.progress(
                run.step,
                run.steps,
                f"epoch {epoch}/{run.config.epochs}: loss {loss:.3f}{right}, "
                f"{speed:,.0f} images/s",
            )

    def _kept(self) -> str:
        if self.folder is None or self.saved is None:
            return "no checkpoint was written"
        return f"{self.folder / LAST} holds the network after step {self.saved}"

    def _save(self) -> None:
        model = self.run.model.state_dict()
        broken = [key for key, value in model.items() if not value.isfinite().all()]
        if broken:
            raise TrainingError(
                f"{shortened(broken)} are not finite after step {self.run.step}; "
                f"{self._kept()}. Lower "
                f"learning_rate={self.run.config.learning_rate:g}"
            )
        self._write(LAST)
        self.saved = self.run.step

    def _write(self, name: str) -> None:
        state = self.run.state()  # gathers from all processes, so all must call it
        if self.folder is not None and self.run.engine.is_main_process:
            text = {
                "step": str(self.run.step),
                "best": json.dumps(self.best),
                "history": json.dumps(self.history),
            }
            file = self.folder / name
            write_checkpoint(file, state, text, kind="training", identity=self.identity)
            lines = json.dumps(self.history, indent=1)
            write_text(self.folder / "history.json", f"{lines}\n")
        self.run.engine.wait_for_everyone()

    def chosen(self) -> Mapping[str, Tensor]:
        """Return the state dict to keep: that of the best epoch or of the last."""
        if self.best is not None and self.best_step == 0 and self.run.shard[0] == 0:
            _LOG.warning(
                "no epoch does better on the validation data than the start (%s "
                "%.4g); the start is kept. Train longer, lower learning_rate=%g, or "
                "set keep=last",
                self.run.judged_by,
                self.best,
                self.run.config.learning_rate,
            )
        return self.best_model or self.run.model.state_dict()


@contextmanager
def _scalars(run: Run) -> Iterator[Callable[..., Any]]:
    """Yield a function ``(name, value, step)`` that logs a scalar everywhere."""
    config = run.config
    with ExitStack() as stack:
        writers: list[Callable[..., Any]] = []
        if config.logger != "none":
            run.engine.init_trackers("ompq", config=asdict(config))
            stack.callback(run.engine.end_training)
            writers.append(lambda name, value, at: run.engine.log({name: value}, at))
        if config.tensorboard is not None and run.engine.is_main_process:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(config.tensorboard)
            stack.callback(board.close)
            writers.append(board.add_scalar)
        yield lambda *scalar: [write(*scalar) for write in writers]


def checked_length(
    batches: Batches, config: TrainConfig, processes: int, device: torch.device
) -> int:
    """Return the number of batches per epoch and process; drops an incomplete step."""
    alone = processes == config.accumulate == 1
    if config.cuda_graph and not (alone and device.type == "cuda"):
        raise ValueError(
            "cuda_graph needs one process on a GPU without accumulation, not "
            f"{processes} on {device.type} with accumulate={config.accumulate}"
        )
    if not isinstance(batches, Sized):
        raise TypeError(
            f"batches is {type(batches).__name__} without a length; training reads it "
            "once per epoch, so pass a list, a DataLoader or training data"
        )
    parts, count = processes * config.accumulate, len(batches)
    steps, reason = count // parts, f"{count} batches, but a step takes {parts}"
    if isinstance(batches, TrainingData):
        if config.batch_size % parts:
            raise ValueError(
                f"batch_size={config.batch_size} cannot be split evenly over "
                f"{processes} processes and accumulate={config.accumulate}; "
                f"use a multiple of {parts}"
            )
        steps = count // config.batch_size
        reason = f"{count} images, but batch_size={config.batch_size}; lower it"
    if not steps:
        raise DataError(f"an epoch has no step: {reason}")
    return steps * config.accumulate


def epoch_batches(
    batches: Batches, epoch: int, config: TrainConfig, numbers: range, shard: Shard
) -> Iterator[LabelledBatch]:
    """Yield those batches of an epoch that have the given numbers, for one process.

    Ready-made batches are dealt to the processes in turn. Training data splits each
    batch, so that a step sees the same images for any number of processes. The global
    generator is seeded before every batch, so that shuffling and dropout depend only on
    the number of the batch, even in a resumed run.
    """
    torch.manual_seed(mixed_seed(config.seed, epoch, 0))
    if isinstance(batches, TrainingData):
        first = numbers.start
        iterator = batches.epoch(
            epoch,
            batch_size=config.batch_size // config.accumulate,
            seed=config.seed,
            start=first,
            shard=shard,
        )
    else:
        process, processes = shard
        first, iterator = 0, islice(batches, process, None, processes)
    for number in range(first, numbers.stop):
        torch.manual_seed(mixed_seed(config.seed, epoch, number))
        batch = next(iterator, None)
        if batch is None:
            raise DataError(
                f"epoch {epoch + 1} ended after {number} of {numbers.stop} batches; "
                "batches must yield as many as its length in every epoch"
            )
        if number in numbers:
            yield batch


def dealt(
    order: Tensor, *, batch_size: int, start: int, shard: Shard
) -> Iterator[Tensor]:
    """Yield a process's part of each full batch of indices (N,), from ``start`` on."""
    process, processes = shard
    for batch in range(start, len(order) // batch_size):
        yield order[batch * batch_size : (batch + 1) * batch_size][process::processes]


def mixed_seed(*numbers: int) -> int:
    """Return a seed that depends on all of the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def labelled(batch: Any, *, class_indices: bool = True) -> LabelledBatch:
    """Return inputs and targets, which are class indices, (N,), unless told otherwise.

    Raises:
        DataError: The batch is not a pair, or its targets are not class indices.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(
            f"a batch is {type(batch).__name__}; training needs (inputs, targets)"
        )
    inputs, targets = batch
    if not class_indices:
        return inputs, targets
    count = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
    whole = isinstance(targets, Tensor) and not (
        targets.is_floating_point() or targets.is_complex()
    )
    if not whole or targets.shape != (count,):
        found = getattr(targets, "dtype", type(targets).__name__)
        shape = tuple(getattr(targets, "shape", ()))
        raise DataError(
            f"targets are {found} of shape {shape} for {count} inputs; training needs "
            f"class indices, integers of shape ({count},), or a loss of your own"
        )
    return inputs, targets.long()
