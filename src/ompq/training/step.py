"""The settings of training, and one step: what is trained, its loss and gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.costs import FLOAT_BITS
from ompq.errors import DataError, QuantizationError, suggestion
from ompq.layers import QuantizedLayer, activation_quantizers, quantized_layers
from ompq.quantization import quantization_of
from ompq.rates import between_codes
from ompq.samples import (
    Batch,
    batch_length,
    call,
    class_rows,
    first_tensor,
    to_device,
)
from ompq.streams import SMALLEST_BITS


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of quantization-aware training.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Images per step, over all processes. Ready-made batches keep
            their own size.
        learning_rate: Initial rate of weights and biases, with cosine decay to 0.
        warmup: Steps of linear warm-up.
        momentum: Momentum of SGD.
        weight_decay: Weight decay; scales never decay.
        decay_all: Whether biases and norms decay as well.
        start: Whether to start from the weights of the ``quantized`` network or those
            of the ``float`` network, which is then needed.
        learn_weight_scales: Whether the scales of weights are learned (LSQ) or fixed.
        weights: How weights are rounded. ``stored`` starts from the network's scales
            and zero points; the other methods do not learn scales. ``minmax`` (HAWQ-V3)
            uses symmetric grids that follow the largest weight of each channel.
            ``dorefa`` (PACT) normalizes tanh w by the layer's maximum and rounds it in
            [0, 1]. The last two have no uniform grid, so their networks run only in
            float: ``lq-nets`` fits the levels of each channel to its weights;
            ``outliers`` (RVQuant) keeps the largest weights of each layer in 16 bits.
        outlier_fraction: Fraction of weights and activations that are outliers.
        widths: ``planned``, or ``learned`` (FracBits; needs ``weights="dorefa"``).
            Learned widths start as planned, become whole after 80 % of the epochs, and
            take no more bits in total than planned.
        width_penalty: Loss for each bit per weight above or below the planned average
            while widths are learned.
        code_penalty: Loss for each bit that a coded weight takes on average. It makes
            the packed file smaller than planned; 0 trains on accuracy alone.
        activations: How the ranges of activations change: ``step`` learns their step
            (LSQ), ``clip`` their upper end (PACT), ``ema`` follows a running minimum
            and maximum (HAWQ-V3), and ``fixed`` keeps them. ``outliers`` (RVQuant) is
            ``ema`` without the largest values, which are kept in 16 bits.
        range_momentum: Momentum of the running minimum and maximum.
        step_rate: Learning rate of scales, as a multiple of that of weights.
        batch_norm: ``folded`` trains the weight and bias that the norm was folded
            into; ``fold-and-train`` (HAWQ-V3) keeps the norm, folds it again at each
            step, and needs the float network.
        freeze_norm_epoch: From this epoch on, norms use their running statistics and no
            longer update them; before, they use batch statistics.
        distill: Weight of the distillation loss against that of the labels, 0 to 1;
            above 0 it needs the float network.
        temperature: Temperature of the softmax in the distillation loss.
        label_smoothing: Probability mass that is spread over all classes.
        gradient_norm: Maximum norm of the gradients; 0 does not clip.
        accumulate: Batches whose gradients are accumulated into one step.
        precision: ``float32``, or ``bfloat16`` for autocast.
        channels_last: Whether images and weights are stored channels-last on a GPU.
        compile: Whether to compile the network with ``torch.compile``.
        cuda_graph: Whether to record a step as a CUDA graph and replay it. It needs a
            single process on a GPU and pays off for small networks.
        checkpoint_steps: Steps between checkpoints; 0 writes one per epoch.
        keep: With validation data, whether to return the ``best`` epoch (or the start,
            if no epoch is better) or the ``last``.
        report_steps: Steps between progress reports, which also check the loss.
        tensorboard: Folder for TensorBoard scalars; None for none.
        logger: Experiment tracker that also gets the scalars, through Accelerate.
        deterministic: Whether a GPU gives identical results in every run; otherwise it
            uses the fastest algorithms.
        seed: Seed of the order of images, augmentation and dropout.
    """

    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 1e-3
    warmup: int = 0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_all: bool = False
    start: Literal["quantized", "float"] = "quantized"
    learn_weight_scales: bool = True
    weights: Literal["stored", "minmax", "dorefa", "lq-nets", "outliers"] = "stored"
    outlier_fraction: float = 0.01
    widths: Literal["planned", "learned"] = "planned"
    width_penalty: float = 1.0
    code_penalty: float = 0.0
    activations: Literal["step", "clip", "ema", "fixed", "outliers"] = "step"
    range_momentum: float = 0.99
    step_rate: float = 0.1
    batch_norm: Literal["folded", "fold-and-train"] = "folded"
    freeze_norm_epoch: int = 1
    distill: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    gradient_norm: float = 0.0
    accumulate: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = True
    compile: bool = False
    cuda_graph: bool = False
    checkpoint_steps: int = 0
    keep: Literal["best", "last"] = "best"
    report_steps: int = 50
    tensorboard: str | None = None
    logger: Literal["none", "wandb", "mlflow"] = "none"
    deterministic: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            problem = _problem(name, value, hints[name])
            if problem:
                raise ValueError(f"{name}={value!r} must be {problem}")
        if self.activations == "outliers" != self.weights:
            raise ValueError(
                f"activations='outliers' needs weights='outliers', not {self.weights!r}"
            )
        if self.widths == "learned" and self.weights != "dorefa":
            raise ValueError(
                f"widths='learned' needs weights='dorefa', not {self.weights!r}"
            )
        stored = self.weights == "stored" and self.batch_norm == "folded"
        if self.code_penalty and not stored:
            raise ValueError(
                f"code_penalty={self.code_penalty:g} needs weights='stored' and "
                f"batch_norm='folded', not {self.weights!r} and {self.batch_norm!r}"
            )

    @property
    def needs_float(self) -> bool:
        """Whether training needs the float network."""
        folds = self.batch_norm == "fold-and-train"
        return self.distill > 0 or folds or self.start == "float"

    @property
    def keeps_plan(self) -> bool:
        """Whether the trained network keeps the planned bits on uniform grids."""
        return self.widths == "planned" and self.weights not in ("lq-nets", "outliers")

    @property
    def whole_epoch(self) -> int:
        """The epoch, after 80 % of them, that begins with learned widths rounded."""
        return int(0.8 * self.epochs)


