"""Integer arithmetic: dyadic scales, integer weights and biases."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import QuantizationError
from ompq.integer.operators import CodeGrid, IntegerWeight
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.quantization.sites import Link
from ompq.quantizers import LARGEST_HALF_BITS, integer_weight

_MULTIPLIER_BITS = 31
_FLOAT_BITS = 24  # of a float32's significand
# A product of 32 and 31 bits, and the half that rounds it, stay below 2^63.
_LARGEST_SHIFT = 61


@dataclass(frozen=True, eq=False)
class Dyadic:
    """The ratio ``multiplier / 2^shift``.

    Attributes:
        multiplier: int64, of any shape; below 2^31.
        shift: int64, of the same shape or ().
    """

    multiplier: Tensor
    shift: Tensor


def dyadic(ratio: Tensor, *, together: bool = False) -> Dyadic:
    """Return the nearest multiplier and shift of each ratio.

    Args:
        ratio: Positive float64 of any shape.
        together: Whether all get the shift of the largest, so that products can be
            added before they are shifted.

    Example:
        >>> found = dyadic(torch.tensor(0.75, dtype=torch.float64))
        >>> found.multiplier.item() / 2 ** found.shift.item()
        0.75
    """
    largest = ratio.max() if together else ratio
    exponent = torch.frexp(largest).exponent.long()  # ratio < 2^exponent
    shift = (_MULTIPLIER_BITS - exponent).clamp(1, _LARGEST_SHIFT)
    # Rounding may reach 2^31 itself; what is larger than that saturates any code.
    limit = float((1 << _MULTIPLIER_BITS) - 1)
    multiplier = torch.ldexp(ratio, shift).round().clamp(max=limit)
    return Dyadic(multiplier.long(), shift)


def float_dyadic(ratio: Tensor) -> Dyadic:
    """Return float32 ratios exactly: 24 bits of each, and the shift.

    Args:
        ratio: Positive float32 of any shape.
    """
    mantissa, exponent = torch.frexp(ratio)
    shift = _FLOAT_BITS - exponent.long()
    # Below 2^-38 a ratio takes every 32-bit sum to 0, as a multiplier of 0 does.
    tiny = shift > _LARGEST_SHIFT
    multiplier = torch.ldexp(mantissa.double(), torch.tensor(_FLOAT_BITS)).long()
    return Dyadic(multiplier.masked_fill(tiny, 0), shift.clamp(0, _LARGEST_SHIFT))


def float_rescaled(sums: Tensor, ratio: Dyadic, zero_point: int = 0) -> Tensor:
    """Return ``sums * ratio + zero`` as float32 arithmetic rounds it, int64.

    The sum becomes 24 bits wide, so does its product with the ratio, and that is
    rounded to a whole number: what 8-bit kernels do with floats, done with integers.

    Args:
        sums: Integers of any shape, below 2^31 in magnitude.
        ratio: From :func:`float_dyadic`; broadcasts against the sums.
        zero_point: Whole number that is added at the end.
    """
    product = _narrowed(_narrowed(sums.long()) * ratio.multiplier)
    return rescaled(product, ratio.shift) + zero_point


def _narrowed(values: Tensor) -> Tensor:
    """Round to 24 significant bits, half to even."""
    powers = torch.ones(63, dtype=torch.int64) << torch.arange(63)
    width = torch.bucketize(values.abs().contiguous(), powers, right=True)
    excess = (width - _FLOAT_BITS).clamp(min=0)
    return rescaled(values, excess) << excess


def rescaled(product: Tensor, shift: Tensor, zero_point: int = 0) -> Tensor:
    """Return ``product / 2^shift + zero`` rounded half to even, int64.

    Args:
        product: int64 of any shape, below 2^62 in magnitude.
        shift: int64, not negative, that broadcasts against it.
        zero_point: Whole number that is added before rounding, which decides on halves.

    Example:
        >>> rescaled(torch.tensor([1, 3, 5, 6]), torch.tensor(1))
        tensor([0, 2, 2, 3])
    """
    one = torch.ones_like(shift)
    whole = one << shift
    raised = product + (whole >> 1)
    result = (raised >> shift) + zero_point
    halves = ((raised & (whole - 1)) == 0) & (shift > 0)
    return result - (halves & (result & 1).bool()).long()


# Bytes are stretched up to this magnitude. Two products with codes of at most 255 then
# fit into 16 bits, as the 8-bit kernels of processors without VNNI need.
STRETCHED = 64
# Limit of the sum of all products and the bias, whatever the input.
LARGEST_SUM = (1 << 31) - 1


def whole_numbers(
    codes: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    bias: Tensor | None,
    grid: CodeGrid,
) -> IntegerWeight:
    """Return a layer's weight and bias in whole numbers.

    Args:
        codes: The weight's codes, uint8, (O, ...).
        zero_point: Their zeros, (O,).
        scale: Their steps, (O,).
        bits: Width of the codes.
        bias: Float, (O,), or None.
        grid: Grid of the layer's input.

    Raises:
        QuantizationError: The sum of products may exceed 32 bits.
    """
    like = (-1, *[1] * (codes.dim() - 1))
    halves, part = integer_weight(codes, zero_point.view(like), bits)
    stretch = 1
    if bits <= LARGEST_HALF_BITS:
        stretch = max(1, STRETCHED // max(1, int(halves.int().abs().max())))
    rows = halves.int() * stretch
    step = scale.double() * part / stretch
    steps = torch.zeros_like(step)
    if bias is not None:
        steps = bias.double() / (grid.scale * step)
    coarser = torch.pow(2.0, _coarsening(rows, steps, grid)).double()
    rows = (rows / coarser.view(like)).round()
    dead = rows.flatten(1).abs().amax(1) == 0
    unit = round(1 / part)
    return IntegerWeight(
        codes=codes,
        bits=bits,
        unit=unit,
        offset=(zero_point * unit).round().int(),
        stretch=torch.full_like(zero_point, stretch).int().masked_fill(dead, 0),
        values=rows.to(torch.int8),
        scale=step * coarser,
        bias=(steps / coarser).round().int(),
    )


def largest_sum(weight: IntegerWeight, grid: CodeGrid) -> Tensor:
    """Return the largest magnitude that each channel's accumulator can have, (O,)."""
    products = weight.values.flatten(1).long().abs().sum(1) * grid.reach
    return products + weight.bias.long().abs()


