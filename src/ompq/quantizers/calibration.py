"""Ranges of activations: a tensor seen batch by batch, then a grid for all of it.

:func:`observe_range` keeps the extremes and a histogram of fixed size. Its bins are a
power of two wide and meet at 0, so that a wider range merges them two by two and the
result does not depend on how the values came in batches. Nothing in it waits for the
device. A grid of activations has one scale, and an integer zero: 0 is exact.

What a value is worth differs: the largest of a tensor are few and often matter little.
:func:`with_importance` gathers squared gradients in the same bins, and a range that
``fisher`` finds costs the network's output least, not the tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ompq.quantizers.grids import Grid, check_bits
from ompq.quantizers.spans import TINY, elements_at_once, thinned

RangeMethod = Literal["minmax", "percentile", "mse", "fisher"]
_METHODS = ("minmax", "percentile", "mse", "fisher")

_BINS = 4096
# Values of one batch that enter the histogram; the extremes are those of all values.
_COUNTED = 1 << 17
_SMALLEST_EXPONENT = -100
# Share of the importance that all values get alike: gradients say what a small error
# costs, and a value that is cut off has a large one.
_EVEN = 0.1


@dataclass(frozen=True, eq=False)
class Observed:
    """What is known of a tensor that was seen in batches.

    Attributes:
        counts: Values in each bin, int64 of shape (4096,). The bins cover
            -2^exponent to 2^exponent.
        exponent: int32 of shape ().
        low: The least value, shape ().
        high: The largest value, shape ().
        importance: Squared gradients of the values in each bin, summed, float64 of
            shape (4096,); None where they are not known.
    """

    counts: Tensor
    exponent: Tensor
    low: Tensor
    high: Tensor
    importance: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The middle of each bin, shape (4096,)."""
        places = torch.arange(_BINS, device=self.counts.device) - _BINS // 2
        return torch.ldexp((places + 0.5) / (_BINS // 2), self.exponent)


def observe_range(x: Tensor, seen: Observed | None = None) -> Observed:
    """Return what is known after one more batch.

    Args:
        x: Values of any shape.
        seen: What was known before; nothing at first.

    Raises:
        ValueError: The batch is empty.

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
    counts = _counted(places, torch.ones_like(places))
    if seen is not None:
        counts = counts + _merged(seen.counts, exponent - seen.exponent)
    return Observed(counts, exponent, low, high)


def value_bins(seen: Observed, x: Tensor) -> Tensor:
    """Return the bins that values of a batch are in, those of them that are counted.

    Args:
        seen: What is known of the tensor, this batch included.
        x: Values of any shape.
    """
    return _places(x.detach().float().flatten(), seen.exponent)


def with_importance(seen: Observed, bins: Tensor, gradient: Tensor) -> Observed:
    """Return what is known once the gradients of one more batch are.

    Args:
        seen: What was known before.
        bins: From :func:`value_bins`, of the batch.
        gradient: Gradient of a loss at each value, shaped as the values.
    """
    squares = thinned(gradient.detach().flatten()[None], _COUNTED)[0].double().square()
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
    """Return a grid for the values seen: one scale, shape (), and an integer zero.

    Args:
        seen: From :func:`observe_range`.
        bits: 2 to 8.
        method: ``minmax`` holds every value, ``percentile`` the middle ``fraction`` of
            them, ``mse`` looks for the least sum of |error|^power, and ``fisher`` for
            the least such sum weighed by importance, where that is known.
        power: For ``mse`` and ``fisher``.
        fraction: For ``percentile``.

    Raises:
        ValueError: Bits, method or fraction are unknown, or a value was not finite.
    """
    check_bits(bits)
    if method not in _METHODS:
        raise ValueError(f"method={method!r} is unknown: choose from {_METHODS}")
    if not torch.isfinite(seen.high - seen.low):
        raise ValueError("activations hold NaN or infinity; check the samples")
    low, high = seen.low.clamp(max=0), seen.high.clamp(min=0)
    if method == "percentile":
        low, high = _percentiles(seen, fraction)
    if method in ("mse", "fisher"):
        weights = _weights(seen, method)
        low, high = _least_error(seen.values, weights, low, high, bits, power)
    scale, zero = _span_grid(low, high, bits)
    nothing = scale <= TINY
    return Grid(torch.where(nothing, 1.0, scale), zero, bits)


def fake_quantize_tensor(x: Tensor, bits: int) -> Tensor:
    """Return the tensor on the grid of least squared error for its own values."""
    return activation_grid(observe_range(x), bits).fake(x)


def tensor_noise(x: Tensor, bits: Sequence[int]) -> Tensor:
    """Return ||x - Q(x)||^2 / ||x||^2 at each width, (widths,), nearly.

    Args:
        x: Values of any shape.
        bits: Widths, each 2 to 8.
    """
    seen = observe_range(x)
    values = thinned(x.detach().float().flatten()[None], _COUNTED)
    errors = [values - activation_grid(seen, width).fake(values) for width in bits]
    energy = values.square().sum().clamp(min=TINY)
    return torch.stack([error.square().sum() for error in errors]) / energy


def _places(values: Tensor, exponent: Tensor) -> Tensor:
    values = thinned(values[None], _COUNTED)[0]
    places = torch.ldexp(values * (_BINS // 2), -exponent).floor().long() + _BINS // 2
    # Only NaN and infinity fall outside; they are reported when a grid is asked for.
    return places.clamp(0, _BINS - 1)


def _weights(seen: Observed, method: RangeMethod) -> Tensor:
    """Return what an error in each bin counts, (bins,); the sum is 1."""
    counts = seen.counts.float() / seen.counts.sum()
    if method == "mse" or seen.importance is None:
        return counts
    total = seen.importance.sum()
    if not (torch.isfinite(total) and total > 0):  # no gradient got there
        return counts
    important = (seen.importance / total).to(counts)
    return torch.lerp(important, counts, _EVEN)


def _counted(places: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros(_BINS, dtype=torch.int64, device=counts.device).scatter_add_(
        0, places, counts
    )


def _merged(counts: Tensor, doublings: Tensor) -> Tensor:
    places = torch.arange(_BINS, device=counts.device) - _BINS // 2
    places = torch.bitwise_right_shift(places, doublings.clamp(max=62).long())
    return _counted(places + _BINS // 2, counts)


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


def _span_grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    top = (1 << bits) - 1
    scale = ((high - low) / top).clamp(min=TINY)
    return scale, (low / scale).round().abs()


def _least_error(
    values: Tensor, weights: Tensor, low: Tensor, high: Tensor, bits: int, power: float
) -> tuple[Tensor, Tensor]:
    # Both ends shrink on their own: first in wide steps, then around the best.
    for parts in (torch.logspace(0, -1.2, 16), torch.logspace(0.08, -0.08, 11)):
        pairs = torch.cartesian_prod(parts, parts).to(low.device)
        lows, highs = low * pairs[:, :1], high * pairs[:, 1:]  # (A, 1)
        scale, zero = _span_grid(lows, highs, bits)
        count = max(1, elements_at_once(low.device) // _BINS)
        errors = [
            _histogram_error(values, weights, Grid(s, z, bits), power)
            for s, z in zip(
                torch.split(scale, count), torch.split(zero, count), strict=True
            )
        ]
        best = torch.cat(errors).argmin()[None]
        low, high = (ends.index_select(0, best).squeeze() for ends in (lows, highs))
    return low, high


def _histogram_error(
    values: Tensor, weights: Tensor, grid: Grid, power: float
) -> Tensor:
    error = (grid.fake(values) - values).abs().pow(power)  # (A, bins)
    return error @ weights
