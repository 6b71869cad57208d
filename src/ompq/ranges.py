"""Clipping ranges of weights and activations, and how much each bit-width loses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ompq.quantizers import LARGEST_HALF_BITS, Grid, check_bits

# What a scale is at least, so that nothing is divided by 0.
TINY = 1e-30


class Rule(NamedTuple):
    """What a kind means at some width.

    Attributes:
        bits: Width of a code.
        top: The highest code.
        zero_point: The zero of all channels; NaN where each has its own.
    """

    bits: int
    qmax: int
    zero_point: float

    @property
    def free(self) -> bool:
        """Whether each channel has its own zero."""
        return math.isnan(self.zero_point)


def elements_at_once(device: torch.device) -> int:
    """Return how many elements to work on: what a core caches, or what fills a GPU."""
    return 1 << 24 if device.type == "cuda" else 1 << 18


def channel_rows(weight: Tensor, channel_dim: int) -> Tensor:
    """Return the weight as float32 of shape (channels, weights of a channel).

    Raises:
        ValueError: The weight is empty.
    """
    if weight.numel() == 0:
        raise ValueError(f"weight of shape {tuple(weight.shape)} is empty")
    rows = weight.detach().movedim(channel_dim, 0)
    return rows.reshape(len(rows), -1).float()


def thinned(rows: Tensor, most: int) -> Tensor:
    """Return at most so many columns, evenly spread, of no common stride with rows."""
    width = rows.shape[1]
    if width <= most:
        return rows
    while math.gcd(most, width) > 1:
        most -= 1
    places = torch.arange(most, device=rows.device) * width // most
    return rows.index_select(1, places)


def row_span(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends, each (C, 1), of a range with all the values and 0 in it."""
    low = rows.amin(1, keepdim=True).clamp(max=0)
    return low, rows.amax(1, keepdim=True).clamp(min=0)