_POSITIVE = ("learning_rate", "temperature")
_BELOW_ONE = ("momentum", "range_momentum")  # with 1 they would never forget, or learn
_FRACTIONS = ("distill", "label_smoothing", "outlier_fraction")
_AT_LEAST_ONE = ("epochs", "batch_size", "accumulate", "report_steps")


def _problem(name: str, value: Any, kind: Any) -> str:
    """Return what a field must be, or "" if it is; values may come from a file."""
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    if kind is int or kind is float:
        return _number_problem(name, value, kind)
    if kind == str | None:
        return "" if value is None or isinstance(value, str) else "a folder's name"
    words = get_args(kind)
    hint = suggestion(str(value), words)
    return "" if value in words else f"one of {', '.join(words)}{hint}"


def _number_problem(name: str, value: Any, kind: type) -> str:
    number = isinstance(value, int if kind is int else int | float)
    if not number or isinstance(value, bool):
        return "a whole number" if kind is int else "a number"
    if name in _BELOW_ONE:
        return "" if 0 <= value < 1 else "from 0 to below 1"
    if name in _FRACTIONS:
        return "" if 0 <= value <= 1 else "from 0 to 1"
    if name in _POSITIVE:
        return "" if 0 < value < math.inf else "above 0 and finite"
    least = 1 if name in _AT_LEAST_ONE else 0
    return "" if least <= value < math.inf else f"at least {least}"


# HAWQ-V3's recipe from its released command (--lr 1e-4 --wd 1e-4 --fold-BN 1 --fix-BN 1
# --act-range-momentum 0.99), with the cosine schedule of the OMPQ paper. One thing
# differs: requantization by multipliers and shifts is not simulated in training;
# ompq.finalize applies it. The 16 bits of residual streams are a setting of quantize.
_HAWQ_V3 = TrainConfig(
    epochs=90,
    batch_size=128,
    learning_rate=1e-4,
    weight_decay=1e-4,
    decay_all=True,
    start="float",
    learn_weight_scales=False,
    weights="minmax",
    activations="ema",
    batch_norm="fold-and-train",
    freeze_norm_epoch=0,
)

