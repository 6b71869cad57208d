"""Integer arithmetic: grids of codes, scales as integers, weights as bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from typing import TypeAlias

import torch
from torch import Tensor

from ompq.errors import QuantizationError
from ompq.quantizers import Grid, integer_weight
from ompq.skeleton import STRETCHED
from ompq.streams import LARGEST_HALF_BITS

Pair: TypeAlias = tuple[int, int]

WIDE = 32  # bits of an output that is not rounded to a grid
_MULTIPLIER_BITS = 31  # what a signed 32-bit integer holds
_FLOAT_BITS = 24  # of a float32's significand
# A product of 32 and 31 bits, and the half that rounds it, stay below 2^63.
_LARGEST_SHIFT = 61
_LARGEST_PAIR = (1 << 15) - 1  # of two products: what 16 bits hold
LARGEST_SUM = (1 << 31) - 1  # of all products and the bias, whatever the input


@dataclass(frozen=True)
class CodeGrid:
    """What the codes of an activation stand for: ``scale * (code - zero_point)``."""

    scale: float
    zero_point: int
    # Width of a code, 2 to 8, unsigned; or 32, signed, for outputs of the network that
    # no quantizer rounds.
    bits: int

    @property
    def wide(self) -> bool:
        """Whether codes are accumulators that were not rounded to a few bits."""
        return self.bits == WIDE

    @property
    def qmin(self) -> int:
        """The lowest code."""
        return -(1 << 31) if self.wide else 0

    @property
    def qmax(self) -> int:
        """The highest code."""
        return (1 << 31) - 1 if self.wide else (1 << self.bits) - 1

    @property
    def reach(self) -> int:
        """The largest magnitude of ``code - zero_point``."""
        return max(self.zero_point - self.qmin, self.qmax - self.zero_point)

    @property
    def levels(self) -> Tensor:
        """All values that codes can stand for, float64, (2^bits,)."""
        codes = torch.arange(self.qmax + 1) - self.zero_point
        return self.scale * codes.double()

    def limits(self, low: float, high: float) -> tuple[int, int]:
        """Return the codes between which values clipped to [low, high] lie."""
        first, last = (
            min(max(round(end / self.scale + self.zero_point), self.qmin), self.qmax)
            if isfinite(end)
            else default
            for end, default in ((low, self.qmin), (high, self.qmax))
        )
        return first, last


@dataclass(frozen=True, eq=False)
class Dyadic:
    """The ratio ``multiplier / 2^shift``."""

    multiplier: Tensor  # int64, of any shape; below 2^31
    shift: Tensor  # int64, of the same shape or ()

    def view(self, *shape: int) -> "Dyadic":
        """Return the ratios in another shape."""
        return Dyadic(self.multiplier.view(shape), self.shift.view(shape))


def dyadic(ratio: Tensor, *, together: bool = False) -> Dyadic:
    """Return the nearest multiplier and shift of each ratio, positive float64.

    ``together`` gives all the shift of the largest, so that products can be added
    before they are shifted.

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
    """Return float32 ratios, positive and of any shape, exactly: 24 bits, a shift."""
    mantissa, exponent = torch.frexp(ratio)
    shift = _FLOAT_BITS - exponent.long()
    # Below 2^-38 a ratio takes every 32-bit sum to 0, as a multiplier of 0 does.
    tiny = shift > _LARGEST_SHIFT
    multiplier = torch.ldexp(mantissa.double(), torch.tensor(_FLOAT_BITS)).long()
    return Dyadic(multiplier.masked_fill(tiny, 0), shift.clamp(0, _LARGEST_SHIFT))


