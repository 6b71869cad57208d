"""What LiteRT stores in fewer than 8 bits, and its arithmetic besides XNNPACK's.

Weights of 4 bits in convolutions, and in linear layers with an odd number of inputs,
are unpacked at every run, and sums are scaled by fixed-point numbers of 31 bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ompq.integer.arithmetic import CodeGrid, Dyadic
from ompq.integer.lowering import Steps
from ompq.integer.operators import Convolution, Layer, Product
from ompq.runtimes.xnnpack_kernels import xnnpack_steps

_FIXED_BITS = 31
_LARGEST_NIBBLE = 7


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
    return xnnpack_steps(steps, _of_litert)


def stored_bits(layer: Layer) -> int:
    """Return in how many bits a weight is stored: 2 (linear layers only), 4 or 8.

    The lowest code of 2 and 4 bits is not used. Rows of 2 bits fill whole bytes.
    """
    weight, largest = layer.weight, int(layer.weight.values.abs().max())
    linear = isinstance(layer, Product)
    if linear and weight.bits <= 2 and largest <= 1 and not weight.values.shape[1] % 4:
        return 2
    return 4 if weight.bits <= 4 and largest <= _LARGEST_NIBBLE else 8


def _of_litert(layer: Layer) -> Layer:
    if stored_bits(layer) != 4:
        return layer
    if isinstance(layer, Convolution):
        return NibbleConvolution(**vars(layer))
    odd = layer.weight.values.shape[1] % 2
    return NibbleProduct(**vars(layer)) if odd else layer