# PACT on ImageNet: SGD from 0.1, 110 epochs, batch 256. The original trains from
# scratch with a step schedule and weight decay on the clipping values; here training
# starts from the float network, with cosine decay and no decay of clipping values.
_PACT = TrainConfig(
    epochs=110,
    batch_size=256,
    learning_rate=0.1,
    start="float",
    weights="dorefa",
    activations="clip",
    step_rate=1.0,
    batch_norm="fold-and-train",
    freeze_norm_epoch=110,
)
# FracBits' ResNets: like PACT with 120 epochs. The learning rate of the widths is not
# published.
_FRACBITS = replace(_PACT, epochs=120, widths="learned", freeze_norm_epoch=120)
# OneBitwidth trains from scratch: ompq.one_bitwidth returns random weights. Not all of
# its settings are published; these are PACT's. Norms are never frozen: at the learning
# rate that random weights need, a network whose norms stop normalising unlearns.
_ONE_BITWIDTH = replace(_PACT, epochs=200, batch_size=128, freeze_norm_epoch=200)
# LQ-Nets on ImageNet: SGD from 0.1, 120 epochs, batch 256; differs as for PACT.
_LQ_NETS = replace(
    _PACT, epochs=120, weights="lq-nets", activations="step", freeze_norm_epoch=120
)
# RVQuant fine-tunes a float network; its learning rate and epochs are not published.
_RVQUANT = replace(
    _HAWQ_V3,
    epochs=10,
    learning_rate=1e-3,
    weights="outliers",
    activations="outliers",
)

# Settings of published work by name; "ours" are the defaults.
TRAIN_PROTOCOLS: Mapping[str, TrainConfig] = MappingProxyType(
    {
        "ours": TrainConfig(),
        "hawq-v3": _HAWQ_V3,
        "paper-qat": _HAWQ_V3,
        "pact": _PACT,
        "fracbits-pact": _FRACBITS,
        "one-bitwidth": _ONE_BITWIDTH,
        "lq-nets": _LQ_NETS,
        "rvquant": _RVQUANT,
    }
)


# A scale must stay positive: it may shrink to this fraction of its initial value. One
# that would fall further is no longer useful for its tensor anyway.
_SMALLEST = 1 / 16
WIDTH = "weight_width"  # name of a layer's parameter for a learned width
_WARM_UP = 3  # passes before recording a CUDA graph, as in PyTorch's documentation


# Called with the network's output and the targets of a batch; returns the mean loss.
Loss: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Trainable:
    """The parameters of a network that are trained, by name."""

    weights: dict[str, nn.Parameter]  # parameters with weight decay
    others: dict[str, nn.Parameter]  # biases and norms
    scales: dict[str, nn.Parameter]  # scales and learned widths
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


def make_trainable(model: nn.Module, config: TrainConfig) -> Trainable:
    """Set ``requires_grad`` on the parameters that the settings train, and only those.

    Also sets how gradients pass through the activation quantizers.
    """
    scales = _scales(model, config)
    excluded = {id(p) for p in scales.values()} | _not_trained(model)
    rest = {n: p for n, p in model.named_parameters() if id(p) not in excluded}
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
    if config.widths == "learned":  # a width shared by several layers is listed once
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
        penalty: Callable[[], Tensor] | None = None,
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
                expected = first_tensor(call(self.teacher, inputs)).float()
        with self._autocast():
            output = call(self.model, inputs)  # type: ignore[arg-type]
            logits = first_tensor(output).float()
            if self.own_loss is None:
                loss = cross_entropy(logits, targets, self.config)
            else:
                loss = _one_number(self.own_loss(output, targets))
            loss = with_distillation(loss, logits, expected, self.config)
            if self.penalty is not None:
                loss = loss + self.penalty()
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
