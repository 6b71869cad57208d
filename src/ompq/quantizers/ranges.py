"""Ranges of weights: min-max, percentile, and search for the least error.

All of them return a grid with a scale and a zero per output channel. What zeros there
may be is the grid's *kind*:

| kind      | zero                                | levels at 2 bits, in steps |
|-----------|-------------------------------------|----------------------------|
| affine    | each channel's best multiple of 0.5 | 0..3, -0.5..2.5, …, -3..0  |
| midrise   | (2^bits - 1) / 2                    | -1.5, -0.5, 0.5, 1.5       |
| midtread  | 2^(bits-1)                          | -2, -1, 0, 1               |
| symmetric | 2^(bits-1) - 1, highest code unused | -1, 0, 1                   |

At 7 and 8 bits every kind is midtread: what fits into a signed byte.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ompq.quantizers.grids import LARGEST_HALF_BITS, Grid, check_bits
from ompq.quantizers.spans import (
    TINY,
    Rule,
    channel_rows,
    elements_at_once,
    even_span,
    row_span,
    span_grid,
)

Kind = Literal["affine", "midrise", "midtread", "symmetric"]
# The least error at every width on every network measured, as it contains the others.
DEFAULT_KIND: Kind = "affine"

# The least part of a channel's range worth trying: fewer bits clip more.
_SMALLEST_PART = {2: 0.15, 3: 0.25, 4: 0.35, 5: 0.45, 6: 0.55, 7: 0.6, 8: 0.65}
# Where weights are few, a range beyond the extremes can suit them better.
_LARGEST_PART = 1.05
_REFINEMENTS = 3


@dataclass(frozen=True, eq=False)
class WeightFit:
    """A weight's grid and what it costs.

    Attributes:
        grid: Scale and zero have the weight's dimensions, all 1 but the channels'.
        noise: ||W - Q(W)||^2 / ||W||^2, shape (); 0 for a weight of zeros.
    """

    grid: Grid
    noise: Tensor


class _Best(NamedTuple):
    error: Tensor  # (C,)
    scale: Tensor  # (C, 1)
    zero: Tensor  # (C, 1)


def minmax_weight(
    weight: Tensor, bits: int, *, channel_dim: int = 0, kind: Kind = DEFAULT_KIND
) -> WeightFit:
    """Return the grid that spans each channel from its least to its largest weight.

    Args:
        weight: Any shape.
        bits: 2 to 8.
        channel_dim: The dimension of the output channels.
        kind: Which zeros are allowed.

    Raises:
        ValueError: Bits or kind are unknown; the weight is empty or not finite.
    """
    rule = kind_rule(bits, kind)
    low, high = row_span(_finite_rows(weight, channel_dim))
    return _fit(weight, channel_dim, rule, *_rule_grid(low, high, rule))


def percentile_weight(
    weight: Tensor,
    bits: int,
    *,
    fraction: float = 0.999,
    channel_dim: int = 0,
    kind: Kind = DEFAULT_KIND,
) -> WeightFit:
    """Return the grid that spans the middle ``fraction`` of each channel's weights.

    Args:
        weight: Any shape.
        bits: 2 to 8.
        fraction: Part of the weights inside the range; the rest is cut off evenly.
        channel_dim: The dimension of the output channels.
        kind: Which zeros are allowed.

    Raises:
        ValueError: As :func:`minmax_weight`, or the fraction is not within 0 and 1.
    """
    rule = kind_rule(bits, kind)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be above 0 and at most 1")
    rows = _finite_rows(weight, channel_dim).sort(dim=1).values
    tail = (1 - fraction) / 2
    low = _quantile(rows, tail).clamp(max=0)
    high = _quantile(rows, 1 - tail).clamp(min=0)
    return _fit(weight, channel_dim, rule, *_rule_grid(low, high, rule))


def search_weight(
    weight: Tensor,
    bits: int,
    *,
    channel_dim: int = 0,
    kind: Kind = DEFAULT_KIND,
    power: float = 2.0,
) -> WeightFit:
    """Return the grid with the least sum of |error|^power in each channel.

    Ranges cut at either end are tried, then scales and zeros around the best of them,
    then scale and zero are fitted to the codes by least squares a few times.

    Args:
        weight: Any shape.
        bits: 2 to 8.
        channel_dim: The dimension of the output channels.
        kind: Which zeros are allowed.
        power: 2 for least squares; 2.4, as in BRECQ, clips less.

    Raises:
        ValueError: As :func:`minmax_weight`, or the power is below 2.

    Example:
        >>> fit = search_weight(torch.tensor([[-0.3, -0.1, 0.1, 0.3]]), bits=2)
        >>> fit.grid.scale, fit.grid.zero
        (tensor([[0.2000]]), tensor([[1.5000]]))
    """
    rule = kind_rule(bits, kind)
    if not power >= 2:
        raise ValueError(f"power={power} must be at least 2, which is least squares")
    rows = _finite_rows(weight, channel_dim)
    channels = max(1, elements_at_once(rows.device) // rows.shape[1])
    found = [_search(part, rule, power) for part in torch.split(rows, channels)]
    scale = torch.cat([best.scale for best in found])
    zero = torch.cat([best.zero for best in found])
    return _fit(weight, channel_dim, rule, scale, zero)


def kind_rule(bits: int, kind: Kind) -> Rule:
    """Return what a kind means at some width.

    Raises:
        ValueError: Bits or kind are unknown.
    """
    middle = 1 << (check_bits(bits) - 1)
    top = 2 * middle - 1
    rules = {
        "affine": Rule(bits, top, math.nan),
        "midrise": Rule(bits, top, top / 2),
        "midtread": Rule(bits, top, middle),
        "symmetric": Rule(bits, top - 1, middle - 1),
    }
    if kind not in rules:
        raise ValueError(f"kind={kind!r} is unknown: choose from {', '.join(rules)}")
    return rules[kind if bits <= LARGEST_HALF_BITS else "midtread"]


def _rule_grid(low: Tensor, high: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    return span_grid(*even_span(low, high, rule), rule.top)


def _search(rows: Tensor, rule: Rule, power: float) -> _Best:
    low, high = even_span(*row_span(rows), rule)
    low_part, high_part = _parts(rule, rows)
    scale, zero = span_grid(low * low_part, high * high_part, rule.top)
    nothing = rows.new_full((len(rows),), math.inf)
    best = _Best(nothing, scale[0], zero[0])
    best = _best_of(best, rows, scale, zero, rule.top, power)
    shifts = torch.tensor([-0.5, 0.0, 0.5] if rule.free else [0.0])
    factor, shift = _pairs(torch.linspace(0.94, 1.06, 9), shifts, rows)
    scale, zero = best.scale * factor, (best.zero + shift).clamp(0, rule.top)
    best = _best_of(best, rows, scale, zero, rule.top, power)
    for _ in range(_REFINEMENTS):
        scale, zero = _refined(rows, best, rule, power)
        best = _best_of(best, rows, scale, zero, rule.top, power)
    return best


def _parts(rule: Rule, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts, each (A, 1, 1), of the lower and upper end to try."""
    # Few weights leave the error a jagged function of the range, and cost little.
    count = 24 if rows.shape[1] <= 64 else 12
    ends = math.log10(_LARGEST_PART), math.log10(_SMALLEST_PART[rule.bits])
    parts = torch.logspace(*ends, count if rule.free else 4 * count)
    parts = torch.cat([torch.ones(1), parts])
    if rule.free:
        return _pairs(parts, parts, rows)
    parts = parts.to(rows.device)[:, None, None]
    return parts, parts


