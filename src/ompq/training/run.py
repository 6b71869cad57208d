"""A training run: its network, optimizer, checkpoints and history."""

import copy
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.errors import DataError, MissingExtraError, TrainingError, shortened
from ompq.files import read_checkpoint, write_checkpoint, write_text
from ompq.samples import Batch, Progress, call, evaluating, first_tensor, model_device
from ompq.training.batches import Batches, LabelledBatch, batches_per_epoch
from ompq.training.config import TrainConfig
from ompq.training.norms import Variances, keep_norms
from ompq.training.step import (
    Gradients,
    Recorded,
    make_trainable,
    may_leave_unused,
    memory_layout,
)


class Alone:
    """What training needs of an ``Accelerator``, for one process without Accelerate."""

    num_processes = 1
    process_index = 0
    is_main_process = True
    sync_gradients = True

    def prepare(self, *objects: Any) -> Any:
        """Return the objects as they are."""
        return objects

    def accumulate(self, _model: Any) -> AbstractContextManager[None]:
        """Do nothing: every batch is a step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, parameters: Iterable[Tensor], longest: float) -> Tensor:
        """Cut the gradients to a length; return the one that they had."""
        return nn.utils.clip_grad_norm_(parameters, longest)

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes: the tensor."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Return at once."""


def make_engine(
    config: TrainConfig, device: torch.device, *, unused: bool = False
) -> Any:
    """Return an ``Accelerator``, or :class:`Alone` where one process can do without.

    Args:
        config: Says how many batches make a step.
        device: Where the network is.
        unused: Whether a pass may not reach all parameters: several processes must
            then look for those that get no gradient, or wait for it in vain.

    Raises:
        MissingExtraError: As :func:`check_installed`.
    """
    check_installed(config)
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs
    except ImportError:
        return Alone()
    # Networks and batches are placed here: they follow the network that was given.
    return Accelerator(
        gradient_accumulation_steps=config.accumulate,
        device_placement=False,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
        # Without it processes on CPUs would not find each other. For one process it
        # would only forbid a later run on another device.
        cpu=_processes() > 1 and device.type == "cpu",
    )


def check_installed(config: TrainConfig) -> None:
    """Make sure that what the settings need besides PyTorch is there.

    Raises:
        MissingExtraError: Several processes, or gradients of several batches, need
            Accelerate; scalars need TensorBoard.
    """
    wanted = {
        "accelerate": ("train", _processes() > 1 or config.accumulate > 1),
        "torch.utils.tensorboard": ("tensorboard", config.tensorboard is not None),
    }
    for module, (extra, needed) in wanted.items():
        if needed:
            try:
                import_module(module)
            except ImportError as error:
                name = module.rpartition(".")[2]
                raise MissingExtraError(name, extra) from error


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


_KIND = "training"
_MODEL, _MOMENTUM = "model/", "momentum/"
LAST, BEST = "last.safetensors", "best.safetensors"
# What may differ between a run and its continuation: it changes no result.
_FREE = {"checkpoint_steps", "report_steps", "tensorboard"}


@dataclass(frozen=True, eq=False)
class State:
    """Where a training stands.

    Attributes:
        step: How many steps are done.
        best: Accuracy of the best epoch so far; None before the first.
        model: The network's ``state_dict``.
        momentum: Parameter's name → momentum.
        history: What was measured, epoch by epoch.
    """

    step: int
    best: float | None
    model: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    history: tuple[Mapping[str, Any], ...] = ()


def run_identity(quantized: nn.Module, length: int, config: TrainConfig) -> str:
    """Return what must be equal for a checkpoint to continue a run.

    Args:
        quantized: The network that training starts from.
        length: Batches an epoch.
        config: The settings.
    """
    settings = {k: v for k, v in asdict(config).items() if k not in _FREE}
    digest = hashlib.sha256(json.dumps([settings, length]).encode())
    for tensor in quantized.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_state(path: Path, state: State, identity: str) -> None:
    """Write a checkpoint, whole or not at all."""
    parts = ((_MODEL, state.model), (_MOMENTUM, state.momentum))
    tensors = {
        prefix + name: tensor
        for prefix, named in parts
        for name, tensor in named.items()
    }
    text = {
        "step": str(state.step),
        "best": json.dumps(state.best),
        "history": json.dumps(state.history),
    }
    write_checkpoint(path, tensors, text, kind=_KIND, identity=identity)


