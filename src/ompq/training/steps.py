"""One step: the loss of a batch and its gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.samples import Batch, call, first_tensor, to_device
from ompq.training.settings import TrainConfig

_WARM_UP = 3  # passes before a step is recorded, so that libraries have set up


class Gradients:
    """Computes gradients of batches, and counts how the network does.

    Attributes:
        counts: Sum of losses, right answers, images, on the device; (3,).
    """

    def __init__(
        self,
        model: Callable[..., Any],
        teacher: nn.Module | None,
        config: TrainConfig,
        *,
        engine: Any,
        device: torch.device,
    ) -> None:
        self.model, self.teacher, self.config = model, teacher, config
        self.engine, self.device = engine, device
        self.counts = torch.zeros(3, device=device)

    def __call__(self, inputs: Batch, targets: Tensor) -> None:
        """Add the gradients of a batch to those of the parameters."""
        taught = self._taught(inputs)
        with self._autocast():
            logits = first_tensor(call(self.model, inputs)).float()  # type: ignore[arg-type]
            loss = training_loss(logits, targets, taught, self.config)
        self.engine.backward(loss)
        with torch.no_grad():
            right = (logits.argmax(1) == targets).sum()
            self.counts[0] += loss.detach() * len(targets)
            self.counts[1] += right
            self.counts[2] += len(targets)

    @torch.no_grad()
    def _taught(self, inputs: Batch) -> Tensor | None:
        if self.teacher is None:
            return None
        with self._autocast():
            return first_tensor(call(self.teacher, inputs)).float()

    def _autocast(self) -> torch.autocast:
        # Every weight is used once, so that a cache of cast weights gains nothing;
        # and what it holds would be lost to a recorded step.
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.config.precision == "bfloat16",
            cache_enabled=False,
        )

    def placed(self, inputs: Batch) -> Batch:
        """Return inputs where, and in the form in which, the network takes them."""
        moved = to_device(inputs, self.device)
        if isinstance(moved, Tensor) and moved.dim() == 4:
            layout = memory_layout(self.config, self.device)
            return moved.contiguous(memory_format=layout)
        return moved


def memory_layout(config: TrainConfig, device: torch.device) -> torch.memory_format:
    """Return how images and weights lie in memory.

    CPUs never get channels last: there PyTorch crashes in the backward pass of some
    convolutions, 1 x 1 with stride 2 of 4 channels among them.
    """
    if config.channels_last and device.type != "cpu":
        return torch.channels_last
    return torch.contiguous_format


def training_loss(
    logits: Tensor, targets: Tensor, taught: Tensor | None, config: TrainConfig
) -> Tensor:
    """Return the mean loss of a batch: the labels' and the teacher's.

    Args:
        logits: The network's, (N, classes).
        targets: Classes, (N,).
        taught: The float network's logits, (N, classes); None without a teacher.
        config: How the two are weighed.
    """
    loss = F.cross_entropy(logits, targets, label_smoothing=config.label_smoothing)
    if taught is None:
        return loss
    heat = config.temperature
    divergence = F.kl_div(
        (logits / heat).log_softmax(1),
        (taught / heat).log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )
    # The square keeps the gradient's size, whatever the temperature.
    return (1 - config.distill) * loss + config.distill * heat**2 * divergence


class Recorded:
    """Replays the gradients of a batch as one CUDA graph.

    Gradients are written to the same places every time, so that they must neither be
    cleared nor added up between batches.
    """

    def __init__(self, gradients: Gradients, model: nn.Module) -> None:
        self.gradients, self.model = gradients, model
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Tensor = torch.empty(0)
        self.targets: Tensor = torch.empty(0)

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Compute the gradients of a batch of the same size as the first one."""
        if self.graph is None:
            self._record(inputs, targets)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        assert self.graph is not None
        self.graph.replay()

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs.clone(), targets.clone()
        # Passes that only warm up should leave no statistics behind.
        held = [self.gradients.counts, *self.model.buffers()]
        before = [tensor.clone() for tensor in held]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._clear()
                self.gradients(self.inputs, self.targets)
        torch.cuda.current_stream().wait_stream(side)
        self._clear()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.gradients(self.inputs, self.targets)
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
