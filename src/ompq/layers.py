"""Quantized convolution and linear layers, and activation quantizers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ompq.errors import QuantizationError
from ompq.grids import (
    Grid,
    learned_clip,
    like_weight,
    of_groups,
    on_log_grid,
    quantize_as_deployed,
    rounded_to,
)
from ompq.network.folding import channel_axis, scaled_channels
from ompq.network.observation import tensors_in, with_tensors

Size: TypeAlias = Sequence[int] | None


def random_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return random numbers from 0 to 1, shaped as ``x``."""
    return torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)


class ActivationQuantizer(nn.Module):
    """Rounds tensors to a grid; it is attached to modules as a hook."""

    scale: nn.Parameter  # step of the grid, ()
    zero_point: Tensor  # code of the value 0, (); an integer
    learnable = True  # whether the step has a gradient

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.bits = grid.bits
        self.scale = nn.Parameter(grid.scale.detach().clone(), requires_grad=False)
        self.register_buffer("zero_point", grid.zero_point.detach().clone())
        self.enabled = True
        # Probability that a value is rounded; below 1 only while a block is
        # reconstructed with QDrop.
        self.keep = 1.0
        self.generator: torch.Generator | None = None  # decides which values
        # What training learns: the ``step`` (LSQ) or the end of the range (``clip``,
        # PACT). ``straight`` learns neither: gradients pass through unchanged.
        self.gradient: Literal["step", "clip", "straight"] = "step"
        # If set, replaces rounding to the grid.
        self.rounding: Callable[[ActivationQuantizer, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the rounded values, shaped as ``x``."""
        if not self.enabled:
            return x
        kind = self._output_dtype(x)
        # Half precision is too coarse to round to 8 bits.
        x = x.to(torch.promote_types(x.dtype, self.scale.dtype))
        rounding = self.rounding or ActivationQuantizer.on_grid
        return self._kept(rounding(self, x), x).to(kind)

    def on_grid(self, x: Tensor) -> Tensor:
        """Return values rounded to the grid, with the gradients that are wanted."""
        grid = Grid(self.scale, self.zero_point, self.bits)
        if not torch.is_grad_enabled():
            return quantize_as_deployed(grid, x)
        if self.gradient == "straight":
            return quantize_as_deployed(grid, x.detach()) + (x - x.detach())
        if self.gradient == "clip":
            # Scaled so that a gradient step on the scale moves the limit as far as if
            # the limit itself were the parameter.
            steps = grid.qmax - self.zero_point
            limit = self.scale.detach() * steps
            limit = limit + (self.scale - self.scale.detach()) / steps
            return learned_clip(x, limit, self.zero_point, self.bits)
        # LSQ counts the elements of one sample.
        return rounded_to(grid, x, prod(x.shape[1:]))

    def _output_dtype(self, x: Tensor) -> torch.dtype:
        """Return the type of the result: the input's, for layers of half precision.

        Under autocast it is that of the scale, and the layers that read it convert it.
        """
        if torch.is_autocast_enabled(x.device.type):
            return torch.promote_types(x.dtype, self.scale.dtype)
        return x.dtype

    def _kept(self, rounded: Tensor, x: Tensor) -> Tensor:
        if self.keep >= 1.0:
            return rounded
        return torch.where(random_like(x, self.generator) < self.keep, rounded, x)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook: round the first tensor of a module's output."""
        tensors = list(tensors_in(output))
        if not tensors or not tensors[0].is_floating_point():
            return output
        return with_tensors(output, [self(tensors[0]), *tensors[1:]])

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: round the first tensor among a module's arguments."""
        return self.after(_module, args, (args, kwargs))

    def extra_repr(self) -> str:
        """Show the bits and the grid."""
        return (
            f"bits={self.bits}, scale={self.scale.item():.4g}, "
            f"zero_point={self.zero_point:g}"
        )


class LogQuantizer(ActivationQuantizer):
    """Rounds to a grid of powers, for long tails: probabilities, outputs of GELU.

    The largest level is ``scale``, ``zero_point`` is the number of levels per halving,
    and the last code means 0. ``shift`` is added before rounding and subtracted
    afterwards, so that the grid covers values from ``-shift`` on.
    """

    learnable = False

    def __init__(self, grid: Grid, shift: float) -> None:
        super().__init__(grid)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        """Return the rounded values, with a straight-through gradient."""
        if not self.enabled:
            return x
        kind = self._output_dtype(x)
        x = x.to(torch.promote_types(x.dtype, self.scale.dtype))
        grid = Grid(self.scale, self.zero_point, self.bits)
        rounded = on_log_grid(grid, x.detach() + self.shift) - self.shift
        return self._kept(rounded + (x - x.detach()), x).to(kind)


@dataclass(frozen=True)
class StoredValues:
    """Marks a layer whose weight lies on no uniform grid and is used as stored."""

    kind: str  # how the weight was rounded
    bytes: int  # size of the unit, including its scales or levels and its bias

    def __call__(self, layer: "QuantizedLayer", _factor: Tensor | None) -> Tensor:
        """Return the layer's weight."""
        return layer.weight


class QuantizedLayer(nn.Module):
    """Mixin that rounds the weight of the layer class it is combined with."""

    weight: nn.Parameter  # stored as floats and rounded in every forward pass
    bias: nn.Parameter | None
    # Step of each output channel, (C,), or of each group of its weights, (C, G).
    weight_scale: nn.Parameter
    weight_zero_point: Tensor  # code of 0, shaped as weight_scale; multiples of 0.5
    bits: int  # width of the weight's codes
    narrow: bool  # whether the highest code is unused
    group_size: int = 0  # inputs that share a scale; 0 for one scale per channel
    rate: float = 0.0  # maximum bits per weight when entropy-coded; 0 if not coded
    # If set, computes the layer together with the batch norm that was folded into it,
    # while the two are trained.
    norm: nn.Module | None
    # If set, weight and bias to compute with, while rounding is being learned.
    learning: tuple[Tensor, Tensor | None] | None = None
    # If set, replaces rounding to the grid, for training methods and for weights on no
    # uniform grid. The second argument is an optional factor on each channel, (C,).
    rounding: Callable[["QuantizedLayer", Tensor | None], Tensor] | None = None
    # Whether integers stretch weights of few bits, for a finer step of the bias.
    stretched: bool = True
    # If set (:func:`ompq.finalize`), computes the layer in integers when no gradient is
    # needed.
    integers: Callable[["QuantizedLayer", Tensor, Size], Tensor] | None = None

    def forward(self, input: Tensor, output_size: Size = None) -> Tensor:
        """Apply the layer with its rounded weight; same arguments as the float one."""
        if self.norm is not None:
            return cast(Tensor, self.norm(self, input, output_size))
        if self.learning is not None:
            return linear_map(self, input, *self.learning, output_size)
        if self.integers is not None and not torch.is_grad_enabled():
            return self.integers(self, input, output_size)
        return linear_map(self, input, self.rounded_weight(), self.bias, output_size)

    def rounded_weight(self, factor: Tensor | None = None) -> Tensor:
        """Return the rounded weight; ``factor`` (C,) scales its channels beforehand."""
        if self.rounding is not None:
            return self.rounding(self, factor)
        weight = self.folded_weight(factor)
        shared = weight.numel() / self.weight_scale.numel()
        return rounded_to(self.grid_like_weight(), weight, shared)

    def folded_weight(self, factor: Tensor | None) -> Tensor:
        """Return the weight with its output channels multiplied by ``factor`` (C,)."""
        if factor is None:
            return self.weight
        return scaled_channels(self.weight, factor, self)

    def grid_like_weight(self) -> Grid:
        """Return the grid, shaped to broadcast with the weight."""
        layout = self.weight.shape, channel_axis(self), self.group_size
        scale = like_weight(self.weight_scale, *layout)
        zero_point = like_weight(self.weight_zero_point, *layout)
        return Grid(scale, zero_point, self.bits, self.narrow)

    def codes(self) -> Tensor:
        """Return the weight's codes, uint8, shaped as the weight."""
        self.check_uniform()
        return self.grid_like_weight().quantize(self.weight)

    def check_uniform(self) -> None:
        """Raise a QuantizationError if the weight lies on no uniform grid."""
        if isinstance(self.rounding, StoredValues):
            raise QuantizationError(
                f"{self.rounding.kind} leaves weights on no uniform grid: the network "
                "computes with floats, and cannot be packed, finalized or exported"
            )

    def extra_repr(self) -> str:
        """Append the bits to the representation of the replaced layer."""
        groups = f", group_size={self.group_size}" if self.group_size else ""
        return f"{super().extra_repr()}, bits={self.bits}{groups}"


def linear_map(
    layer: nn.Module,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_size: Size = None,
) -> Tensor:
    """Apply a layer's convolution or matrix product with another weight and bias."""
    if isinstance(layer, _CustomForward):
        return layer.forward_with(x, weight, bias)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(layer, _ConvTransposeNd):
        dims = weight.dim() - 2
        size = None if output_size is None else list(output_size)
        sizes = (layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation)
        padding = layer._output_padding(x, size, *sizes)  # type: ignore[arg-type]
        function = getattr(F, f"conv_transpose{dims}d")
        options = (layer.stride, layer.padding, padding, layer.groups, layer.dilation)
        return cast(Tensor, function(x, weight, bias, *options))
    assert isinstance(layer, _ConvNd)
    return layer._conv_forward(x, weight, bias)


class QuantizedLinear(QuantizedLayer, nn.Linear):  # type: ignore[misc]
    """A linear layer with rounded weights."""


class QuantizedConv1d(QuantizedLayer, nn.Conv1d):  # type: ignore[misc]
    """A 1-D convolution with rounded weights."""


class QuantizedConv2d(QuantizedLayer, nn.Conv2d):  # type: ignore[misc]
    """A 2-D convolution with rounded weights."""


class QuantizedConv3d(QuantizedLayer, nn.Conv3d):  # type: ignore[misc]
    """A 3-D convolution with rounded weights."""


class QuantizedConvTranspose1d(QuantizedLayer, nn.ConvTranspose1d):  # type: ignore[misc]
    """A transposed 1-D convolution with rounded weights."""


class QuantizedConvTranspose2d(QuantizedLayer, nn.ConvTranspose2d):  # type: ignore[misc]
    """A transposed 2-D convolution with rounded weights."""


class QuantizedConvTranspose3d(QuantizedLayer, nn.ConvTranspose3d):  # type: ignore[misc]
    """A transposed 3-D convolution with rounded weights."""


class _CustomForward(QuantizedLayer):
    """Mixin for subclasses whose forward does more, such as padding, and is kept."""

    def forward_with(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the forward of the replaced class with another weight and bias."""
        # Attributes in the instance's dict take precedence over parameters.
        self.__dict__ |= {"weight": weight, "bias": bias}
        try:
            return cast(Tensor, plain_class(self).forward(self, x))
        finally:
            del self.__dict__["weight"], self.__dict__["bias"]


_REPLACEMENTS: dict[type[nn.Module], type[QuantizedLayer]] = {
    kind.__mro__[2]: kind
    for kind in QuantizedLayer.__subclasses__()
    if kind is not _CustomForward
}
# Classes made for layers with a forward of their own, by the class they replace.
_CUSTOM_REPLACEMENTS: dict[type[nn.Module], type[QuantizedLayer]] = {}


def plain_class(layer: QuantizedLayer) -> Any:
    """Return the class of the layer that a quantized layer replaced."""
    kinds = type(layer).__mro__
    return next(kind for kind in kinds if not issubclass(kind, QuantizedLayer))


def _replacement(layer: nn.Module) -> type[QuantizedLayer]:
    """Return the quantized class for a layer.

    A subclass that computes the same as its PyTorch base class is treated as the base.
    """
    base = next(kind for kind in _REPLACEMENTS if isinstance(layer, kind))
    kind: Any = type(layer)
    if kind is base or kind.forward is base.forward:
        return _REPLACEMENTS[base]
    probe = _probe(layer)
    try:
        with torch.no_grad():
            if torch.equal(kind.forward(layer, probe), base.forward(layer, probe)):
                return _REPLACEMENTS[base]
    except Exception:  # a custom forward may raise anything on an unsuitable input
        pass
    made: Any = type(f"Quantized{kind.__name__}", (_CustomForward, kind), {})
    return _CUSTOM_REPLACEMENTS.setdefault(kind, made)


def _probe(layer: nn.Module) -> Tensor:
    """Return an input for a layer that is neither zero nor constant."""
    weight = cast(Tensor, layer.weight)
    shape = [2, weight.shape[1]]
    if isinstance(layer, _ConvNd):
        pairs = zip(layer.kernel_size, layer.dilation, strict=True)
        shape = [2, layer.in_channels, *(size * gap + 5 for size, gap in pairs)]
    return torch.linspace(-1, 1, prod(shape)).reshape(shape).to(weight)


def quantized_layer(
    layer: nn.Module, grid: Grid, group_size: int = 0
) -> QuantizedLayer:
    """Return a quantized copy of a layer whose batch norm, if any, is folded.

    The grid broadcasts with the weight and has one scale per channel, or per group.
    """
    kind = _replacement(layer)
    # A copy with another class keeps every attribute, whatever the constructor takes.
    made = copy.deepcopy(layer)
    made.__class__ = kind
    quantized = cast(QuantizedLayer, made)
    quantized.bits = grid.bits
    quantized.narrow = grid.narrow
    quantized.group_size = group_size
    quantized.norm = None
    scale, zero_point = (
        of_groups(each.detach(), group_size).clone()
        for each in (grid.scale, grid.zero_point)
    )
    quantized.weight_scale = nn.Parameter(scale, requires_grad=False)
    quantized.register_buffer("weight_zero_point", zero_point)
    return quantized


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a network by name, in order of definition."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}


def activation_quantizers(model: nn.Module) -> dict[str, ActivationQuantizer]:
    """Return the activation quantizers of a network by name."""
    found = model.named_modules()
    return {name: m for name, m in found if isinstance(m, ActivationQuantizer)}


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the submodule of this dotted name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, new)
