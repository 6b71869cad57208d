"""One training step: what is trained, its loss and its gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.bit_widths import FLOAT_BITS
from ompq.configs import TrainConfig
from ompq.entropy_coding.rates import between_codes
from ompq.errors import DataError, QuantizationError
from ompq.layers import QuantizedLayer, activation_quantizers, quantized_layers
from ompq.quantization.record import quantization_of
from ompq.samples import (
    Batch,
    batch_length,
    call,
    class_rows,
    first_tensor,
    map_batch,
    to_device,
)
from ompq.training.rounding_rules import WeightRule

# A scale must stay positive: it may shrink to this fraction of its initial value. One
# that would fall further is no longer useful for its tensor anyway.
_SMALLEST = 1 / 16
_WARM_UP = 3  # passes before recording a CUDA graph, as in PyTorch's documentation

# Called with the network's output and the targets of a batch; returns the mean loss.
Loss: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Trainable:
    """The parameters of a network that are trained, by name."""

    weights: dict[str, nn.Parameter]  # parameters with weight decay
    others: dict[str, nn.Parameter]  # biases and norms
    scales: dict[str, nn.Parameter]  # scales, and what the weight rule learns
    floors: list[Tensor]  # the smallest value allowed for each of these

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """All trained parameters."""
        return {**self.weights, **self.others, **self.scales}

    def optimizer(self, config: TrainConfig) -> torch.optim.SGD:
        """Return SGD; a group's learning rate is ``ratio`` times the scheduled one."""
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
        """Clamp scales to their smallest allowed values."""
        if self.scales:
            torch._foreach_maximum_([*self.scales.values()], self.floors)


def make_trainable(
    model: nn.Module, config: TrainConfig, rule: WeightRule | None = None
) -> Trainable:
    """Set ``requires_grad`` on the parameters that the settings train, and only those.

    Also sets how gradients pass through the activation quantizers.
    """
    scales = _scales(model, config)
    least = {id(p): _SMALLEST * p.detach().clone() for p in scales.values()}
    for parameter, floor in () if rule is None else rule.learned():
        least[id(parameter)] = torch.full_like(parameter, floor)
    # A parameter shared by several layers is listed once.
    scales |= {name: p for name, p in model.named_parameters() if id(p) in least}
    excluded = {*least} | _not_trained(model)
    rest = {n: p for n, p in model.named_parameters() if id(p) not in excluded}
    for parameter in model.parameters():
        parameter.requires_grad = False
    for parameter in (*scales.values(), *rest.values()):
        parameter.requires_grad_()
    return Trainable(
        weights={name: p for name, p in rest.items() if p.dim() > 1},
        others={name: p for name, p in rest.items() if p.dim() <= 1},
        scales=scales,
        floors=[least[id(scale)] for scale in scales.values()],
    )


def _scales(model: nn.Module, config: TrainConfig) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    if config.learn_weight_scales and config.weights == "stored":
        for name, layer in quantized_layers(model).items():
            found[f"{name}.weight_scale".removeprefix(".")] = layer.weight_scale
    for name, quantizer in activation_quantizers(model).items():
        if config.activations == "clip":
            quantizer.gradient = "clip"
        if config.activations in ("step", "clip"):
            found[f"{name}.scale"] = quantizer.scale
    return found