def _pairs(first: Tensor, second: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return all pairs of two vectors as two tensors of shape (A, 1, 1)."""
    pairs = torch.cartesian_prod(first, second).to(rows.device)
    return pairs[:, :1, None], pairs[:, 1:, None]


def _best_of(
    best: _Best, rows: Tensor, scale: Tensor, zero: Tensor, top: int, power: float
) -> _Best:
    """Return the better of the best so far and the candidates, (A, C, 1) each."""
    count = min(len(scale), max(1, elements_at_once(rows.device) // rows.numel()))
    room = rows.new_empty(count, *rows.shape)
    for s, z in zip(torch.split(scale, count), torch.split(zero, count), strict=True):
        error = torch.div(rows, s, out=room[: len(s)]).add_(z).round_().clamp_(0, top)
        error = error.sub_(z).mul_(s).sub_(rows)
        error = error.square_() if power == 2 else error.abs_().pow_(power)
        least, at = error.sum(-1).min(0)
        at, better = at[None, :, None], (least < best.error)[:, None]
        best = _Best(
            torch.minimum(least, best.error),
            torch.where(better, s.gather(0, at)[0], best.scale),
            torch.where(better, z.gather(0, at)[0], best.zero),
        )
    return best


def _refined(
    rows: Tensor, best: _Best, rule: Rule, power: float
) -> tuple[Tensor, Tensor]:
    """Return scales that suit the present codes, (2, C, 1), by least squares.

    The first keeps the zero, the second takes the one that suits the codes, too. A
    power above 2 weighs each square by what is missing to that power.
    """
    codes = (rows / best.scale + best.zero).round().clamp(0, rule.top)
    error = best.scale * (codes - best.zero) - rows
    weight = error.abs().pow(power - 2)

    def mean(values: Tensor) -> Tensor:
        return (weight * values).mean(-1, keepdim=True)

    total, code, row = weight.mean(-1, keepdim=True), mean(codes), mean(rows)
    slope = (total * mean(codes * rows) - code * row) / (
        total * mean(codes.square()) - code.square()
    )
    zero = ((code - row / slope) / total * 2).round().div(2).clamp(0, rule.top)
    zero = torch.where((slope > 0) & rule.free, zero, best.zero)
    zero = torch.stack([best.zero, zero])
    levels = codes - zero
    scale = mean(rows * levels) / mean(levels.square())
    return torch.where(scale > 0, scale, best.scale), zero


def _quantile(ordered: Tensor, quantile: float) -> Tensor:
    position = quantile * (ordered.shape[1] - 1)
    lower, upper = math.floor(position), math.ceil(position)
    ends = ordered[:, lower : lower + 1], ordered[:, upper : upper + 1]
    return torch.lerp(*ends, position - lower)


def _finite_rows(weight: Tensor, channel_dim: int) -> Tensor:
    rows = channel_rows(weight, channel_dim)
    if not torch.isfinite(rows).all():
        raise ValueError("weight holds NaN or infinity: no grid can hold it; retrain")
    return rows


def _fit(
    weight: Tensor, channel_dim: int, rule: Rule, scale: Tensor, zero: Tensor
) -> WeightFit:
    # A channel of zeros gets a grid that has 0 and that a runtime can work with.
    dead = scale <= TINY
    scale = torch.where(dead, 1.0, scale)
    zero = torch.where(dead, float(1 << (rule.bits - 1)), zero)
    shape = [1] * weight.dim()
    shape[channel_dim] = -1
    narrow = rule.top < (1 << rule.bits) - 1
    grid = Grid(scale.view(shape), zero.view(shape), rule.bits, narrow)
    values = weight.detach().float()
    error = (values - grid.fake(values)).square().sum()
    return WeightFit(grid, error / values.square().sum().clamp(min=TINY))
