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
from typing import Literal

import torch
from torch import Tensor

from ompq.quantizers.grids import LARGEST_HALF_BITS, Grid, check_bits
from ompq.quantizers.search import Measure, least_error
from ompq.quantizers.spans import (
    TINY,
    Rule,
    channel_rows,
    even_span,
    row_span,
    span_grid,
)

Kind = Literal["affine", "midrise", "midtread", "symmetric"]
# The least error at every width on every network measured, as it contains the others.
DEFAULT_KIND: Kind = "affine"


@dataclass(frozen=True, eq=False)
class WeightFit:
    """A weight's grid and what it costs.

    Attributes:
        grid: Scale and zero have the weight's dimensions, all 1 but the channels'.
        noise: ||W - Q(W)||^2 / ||W||^2, shape (); 0 for a weight of zeros.
    """

    grid: Grid
    noise: Tensor


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
    gram: Tensor | None = None,
) -> WeightFit:
    """Return the grid with the least error in each channel.

    Args:
        weight: Any shape.
        bits: 2 to 8.
        channel_dim: The dimension of the output channels.
        kind: Which zeros are allowed.
        power: The error is the sum of |error|^power: 2 for least squares; 2.4, as in
            BRECQ, clips less.
        gram: Products of what the weights of a channel are multiplied by, (K, K), or
            (C, K, K) where channels have different inputs; positive definite. With it
            the error is that of the outputs, errorᵀ · gram · error, whatever the power.

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
    if gram is not None:
        gram = gram.to(rows).reshape(-1, *gram.shape[-2:])
    scale, zero = least_error(rows, rule, Measure(power, gram))
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
