"""The grids that the types of GGUF files hold.

A block of 16 or 32 weights has a scale and, in some types, a minimum. Both are 16-bit
floats, or, where 256 weights make a super-block, small multiples of a number that the
blocks of a super-block share.
"""

import torch
from torch import Tensor

from ompq.entropy_coding.rates import LARGEST_HALF
from ompq.grids import Grid, like_weight, of_groups
from ompq.network.units import SUPER_BLOCK
from ompq.weight_ranges import channel_rows, search_weight

# The largest multiples in super-blocks, by the width of the weights: Q2_K to Q6_K.
LARGEST_MULTIPLES = {2: 15, 3: 31, 4: 63, 5: 63, 6: 127}
WITH_MINIMA = (2, 4, 5)  # the widths of which blocks of super-blocks have minima
_BYTES = 8  # from this width on, signs do not matter
# A multiple of the shared number has as many digits as 16-bit floats, so scales are
# such floats, which all kinds of files hold.
_HALF_DIGITS, _LEAST_HALF = 11, 2.0**-24
_LEAST_SHARED = 2.0**-20


def gguf_grid(
    weight: Tensor, bits: int, *, group_size: int, super_blocks: bool
) -> Grid:
    """Return the grid of least squared error that a type of GGUF holds for a weight.

    Args:
        weight: (C, K).
        group_size: Number of weights of a block.
        super_blocks: Whether 256 weights make a super-block.
    """
    if not super_blocks or bits >= _BYTES:
        grid = _signed_grid(weight, bits, group_size)
        scale = grid.scale.clamp(_LEAST_HALF, LARGEST_HALF).half().to(grid.scale)
        return Grid(scale, grid.zero_point, bits)
    affine = bits in WITH_MINIMA
    if affine:
        grid = search_weight(weight, bits, group_size=group_size, kind="affine")
    else:
        grid = _signed_grid(weight, bits, group_size)
    return _in_super_blocks(grid, weight, group_size)


def _signed_grid(weight: Tensor, bits: int, group_size: int) -> Grid:
    """Return a grid whose scales may be negative.

    The codes of B bits go from -2^(B-1) to 2^(B-1) - 1. With a negative scale the
    longer end is that of positive weights: the zero point is then one less.
    """
    middle, size = 1 << (bits - 1), group_size
    grid = search_weight(weight, bits, group_size=size, kind="midtread")
    if bits >= _BYTES:
        return grid
    other = search_weight(-weight, bits, group_size=size, kind="midtread")
    other = Grid(other.scale, torch.full_like(other.scale, middle - 1.0), bits)
    lost, less = (
        channel_rows(one.fake(weight) - weight, 0, size).square().sum(1)
        for one in (grid, other)
    )
    better = (less < lost).reshape(len(weight), -1)
    better = like_weight(better, weight.shape, group_size=size)
    return Grid(
        torch.where(better, other.scale, grid.scale),
        torch.where(better, other.zero_point, grid.zero_point),
        bits,
    )


def _in_super_blocks(grid: Grid, weight: Tensor, group_size: int) -> Grid:
    """Round scales and minima to multiples of what a super-block shares."""
    most, bits = LARGEST_MULTIPLES[grid.bits], grid.bits
    shape = (len(weight), -1, SUPER_BLOCK // group_size)
    scale, zero_point = (
        of_groups(values, group_size).reshape(shape)
        for values in (grid.scale, grid.zero_point)
    )
    blocks = channel_rows(weight, 0, group_size)
    used = blocks.any(1).reshape(scale.shape)
    scale = torch.where(used, scale, 0.0)
    shared = _short_floats(
        scale.amax(-1, keepdim=True) / most, _HALF_DIGITS - most.bit_length()
    )
    multiples = (scale / shared).round_().clamp_(1, most)
    found = shared * multiples
    if bits in WITH_MINIMA:
        minima = torch.where(used, scale * zero_point, 0.0)
        step = (minima.amax(-1, keepdim=True) / most).half().to(minima)
        step = step.clamp(min=_LEAST_HALF)
        zero_point = step * (minima / step).round_().clamp_(0, most) / found
    else:
        zero_point = torch.where(used, zero_point, float(1 << (bits - 1)))
    flat = found.reshape(len(weight), -1), zero_point.reshape(len(weight), -1)
    scale, zero_point = (
        like_weight(one, weight.shape, group_size=group_size) for one in flat
    )
    return Grid(scale, zero_point, bits)


def _short_floats(values: Tensor, digits: int) -> Tensor:
    """Round positive numbers up to floats with a few binary digits."""
    mantissa, exponent = torch.frexp(values.clamp(min=_LEAST_SHARED))
    return torch.ldexp((mantissa * 2**digits).ceil() / 2**digits, exponent)
