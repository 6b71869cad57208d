"""The grid of least error for rows of weights, found by trying many.

What an error costs is a :class:`Measure`: its size, or what it does to outputs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ompq.quantizers.spans import (
    Rule,
    elements_at_once,
    even_span,
    row_span,
    span_grid,
)

# Up to so many weights of a channel leave the error a jagged function of the range;
# with more, one good range is nearly as good as the next.
FEW_WEIGHTS = 64
# The least part of a channel's range worth trying: fewer bits clip more.
_SMALLEST_PART = {2: 0.15, 3: 0.25, 4: 0.35, 5: 0.45, 6: 0.55, 7: 0.6, 8: 0.65}
# Where weights are few, a range beyond the extremes can suit them better.
_LARGEST_PART = 1.05
_REFINEMENTS = 3


class Measure(NamedTuple):
    """What the errors of a channel's weights cost.

    Attributes:
        power: The sum of |error| to this power, where there is no Gram matrix.
        gram: Else errorᵀ · gram · error, (C, K, K), or (1, K, K) where all channels
            have the same; positive definite.
    """

    power: float
    gram: Tensor | None

    def split(self, channels: int, count: int) -> "list[Measure]":
        """Return the measures of so many channels at a time, of ``count`` in all."""
        if self.gram is None or len(self.gram) == 1:
            return [self] * math.ceil(count / channels)
        return [Measure(self.power, part) for part in torch.split(self.gram, channels)]

    def cost(self, error: Tensor) -> Tensor:
        """Return what errors, (A, C, K), cost each channel, (A, C); changes them."""
        if self.gram is not None:
            return (self._mapped(error, self.gram) * error).sum(-1)
        if self.power == 2:
            return error.square_().sum(-1)
        return error.abs_().pow_(self.power).sum(-1)

    def product(self, first: Tensor, second: Tensor, error: Tensor) -> Tensor:
        """Return inner products, (..., C, 1), whose least squares lower the cost.

        Args:
            first: (..., C, K).
            second: As the first.
            error: Present errors, (C, K). A power above 2 weighs each square by what
                is missing to that power.
        """
        if self.gram is not None:
            mapped = self._mapped(first, self.gram)
            return (mapped * second).sum(-1, keepdim=True)
        weight = error.abs().pow(self.power - 2)
        return (weight * first * second).mean(-1, keepdim=True)

    @staticmethod
    def _mapped(values: Tensor, gram: Tensor) -> Tensor:
        if len(gram) == 1:
            return values @ gram[0]
        return torch.einsum("...ck,ckl->...cl", values, gram)


class _Best(NamedTuple):
    error: Tensor  # (C,)
    scale: Tensor  # (C, 1)
    zero: Tensor  # (C, 1)


def least_error(rows: Tensor, rule: Rule, measure: Measure) -> tuple[Tensor, Tensor]:
    """Return scale and zero, (C, 1) each, that cost the least.

    Ranges cut at either end are tried, then scales and zeros around the best of them,
    then scale and zero are fitted to the codes by least squares a few times.

    Args:
        rows: Weights, (C, K).
        rule: Which zeros there may be.
        measure: What errors cost.
    """
    channels = max(1, elements_at_once(rows.device) // rows.shape[1])
    parts = torch.split(rows, channels)
    measures = measure.split(channels, len(rows))
    found = [_search(*pair, rule) for pair in zip(parts, measures, strict=True)]
    scale = torch.cat([best.scale for best in found])
    return scale, torch.cat([best.zero for best in found])


def _search(rows: Tensor, measure: Measure, rule: Rule) -> _Best:
    low, high = even_span(*row_span(rows), rule)
    low_part, high_part = _parts(rule, rows)
    scale, zero = span_grid(low * low_part, high * high_part, rule.top)
    nothing = rows.new_full((len(rows),), math.inf)
    best = _Best(nothing, scale[0], zero[0])
    best = _best_of(best, rows, scale, zero, rule.top, measure)
    shifts = torch.tensor([-0.5, 0.0, 0.5] if rule.free else [0.0])
    factor, shift = _pairs(torch.linspace(0.94, 1.06, 9), shifts, rows)
    scale, zero = best.scale * factor, (best.zero + shift).clamp(0, rule.top)
    best = _best_of(best, rows, scale, zero, rule.top, measure)
    for _ in range(_REFINEMENTS):
        scale, zero = _refined(rows, best, rule, measure)
        best = _best_of(best, rows, scale, zero, rule.top, measure)
    return best


def _parts(rule: Rule, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts, each (A, 1, 1), of the lower and upper end to try."""
    count = 24 if rows.shape[1] <= FEW_WEIGHTS else 12
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
    best: _Best, rows: Tensor, scale: Tensor, zero: Tensor, top: int, measure: Measure
) -> _Best:
    """Return the better of the best so far and the candidates, (A, C, 1) each."""
    count = min(len(scale), max(1, elements_at_once(rows.device) // rows.numel()))
    room = rows.new_empty(count, *rows.shape)
    for s, z in zip(torch.split(scale, count), torch.split(zero, count), strict=True):
        error = torch.div(rows, s, out=room[: len(s)]).add_(z).round_().clamp_(0, top)
        error = error.sub_(z).mul_(s).sub_(rows)
        least, at = measure.cost(error).min(0)
        at, better = at[None, :, None], (least < best.error)[:, None]
        best = _Best(
            torch.minimum(least, best.error),
            torch.where(better, s.gather(0, at)[0], best.scale),
            torch.where(better, z.gather(0, at)[0], best.zero),
        )
    return best


def _refined(
    rows: Tensor, best: _Best, rule: Rule, measure: Measure
) -> tuple[Tensor, Tensor]:
    """Return scales that suit the present codes, (2, C, 1), by least squares.

    The first keeps the zero, the second takes the one that suits the codes, too.
    """
    codes = (rows / best.scale + best.zero).round().clamp(0, rule.top)
    error = best.scale * (codes - best.zero) - rows

    def product(first: Tensor, second: Tensor) -> Tensor:
        return measure.product(first, second, error)

    ones = torch.ones_like(rows)
    total, code, row = product(ones, ones), product(ones, codes), product(ones, rows)
    slope = (total * product(codes, rows) - code * row) / (
        total * product(codes, codes) - code.square()
    )
    zero = ((code - row / slope) / total * 2).round().div(2).clamp(0, rule.top)
    zero = torch.where((slope > 0) & rule.free, zero, best.zero)
    zero = torch.stack([best.zero, zero])
    levels = codes - zero
    scale = product(levels, rows) / product(levels, levels)
    return torch.where(scale > 0, scale, best.scale), zero
