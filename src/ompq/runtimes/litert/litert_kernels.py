"""The arithmetic of LiteRT's 8-bit kernels, where it is not that of the integer engine.

Convolutions and linear layers agree already: the sum is scaled by one product in
float32. Residual sums use fixed-point numbers of 21 bits, and weights of 4 bits in
convolutions use fixed-point numbers of 31 bits. These operators replace those of the
integer engine, so that :class:`IntegerNetwork` computes what the runtime computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ompq.integer.arithmetic import (
    CodeGrid,
    Dyadic,
    IntegerWeight,
    float_dyadic,
    float_rescaled,
)
from ompq.integer.lowering import Steps
from ompq.integer.operators import Average, Convolution, Layer, Product, Step, Sum

_SUM_BITS = 20  # bits after the leading one of the larger multiplier of a sum
_FIXED_BITS = 31
_LARGEST_NIBBLE = 7


class LitertSum(Sum):
    """A residual sum with multipliers of 21 bits, halves rounded up."""

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return both multipliers, which share a shift."""
        scales = torch.tensor([grid.scale for grid in sources], dtype=torch.float32)
        ratios = scales / torch.tensor(target.scale, dtype=torch.float32)
        exponent = torch.frexp(ratios.max()).exponent.long() - 1
        shift = _SUM_BITS - exponent
        return Dyadic(torch.ldexp(ratios.double(), shift).round().long(), shift)

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Add both products, shift, and round halves up."""
        product = (sums.long() * ratio.multiplier).sum(-1)
        half = torch.ones_like(ratio.shift) << (ratio.shift - 1)
        return ((product + half) >> ratio.shift) + target.zero_point


@dataclass(frozen=True, eq=False)
class LitertMean(Average):
    """A mean over the whole image, whose sum is scaled by one product in float32."""

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return the ratio that converts sums to codes, as float32."""
        (source,) = sources
        scales = torch.tensor([source.scale, target.scale], dtype=torch.float32)
        return float_dyadic(scales[0] / (scales[1] * self.divisor))

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Return codes as float32 arithmetic rounds them."""
        return float_rescaled(sums, ratio, target.zero_point)


class _FixedPoint(Layer):
    """Scales sums by fixed-point numbers, as where weights of 4 bits are unpacked."""

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return a multiplier of 31 bits and a power of two for each channel."""
        grids = sources[0].scale, target.scale
        source, result = (float(torch.tensor(s, dtype=torch.float32)) for s in grids)
        ratio = source * self.weight.scale.float().double() / result
        mantissa, exponent = torch.frexp(ratio)
        multiplier = (mantissa * (1 << _FIXED_BITS)).round().long()
        whole = multiplier == 1 << _FIXED_BITS
        multiplier = torch.where(whole, multiplier // 2, multiplier)
        found = Dyadic(multiplier, exponent.long() + whole)
        return found.view(-1, *[1] * (self.weight.values.dim() - 2))

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Multiply, then shift; both round to nearest, halves up."""
        left, right = ratio.shift.clamp(min=0), (-ratio.shift).clamp(min=0)
        product = (sums.long() << left) * ratio.multiplier
        high = (product + (1 << (_FIXED_BITS - 1))) >> _FIXED_BITS
        half = (torch.ones_like(right) << right) >> 1
        return ((high + half) >> right) + target.zero_point


class NibbleConvolution(_FixedPoint, Convolution):
    """A convolution of 4-bit weights, which no fast kernel computes."""


class NibbleProduct(_FixedPoint, Product):
    """A linear layer of 4-bit weights and an odd number of inputs, also slow."""


def litert_steps(steps: Steps) -> Steps:
    """Return the steps of a network with the arithmetic of LiteRT."""
    return replace(steps, steps=tuple(map(_of_litert, steps.steps)))


def is_nibbles(weight: IntegerWeight) -> bool:
    """Whether a weight is stored in 4 bits, of which LiteRT does not use -8."""
    return weight.bits <= 4 and int(weight.values.abs().max()) <= _LARGEST_NIBBLE


def _of_litert(step: Step) -> Step:
    operator = step.operator
    if isinstance(operator, Sum):
        return replace(step, operator=LitertSum())
    if isinstance(operator, Average) and operator.whole:
        return replace(step, operator=LitertMean(**vars(operator)))
    if isinstance(operator, Average):
        return replace(step, operator=_average_layer(operator, step.shape[0]))
    if isinstance(operator, Layer) and is_nibbles(operator.weight):
        return replace(step, operator=_of_nibbles(operator))
    return step


def _of_nibbles(layer: Layer) -> Layer:
    if isinstance(layer, Convolution):
        return NibbleConvolution(**vars(layer))
    odd = layer.weight.values.shape[1] % 2
    return NibbleProduct(**vars(layer)) if odd else layer


def _average_layer(average: Average, channels: int) -> Convolution:
    """Return an average over windows as a depthwise convolution.

    The runtime's own average pooling cannot change the grid, and rounds differently.
    """
    ones = torch.ones(channels, 1, *average.window, dtype=torch.int8)
    each = torch.ones(channels, dtype=torch.int32)
    weight = IntegerWeight(
        codes=ones.to(torch.uint8),
        bits=8,
        unit=1,
        offset=each * 0,
        stretch=each,
        values=ones,
        scale=each.double() / average.divisor,
        bias=each * 0,
    )
    return Convolution(
        weight, average.stride, average.padding * 2, (1, 1), groups=channels
    )
