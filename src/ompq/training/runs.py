"""A run of training: its network, its optimizer, and where it stands."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.errors import DataError
from ompq.samples import Batch, call, evaluating, first_tensor, model_device
from ompq.training.batches import Batches, batches_per_epoch
from ompq.training.checkpoints import State, momentum_of, restore_momentum
from ompq.training.engines import make_engine
from ompq.training.norms import Variances, keep_norms
from ompq.training.parameters import make_trainable, may_leave_unused
from ompq.training.settings import TrainConfig
from ompq.training.steps import Gradients, Recorded, memory_layout


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
