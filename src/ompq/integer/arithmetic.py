"""Integer arithmetic: grids of codes, scales as multiplier and shift, 8-bit weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod
from typing import TypeAlias

import torch
from torch import Tensor

from ompq.bit_widths import LARGEST_HALF_BITS, STRETCHED
from ompq.errors import QuantizationError
from ompq.grids import Grid, integer_weight

Pair: TypeAlias = tuple[int, int]

_BYTE = 8  # most bits of a code that is stored in a byte
WIDE = 32  # bits of an output that no quantizer rounds
_MULTIPLIER_BITS = 31  # multipliers are positive signed 32-bit integers
_FLOAT_BITS = 24  # bits of a float32's significand
# A product of 32 and 31 bits, plus half a step for rounding, stays below 2^63.
_LARGEST_SHIFT = 61
_LARGEST_PAIR = (1 << 15) - 1  # sum of two products that fits signed 16 bits
LARGEST_SUM = (1 << 31) - 1  # limit for all products and the bias, for any input


@dataclass(frozen=True)
class CodeGrid:
    """The grid of an activation; a code means ``scale * (code - zero_point)``."""

    scale: float
    zero_point: int
    # 2 to 8, or 16 in residual streams, unsigned; or 32, signed, for outputs that no
    # quantizer rounds.
    bits: int

    @property
    def wide(self) -> bool:
        """Whether codes are 32-bit outputs that no quantizer rounds."""
        return self.bits == WIDE

    @property
    def dtype(self) -> torch.dtype:
        """The type of codes: uint8 if they fit."""
        return torch.uint8 if self.bits <= _BYTE else torch.int32

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
        """The values of all codes, float64, (2^bits,)."""
        codes = torch.arange(self.qmax + 1) - self.zero_point
        return self.scale * codes.double()

    def limits(self, low: float, high: float) -> tuple[int, int]:
        """Return the lowest and highest code of values clipped to [low, high]."""
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

    multiplier: Tensor  # int64 of any shape, below 2^31
    shift: Tensor  # int64 of the same shape or ()

    def view(self, *shape: int) -> "Dyadic":
        """Return the ratios in another shape."""
        return Dyadic(self.multiplier.view(shape), self.shift.view(shape))


def dyadic(ratio: Tensor, *, together: bool = False) -> Dyadic:
    """Return the nearest multiplier and shift of positive float64 ratios.

    With ``together`` all of them get the shift of the largest ratio, so that products
    can be added before they are shifted.

    Example:
        >>> ratio = dyadic(torch.tensor(0.75, dtype=torch.float64))
        >>> ratio.multiplier.item() / 2 ** ratio.shift.item()
        0.75
    """
    largest = ratio.max() if together else ratio
    exponent = torch.frexp(largest).exponent.long()  # ratio < 2^exponent
    shift = (_MULTIPLIER_BITS - exponent).clamp(1, _LARGEST_SHIFT)
    # Rounding may give 2^31 itself. Any larger ratio saturates every code anyway.
    limit = float((1 << _MULTIPLIER_BITS) - 1)
    multiplier = torch.ldexp(ratio, shift).round().clamp(max=limit)
    return Dyadic(multiplier.long(), shift)


def float_dyadic(ratio: Tensor) -> Dyadic:
    """Return the exact 24-bit multiplier and shift of positive float32 ratios."""
    mantissa, exponent = torch.frexp(ratio)
    shift = _FLOAT_BITS - exponent.long()
    # A ratio below 2^-38 rounds every 32-bit sum to 0, and so does a multiplier of 0.
    tiny = shift > _LARGEST_SHIFT
    multiplier = torch.ldexp(mantissa.double(), torch.tensor(_FLOAT_BITS)).long()
    return Dyadic(multiplier.masked_fill(tiny, 0), shift.clamp(0, _LARGEST_SHIFT))


def float_rescaled(sums: Tensor, ratio: Dyadic, zero_point: int = 0) -> Tensor:
    """Return ``sums * ratio + zero_point`` as float32 arithmetic rounds it, int64.

    This emulates, with integers, what 8-bit kernels compute with floats. Sums, below
    2^31 in magnitude, are rounded to 24 significant bits, and so are their products
    with the ratio (of :func:`float_dyadic`), which are then rounded to integers.
    """
    product = _as_float32(_as_float32(sums.long()) * ratio.multiplier)
    return rescale(product, ratio.shift) + zero_point


def _as_float32(values: Tensor) -> Tensor:
    """Round integers to 24 significant bits, half to even."""
    powers = torch.ones(63, dtype=torch.int64) << torch.arange(63)
    width = torch.bucketize(values.abs().contiguous(), powers, right=True)
    excess = (width - _FLOAT_BITS).clamp(min=0)
    return rescale(values, excess) << excess


def rescale(product: Tensor, shift: Tensor, zero_point: int = 0) -> Tensor:
    """Return ``product / 2^shift + zero_point`` rounded half to even, int64.

    The product is below 2^62 in magnitude. Halves round to an even code, that is, after
    the zero point is added.

    Example:
        >>> rescaled(torch.tensor([1, 3, 5, 6]), torch.tensor(1))
        tensor([0, 2, 2, 3])
    """
    divisor = torch.ones_like(shift) << shift
    raised = product + (divisor >> 1)
    result = (raised >> shift) + zero_point
    halves = ((raised & (divisor - 1)) == 0) & (shift > 0)
    return result - (halves & (result & 1).bool()).long()


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A weight as signed bytes, and its bias in steps of the accumulator.

    A byte means ``scale * byte``. The byte of a code is ``(code * unit - offset) *
    stretch``: its distance from the zero point, in half steps if need be, times an
    integer that makes the accumulator's step finer, and with it the bias more exact.
    """

    codes: Tensor  # uint8 of the weight's shape, 0 to 2^bits - 1
    bits: int
    unit: int  # 2 if zero points may lie halfway between codes, else 1
    offset: Tensor  # int32, (O,): the zero point times the unit
    stretch: Tensor  # int32, (O,); 0 for a channel whose weights are all 0
    values: Tensor  # the bytes, int8 of the weight's shape
    scale: Tensor  # float64, (O,)
    bias: Tensor  # int32, (O,), in steps of the input's scale times ``scale``

    @classmethod
    def of(
        cls,
        codes: Tensor,
        grid: Grid,
        bias: Tensor | None,
        source: CodeGrid,
        *,
        stretched: bool = True,
    ) -> "IntegerWeight":
        """Convert a weight, uint8 codes (O, ...), and its bias (O,) to integers.

        Bytes that are not stretched are codes minus an integer zero point where
        possible, which kernels of fewer than 8 bits multiply as they are.
        """
        like = (-1, *[1] * (codes.dim() - 1))
        zero_point = grid.zero_point.flatten()
        halves, part = integer_weight(codes, zero_point.view(like), grid.bits)
        if not stretched and bool((zero_point == zero_point.round()).all()):
            halves, part = (halves * part).to(torch.int8), 1.0
        stretch = 1
        if stretched and grid.bits <= LARGEST_HALF_BITS:
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
        """Whether the formula above gives all bytes; not if a channel was coarsened."""
        halves = self.codes.int() * self.unit - self.per_channel(self.offset)
        made = halves * self.per_channel(self.stretch)
        return torch.equal(made, self.values.int())

    def per_channel(self, given: Tensor) -> Tensor:
        """Reshape values per channel, (O,), so that they broadcast with the weight."""
        if given.dim() == self.codes.dim():
            return given
        return given.view(-1, *[1] * (self.codes.dim() - 1))

    def largest_sum(self, source: CodeGrid) -> Tensor:
        """Return the largest magnitude of each channel's accumulator, int64, (O,)."""
        products = self.values.flatten(1).long().abs().sum(1) * source.reach
        return products + self.bias.long().abs()

    def pair_excess(self, source: CodeGrid) -> Tensor:
        """Return the largest sum of two products relative to 16 bits, (O,); 1 fits.

        Processors with AVX2 or AVX-512 but without VNNI add products of unsigned and
        signed bytes in pairs, in saturating 16-bit arithmetic. The runtime decides
        which weights form a pair, so assume the two largest of one sign.
        """
        rows = self.values.flatten(1).int()
        by_sign = torch.stack([rows, -rows]).clamp(min=0)
        pairs = by_sign.topk(min(2, rows.shape[1]), dim=2).values.sum(2)  # (2, O)
        return pairs.amax(0).double() * source.qmax / _LARGEST_PAIR

    def by_phase(self, stride: int) -> "IntegerWeight":
        """Return the weight of a convolution that computes a transposed one.

        The weight of a transposed convolution, (O, I, K * stride, K * stride), computes
        ``stride`` × ``stride`` neighbouring values from the same inputs. The result,
        (O * stride * stride, I, K, K), computes each of them in a channel of its own.
        """

        def moved(values: Tensor) -> Tensor:
            channels, inputs, height, width = values.shape
            rows, columns = height // stride, width // stride
            shape = (channels, inputs, rows, stride, columns, stride)
            phases = values.view(shape).flip(2, 4).permute(0, 3, 5, 1, 2, 4)
            return phases.reshape(-1, inputs, rows, columns)

        each = {
            name: getattr(self, name).repeat_interleave(stride * stride)
            for name in ("offset", "stretch", "scale", "bias")
        }
        return replace(self, codes=moved(self.codes), values=moved(self.values), **each)

    def cpu(self) -> "IntegerWeight":
        """Return a copy in host memory."""
        fields = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
            if name != "affine"
        }
        return IntegerWeight(**fields)  # type: ignore[arg-type]


