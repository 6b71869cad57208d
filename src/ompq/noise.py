"""How much of a weight is lost at each bit-width: fast enough for every plan.

The figure is that of :func:`ompq.ranges.search_weight`, within a few percent for most
layers, in a small part of its time. Channels with few weights try a set of ranges. For
the others the range comes from a model: rounding costs scale^2 / 12 a weight, and what
clipping costs is measured for a few limits, once for all bit-widths. Either way the
error is then measured on the grid, for at most so many weights of a channel.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ompq.ranges import DEFAULT_KIND, kind_rule
from ompq.spans import (
    TINY,
    Rule,
    channel_rows,
    elements_at_once,
    even_span,
    row_span,
    span_grid,
    thinned,
)

# Channels of at most so many weights try ranges from these parts of the whole up.
_FEW_WEIGHTS = 32
_FEW_PARTS = {2: 0.5, 3: 0.7, 4: 0.85, 5: 0.9, 6: 0.93, 7: 0.93, 8: 0.93}
_LARGEST_PART = 1.1
# Layers of at most so many weights try ranges around the model's.
_SMALL_LAYER = 1 << 14
# The others do so up to this width, where half a step more or less of zero matters.
_SHIFTED_BITS = 3
# Limits at which clipping is measured, and values interpolated from one to the next.
_LIMITS = 8
_BETWEEN = 3


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
    rules = [kind_rule(width, DEFAULT_KIND) for width in bits]
    rows = channel_rows(weight, channel_dim)
    ends = torch.cat(row_span(rows), 1)  # (C, 2)
    sample = thinned(rows, max_weights)
    # The extremes count for as much as they are likely to be missing.
    seen = sample.shape[1] / rows.shape[1]
    unseen = seen * (1 - seen)
    low, high, top, counts = _spans_to_try(rules, sample, ends, unseen)
    scale, zero = span_grid(low, high, top)  # (A, C)
    error = _errors(sample, scale, zero, top)
    energy = sample.square().sum()
    if unseen:
        error = error + unseen * _errors(ends, scale, zero, top)
        energy = energy + unseen * ends.square().sum()
    least = torch.stack([some.amin(0).sum() for some in torch.split(error, counts)])
    noise: list[float] = (least / energy.clamp(min=TINY)).tolist()
    return noise


def _spans_to_try(
    rules: Sequence[Rule], sample: Tensor, ends: Tensor, unseen: float
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return low and high, (A, C), their top codes, (A, 1), and how many a rule has."""
    device = sample.device
    top = torch.tensor([[float(rule.top)] for rule in rules]).to(device)
    if sample.shape[1] <= _FEW_WEIGHTS:
        low, high = _even(ends[:, :1].T, ends[:, 1:].T, rules)
        parts = [_parts(rule, _FEW_PARTS[rule.bits], 5) for rule in rules]
    else:
        low, high = _even(*_modelled_span(sample, ends, top, unseen), rules)
        # A sample would find ranges that suit it better than the rest.
        small = not unseen and sample.numel() <= _SMALL_LAYER
        parts = [_parts(rule, 0.9, 3) if small else _shifted(rule) for rule in rules]
    counts = [len(some) for some in parts]
    owner = torch.arange(len(rules)).repeat_interleave(torch.tensor(counts)).to(device)
    part = torch.cat(parts).to(device)
    return low[owner] * part[:, :1], high[owner] * part[:, 1:], top[owner], counts