def float_rescaled(sums: Tensor, ratio: Dyadic, zero_point: int = 0) -> Tensor:
    """Return ``sums * ratio + zero_point`` as float32 arithmetic rounds it, int64.

    The sum, below 2^31 in magnitude, becomes 24 bits wide, so does its product with the
    ratio (of :func:`float_dyadic`), and that is rounded to a whole number: what 8-bit
    kernels do with floats, done with integers.
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
    """Return ``product / 2^shift + zero_point`` rounded half to even, int64.

    The product is below 2^62 in magnitude; the zero point decides on halves.

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


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A weight as signed bytes, and its bias in steps of the accumulator.

    The value of a byte is ``scale * byte``, and the byte of a code is
    ``(code * unit - offset) * stretch``: the distance from the zero point in halves of
    a step, times a whole number that makes the accumulator's step, and with it the
    bias, finer.
    """

    codes: Tensor  # uint8 of the weight's shape, 0 to 2^bits - 1
    bits: int
    unit: int  # 2 where zero points may lie halfway between codes, else 1
    offset: Tensor  # int32, (O,): the zero point, times the unit
    stretch: Tensor  # int32, (O,); 0 for a channel without weights
    values: Tensor  # the bytes, int8 of the weight's shape
    scale: Tensor  # float64, (O,)
    bias: Tensor  # int32, (O,), in steps of the input's scale times ``scale``

    @classmethod
    def of(
        cls, codes: Tensor, grid: Grid, bias: Tensor | None, source: CodeGrid
    ) -> "IntegerWeight":
        """Return a weight, uint8 codes (O, ...), and its bias (O,) in whole numbers."""
        like = (-1, *[1] * (codes.dim() - 1))
        zero_point = grid.zero_point.flatten()
        halves, part = integer_weight(codes, zero_point.view(like), grid.bits)
        stretch = 1
        if grid.bits <= LARGEST_HALF_BITS:
            stretch = max(1, STRETCHED // max(1, int(halves.int().abs().max())))
        rows = halves.int() * stretch
        step = grid.scale.detach().flatten().double() * part / stretch
        steps = torch.zeros_like(step)
        if bias is not None:
            steps = bias.detach().double() / (source.scale * step)
        coarser = torch.pow(2.0, _coarsening(rows, steps, source)).double()
        rows = (rows / coarser.view(like)).round()
        dead = rows.flatten(1).abs().amax(1) == 0
        unit = round(1 / part)
        return cls(
            codes=codes,
            bits=grid.bits,
            unit=unit,
            offset=(zero_point * unit).round().int(),
            stretch=torch.full_like(zero_point, stretch).int().masked_fill(dead, 0),
            values=rows.to(torch.int8),
            scale=step * coarser,
            bias=(steps / coarser).round().int(),
        )

    @cached_property
    def affine(self) -> bool:
        """Whether the formula gives the bytes: not those of a coarsened channel."""
        halves = self.codes.int() * self.unit - self.per_channel(self.offset)
        made = halves * self.per_channel(self.stretch)
        return torch.equal(made, self.values.int())

    def per_channel(self, given: Tensor) -> Tensor:
        """Return what each channel has, (O,), so that it broadcasts with the weight."""
        if given.dim() == self.codes.dim():
            return given
        return given.view(-1, *[1] * (self.codes.dim() - 1))

    def largest_sum(self, source: CodeGrid) -> Tensor:
        """Return the largest magnitude of each channel's accumulator, int64, (O,)."""
        products = self.values.flatten(1).long().abs().sum(1) * source.reach
        return products + self.bias.long().abs()

    def pair_excess(self, source: CodeGrid) -> Tensor:
        """Return how far two products may exceed 16 bits, as a ratio; (O,), 1 is safe.

        Processors with AVX2 or AVX-512 but without VNNI add products of unsigned and
        signed bytes in pairs, in 16 bits, and saturate. Which weights meet in a pair is
        the runtime's choice, so the two largest of one sign count.
        """
        rows = self.values.flatten(1).int()
        both = torch.stack([rows, -rows]).clamp(min=0)
        pairs = both.topk(min(2, rows.shape[1]), dim=2).values.sum(2)  # (2, O)
        return pairs.amax(0).double() * source.qmax / _LARGEST_PAIR

    def cpu(self) -> "IntegerWeight":
        """Return it in host memory."""
        found = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
            if name != "affine"
        }
        return IntegerWeight(**found)  # type: ignore[arg-type]


def _coarsening(rows: Tensor, bias: Tensor, source: CodeGrid) -> Tensor:
    """Return by which powers of two channels must be made coarser to fit, (O,).

    A channel that is nearly dead has tiny weights beside an ordinary bias, which in
    steps of the accumulator then exceeds 32 bits. Its weights lose bits until the bias
    fits: an error of about a millionth of the bias.
    """
    products = rows.flatten(1).abs().sum(1).double() * source.reach
    if products.max() > LARGEST_SUM:
        raise QuantizationError(
            f"sums of {rows[0].numel()} products reach {products.max():.3g}, but "
            f"32 bits hold {LARGEST_SUM}: give the layer fewer bits"
        )
    excess = (products + bias.abs() + 1) / LARGEST_SUM
    return excess.log2().ceil().clamp(min=0)


def padded(x: Tensor, sides: Sequence[Pair], value: int = 0) -> Tensor:
    """Return integers (N, ...) padded before and after each dimension but the first."""
    if not any(before or after for before, after in sides):
        return x
    # torch's own padding turns the constant into a float.
    sizes = [
        size + before + after
        for size, (before, after) in zip(x.shape[1:], sides, strict=True)
    ]
    whole = x.new_full((x.shape[0], *sizes), value)
    inner = whole
    for axis, (before, _) in enumerate(sides, start=1):
        inner = inner.narrow(axis, before, x.shape[axis])
    inner.copy_(x)
    return whole


def taps(x: Tensor, window: Pair, stride: Pair, dilation: Pair) -> Iterator[Tensor]:
    """Yield what all windows of x have at each of their places, (N, C, H', W')."""
    counts = [
        (x.shape[axis + 2] - dilation[axis] * (window[axis] - 1) - 1) // stride[axis]
        + 1
        for axis in (0, 1)
    ]
    for place in range(prod(window)):
        starts = (place // window[1] * dilation[0], place % window[1] * dilation[1])
        rows, columns = (
            slice(start, start + stride[axis] * (counts[axis] - 1) + 1, stride[axis])
            for axis, start in enumerate(starts)
        )
        yield x[:, :, rows, columns]
