"""What is trained, and one step: the loss of a batch and its gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.costs import FLOAT_BITS
from ompq.errors import QuantizationError
from ompq.layers import QuantizedLayer, activation_quantizers, quantized_layers
from ompq.quantization import quantization_of
from ompq.rates import between_codes
from ompq.samples import Batch, call, first_tensor, to_device
from ompq.streams import SMALLEST_BITS
from ompq.training.config import TrainConfig

# A scale may shrink to this fraction of its initial value: it must stay positive, and
# one that falls further has lost its tensor anyway.
_SMALLEST = 1 / 16
WIDTH = "weight_width"  # how a layer calls the width that it learns
_WARM_UP = 3  # passes before a CUDA graph is recorded; PyTorch's documentation has 3


@dataclass(frozen=True, eq=False)
class Trainable:
    """The parameters of a network that are trained, by name."""

    weights: dict[str, nn.Parameter]  # those with weight decay
    others: dict[str, nn.Parameter]  # biases and norms
    scales: dict[str, nn.Parameter]  # steps of weights and activations
    floors: list[Tensor]  # the smallest value of each scale

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """All of them."""
        return {**self.weights, **self.others, **self.scales}

    def optimizer(self, config: TrainConfig) -> torch.optim.SGD:
        """Return the optimizer; ``ratio`` is a group's multiple of the rate."""
        decay = config.weight_decay if config.decay_all else 0.0
        groups: list[dict[str, Any]] = [
            {"params": [*self.weights.values()], "ratio": 1.0},
            {"params": [*self.others.values()], "ratio": 1.0, "weight_decay": decay},
            {
                "params": [*self.scales.values()],
                "ratio": config.step_rate,
                "weight_decay": 0.0,
            },
        ]
        return torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    @torch.no_grad()
    def keep_positive(self) -> None:
        """Raise the scales that a step took too low."""
        if self.scales:
            torch._foreach_maximum_([*self.scales.values()], self.floors)


def make_trainable(model: nn.Module, config: TrainConfig) -> Trainable:
    """Require gradients of what the settings train, and of nothing else."""
    scales = _scales(model, config)
    known = {id(p) for p in scales.values()} | _fixed(model)
    rest = {n: p for n, p in model.named_parameters() if id(p) not in known}
    for parameter in model.parameters():
        parameter.requires_grad = False
    for parameter in (*scales.values(), *rest.values()):
        parameter.requires_grad_()
    return Trainable(
        weights={name: p for name, p in rest.items() if p.dim() > 1},
        others={name: p for name, p in rest.items() if p.dim() <= 1},
        scales=scales,
        floors=[
            _SMALLEST * scale.detach().clone()
            if not name.endswith(WIDTH)
            else torch.full_like(scale, SMALLEST_BITS)
            for name, scale in scales.items()
        ],
    )


def _scales(model: nn.Module, config: TrainConfig) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    if config.learn_weight_scales and config.weights == "stored":
        for name, layer in quantized_layers(model).items():
            found[f"{name}.weight_scale".removeprefix(".")] = layer.weight_scale
    if config.widths == "learned":  # one that layers share is named once
        named = model.named_parameters()
        found |= {name: p for name, p in named if name.endswith(WIDTH)}
    for name, quantizer in activation_quantizers(model).items():
        if config.activations == "clip":
            quantizer.gradient = "clip"
        elif config.activations in ("ema", "outliers"):
            quantizer.gradient = "straight"
        if config.activations in ("step", "clip"):
            found[f"{name}.scale"] = quantizer.scale
    return found


def _fixed(model: nn.Module) -> set[int]:
    """Return the ids of parameters that are not trained, or only as scales.

    Scales; weights that were rounded in place, in modules that are not quantized
    layers; biases of layers that keep their norm, whose shift replaces them.
    """
    layers = quantized_layers(model).values()
    found = {id(layer.weight_scale) for layer in layers}
    found |= {id(layer.bias) for layer in layers if layer.norm is not None}
    found |= {id(one.scale) for one in activation_quantizers(model).values()}
    record = quantization_of(model)
    for unit in record.graph.units:
        owner = model.get_submodule(unit.parameter.rpartition(".")[0])
        rounded = record.allocation[unit.name].weight < FLOAT_BITS
        if rounded and not isinstance(owner, QuantizedLayer):
            found.add(id(model.get_parameter(unit.parameter)))
    return found


def may_leave_unused(model: nn.Module) -> bool:
    """Return whether a pass may leave parameters of a quantized network unused.

    Quantized layers were observed to run; layers that stayed float may not.
    """
    parts = (*quantized_layers(model).values(), *activation_quantizers(model).values())
    used = {id(parameter) for part in parts for parameter in part.parameters()}
    return any(id(parameter) not in used for parameter in model.parameters())