def read_state(path: Path, identity: str) -> State:
    """Read a checkpoint.

    Raises:
        CheckpointError: It is none, or of another run.
    """
    tensors, text = read_checkpoint(path, kind=_KIND, identity=identity)
    return State(
        step=int(text["step"]),
        best=json.loads(text["best"]),
        model=_under(tensors, _MODEL),
        momentum=_under(tensors, _MOMENTUM),
        history=tuple(json.loads(text["history"])),
    )


def momentum_of(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return parameter's name → momentum, for those that have one by now."""
    buffers = {name: optimizer.state.get(p, {}) for name, p in named.items()}
    return {
        name: state["momentum_buffer"]
        for name, state in buffers.items()
        if state.get("momentum_buffer") is not None
    }


def restore_momentum(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, nn.Parameter],
    momentum: Mapping[str, Tensor],
) -> None:
    """Give the optimizer the momentum that a checkpoint holds."""
    for name, tensor in momentum.items():
        parameter = named[name]
        buffer = torch.empty_like(parameter).copy_(tensor)
        optimizer.state[parameter]["momentum_buffer"] = buffer


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


class Run:
    """A training that is under way.

    Attributes:
        step: How many steps are done.
        steps: How many there are.
        epoch_steps: How many an epoch has.
    """

    def __init__(
        self,
        quantized: nn.Module,
        batches: Batches,
        config: TrainConfig,
        *,
        teacher: nn.Module | None,
    ) -> None:
        self.config = config
        self.device = model_device(quantized)
        unused = may_leave_unused(quantized)
        self.engine = make_engine(config, self.device, unused=unused)
        if self.engine.num_processes > 1:
            self.device = self.engine.device
        processes = self.engine.num_processes
        self.length = checked_length(batches, config, processes, self.device)
        self.step, self.epoch_steps = 0, self.length // config.accumulate
        self.steps = self.epoch_steps * config.epochs
        self.model = copy.deepcopy(quantized).to(self.device)
        if config.batch_norm == "fold-and-train":
            assert teacher is not None  # asked for before
            keep_norms(self.model, teacher)
        self.trainable = make_trainable(self.model, config)
        self.model.to(memory_format=memory_layout(config, self.device))
        self.optimizer = self.trainable.optimizer(config)
        self.prepared, self.stepping = self.engine.prepare(self.model, self.optimizer)
        self.variances = Variances(self.model)
        called = torch.compile(self.prepared) if config.compile else self.prepared
        self.gradients = Gradients(
            called,
            _ready(teacher, self.device, config) if config.distill else None,
            config,
            engine=self.engine,
            device=self.device,
        )
        self.compute: Callable[..., None] = self.gradients

    @property
    def shard(self) -> tuple[int, int]:
        """This process, and how many there are."""
        return self.engine.process_index, self.engine.num_processes

    def begin_epoch(self, number: int) -> None:
        """Set the network's modes: norms are frozen from some epoch on."""
        self.model.train()
        frozen = number >= self.config.freeze_norm_epoch
        for module in self.model.modules():
            if isinstance(module, _BatchNorm) and frozen:
                module.eval()
        # What was recorded is the step with norms as they were.
        self.compute = self._recorded() if self.config.cuda_graph else self.gradients

    def _recorded(self) -> Recorded:
        if isinstance(self.compute, Recorded) and not self._freezes():
            return self.compute
        return Recorded(self.gradients, self.model)

    def _freezes(self) -> bool:
        return self.step == self.config.freeze_norm_epoch * self.epoch_steps

    def advance(self, inputs: Batch, targets: Tensor) -> bool:
        """Learn from one batch; say whether it completed a step."""
        inputs = self.gradients.placed(inputs)
        targets = targets.to(self.device, non_blocking=True)
        with self.engine.accumulate(self.prepared):
            self.compute(inputs, targets)
            if not self.engine.sync_gradients:
                return False
            self._move()
        self.step += 1
        return True

    def _move(self) -> None:
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        if self.config.gradient_norm:
            parameters = [*self.trainable.named.values()]
            # The engine's: under fp16 it takes the scale of the loss out first.
            self.engine.clip_grad_norm_(parameters, self.config.gradient_norm)
        self.stepping.step()
        if not isinstance(self.compute, Recorded):
            self.stepping.zero_grad()
        self.trainable.keep_positive()
        self.variances.limit()

    def rate(self) -> float:
        """Return the learning rate of the next step: a cosine after a linear rise."""
        done, warmup = self.step, self.config.warmup
        if done < warmup:
            return self.config.learning_rate * (done + 1) / warmup
        share = (done - warmup) / max(1, self.steps - warmup)
        return self.config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))

    def taken_counts(self) -> tuple[float, float, int]:
        """Return mean loss, share of right answers and images since the last call."""
        total: Tensor = self.engine.reduce(self.gradients.counts.clone())
        self.gradients.counts.zero_()
        loss, right, count = total.tolist()
        return loss / max(count, 1), right / max(count, 1), int(count)

    def accuracy(self, batches: Any) -> float:
        """Return the share of images that the network gets right, all processes.

        Raises:
            DataError: There are none.
        """
        process, processes = self.shard
        counts = torch.zeros(2, device=self.device)
        with evaluating(self.model):
            for number, (inputs, targets) in enumerate(batches):
                if number % processes == process:
                    logits = call(self.model, self.gradients.placed(inputs))
                    answers = first_tensor(logits).argmax(1)
                    counts[0] += (answers == targets.to(self.device)).sum()
                    counts[1] += len(targets)
        right, count = self.engine.reduce(counts).tolist()
        if not count:
            raise DataError(
                "validation gave no images; it is read once before training and once "
                "an epoch: pass a list or a DataLoader that is not empty"
            )
        return float(right / count)

    def state(self, best: float | None, history: Sequence[Mapping[str, Any]]) -> State:
        """Return where the training stands."""
        momentum = momentum_of(self.optimizer, self.trainable.named)
        model = self.model.state_dict()
        return State(self.step, best, model, momentum, tuple(history))

    def restore(self, state: State) -> None:
        """Go to where a checkpoint stands."""
        self.model.load_state_dict(state.model)
        restore_momentum(self.optimizer, self.trainable.named, state.momentum)
        self.step = state.step


