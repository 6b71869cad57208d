"""How much of a weight is lost at each bit-width: fast enough for every plan.

The figure is that of :func:`ompq.quantizers.ranges.search_weight`, within a few percent
for most layers, in a small part of its time. Channels with few weights try a set of
ranges. For the others the range comes from a model: rounding costs scale^2 / 12 a
weight, and what clipping costs is measured for a few limits, once for all bit-widths.
At low widths, where the model is too simple, the error is then measured on grids around
it. At most so many weights of a channel are looked at.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ompq.quantizers.ranges import DEFAULT_KIND, kind_rule
from ompq.quantizers.spans import (
    TINY,
    Rule,
    channel_rows,
    elements_at_once,
    span_grid,
    thinned,
)

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
_LARGEST_PART = 1.1
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
    scale, zero, top = _grids(spans, tries)
    error = _errors(sample, scale, zero, top, room)  # (A, C)
    energy = sample.square().sum()
    if unseen:
        ends = sizes.T * sizes.new_tensor([-1, 1])
        error = error + unseen * _errors(ends, scale, zero, top, room)
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
    return tries, *_modelled_spans(sample, sizes, tries.top, unseen, room)


def _grids(spans: Tensor, tries: "_Tries") -> tuple[Tensor, Tensor, Tensor]:
    """Return scale and zero, (A, C), and top codes, (A, 1)."""
    # Where the zero is fixed, the end that needs the larger step decides.
    step = (spans / tries.levels).amax(0)
    spans = torch.where(tries.levels.isinf(), spans, tries.levels * step)
    low, high = spans.index_select(1, tries.owner) * tries.parts
    top = tries.top.index_select(0, tries.owner)
    return *span_grid(-low, high, top), top


class _Tries(NamedTuple):
    """Ranges to try, A in all for B widths."""

    counts: list[int]  # for each width
    owner: Tensor  # (A,), the width of each
    parts: Tensor  # (2, A, 1), of the lower and upper end
    top: Tensor  # (B, 1)
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
    top = torch.tensor([[float(rule.top)] for rule in rules])
    zero = torch.tensor([[rule.zero] for rule in rules])
    levels = torch.stack([zero, top - zero]).nan_to_num(math.inf)
    return _Tries(counts, owner, torch.cat(pairs).T[..., None], top, levels)


def _around(rule: Rule, least: float, count: int) -> Tensor:
    """Return pairs of parts of the lower and upper end to try, (count^2, 2)."""
    if not rule.free:
        return torch.linspace(_LARGEST_PART, least, count**2)[:, None].expand(-1, 2)
    one = torch.logspace(math.log10(_LARGEST_PART), math.log10(least), count)
    return torch.cartesian_prod(one, one)


def _shifted(rule: Rule) -> Tensor:
    """Return pairs of parts to try: the range, and its zero half a step off, (A, 2)."""
    shift = 1 / rule.top
    pairs = [(1.0, 1.0), (1 - shift, 1 + shift), (1 + shift, 1 - shift)]
    if rule.free:
        return torch.tensor(pairs if rule.bits <= _SHIFTED_BITS else []).view(-1, 2)
    return torch.tensor(pairs[:1])


def _errors(
    rows: Tensor, scale: Tensor, zero: Tensor, top: Tensor, room: Tensor
) -> Tensor:
    """Return squared errors, (A, C), of rows (C, K) on grids (A, C)."""
    count = max(1, room.shape[1] // max(1, rows.shape[1] * len(scale)))
    found = []
    for x, s, z in zip(
        *(torch.split(t, count, -1) for t in (rows.T, scale, zero)), strict=True
    ):
        # The longer of weights and channels comes last: short inner loops are slow.
        if rows.shape[1] <= _FEW_WEIGHTS:
            lost = _lost(x.contiguous()[:, None], s, z, top, room)  # (K, A, C)
            found.append(lost.square_().sum(0))
        else:
            lost = _lost(x.T[:, None], s.T[..., None], z.T[..., None], top, room)
            found.append(torch.linalg.vector_norm(lost, dim=-1).square_().T)
    return torch.cat(found, -1) * scale.square()


def _lost(x: Tensor, scale: Tensor, zero: Tensor, top: Tensor, room: Tensor) -> Tensor:
    """Return the errors in steps; weights or channels come first, candidates second."""
    shape = (len(x), scale.shape[-2], x.shape[-1])
    exact, codes = _room(room[0], shape), _room(room[1], shape)
    torch.mul(x, scale.reciprocal(), out=exact).add_(zero)
    torch.round(exact, out=codes)
    return torch.minimum(codes, top, out=codes).relu_().sub_(exact)


def _room(room: Tensor, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape)
    return room[:size].view(shape) if size <= len(room) else room.new_empty(shape)


def _modelled_spans(
    sample: Tensor, sizes: Tensor, top: Tensor, unseen: float, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how far to reach below and above 0, (2, B, C), and the error, (B, C)."""
    limits, finer, between = (tensor.to(sample.device) for tensor in _limits())
    clipped = _beyond(sample, sizes[..., None] * limits, room)  # (2, C, J)
    if unseen:
        clipped = torch.hypot(clipped, unseen**0.5 * (sizes[..., None] * (1 - limits)))
    clipped = (between @ clipped.mT).clamp_(min=0).square_()[:, :, None]
    reach = (finer[:, None] * sizes[:, None])[:, :, None]  # (2, J', 1, C)
    (below, above), (lost_below, lost_above) = reach, clipped
    rounding = sample.shape[1] / 12 / top.square()  # (B, 1)
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
