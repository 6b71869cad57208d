"""Quantized convolution and linear layers, and the activation quantizer."""

import copy
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ompq.errors import QuantizationError
from ompq.graph import channel_axis
from ompq.quantizers import Grid, deployed, learned_clip, rounded_to
from ompq.recording import tensors_in, with_tensors

Size: TypeAlias = Sequence[int] | None


class ActivationQuantizer(nn.Module):
    """Rounds a tensor to one grid, wherever it is attached."""

    scale: nn.Parameter  # step of the grid, ()
    zero_point: Tensor  # code of the value 0, (); an integer
    noise: Tensor | None

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.bits = grid.bits
        self.scale = nn.Parameter(grid.scale.detach().clone(), requires_grad=False)
        self.register_buffer("zero_point", grid.zero_point.detach().clone())
        self.enabled = True
        # Probability with which a value is rounded; the rest pass as they are. Below 1
        # only while a block is reconstructed with QDrop.
        self.keep = 1.0
        # What gradients move in training: the ``step`` (LSQ) or the end of the range
        # (``clip``, PACT); ``straight`` passes them on as if nothing were rounded.
        self.gradient: Literal["step", "clip", "straight"] = "step"

    def forward(self, x: Tensor) -> Tensor:
        """Return the rounded values, shaped as ``x``."""
        if not self.enabled:
            return x
        # Under autocast, half a precision would not hold 8 bits and their rounding.
        x = x.to(torch.promote_types(x.dtype, self.scale.dtype))
        grid = Grid(self.scale, self.zero_point, self.bits)
        if not torch.is_grad_enabled():
            rounded = deployed(grid, x)
        elif self.gradient == "straight":
            rounded = deployed(grid, x.detach()) + (x - x.detach())
        elif self.gradient == "clip":
            # The optimizer moves the limit by what it would move it by if the limit,
            # and not a step of it, were the parameter.
            steps = grid.qmax - self.zero_point
            limit = self.scale.detach() * steps
            limit = limit + (self.scale - self.scale.detach()) / steps
            rounded = learned_clip(x, limit, self.zero_point, self.bits)
        else:  # the batch does not count
            rounded = rounded_to(grid, x, prod(x.shape[1:]))
        if self.keep >= 1.0:
            return rounded
        kept = torch.rand_like(x) < self.keep
        return torch.where(kept, rounded, x)

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Forward hook: round the first tensor that a module returns."""
        tensors = list(tensors_in(output))
        if not tensors or not tensors[0].is_floating_point():
            return output
        return with_tensors(output, [self(tensors[0]), *tensors[1:]])

    def before(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook: round the first tensor that a module gets."""
        return self.after(_module, args, (args, kwargs))

    def extra_repr(self) -> str:
        """Tell the width and the grid."""
        return (
            f"bits={self.bits}, scale={self.scale.item():.4g}, "
            f"zero_point={self.zero_point:g}"
        )


class QuantizedLayer(nn.Module):
    """What a quantized layer adds to the layer it replaces."""

    weight: nn.Parameter  # the stored weight; float
    bias: nn.Parameter | None
    weight_scale: nn.Parameter  # step of each output channel, (C,)
    weight_zero_point: Tensor  # code of 0 for each channel, (C,); multiples of 0.5
    bits: int  # width of the weight's codes
    narrow: bool  # whether the highest code is left out
    # Computes the layer with the batch norm that was folded into it, while the two are
    # trained together; else None.
    norm: nn.Module | None
    # Weight and bias while rounding is being learned; else None.
    learning: tuple[Tensor, Tensor | None] | None = None
    # Computes the layer in integers, once the network is finalized
    # (:func:`ompq.finalize`) and no gradient is needed; else None.
    integers: Callable[["QuantizedLayer", Tensor], Tensor] | None = None

    def forward(self, input: Tensor, output_size: Size = None) -> Tensor:
        """Compute the layer with its rounded weight; arguments as in the float one."""
        if self.norm is not None:
            return cast(Tensor, self.norm(self, input, output_size))
        if self.learning is not None:
            return linear_map(self, input, *self.learning, output_size)
        if self.integers is not None and not torch.is_grad_enabled():
            return self.integers(self, input)
        return linear_map(self, input, self.rounded_weight(), self.bias, output_size)

    def rounded_weight(self) -> Tensor:
        """Return the weight on its grid, shaped as the weight."""
        return rounded_to(self.grid_like_weight(), self.weight)

    def grid_like_weight(self) -> Grid:
        """Return the grid shaped so that it broadcasts with the weight."""
        shape = [1] * self.weight.dim()
        axis = channel_axis(self)
        shape[axis] = self.weight.shape[axis]
        return Grid(
            self.weight_scale.reshape(shape),
            self.weight_zero_point.reshape(shape),
            self.bits,
            self.narrow,
        )

    def codes(self) -> Tensor:
        """Return the weight's codes, uint8, shaped as the weight."""
        return self.grid_like_weight().quantize(self.weight)

    def extra_repr(self) -> str:
        """Tell the width next to what the replaced layer tells."""
        return f"{super().extra_repr()}, bits={self.bits}"


def linear_map(
    layer: nn.Module,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    output_size: Size = None,
) -> Tensor:
    """Apply a layer's convolution or product with another weight and bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(layer, _ConvTransposeNd):
        dims = weight.dim() - 2
        size = None if output_size is None else list(output_size)
        place = (layer.stride, layer.padding, layer.kernel_size, dims, layer.dilation)
        padding = layer._output_padding(x, size, *place)  # type: ignore[arg-type]
        function = getattr(F, f"conv_transpose{dims}d")
        more = (layer.stride, layer.padding, padding, layer.groups, layer.dilation)
        return cast(Tensor, function(x, weight, bias, *more))
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


_REPLACEMENTS: dict[type[nn.Module], type[QuantizedLayer]] = {
    kind.__mro__[2]: kind for kind in QuantizedLayer.__subclasses__()
}


def quantized_layer(layer: nn.Module, grid: Grid) -> QuantizedLayer:
    """Return a quantized copy of a layer, its norm folded in, on a grid of (C,)."""
    kind = _REPLACEMENTS.get(type(layer))
    if kind is None:
        raise QuantizationError(
            f"{type(layer).__name__} overrides forward and cannot be replaced; "
            "pin it to 32 bits to keep it float"
        )
    made = copy.deepcopy(layer)
    # The copy keeps every attribute of the layer, whatever its constructor took;
    # only what it computes changes.
    made.__class__ = kind
    quantized = cast(QuantizedLayer, made)
    quantized.bits = grid.bits
    quantized.narrow = grid.narrow
    quantized.norm = None
    scale, zero_point = grid.scale.detach().clone(), grid.zero_point.detach().clone()
    quantized.weight_scale = nn.Parameter(scale.flatten(), requires_grad=False)
    quantized.register_buffer("weight_zero_point", zero_point.flatten())
    return quantized


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a network by name, in order of definition."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}


def activation_quantizers(model: nn.Module) -> dict[str, ActivationQuantizer]:
    """Return the activation quantizers of a network by name."""
    found = model.named_modules()
    return {name: m for name, m in found if isinstance(m, ActivationQuantizer)}


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place that a dotted name says."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, new)
