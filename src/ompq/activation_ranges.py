"""Ranges of activations: histograms of what was seen, and the grid that fits them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from typing import get_args

import torch
from torch import Tensor

from ompq.bit_widths import check_bits
from ompq.configs import RangeMethod
from ompq.errors import check_known
from ompq.grids import STREAM_BITS, Grid, on_log_grid
from ompq.weight_ranges import (
    TINY,
    elements_at_once,
    integer_grid,
    shrink_ranges,
    split_rows,
    subsample,
)

_BINS = 4096  # of a histogram: 16 for each of the 256 levels of 8 bits
_COUNTED = 1 << 17  # values of a batch in the histogram; the extremes are those of all
_SMALLEST_EXPONENT = -100  # stands for that of zero; float32 has -125 to 128
# Share of the importance that is the same for all values: gradients tell the cost of
# small errors, but values that are clipped have large ones.
_EVEN = 0.1
# Log grids to try: codes per halving, scales below the largest value, and shifts, as
# multiples of the one that makes the lowest value 0.
_IN_OCTAVE, _SMALLER_SCALES = (1, 2, 3, 4, 6, 8, 12, 16, 24), 9
_SHIFTS = (1.0, 1.5, 2.0, 2.5)


@dataclass(frozen=True, eq=False)
class Observed:
    """A histogram of a tensor over several batches."""

    counts: Tensor  # int64, (4096,); the bins cover -2^exponent to 2^exponent
    exponent: Tensor  # int32, ()
    low: Tensor  # the smallest value, ()
    high: Tensor  # the largest value, ()
    # Sum of squared gradients of the values in each bin, float64, (4096,), if known.
    importance: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The middle of each bin, shape (4096,)."""
        places = torch.arange(_BINS, device=self.counts.device) - _BINS // 2
        return torch.ldexp((places + 0.5) / (_BINS // 2), self.exponent)


def observe_range(x: Tensor, seen: Observed | None = None) -> Observed:
    """Return the histogram with one more batch, of any shape, added.

    Example:
        >>> seen = observe_range(torch.tensor([0.0, 1.0]))
        >>> seen = observe_range(torch.tensor([-2.0, 5.0]), seen)
        >>> seen.low, seen.high, seen.counts.sum()
        (tensor(-2.), tensor(5.), tensor(4))
    """
    if x.numel() == 0:
        raise ValueError(f"activations of shape {tuple(x.shape)} are empty")
    values = x.detach().float().flatten()
    low, high = values.amin(), values.amax()
    exponent = torch.frexp(torch.maximum(high, -low)).exponent
    nothing = (low == 0) & (high == 0)
    exponent = torch.where(nothing, _SMALLEST_EXPONENT, exponent)
    if seen is not None:
        exponent = torch.maximum(exponent, seen.exponent)
        low, high = torch.minimum(low, seen.low), torch.maximum(high, seen.high)
    places = _places(values, exponent)
    counts = _count(places, torch.ones_like(places))
    if seen is not None:
        counts = counts + _merge(seen.counts, exponent - seen.exponent)
    return Observed(counts, exponent, low, high)


def value_bins(seen: Observed, x: Tensor) -> Tensor:
    """Return the bins of the counted values of a batch that was already added."""
    return _places(x.detach().float().flatten(), seen.exponent)


def with_importance(seen: Observed, bins: Tensor, gradient: Tensor) -> Observed:
    """Return the histogram with the gradients of one more batch, given its bins."""
    squares = (
        subsample(gradient.detach().flatten()[None], _COUNTED)[0].double().square()
    )
    # On the CPU: sums of floats on a GPU differ from one run to the next.
    found = torch.bincount(bins.cpu(), squares.cpu(), minlength=_BINS)
    known = found if seen.importance is None else seen.importance + found
    return replace(seen, importance=known)


def activation_grid(
    seen: Observed,
    bits: int,
    method: RangeMethod = "mse",
    *,
    power: float = 2.0,
    fraction: float = 0.9999,
) -> Grid:
    """Return a grid for the values seen: one scale and integer zero point, () each.

    Args:
        method: ``minmax`` covers all values and ``percentile`` the middle ``fraction``
            of them. ``mse`` minimises the sum of |error|^power, and ``fisher`` this sum
            weighted by importance, if known. ``shrink`` is BRECQ's search, in which
            both ends shrink together.
    """
    check_bits(bits, more=(STREAM_BITS,))
    check_known("method", method, get_args(RangeMethod))
    if not torch.isfinite(seen.high - seen.low):
        raise ValueError("activations hold NaN or infinity; check the samples")
    low, high = seen.low.clamp(max=0), seen.high.clamp(min=0)
    if method == "shrink":
        rows, counts = seen.values[None], seen.counts.float()
        scale, zero = shrink_ranges(rows, low.view(1, 1), high.view(1, 1), bits, counts)
        return Grid(scale.reshape(()), zero.reshape(()), bits)
    if method == "percentile":
        low, high = _percentiles(seen, fraction)
    if method in ("mse", "fisher"):
        weights = _weights(seen, method)
        low, high = _least_error(seen.values, weights, low, high, bits, power)
    scale, zero_point = integer_grid(low, high, bits)
    nothing = scale <= TINY
    return Grid(torch.where(nothing, 1.0, scale), zero_point, bits)


def log_grid(
    seen: Observed, bits: int, method: RangeMethod = "fisher"
) -> tuple[Grid, float | None]:
    """Return the log grid that costs the network's output least, and its shift.

    See :func:`ompq.grids.on_log_grid`. If a uniform grid costs less, it is chosen
    with a shift of None. Positive values, such as probabilities, always get a log grid:
    the sum of the small ones matters, which the errors of single values do not show.
    """
    weights = _weights(seen, "fisher").double()

    def error(rounded: Tensor) -> float:
        return float(((rounded - seen.values).double().square() * weights).sum())

    even, positive = activation_grid(seen, bits, method), bool(seen.low >= 0)
    best: tuple[float, Grid, float | None] = math.inf, even, None
    if not positive:
        best = error(even.fake(seen.values)), even, None
    for factor in (0.0,) if positive else _SHIFTS:
        shift = round(factor * abs(float(seen.low)), 4)
        values = (seen.values + shift).clamp(min=0)
        for octave, part in product(_IN_OCTAVE, range(_SMALLER_SCALES)):
            scale = (seen.high + shift) * 2.0 ** (-part / 4)
            grid = Grid(scale, torch.tensor(float(octave)).to(values), bits)
            tried = error(on_log_grid(grid, values) - shift), grid, shift
            best = min(best, tried, key=itemgetter(0))
    return best[1:]


def fake_quantize_tensor(x: Tensor, bits: int) -> Tensor:
    """Round a tensor to the grid of least squared error for its own values."""
    return activation_grid(observe_range(x), bits).fake(x)


def tensor_noise(x: Tensor, bits: Sequence[int]) -> Tensor:
    """Estimate ||x - Q(x)||^2 / ||x||^2 at each width, (widths,)."""
    seen = observe_range(x)
    values = subsample(x.detach().float().flatten()[None], _COUNTED)
    errors = [values - activation_grid(seen, width).fake(values) for width in bits]
    # Double: float32 sums depend on how many threads share them.
    sums = [part.square().sum(dtype=torch.float64) for part in (values, *errors)]
    return torch.stack(sums[1:]) / sums[0].clamp(min=TINY)


def _places(values: Tensor, exponent: Tensor) -> Tensor:
    values = subsample(values[None], _COUNTED)[0]
    places = torch.ldexp(values * (_BINS // 2), -exponent).floor().long() + _BINS // 2
    # Only NaN and infinity are outside; activation_grid reports them.
    return places.clamp(0, _BINS - 1)


def _weights(seen: Observed, method: RangeMethod) -> Tensor:
    """Return the weight of errors in each bin, (bins,); the sum is 1."""
    counts = seen.counts.float() / seen.counts.sum()
    if method == "mse" or seen.importance is None:
        return counts
    total = seen.importance.sum()
    if not (torch.isfinite(total) and total > 0):  # no gradient reached it
        return counts
    important = (seen.importance / total).to(counts)
    return torch.lerp(important, counts, _EVEN)


def _count(places: Tensor, counts: Tensor) -> Tensor:
    return counts.new_zeros(_BINS).scatter_add_(0, places, counts)


def _merge(counts: Tensor, doublings: Tensor) -> Tensor:
    places = torch.arange(_BINS, device=counts.device) - _BINS // 2
    places = torch.bitwise_right_shift(places, doublings.clamp(max=62).long())
    return _count(places + _BINS // 2, counts)


def _percentiles(seen: Observed, fraction: float) -> tuple[Tensor, Tensor]:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be above 0 and at most 1")
    reached = seen.counts.cumsum(0).double() / seen.counts.sum()
    tail = (1 - fraction) / 2
    half_bin = torch.ldexp(torch.ones_like(seen.low), seen.exponent) / _BINS
    # A bin counts as inside unless all of it lies in the tail.
    low = seen.values[(reached <= tail).sum().clamp(max=_BINS - 1)] - half_bin
    high = seen.values[(reached < 1 - tail).sum().clamp(max=_BINS - 1)] + half_bin
    low, high = torch.maximum(low, seen.low), torch.minimum(high, seen.high)
    return low.clamp(max=0), high.clamp(min=0)


def _least_error(
    values: Tensor, weights: Tensor, low: Tensor, high: Tensor, bits: int, power: float
) -> tuple[Tensor, Tensor]:
    # Each end shrinks on its own: first in large steps, then around the best.
    for parts in (torch.logspace(0, -1.2, 16), torch.logspace(0.08, -0.08, 11)):
        pairs = torch.cartesian_prod(parts, parts).to(low.device)
        lows, highs = low * pairs[:, :1], high * pairs[:, 1:]  # (A, 1)
        scale, zero_point = integer_grid(lows, highs, bits)
        count = max(1, elements_at_once(low.device) // _BINS)
        errors = [
            (Grid(s, z, bits).fake(values) - values).abs().pow(power) @ weights
            for s, z in split_rows(scale, zero_point, count)
        ]
        best = torch.cat(errors).argmin()[None]
        low, high = (ends.index_select(0, best).squeeze() for ends in (lows, highs))
    return low, high