class Gradients:
    """Computes gradients of batches, and sums up losses, correct answers and images.

    The counts, (3,), are float64 so that a sum over an epoch depends on nothing but the
    order of its batches.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        teacher: nn.Module | None,
        config: TrainConfig,
        *,
        backward: Callable[[Tensor], Any],
        device: torch.device,
        penalty: Callable[[], Tensor] | None = None,
    ) -> None:
        self.model, self.teacher, self.config = model, teacher, config
        self.backward, self.device, self.penalty = backward, device, penalty
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)

    def __call__(self, inputs: Batch, targets: Tensor) -> None:
        """Add the gradients of a batch to those of the parameters."""
        expected = None
        if self.teacher is not None:
            with torch.no_grad(), self._autocast():
                expected = first_tensor(call(self.teacher, inputs)).float()
        with self._autocast():
            logits = first_tensor(call(self.model, inputs)).float()  # type: ignore[arg-type]
            loss = training_loss(logits, targets, expected, self.config)
            if self.penalty is not None:
                loss = loss + self.penalty()
        self.backward(loss)
        with torch.no_grad():
            self.counts[0] += loss.detach() * len(targets)
            self.counts[1] += (logits.argmax(1) == targets).sum()
            self.counts[2] += len(targets)

    def _autocast(self) -> torch.autocast:
        # Every weight is used once, so a cache of cast weights gains nothing; and
        # what it holds would be lost to a recorded step.
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.config.precision == "bfloat16",
            cache_enabled=False,
        )

    def placed(self, inputs: Batch) -> Batch:
        """Return inputs on the network's device, in its memory format."""
        moved = to_device(inputs, self.device)
        if isinstance(moved, Tensor) and moved.dim() == 4:
            layout = memory_layout(self.config, self.device)
            return moved.contiguous(memory_format=layout)
        return moved


def memory_layout(config: TrainConfig, device: torch.device) -> torch.memory_format:
    """Return the memory format of images and weights.

    CPUs never get channels-last: there PyTorch crashes in the backward pass of some
    convolutions, 1 × 1 with stride 2 of 4 channels among them.
    """
    if config.channels_last and device.type != "cpu":
        return torch.channels_last
    return torch.contiguous_format


def training_loss(
    logits: Tensor, targets: Tensor, expected: Tensor | None, config: TrainConfig
) -> Tensor:
    """Return the mean loss of a batch: cross entropy, and distillation if asked for.

    Logits and the teacher's ``expected`` ones are (N, classes), targets (N,).
    """
    loss = F.cross_entropy(logits, targets, label_smoothing=config.label_smoothing)
    if expected is None:
        return loss
    divergence = F.kl_div(
        (logits / config.temperature).log_softmax(1),
        (expected / config.temperature).log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )
    # The square keeps the gradient's size, whatever the temperature.
    heat = config.temperature**2
    return (1 - config.distill) * loss + config.distill * heat * divergence


class CodePenalty:
    """What is added to the loss for the bits that coded weights take, on average.

    Weights feel it, and steps do not: a wider step takes fewer bits of whatever layer.
    """

    def __init__(self, model: nn.Module, penalty: float) -> None:
        self.layers = [each for each in quantized_layers(model).values() if each.rate]
        self.penalty = penalty
        if not self.layers:
            raise QuantizationError(
                f"code_penalty={penalty:g} needs coded weights, and the network has "
                "none; plan it with storage='coded'"
            )

    def __call__(self) -> Tensor:
        """Return it, with its gradient."""
        taken = [
            between_codes(layer.weight / grid.scale.detach() + grid.zero_point).sum()
            for layer, grid in ((each, each.grid_like_weight()) for each in self.layers)
        ]
        count = sum(layer.weight.numel() for layer in self.layers)
        return self.penalty / count * torch.stack(taken).sum()


class Recorded:
    """Replays the gradients of a batch as one CUDA graph.

    Gradients are written to the same memory every time, so they must neither be
    cleared nor accumulated between batches.
    """

    def __init__(self, gradients: Gradients, model: nn.Module) -> None:
        self.gradients, self.model = gradients, model
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: Tensor = torch.empty(0)
        self.targets: Tensor = torch.empty(0)

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        """Compute the gradients of a batch of the same size as the first one."""
        if self.graph is None:
            self.graph = self._record(inputs, targets)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()

    def _record(self, inputs: Tensor, targets: Tensor) -> torch.cuda.CUDAGraph:
        self.inputs, self.targets = inputs.clone(), targets.clone()
        # The warm-up passes should leave no statistics behind.
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.gradients(self.inputs, self.targets)
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
        return graph

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
