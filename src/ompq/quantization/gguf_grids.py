"""The grids that the types of GGUF files hold.

A block of 16 or 32 weights has a scale and, in some types, a minimum. Both are 16-bit
floats, or, where 256 weights make a super-block, small multiples of a number that the
blocks of a super-block share.
"""

import torch
from torch import Tensor

from ompq.entropy_coding.rates import LARGEST_HALF
from ompq.grids import Grid, like_weight
from ompq.network.units import SUPER_BLOCK
from ompq.weight_ranges import channel_rows

# The largest multiples in super-blocks, by the width of the weights: Q2_K to Q6_K.
LARGEST_MULTIPLES = {2: 15, 3: 31, 4: 63, 5: 63, 6: 127}
WITH_MINIMA = (2, 4, 5)  # the widths of which blocks of super-blocks have minima
_BYTES = 8  # this width has no super-blocks
# Scales to try, relative to that of the largest weight: from the smallest that pays for
# weights of a normal distribution to one whose shorter end reaches the largest.
_LEAST_PARTS = {2: 0.4, 3: 0.5, 4: 0.65, 5: 0.75, 6: 0.85, 8: 0.95}
_MOST_PART, _TRIED, _ENDS, _REFITS = 1.15, 12, 5, 3
_AT_ONCE = 1 << 20  # weights at a time, few enough for a processor's cache
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
    whole = super_blocks and bits < _BYTES
    search = _with_minimum if whole and bits in WITH_MINIMA else _with_sign
    rows = channel_rows(weight, 0, group_size)
    some = max(1, _AT_ONCE // rows.shape[1])
    found = [search(part, bits) for part in torch.split(rows, some)]
    scale, zero_point = (torch.cat(parts) for parts in zip(*found, strict=True))
    used = rows.any(1, keepdim=True)
    zero_point = torch.where(used, zero_point, float(1 << (bits - 1)))
    if whole:
        shape = (len(weight), -1, SUPER_BLOCK // group_size)
        scale, zero_point = _in_super_blocks(
            torch.where(used, scale, 0.0).reshape(shape),
            zero_point.reshape(shape),
            bits,
        )
    else:
        scale = torch.where(used, scale, 1.0).clamp(_LEAST_HALF, LARGEST_HALF).half()
    scale, zero_point = (
        like_weight(one.reshape(len(weight), -1).to(rows), weight.shape, 0, group_size)
        for one in (scale, zero_point)
    )
    return Grid(scale, zero_point, bits)


def _with_sign(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points (R, 1) of blocks (R, size) without minima.

    The codes of B bits go from -2^(B-1) to 2^(B-1) - 1, and scales may be negative:
    then the longer end is that of positive weights, and the zero point is one less.
    """
    middle = 1 << (bits - 1)
    whole = rows.abs().amax(1, keepdim=True).clamp(min=_LEAST_HALF) / middle
    best = torch.full_like(whole, torch.inf)
    scale = whole
    parts = torch.linspace(_LEAST_PARTS[bits], _MOST_PART, _TRIED).tolist()
    tried = [sign * part * whole for part in parts for sign in (1, -1)]
    for step in range(len(tried) + _REFITS):
        if step < len(tried):
            own = tried[step]
        else:  # least squares
            codes = (rows / scale).round_().clamp_(-middle, middle - 1)
            own = (rows * codes).sum(1, keepdim=True)
            own = own / codes.square().sum(1, keepdim=True).clamp(min=1)
            own = torch.where(own == 0, scale, own)
        codes = (rows / own).round_().clamp_(-middle, middle - 1)
        lost = codes.mul_(own).sub_(rows).square_().sum(1, keepdim=True)
        scale = torch.where(lost < best, own, scale)
        best = torch.minimum(lost, best)
    zero_point = torch.where(scale < 0, middle - 1.0, float(middle))
    return scale.abs(), zero_point


def _with_minimum(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points (R, 1) of blocks (R, size) with minima."""
    qmax = (1 << bits) - 1
    low, high = (end[:, None] for end in rows.aminmax(dim=1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale, least = ((high - low) / qmax).clamp(min=_LEAST_HALF), low
    best = torch.full_like(scale, torch.inf)
    parts = torch.linspace(_LEAST_PARTS[bits], 1.0, _ENDS).tolist()
    for step in range(_ENDS**2 + _REFITS):
        if step < _ENDS**2:
            bottom, top = parts[step // _ENDS] * low, parts[step % _ENDS] * high
            own = ((top - bottom) / qmax).clamp(min=_LEAST_HALF)
        else:
            own, bottom = _fitted(rows, scale, least, qmax)
        codes = ((rows - bottom) / own).round_().clamp_(0, qmax)
        lost = codes.mul_(own).add_(bottom).sub_(rows).square_().sum(1, keepdim=True)
        better = lost < best
        scale, least = (
            torch.where(better, own, scale),
            torch.where(better, bottom, least),
        )
        best = torch.minimum(lost, best)
    return scale, -least / scale


def _fitted(
    rows: Tensor, scale: Tensor, least: Tensor, qmax: int
) -> tuple[Tensor, Tensor]:
    """Fit scales and minima to the codes by least squares; minima are not positive."""
    codes = ((rows - least) / scale).round_().clamp_(0, qmax)
    code, row = codes.mean(1, keepdim=True), rows.mean(1, keepdim=True)
    product = (codes * rows).mean(1, keepdim=True)
    square = codes.square().mean(1, keepdim=True)
    slope = (product - code * row) / (square - code.square())
    bottom = row - slope * code
    through = product / square  # a line through 0
    slope = torch.where(bottom > 0, through, slope)
    usable = (slope > 0) & slope.isfinite()
    bottom = torch.where(usable, bottom.clamp(max=0), least)
    return torch.where(usable, slope, scale), bottom


def _in_super_blocks(
    scale: Tensor, zero_point: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Round scales and minima to multiples of what a super-block shares.

    The shape is (C, super-blocks, blocks); scales of blocks of zeros are 0.
    """
    most = LARGEST_MULTIPLES[bits]
    digits = _HALF_DIGITS - most.bit_length()
    shared = _short_floats(scale.amax(-1, keepdim=True) / most, digits)
    found = shared * (scale / shared).round_().clamp_(1, most)
    if bits not in WITH_MINIMA:
        return found, zero_point
    minima = scale * zero_point
    step = (minima.amax(-1, keepdim=True) / most).half().to(minima)
    step = step.clamp(min=_LEAST_HALF)
    return found, step * (minima / step).round_().clamp_(0, most) / found


def _short_floats(values: Tensor, digits: int) -> Tensor:
    """Round positive numbers up to floats with a few binary digits."""
    mantissa, exponent = torch.frexp(values.clamp(min=_LEAST_SHARED))
    return torch.ldexp((mantissa * 2**digits).ceil() / 2**digits, exponent)