def even_span(low: Tensor, high: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the least range around another whose zero is the rule's, if it has one."""
    if rule.free:
        return low, high
    below, above = rule.zero_point, rule.qmax - rule.zero_point
    scale = torch.maximum(high / above, -low / below)
    return -below * scale, above * scale


def span_grid(low: Tensor, high: Tensor, qmax: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return scale and zero, a multiple of 0.5, of ranges that contain 0."""
    scale = ((high - low) / qmax).clamp(min=TINY)
    return scale, (low / scale * 2).round().abs() / 2


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
    zero_point: Tensor  # (C, 1)


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
    return scale, torch.cat([best.zero_point for best in found])


def _search(rows: Tensor, measure: Measure, rule: Rule) -> _Best:
    low, high = even_span(*row_span(rows), rule)
    low_part, high_part = _parts(rule, rows)
    scale, zero_point = span_grid(low * low_part, high * high_part, rule.qmax)
    nothing = rows.new_full((len(rows),), math.inf)
    best = _Best(nothing, scale[0], zero_point[0])
    best = _best_of(best, rows, scale, zero_point, rule.qmax, measure)
    shifts = torch.tensor([-0.5, 0.0, 0.5] if rule.free else [0.0])
    factor, shift = _pairs(torch.linspace(0.94, 1.06, 9), shifts, rows)
    scale, zero_point = (
        best.scale * factor,
        (best.zero_point + shift).clamp(0, rule.qmax),
    )
    best = _best_of(best, rows, scale, zero_point, rule.qmax, measure)
    for _ in range(_REFINEMENTS):
        scale, zero_point = _refined(rows, best, rule, measure)
        best = _best_of(best, rows, scale, zero_point, rule.qmax, measure)
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
    best: _Best,
    rows: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    qmax: int,
    measure: Measure,
) -> _Best:
    """Return the better of the best so far and the candidates, (A, C, 1) each."""
    count = min(len(scale), max(1, elements_at_once(rows.device) // rows.numel()))
    room = rows.new_empty(count, *rows.shape)
    for s, z in zip(
        torch.split(scale, count), torch.split(zero_point, count), strict=True
    ):
        error = torch.div(rows, s, out=room[: len(s)]).add_(z).round_().clamp_(0, qmax)
        error = error.sub_(z).mul_(s).sub_(rows)
        least, at = measure.cost(error).min(0)
        at, better = at[None, :, None], (least < best.error)[:, None]
        best = _Best(
            torch.minimum(least, best.error),
            torch.where(better, s.gather(0, at)[0], best.scale),
            torch.where(better, z.gather(0, at)[0], best.zero_point),
        )
    return best


def _refined(
    rows: Tensor, best: _Best, rule: Rule, measure: Measure
) -> tuple[Tensor, Tensor]:
    """Return scales that suit the present codes, (2, C, 1), by least squares.

    The first keeps the zero, the second takes the one that suits the codes, too.
    """
    codes = (rows / best.scale + best.zero_point).round().clamp(0, rule.qmax)
    error = best.scale * (codes - best.zero_point) - rows

    def product(first: Tensor, second: Tensor) -> Tensor:
        return measure.product(first, second, error)

    ones = torch.ones_like(rows)
    total, code, row = product(ones, ones), product(ones, codes), product(ones, rows)
    slope = (total * product(codes, rows) - code * row) / (
        total * product(codes, codes) - code.square()
    )
    zero_point = ((code - row / slope) / total * 2).round().div(2).clamp(0, rule.qmax)
    zero_point = torch.where((slope > 0) & rule.free, zero_point, best.zero_point)
    zero_point = torch.stack([best.zero_point, zero_point])
    levels = codes - zero_point
    scale = product(levels, rows) / product(levels, levels)
    return torch.where(scale > 0, scale, best.scale), zero_point


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
        >>> fit.grid.scale, fit.grid.zero_point
        (tensor([[0.2000]]), tensor([[1.5000]]))
    """
    rule = kind_rule(bits, kind)
    if not power >= 2:
        raise ValueError(f"power={power} must be at least 2, which is least squares")
    rows = _finite_rows(weight, channel_dim)
    if gram is not None:
        gram = gram.to(rows).reshape(-1, *gram.shape[-2:])
    scale, zero_point = least_error(rows, rule, Measure(power, gram))
    return _fit(weight, channel_dim, rule, scale, zero_point)


def kind_rule(bits: int, kind: Kind) -> Rule:
    """Return what a kind means at some width.

    Raises:
        ValueError: Bits or kind are unknown.
    """
    middle = 1 << (check_bits(bits) - 1)
    qmax = 2 * middle - 1
    rules = {
        "affine": Rule(bits, qmax, math.nan),
        "midrise": Rule(bits, qmax, qmax / 2),
        "midtread": Rule(bits, qmax, middle),
        "symmetric": Rule(bits, qmax - 1, middle - 1),
    }
    if kind not in rules:
        raise ValueError(f"kind={kind!r} is unknown: choose from {', '.join(rules)}")
    return rules[kind if bits <= LARGEST_HALF_BITS else "midtread"]


def _rule_grid(low: Tensor, high: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    return span_grid(*even_span(low, high, rule), rule.qmax)


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
    weight: Tensor, channel_dim: int, rule: Rule, scale: Tensor, zero_point: Tensor
) -> WeightFit:
    # A channel of zeros gets a grid that has 0 and that a runtime can work with.
    dead = scale <= TINY
    scale = torch.where(dead, 1.0, scale)
    zero_point = torch.where(dead, float(1 << (rule.bits - 1)), zero_point)
    shape = [1] * weight.dim()
    shape[channel_dim] = -1
    narrow = rule.qmax < (1 << rule.bits) - 1
    grid = Grid(scale.view(shape), zero_point.view(shape), rule.bits, narrow)
    values = weight.detach().float()
    error = (values - grid.fake(values)).square().sum()
    return WeightFit(grid, error / values.square().sum().clamp(min=TINY))


# Channels of at most so many weights try so many parts of the whole at either end,
# from this one up: bits → (smallest part, parts).
_FEW_WEIGHTS = 32
_FEW_PARTS = {
    2: (0.5, 5),
    3: (0.7, 5),
    4: (0.85, 5),
    5: (0.9, 5),
    6: (0.93, 4),
    7: (0.93, 4),
    8: (0.93, 4),
}
_LARGEST_PART_NOISE = 1.1
# Layers of at most so many weights try ranges around the model's.
_SMALL_LAYER = 1 << 14
# The others are measured up to this width, with the zero half a step off as well;
# above, the model is as good, unless the zero is fixed.
_SHIFTED_BITS = 3
# Limits at which clipping is measured, and values interpolated from one to the next.
_LIMITS = 6
_BETWEEN = 4


def weight_noise(
    weight: Tensor, bits: int, *, channel_dim: int = 0, max_weights: int = 512
) -> float:
    """Return ||W - Q(W)||^2 / ||W||^2, nearly; 0 for a weight of zeros.

    Args:
        weight: Any shape.
        bits: 2 to 8.
        channel_dim: The dimension of the output channels.
        max_weights: At most so many weights of a channel are looked at.

    Raises:
        ValueError: As :func:`weight_noises`.
    """
    return weight_noises(
        weight, [bits], channel_dim=channel_dim, max_weights=max_weights
    )[0]


def weight_noises(
    weight: Tensor,
    bits: Sequence[int],
    *,
    channel_dim: int = 0,
    max_weights: int = 512,
) -> list[float]:
    """Return :func:`weight_noise` for several bit-widths in one go.

    Args:
        weight: Any shape.
        bits: Widths, each 2 to 8.
        channel_dim: The dimension of the output channels.
        max_weights: At most so many weights of a channel are looked at.

    Raises:
        ValueError: Bits are unknown, the weight is empty, or no weight may be seen.
    """
    if max_weights < 1:
        raise ValueError(f"max_weights={max_weights} must be at least 1")
    rows = channel_rows(weight, channel_dim)
    if not bits:
        return []
    sample = thinned(rows, max_weights)
    # The extremes count for as much as they are likely to be missing.
    seen = sample.shape[1] / rows.shape[1]
    unseen = seen * (1 - seen)
    # One piece of memory for all of the work: asking for it anew would take longer.
    room = rows.new_empty(2, elements_at_once(rows.device))
    sizes = torch.stack([rows.amin(1).neg_(), rows.amax(1)]).clamp_(min=0)  # (2, C)
    tries, spans, modelled = _spans(sample, sizes, tuple(bits), unseen, room)
    scale, zero_point, qmax = _grids(spans, tries)
    error = _errors(sample, scale, zero_point, qmax, room)  # (A, C)
    energy = sample.square().sum()
    if unseen:
        ends = sizes.T * sizes.new_tensor([-1, 1])
        error = error + unseen * _errors(ends, scale, zero_point, qmax, room)
        energy = energy + unseen * ends.square().sum()
    least = [
        some.amin(0).sum() if len(some) else modelled[width].sum()
        for width, some in enumerate(torch.split(error, tries.counts))
    ]
    noise: list[float] = (torch.stack(least) / energy.clamp(min=TINY)).tolist()
    return noise


def _spans(
    sample: Tensor, sizes: Tensor, bits: tuple[int, ...], unseen: float, room: Tensor
) -> tuple["_Tries", Tensor, Tensor]:
    """Return what to try around which spans, (2, B or 1, C), and modelled errors."""
    few = sample.shape[1] <= _FEW_WEIGHTS
    # Only a whole layer: a sample would find ranges that suit it but not the rest.
    small = not unseen and sample.numel() <= _SMALL_LAYER
    tries = _tries(bits, few=few, small=small).to(sample.device)
    if few:
        return tries, sizes[:, None], sizes
    return tries, *_modelled_spans(sample, sizes, tries.qmax, unseen, room)


def _grids(spans: Tensor, tries: "_Tries") -> tuple[Tensor, Tensor, Tensor]:
    """Return scale and zero, (A, C), and top codes, (A, 1)."""
    # Where the zero is fixed, the end that needs the larger step decides.
    step = (spans / tries.levels).amax(0)
    spans = torch.where(tries.levels.isinf(), spans, tries.levels * step)
    low, high = spans.index_select(1, tries.owner) * tries.parts
    qmax = tries.qmax.index_select(0, tries.owner)
    return *span_grid(-low, high, qmax), qmax


class _Tries(NamedTuple):
    """Ranges to try, A in all for B widths."""

    counts: list[int]  # for each width
    owner: Tensor  # (A,), the width of each
    parts: Tensor  # (2, A, 1), of the lower and upper end
    qmax: Tensor  # (B, 1)
    levels: Tensor  # (2, B, 1), below and above a fixed zero; infinite if it is free

    def to(self, device: torch.device) -> "_Tries":
        return _Tries(self.counts, *(tensor.to(device) for tensor in self[1:]))


@cache
def _tries(bits: tuple[int, ...], *, few: bool, small: bool) -> _Tries:
    rules = [kind_rule(width, DEFAULT_KIND) for width in bits]
    if few:
        pairs = [_around(rule, *_FEW_PARTS[rule.bits]) for rule in rules]
    elif small:
        pairs = [_around(rule, 0.9, 3) for rule in rules]
    else:
        pairs = [_shifted(rule) for rule in rules]
    counts = [len(some) for some in pairs]
    owner = torch.arange(len(rules)).repeat_interleave(torch.tensor(counts))
    qmax = torch.tensor([[float(rule.qmax)] for rule in rules])
    zero_point = torch.tensor([[rule.zero_point] for rule in rules])
    levels = torch.stack([zero_point, qmax - zero_point]).nan_to_num(math.inf)
    return _Tries(counts, owner, torch.cat(pairs).T[..., None], qmax, levels)


def _around(rule: Rule, least: float, count: int) -> Tensor:
    """Return pairs of parts of the lower and upper end to try, (count^2, 2)."""
    if not rule.free:
        return torch.linspace(_LARGEST_PART_NOISE, least, count**2)[:, None].expand(
            -1, 2
        )
    one = torch.logspace(math.log10(_LARGEST_PART_NOISE), math.log10(least), count)
    return torch.cartesian_prod(one, one)


def _shifted(rule: Rule) -> Tensor:
    """Return pairs of parts to try: the range, and its zero half a step off, (A, 2)."""
    shift = 1 / rule.qmax
    pairs = [(1.0, 1.0), (1 - shift, 1 + shift), (1 + shift, 1 - shift)]
    if rule.free:
        return torch.tensor(pairs if rule.bits <= _SHIFTED_BITS else []).view(-1, 2)
    return torch.tensor(pairs[:1])


def _errors(
    rows: Tensor, scale: Tensor, zero_point: Tensor, qmax: Tensor, room: Tensor
) -> Tensor:
    """Return squared errors, (A, C), of rows (C, K) on grids (A, C)."""
    count = max(1, room.shape[1] // max(1, rows.shape[1] * len(scale)))
    found = []
    for x, s, z in zip(
        *(torch.split(t, count, -1) for t in (rows.T, scale, zero_point)), strict=True
    ):
        # The longer of weights and channels comes last: short inner loops are slow.
        if rows.shape[1] <= _FEW_WEIGHTS:
            lost = _lost(x.contiguous()[:, None], s, z, qmax, room)  # (K, A, C)
            found.append(lost.square_().sum(0))
        else:
            lost = _lost(x.T[:, None], s.T[..., None], z.T[..., None], qmax, room)
            found.append(torch.linalg.vector_norm(lost, dim=-1).square_().T)
    return torch.cat(found, -1) * scale.square()


def _lost(
    x: Tensor, scale: Tensor, zero_point: Tensor, qmax: Tensor, room: Tensor
) -> Tensor:
    """Return the errors in steps; weights or channels come first, candidates second."""
    shape = (len(x), scale.shape[-2], x.shape[-1])
    exact, codes = _room(room[0], shape), _room(room[1], shape)
    torch.mul(x, scale.reciprocal(), out=exact).add_(zero_point)
    torch.round(exact, out=codes)
    return torch.minimum(codes, qmax, out=codes).relu_().sub_(exact)


def _room(room: Tensor, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape)
    return room[:size].view(shape) if size <= len(room) else room.new_empty(shape)


def _modelled_spans(
    sample: Tensor, sizes: Tensor, qmax: Tensor, unseen: float, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how far to reach below and above 0, (2, B, C), and the error, (B, C)."""
    limits, finer, between = (tensor.to(sample.device) for tensor in _limits())
    clipped = _beyond(sample, sizes[..., None] * limits, room)  # (2, C, J)
    if unseen:
        clipped = torch.hypot(clipped, unseen**0.5 * (sizes[..., None] * (1 - limits)))
    clipped = (between @ clipped.mT).clamp_(min=0).square_()[:, :, None]
    reach = (finer[:, None] * sizes[:, None])[:, :, None]  # (2, J', 1, C)
    (below, above), (lost_below, lost_above) = reach, clipped
    rounding = sample.shape[1] / 12 / qmax.square()  # (B, 1)
    cost = (below + above).square_() * rounding + (lost_below + lost_above)
    low = _at(cost.min(0).indices, below)
    cost = (above + low).square_().mul_(rounding).add_(lost_above)
    places = cost.min(0).indices
    high, lost_high = _at(places, above), _at(places, lost_above)
    cost = (below + high).square_().mul_(rounding).add_(lost_below)
    least, places = cost.min(0)
    return torch.stack([_at(places, below), high]), least + lost_high


def _at(places: Tensor, values: Tensor) -> Tensor:
    """Return the values, of (J, 1, C), at places (B, C)."""
    return values[:, 0].gather(0, places)


def _beyond(sample: Tensor, limits: Tensor, room: Tensor) -> Tensor:
    """Return the norm of what lies below and above each pair of limits, (2, C, J)."""
    count = max(1, room.shape[1] // (sample.shape[1] * _LIMITS))
    norms = []
    for x, (below, above) in zip(
        torch.split(sample, count), torch.split(limits, count, 1), strict=True
    ):
        excess = _room(room[0], (len(x), _LIMITS, x.shape[1]))
        torch.sub(-below[..., None], x[:, None], out=excess).relu_()
        lost_below = torch.linalg.vector_norm(excess, dim=-1)
        torch.sub(x[:, None], above[..., None], out=excess).relu_()
        lost_above = torch.linalg.vector_norm(excess, dim=-1)
        norms.append(torch.stack([lost_below, lost_above]))
    return torch.cat(norms, 1)


@cache
def _limits() -> tuple[Tensor, Tensor, Tensor]:
    """Return parts of a range, (J,), finer ones, (J',), and what interpolates, (J', J).

    The matrix is that of cubic convolution (Keys 1981), continued linearly at the ends.
    """
    place = torch.arange((_LIMITS - 1) * _BETWEEN + 1) / _BETWEEN
    far = (place[:, None] - torch.arange(-1, _LIMITS + 1)).abs()
    near = (1.5 * far - 2.5) * far.square() + 1
    next_to = ((2.5 - 0.5 * far) * far - 4) * far + 2
    weights = torch.where(far < 1, near, torch.where(far < 2, next_to, 0.0))
    between = weights[:, 1:-1].clone()
    between[:, :2] += weights[:, :1] * torch.tensor([2.0, -1.0])
    between[:, -2:] += weights[:, -1:] * torch.tensor([-1.0, 2.0])
    finer = 10 ** (-place / (_LIMITS - 1))
    return finer[::_BETWEEN].contiguous(), finer, between


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
    scale, zero_point = _span_grid(low, high, bits)
    nothing = scale <= TINY
    return Grid(torch.where(nothing, 1.0, scale), zero_point, bits)


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
    qmax = (1 << bits) - 1
    scale = ((high - low) / qmax).clamp(min=TINY)
    return scale, (low / scale).round().abs()


def _least_error(
    values: Tensor, weights: Tensor, low: Tensor, high: Tensor, bits: int, power: float
) -> tuple[Tensor, Tensor]:
    # Both ends shrink on their own: first in wide steps, then around the best.
    for parts in (torch.logspace(0, -1.2, 16), torch.logspace(0.08, -0.08, 11)):
        pairs = torch.cartesian_prod(parts, parts).to(low.device)
        lows, highs = low * pairs[:, :1], high * pairs[:, 1:]  # (A, 1)
        scale, zero_point = _span_grid(lows, highs, bits)
        count = max(1, elements_at_once(low.device) // _BINS)
        errors = [
            _histogram_error(values, weights, Grid(s, z, bits), power)
            for s, z in zip(
                torch.split(scale, count), torch.split(zero_point, count), strict=True
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