def checked_length(
    batches: Batches, config: TrainConfig, processes: int, device: torch.device
) -> int:
    """Return how many batches each process gets in an epoch, if it can train at all.

    Raises:
        TypeError, DataError: As :func:`batches_per_epoch`.
        ValueError: The settings do not suit the batches, or the device.
    """
    alone = processes == config.accumulate == 1
    if config.cuda_graph and not (alone and device.type == "cuda"):
        raise ValueError(
            "cuda_graph needs one process on a GPU without accumulation, not "
            f"{processes} on {device.type} with accumulate={config.accumulate}"
        )
    return batches_per_epoch(batches, config, processes)


def _ready(
    teacher: nn.Module | None, device: torch.device, config: TrainConfig
) -> nn.Module:
    """Return a copy of the float network that only answers."""
    assert teacher is not None  # asked for before
    copied = copy.deepcopy(teacher).to(device).eval()
    return copied.to(memory_format=memory_layout(config, device))


logger = logging.getLogger(__name__)


class Keeper:
    """Watches a run, reports on it, and keeps it in files.

    Attributes:
        best: The best accuracy so far; None without validation.
        history: What was measured, epoch by epoch.
    """

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
        self.sums, self.since = (0.0, 0.0, 0), time.perf_counter()
        self.write: Callable[..., Any] = lambda *_: None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Begin, or continue from the checkpoint; end what is written meanwhile."""
        with _scalars(self.run) as self.write:
            last = None if self.folder is None else self.folder / LAST
            if last is not None and last.exists():
                self._resume(last)
            elif self.validation is not None and self.run.config.keep == "best":
                self._judge(self.run.accuracy(self.validation))
            self.since = time.perf_counter()
            yield

    def _resume(self, last: Path) -> None:
        state = read_state(last, self.identity)
        self.run.restore(state)
        self.best, self.saved = state.best, state.step
        self.history = list(state.history)
        if self.best is not None:
            assert self.folder is not None
            best = read_state(self.folder / BEST, self.identity)
            self.best_model, self.best_step = best.model, best.step
        logger.info("continuing after step %d of %d", state.step, self.run.steps)

    def after_step(self) -> None:
        """Report and write checkpoints, as often as the settings say."""
        run, config = self.run, self.run.config
        ended = run.step % run.epoch_steps == 0
        due = config.checkpoint_steps and run.step % config.checkpoint_steps == 0
        if ended or due or run.step % config.report_steps == 0:
            self._report()
        if due and not ended:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """Measure the accuracy, remember the best, write a checkpoint."""
        loss, right, count = self.sums
        self.sums = (0.0, 0.0, 0)
        entry = {"epoch": epoch + 1, "loss": loss / count, "top1": right / count}
        if self.validation is not None:
            entry["validation"] = self.run.accuracy(self.validation)
            self.write("validation top-1", entry["validation"], self.run.step)
        self.history.append(entry)
        logger.info("epoch %s", ", ".join(f"{k} {v:.4g}" for k, v in entry.items()))
        if "validation" in entry and self.run.config.keep == "best":
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
        run = self.run
        loss, right, count = run.taken_counts()
        now = time.perf_counter()
        speed = count / max(now - self.since, 1e-9)
        self.since = now
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} by step {run.step} of {run.steps}; "
                f"{self._good()}. Lower "
                f"learning_rate={run.config.learning_rate:g}, or set gradient_norm"
            )
        old = self.sums
        self.sums = (old[0] + loss * count, old[1] + right * count, old[2] + count)
        for name, value in (("loss", loss), ("top-1", right), ("rate", run.rate())):
            self.write(name, value, run.step)
        if self.progress is not None:
            epoch = -(-run.step // run.epoch_steps)
            self.progress(
                run.step,
                run.steps,
                f"epoch {epoch}/{run.config.epochs}: loss {loss:.3f}, "
                f"top-1 {right:.1%}, {speed:,.0f} images/s",
            )

    def _good(self) -> str:
        if self.saved is None:
            return "no checkpoint was written"
        assert self.folder is not None
        return f"{self.folder / LAST} holds the network after step {self.saved}"

    def _save(self) -> None:
        state = self.run.model.state_dict()
        broken = [k for k, v in state.items() if not v.isfinite().all()]
        if broken:
            raise TrainingError(
                f"{shortened(broken)} are not finite after step {self.run.step}; "
                f"{self._good()}. Lower "
                f"learning_rate={self.run.config.learning_rate:g}"
            )
        self._write(LAST)
        self.saved = None if self.folder is None else self.run.step

    def _write(self, name: str) -> None:
        if self.folder is not None and self.run.engine.is_main_process:
            state: State = self.run.state(self.best, self.history)
            write_state(self.folder / name, state, self.identity)
            text = json.dumps(self.history, indent=1)
            write_text(self.folder / "history.json", f"{text}\n")
        self.run.engine.wait_for_everyone()

    def chosen(self) -> Mapping[str, Tensor]:
        """Return the state of the network to return."""
        main = self.run.engine.is_main_process
        if main and self.best is not None and self.best_step == 0:
            logger.warning(
                "no epoch does better on the validation data than the start, %.2f %%; "
                "the start is kept. Train longer, lower learning_rate=%g, or set "
                "keep=last",
                100 * self.best,
                self.run.config.learning_rate,
            )
        return self.best_model or self.run.model.state_dict()


@contextmanager
def _scalars(run: Run) -> Iterator[Callable[..., Any]]:
    """Yield a function that writes a scalar for TensorBoard: name, value, step."""
    folder = run.config.tensorboard
    if folder is None or not run.engine.is_main_process:
        yield lambda *_: None
        return
    from torch.utils.tensorboard import SummaryWriter  # the engine made sure of it

    writer = SummaryWriter(folder)
    try:
        yield writer.add_scalar
    finally:
        writer.close()