def _coarsening(rows: Tensor, bias: Tensor, grid: CodeGrid) -> Tensor:
    """Return by which powers of two channels must be made coarser to fit, (O,).

    A channel that is nearly dead has tiny weights beside an ordinary bias, which in
    steps of the accumulator then exceeds 32 bits. Its weights lose bits until the bias
    fits: an error of about a millionth of the bias.
    """
    products = rows.flatten(1).abs().sum(1).double() * grid.reach
    if products.max() > LARGEST_SUM:
        raise QuantizationError(
            f"sums of {rows[0].numel()} products reach {products.max():.3g}, but "
            f"32 bits hold {LARGEST_SUM}: give the layer fewer bits"
        )
    excess = (products + bias.abs() + 1) / LARGEST_SUM
    return excess.log2().ceil().clamp(min=0)


_WHOLE_FLOATS = 1 << 24  # up to here float32 holds every whole number


def code_grid(quantizer: ActivationQuantizer) -> CodeGrid:
    """Return the grid of a quantizer as plain numbers."""
    zero_point = round(float(quantizer.zero_point))
    return CodeGrid(float(quantizer.scale), zero_point, quantizer.bits)


def layer_weight(layer: QuantizedLayer, grid: CodeGrid) -> IntegerWeight:
    """Return a layer's weight and bias in whole numbers.

    Args:
        layer: A convolution or linear layer with weight (O, ...).
        grid: Grid of its input.

    Raises:
        QuantizationError: The sum of products may exceed 32 bits.
    """
    return whole_numbers(
        layer.codes(),
        layer.weight_zero_point,
        layer.weight_scale.detach(),
        layer.bits,
        None if layer.bias is None else layer.bias.detach(),
        grid,
    )


class IntegerMap:
    """Computes a layer as 8-bit kernels do, to the last bit, with whole floats.

    The sum of products is exact. Its scale is applied as ONNX Runtime does it: one
    product in float32, rounded to a step of the output's grid.

    The weight is quantized once, and again when a tensor it depends on has changed
    (which torch counts; a write through ``.data`` is not counted).

    Attributes:
        source: Quantizer of the layer's input.
        target: Quantizer of its output; None for logits.
    """

    def __init__(
        self, source: ActivationQuantizer, target: ActivationQuantizer | None
    ) -> None:
        self.source, self.target = source, target
        self._key: tuple[Any, ...] = ()
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, layer: QuantizedLayer, x: Tensor) -> Tensor:
        """Return the layer's output for x (N, C, ...), which lies on its grid."""
        weight, bias, ratio = self._weight(layer)
        # In place where it can be: these tensors are large, and no gradient is kept.
        levels = (x / self.source.scale).round_().to(weight.dtype)
        sums = linear_map(layer, levels, weight, None)
        # A fast algorithm of convolution may leave a sum near its whole number.
        sums = sums.round_().add_(_like(layer, bias, sums)).float()
        if self.target is None:
            return sums.mul_(_like(layer, ratio, sums)).to(x.dtype)
        steps = sums.mul_(_like(layer, ratio, sums)).round_()
        return steps.to(x.dtype).mul_(self.target.scale)

    def _weight(self, layer: QuantizedLayer) -> tuple[Tensor, Tensor, Tensor]:
        """Return weight (O, ...) and bias (O,) in whole floats, and the ratio (O,)."""
        target = self.target
        read = [layer.weight, layer.weight_scale, layer.weight_zero_point, layer.bias]
        read += [self.source.scale, self.source.zero_point]
        read += [] if target is None else [target.scale]
        key = tuple(
            (t.data_ptr(), t._version, t.dtype, t.device) for t in read if t is not None
        )
        if self._prepared is None or key != self._key:
            grid = code_grid(self.source)
            found = layer_weight(layer, grid)
            kind = torch.float32
            if int(largest_sum(found, grid).max()) >= _WHOLE_FLOATS:
                kind = torch.float64
            ratio = self.source.scale.detach().float() * found.scale.float()
            if target is not None:
                ratio = ratio / target.scale.detach().float()
            self._prepared = found.values.to(kind), found.bias.to(kind), ratio
            self._key = key
        return self._prepared


def link_layers(model: nn.Module, links: Iterable[Link]) -> None:
    """Let layers compute with whole numbers; the others compute with floats.

    Args:
        model: The quantized network; changed in place.
        links: Layers with the quantizers of their input and output.
    """
    layers, quantizers = quantized_layers(model), activation_quantizers(model)
    for layer in layers.values():
        layer.integers = None
    for link in links:
        layers[link.layer].integers = IntegerMap(
            quantizers[link.source], quantizers[link.target] if link.target else None
        )


def _like(layer: nn.Module, values: Tensor, output: Tensor) -> Tensor:
    """Return values (C,) in a shape that broadcasts with a layer's output."""
    shape = [1] * output.dim()
    shape[output.dim() - 1 if isinstance(layer, nn.Linear) else 1] = -1
    return values.reshape(shape)
