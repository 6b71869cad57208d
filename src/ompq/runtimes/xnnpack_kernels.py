"""XNNPACK's arithmetic of 8-bit codes, where it is not that of the integer engine.

LiteRT and ExecuTorch compute with XNNPACK on CPUs. Its convolutions and linear layers
agree with the engine already: the sum is scaled by one product in float32. Residual
sums use fixed-point numbers of 21 bits, and averages one product in float32. These
operators replace those of the engine, so that :class:`IntegerNetwork` computes what the
runtime computes.
"""

from collections.abc import Callable, Sequence
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
from ompq.integer.operators import Average, Convolution, Layer, Operator, Step, Sum

_SUM_BITS = 20  # bits after the leading one of the larger multiplier of a sum


class XnnpackSum(Sum):
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
class XnnpackMean(Average):
    """A mean over the whole image, whose sum is scaled by one product in float32."""

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return the ratio that converts sums to codes, as float32."""
        (source,) = sources
        scales = torch.tensor([source.scale, target.scale], dtype=torch.float32)
        return float_dyadic(scales[0] / (scales[1] * self.divisor))

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Return codes as float32 arithmetic rounds them."""
        return float_rescaled(sums, ratio, target.zero_point)


def xnnpack_steps(steps: Steps, layers: Callable[[Layer], Operator]) -> Steps:
    """Return the steps of a network with XNNPACK's arithmetic; ``layers`` of layers."""

    def of(step: Step) -> Operator:
        operator = step.operator
        if isinstance(operator, Sum):
            return XnnpackSum()
        if isinstance(operator, Average) and operator.whole:
            return XnnpackMean(**vars(operator))
        if isinstance(operator, Average):
            return _average_layer(operator, step.shape[0])
        return layers(operator) if isinstance(operator, Layer) else operator

    found = (replace(step, operator=of(step)) for step in steps.steps)
    return replace(steps, steps=tuple(found))


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