def _coarsening(rows: Tensor, bias: Tensor, source: CodeGrid) -> Tensor:
    """Return by which powers of two channels must be coarsened to fit 32 bits, (O,).

    A nearly dead channel has tiny weights and an ordinary bias, which may then exceed
    32 bits in steps of the accumulator. Its weights lose bits until the bias fits. The
    error is about a millionth of the bias.
    """
    products = rows.flatten(1).abs().sum(1).double() * source.reach
    if products.max() > LARGEST_SUM:
        raise QuantizationError(
            f"sums of {rows[0].numel()} products reach {products.max():.3g}, but "
            f"32 bits hold at most {LARGEST_SUM}; give the layer fewer bits"
        )
    excess = (products + bias.abs() + 1) / LARGEST_SUM
    return excess.log2().ceil().clamp(min=0)


def pad_integers(x: Tensor, sides: Sequence[Pair], value: int = 0) -> Tensor:
    """Return integers (N, ...) padded before and after each dimension but the first."""
    if not any(before or after for before, after in sides):
        return x
    # torch.nn.functional.pad would convert the constant to a float.
    sizes = [
        size + before + after
        for size, (before, after) in zip(x.shape[1:], sides, strict=True)
    ]
    result = x.new_full((x.shape[0], *sizes), value)
    inner = result
    for axis, (before, _) in enumerate(sides, start=1):
        inner = inner.narrow(axis, before, x.shape[axis])
    inner.copy_(x)
    return result


def taps(x: Tensor, window: Pair, stride: Pair, dilation: Pair) -> Iterator[Tensor]:
    """Yield the values of all windows at each position in a window, (N, C, H', W')."""
    counts = [
        (x.shape[axis + 2] - dilation[axis] * (window[axis] - 1) - 1) // stride[axis]
        + 1
        for axis in (0, 1)
    ]
    for position in range(prod(window)):
        row, column = divmod(position, window[1])
        starts = (row * dilation[0], column * dilation[1])
        rows, columns = (
            slice(start, start + stride[axis] * (counts[axis] - 1) + 1, stride[axis])
            for axis, start in enumerate(starts)
        )
        yield x[:, :, rows, columns]