def _errors(rows: Tensor, scale: Tensor, zero: Tensor, top: Tensor) -> Tensor:
    """Return squared errors, (A, C), of rows (C, K) on grids (A, C)."""
    count = max(1, elements_at_once(rows.device) // (rows.shape[1] * len(scale)))
    chunks = zip(
        *(torch.split(t, count, -1) for t in (rows.T, scale, zero)), strict=True
    )
    # The longer of weights and channels comes last: short inner loops are slow.
    if rows.shape[1] <= _FEW_WEIGHTS:
        found = [_lost(x.contiguous()[:, None], s, z, top, 0) for x, s, z in chunks]
    else:
        found = [
            _lost(x.T[:, None], s.T[..., None], z.T[..., None], top, -1).T
            for x, s, z in chunks
        ]
    return torch.cat(found, -1) * scale.square()


def _lost(x: Tensor, scale: Tensor, zero: Tensor, top: Tensor, dim: int) -> Tensor:
    exact = (x * scale.reciprocal()).add_(zero)
    codes = exact.round()
    torch.minimum(codes, top, out=codes)
    return codes.relu_().sub_(exact).square_().sum(dim)


def _modelled_span(
    sample: Tensor, ends: Tensor, top: Tensor, unseen: float
) -> tuple[Tensor, Tensor]:
    limits, blend = (t.to(sample.device) for t in _limits())
    lows, highs = ends[:, :1] * limits, ends[:, 1:] * limits  # (C, J)
    below = torch.hypot(_beyond(-sample, -lows), unseen**0.5 * (lows - ends[:, :1]))
    above = torch.hypot(_beyond(sample, highs), unseen**0.5 * (ends[:, 1:] - highs))
    below, above = ((blend @ end.T).square() for end in (below, above))  # (J', C)
    lows, highs = ((blend @ end.T) for end in (-lows, highs))
    rounding = sample.shape[1] / 12 / top.square()  # (B, 1)
    lows, highs, below, above = (t[:, None] for t in (lows, highs, below, above))
    low = _least((highs + lows).square() * rounding + (below + above), lows)
    high = _least((highs + low).square() * rounding + above, highs)
    low = _least((lows + high).square() * rounding + below, lows)
    return -low, high


def _least(cost: Tensor, ends: Tensor) -> Tensor:
    """Return for each cost (J, B, C) the end, of (J, 1, C), that has the least."""
    return ends[:, 0].gather(0, cost.min(0).indices)


def _beyond(sample: Tensor, limits: Tensor) -> Tensor:
    """Return the norm of what exceeds each limit, both (C, J)."""
    count = max(1, elements_at_once(sample.device) // (sample.shape[1] * _LIMITS))
    chunks = zip(torch.split(sample, count), torch.split(limits, count), strict=True)
    return torch.cat(
        [
            torch.linalg.vector_norm((x[:, None] - limit[..., None]).relu_(), dim=-1)
            for x, limit in chunks
        ]
    )


def _even(low: Tensor, high: Tensor, rules: Sequence[Rule]) -> tuple[Tensor, Tensor]:
    low, high = (end.expand(len(rules), -1) for end in (low, high))
    spans = [
        even_span(low[i : i + 1], high[i : i + 1], rule) for i, rule in enumerate(rules)
    ]
    return torch.cat([low for low, _ in spans]), torch.cat([high for _, high in spans])


@cache
def _parts(rule: Rule, least: float, count: int) -> Tensor:
    """Return pairs of parts of the lower and upper end to try, (count^2, 2)."""
    if not rule.free:
        return torch.linspace(_LARGEST_PART, least, count**2)[:, None].expand(-1, 2)
    one = torch.logspace(math.log10(_LARGEST_PART), math.log10(least), count)
    return torch.cartesian_prod(one, one)


@cache
def _shifted(rule: Rule) -> Tensor:
    """Return pairs of parts to try: the range, and at low widths its zero moved."""
    shift = 1 / rule.top if rule.bits <= _SHIFTED_BITS else 0.0
    pairs = [(1.0, 1.0), (1 - shift, 1 + shift), (1 + shift, 1 - shift)]
    return torch.tensor(pairs if shift else pairs[:1])


@cache
def _limits() -> tuple[Tensor, Tensor]:
    """Return parts of a range, (J,), and the matrix (J', J) that interpolates."""
    limits = torch.logspace(0, -1, _LIMITS)
    place = torch.arange((_LIMITS - 1) * _BETWEEN + 1) / _BETWEEN
    blend = (1 - (place[:, None] - torch.arange(_LIMITS)).abs()).clamp(min=0)
    return limits, blend