def _not_trained(model: nn.Module) -> set[int]:
    """Return the ids of parameters that are not trained, or only as scales.

    They are the scales, weights rounded in place in modules that are not quantized
    layers, and biases of layers that keep their norm, whose shift replaces them.
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
    """Return whether a forward pass may leave parameters unused.

    Quantized layers are known to run; layers that stayed float may not.
    """
    parts = (*quantized_layers(model).values(), *activation_quantizers(model).values())
    used = {id(parameter) for part in parts for parameter in part.parameters()}
    return any(id(parameter) not in used for parameter in model.parameters())


class Gradients:
    """Computes gradients of batches; counts losses, correct predictions and images.

    The counts, (3,), are float64, so that a sum over an epoch depends only on the order
    of its batches. With a loss of the user's own, no prediction is counted as correct.
    """

    def __init__(  # noqa: PLR0913 - the last two are optional
        self,
        model: Callable[..., Any],
        teacher: nn.Module | None,
        config: TrainConfig,
        *,
        backward: Callable[[Tensor], Any],
        device: torch.device,
        penalty: Callable[[], Tensor | None] | None = None,
        own_loss: Loss | None = None,
    ) -> None:
        self.model, self.teacher, self.config = model, teacher, config
        self.backward, self.device, self.penalty = backward, device, penalty
        self.own_loss = own_loss
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)

    def __call__(self, inputs: Batch, targets: Any) -> None:
        """Add the gradients of a batch to those in the parameters."""
        expected = None
        if self.teacher is not None:
            with torch.no_grad(), self._autocast():
                own = map_batch(inputs, torch.clone)  # it may be changed in place
                expected = first_tensor(call(self.teacher, own)).float()
        with self._autocast():
            output = call(self.model, inputs)  # type: ignore[arg-type]
            logits = first_tensor(output).float()
            if self.own_loss is None:
                loss = cross_entropy(logits, targets, self.config)
            else:
                loss = _one_number(self.own_loss(output, targets))
            loss = with_distillation(loss, logits, expected, self.config)
            penalty = None if self.penalty is None else self.penalty()
            loss = loss if penalty is None else loss + penalty
        self.backward(loss)
        images = batch_length(inputs)
        with torch.no_grad():
            self.counts[0] += loss.detach() * images
            if self.own_loss is None:
                self.counts[1] += (logits.argmax(1) == targets).sum()
            self.counts[2] += images

    def _autocast(self) -> torch.autocast:
        # Every weight is used once, so caching cast weights would gain nothing, and the
        # cache does not work with CUDA graphs.
        return torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self.config.precision == "bfloat16",
            cache_enabled=False,
        )

    def placed(self, inputs: Batch) -> Batch:
        """Return inputs on the network's device and in its memory format."""
        moved = to_device(inputs, self.device)
        if isinstance(moved, Tensor) and moved.dim() == 4:
            layout = memory_layout(self.config, self.device)
            return moved.contiguous(memory_format=layout)
        return moved


def memory_layout(config: TrainConfig, device: torch.device) -> torch.memory_format:
    """Return the memory format of images and weights.

    CPUs never use channels-last: PyTorch crashes there in the backward pass of some
    convolutions, for example 1 × 1 with stride 2 and 4 channels.
    """
    if config.channels_last and device.type != "cpu":
        return torch.channels_last
    return torch.contiguous_format


def _one_number(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.view(())
    what = type(loss).__name__
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)}"
        what += "" if loss.requires_grad else " without a gradient"
    raise ValueError(
        f"the loss returned {what}; return the mean over the batch, a tensor of one "
        "number computed from the network's output"
    )


def cross_entropy(logits: Tensor, targets: Tensor, config: TrainConfig) -> Tensor:
    """Return the mean cross entropy of logits (N, classes) and class indices (N,)."""
    try:
        return F.cross_entropy(logits, targets, label_smoothing=config.label_smoothing)
    except IndexError as error:  # a GPU does not tell
        classes = logits.shape[1]
        raise DataError(
            f"{error} The network has {classes} outputs: targets are class indices, 0 "
            f"to {classes - 1}"
        ) from error


def with_distillation(
    loss: Tensor, logits: Tensor, expected: Tensor | None, config: TrainConfig
) -> Tensor:
    """Return the loss of a batch, mixed with that of distillation.

    Logits, and the teacher's if given (``expected``), are (N, classes, ...).
    """
    if expected is None:
        return loss
    rows, others = class_rows(logits), class_rows(expected)
    divergence = F.kl_div(
        (rows / config.temperature).log_softmax(1),
        (others / config.temperature).log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )
    # The square makes the size of the gradient independent of the temperature.
    divergence = config.temperature**2 * divergence
    return (1 - config.distill) * loss + config.distill * divergence


class CodePenalty:
    """A loss on the average bits of coded weights.

    It has gradients for weights but not for scales, which would simply all grow.
    """

    def __init__(self, model: nn.Module, penalty: float) -> None:
        self.layers = [each for each in quantized_layers(model).values() if each.rate]
        self.penalty = penalty
        if not self.layers:
            raise QuantizationError(
                f"code_penalty={penalty:g} needs coded weights, but the network has "
                "none; plan it with storage='coded'"
            )

    def __call__(self) -> Tensor:
        """Return the loss, a scalar."""
        bits = [
            between_codes(layer.weight / grid.scale.detach() + grid.zero_point).sum()
            for layer, grid in ((each, each.grid_like_weight()) for each in self.layers)
        ]
        count = sum(layer.weight.numel() for layer in self.layers)
        return self.penalty / count * torch.stack(bits).sum()


class Recorded:
    """Computes the gradients of a batch by replaying a CUDA graph.

    The graph overwrites the same gradient tensors every time, so gradients must be
    neither cleared nor accumulated between batches.
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
        # The warm-up passes must not change running statistics or counts.
        buffers = [self.gradients.counts, *self.model.buffers()]
        before = [tensor.clone() for tensor in buffers]
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
            for tensor, value in zip(buffers, before, strict=True):
                tensor.copy_(value)
        return graph

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
