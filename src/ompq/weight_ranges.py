"""Clipping ranges: grids of weights and activations with the least error."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.bit_widths import LARGEST_HALF_BITS, check_bits
from ompq.configs import WeightKind
from ompq.errors import check_known
from ompq.grids import Grid, like_weight

DEFAULT_KIND: WeightKind = "affine"  # contains the other kinds, so has the least error


_SHRINKS, _SHRINK_POWER = 80, 2.4  # BRECQ's

TINY = 1e-30  # the smallest scale, so that nothing is divided by 0
# With up to this many weights in a channel the error is a jagged function of the range;
# with more, many ranges are nearly as good as the best.
FEW_WEIGHTS = 64
# Channels with more than twice as many weights are searched on a sample of this size.
# On the wide layers of ResNet-18 the squared error grows by at most 2.1 % (at 6 bits).
_SEARCHED = 512
# The noise of a layer is estimated from at most this many channels and weights. On
# MobileNetV2 and ResNet-18 that is off by about 5 %, and takes a tenth of the time of a
# forward pass for all layers.
_NOISE_CHANNELS, _NOISE_WEIGHTS = 64, 1 << 13
# Smallest fraction of a channel's range worth trying, from 2 to 8 bits: the optimum for
# a Gaussian, reduced for heavier tails as measured on MobileNetV2 and ResNet-18.
_SMALLEST_PARTS = (0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8)


class Rule(NamedTuple):
    """The grids that channels may have at B bit-widths. Tensors are (B, 1, 1)."""

    qmax: Tensor  # the highest code
    zero_point: Tensor  # the only zero point allowed; NaN if it is free
    smallest: Tensor  # the smallest fraction of a channel's range worth trying
    free: bool  # whether the zero point is free at any of the widths

    @classmethod
    def of(
        cls, widths: Iterable[int], kind: WeightKind, device: torch.device | None = None
    ) -> "Rule":
        """Return the rule of a kind of grid."""
        rows = []
        for bits in widths:
            middle = 1 << (check_bits(bits) - 1)
            qmax = 2 * middle - 1
            rules = {
                "affine": (qmax, math.nan),
                "midrise": (qmax, qmax / 2),
                "midtread": (qmax, middle),
                "symmetric": (qmax - 1, middle - 1),
            }
            check_known("kind", kind, rules)
            few = bits <= LARGEST_HALF_BITS or kind == "symmetric"
            rule = rules[kind if few else "midtread"]
            rows.append((*rule, _SMALLEST_PARTS[bits - 2]))
        table = torch.tensor(rows, dtype=torch.float32, device=device)  # (B, 3)
        free = any(math.isnan(zero_point) for _, zero_point, _ in rows)
        qmaxes, zero_points, parts = table[..., None, None].unbind(1)
        return cls(qmaxes, zero_points, parts, free)


class _Effort(NamedTuple):
    """How many ranges are tried."""

    few: int  # ends to try on each side of channels with few weights
    many: int  # ends to try on each side of the others
    neighbours: int  # scales to try around the best, with three zero points each
    refits: int  # least-squares fits to the codes of the best


# For weights that are kept, for a sample of long channels first, and for scores.
_THOROUGH = _Effort(few=24, many=12, neighbours=9, refits=3)
_ON_SAMPLE = _Effort(few=24, many=8, neighbours=5, refits=2)
_QUICK = _Effort(few=8, many=4, neighbours=0, refits=1)
# For so many rows that the search takes longer than everything else: noise is up to a
# sixth larger, in 40 % of the time.
_QUICKEST, _MANY_ROWS = _Effort(few=5, many=4, neighbours=0, refits=1), 1 << 16


class _Measure(NamedTuple):
    """How the errors of a channel's weights are measured."""

    power: float = 2.0  # the sum of |error| to this power, without a Gram matrix
    # With one, errorᵀ · gram · error. It is positive definite, (C, K, K), or (1, K, K)
    # if all channels share it.
    gram: Tensor | None = None
    counts: Tensor | None = None  # the number of weights that each stands for, (C, K)

    def cost(self, lost: Tensor, scale: Tensor) -> Tensor:
        """Return the cost of errors in steps, (A, B, C, K), which are overwritten."""
        if self.gram is not None:
            return (self.times(lost, lost) * lost).sum(-1) * scale[..., 0].square()
        if self.counts is not None:
            lost = lost.mul_(self.counts ** (1 / self.power))
        cost: Tensor = torch.linalg.vector_norm(lost, self.power, -1)
        return (cost * scale[..., 0]).pow(self.power)

    def times(self, values: Tensor, error: Tensor) -> Tensor:
        """Multiply values, (..., C, K), by the matrix of the cost's quadratic form.

        For a power above 2, squares are weighted by |error|^(power - 2).
        """
        if self.gram is not None:
            if len(self.gram) == 1:
                return values @ self.gram[0]
            return torch.einsum("...ck,ckl->...cl", values, self.gram)
        if self.power != 2:
            values = values * error.abs().pow(self.power - 2)
        return values if self.counts is None else values * self.counts


class _Best(NamedTuple):
    """The best grids so far."""

    cost: Tensor  # (B, C)
    scale: Tensor  # (B, C, 1)
    zero_point: Tensor  # (B, C, 1)


def search_weight(  # noqa: PLR0913
    weight: Tensor,
    bits: int,
    *,
    channel_dim: int = 0,
    group_size: int = 0,
    kind: WeightKind = DEFAULT_KIND,
    power: float = 2.0,
    gram: Tensor | None = None,
) -> Grid:
    """Return the grid with the least error for each channel, or for each group.

    Tries ranges that are cut at both ends, then scales and zero points around the best,
    and finally fits both to the codes by least squares a few times.

    Args:
        group_size: Number of consecutive weights of a channel, in a weight of (C, K),
            that have their own grid; 0 means one grid per channel.
        power: The error is the sum of |error|^power: 2 for least squares; 2.4, as in
            BRECQ, clips less.
        gram: Gram matrix of the inputs of a channel's weights, (K, K), or (C, K, K) if
            channels have different inputs; positive definite. The error is then that of
            the outputs, errorᵀ · gram · error, for any power.

    Returns:
        Scale and zero point broadcast with the weight; with groups they have its shape.

    Example:
        >>> grid = search_weight(torch.tensor([[-0.3, -0.1, 0.1, 0.3]]), bits=2)
        >>> grid.scale, grid.zero_point
        (tensor([[0.2000]]), tensor([[1.5000]]))
    """
    rule = Rule.of([bits], kind, weight.device)
    if not power >= 2:
        raise ValueError(f"power={power} must be at least 2, which is least squares")
    rows = channel_rows(weight, channel_dim, group_size)
    if not all(end.isfinite() for end in rows.aminmax()):
        raise ValueError("weight holds NaN or infinity; load other weights")
    if gram is not None:
        gram = gram.to(rows).reshape(-1, *gram.shape[-2:])
    measure = _Measure(power, gram, _counts(weight, group_size))
    pieces = _pieces(rows, measure)
    found = [_search(part, rule, own, _THOROUGH) for part, own in pieces]
    scale = torch.cat([best.scale[0] for best in found])
    zero_point = torch.cat([best.zero_point[0] for best in found])
    grid = Grid(scale, zero_point, bits, int(rule.qmax) < (1 << bits) - 1)
    return _like_weight(grid, weight, channel_dim, group_size)


def _counts(weight: Tensor, group_size: int) -> Tensor | None:
    """Return 1 for weights and 0 for the padding of groups; None without padding."""
    if not group_size or weight.shape[1] % group_size == 0:
        return None
    return channel_rows(torch.ones_like(weight), 0, group_size)


def _like_weight(grid: Grid, weight: Tensor, channel_dim: int, group_size: int) -> Grid:
    """Return a grid of rows, (C, 1), in a shape that broadcasts with the weight."""
    # Rows of zeros get a grid that contains 0 and that runtimes support.
    dead, middle = grid.scale <= TINY, float(1 << (grid.bits - 1))
    scale = torch.where(dead, 1.0, grid.scale)
    zero_point = torch.where(dead, middle, grid.zero_point)
    like = weight.shape, channel_dim, group_size
    scale, zero_point = like_weight(scale, *like), like_weight(zero_point, *like)
    return replace(grid, scale=scale, zero_point=zero_point)


def minmax_weight(
    weight: Tensor,
    bits: int,
    *,
    channel_dim: int = 0,
    group_size: int = 0,
    kind: WeightKind = DEFAULT_KIND,
) -> Grid:
    """Return the smallest grid that covers all weights of each channel, and 0 (ZeroQ).

    Arguments and shapes are those of :func:`search_weight`.
    """
    rule = Rule.of([bits], kind, weight.device)
    rows = channel_rows(weight, channel_dim, group_size)
    low, high = rule_range(*row_range(rows), rule)
    scale, zero_point = range_grid(low[0], high[0], rule.qmax[0])
    grid = Grid(scale, zero_point, bits, int(rule.qmax) < (1 << bits) - 1)
    return _like_weight(grid, weight, channel_dim, group_size)


def shrunk_weight(
    weight: Tensor, bits: int, *, channel_dim: int = 0, group_size: int = 0
) -> Grid:
    """Return BRECQ's grid of each channel, with an integer zero point.

    Both ends of the range shrink together, in steps of 1 % down to 21 %; the range with
    the smallest sum of |error|^2.4 wins. Two things differ from BRECQ: ranges contain
    0, and above 6 bits the zero point is the middle code, as int8 runtimes require.
    """
    rows = channel_rows(weight, channel_dim, group_size)
    rule = Rule.of([bits], "affine", weight.device)
    low, high = (end[0] for end in rule_range(*row_range(rows), rule))
    scale, zero_point = shrink_ranges(rows, low, high, bits)
    zero_point = torch.where(low == high, float(1 << (bits - 1)), zero_point)
    return _like_weight(Grid(scale, zero_point, bits), weight, channel_dim, group_size)


def shrunk_tensor(x: Tensor, bits: int) -> Grid:
    """Return BRECQ's grid of a whole tensor."""
    rows = x.detach().float().reshape(1, -1)
    scale, zero_point = shrink_ranges(rows, *row_range(rows), bits)
    return Grid(scale.reshape(()), zero_point.reshape(()), bits)


def shrink_ranges(
    rows: Tensor, low: Tensor, high: Tensor, bits: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, (C, 1) each, of the best of 80 shrunk ranges."""
    whole, zero_point = integer_grid(low, high, bits)
    best, scale = torch.full_like(whole, math.inf), whole
    for step in range(_SHRINKS):
        tried = whole * (1 - step / 100)
        lost = Grid(tried, zero_point, bits).fake(rows).sub_(rows).abs_()
        lost = lost.pow_(_SHRINK_POWER)
        lost = lost if weights is None else lost * weights
        error = lost.mean(1, keepdim=True)
        scale = torch.where(error < best, tried, scale)
        best = torch.minimum(best, error)
    return torch.where(whole <= TINY, 1.0, scale), zero_point


class QuickGrids(NamedTuple):
    """Good grids of C rows at B widths, and their errors."""

    scale: Tensor  # (B, C, 1)
    zero_point: Tensor  # (B, C, 1)
    qmax: Tensor  # (B, 1, 1)
    lost: Tensor  # squared errors of each row, (B, C)
    energy: Tensor  # squares of each row, (C,)

    def errors(self, rows: Tensor, widths: slice) -> Tensor:
        """Return the rounding errors of rows (C, K) at b of the widths, (b, C, K)."""
        scale, zero_point, qmax = (tensor[widths] for tensor in self[:3])
        levels = (rows / scale).add_(zero_point).round_()
        levels = torch.minimum(levels, qmax, out=levels).relu_()
        return levels.sub_(zero_point).mul_(scale).sub_(rows)

    def of_rows(self, rows: slice) -> "QuickGrids":
        """Return the grids of some rows."""
        scale, zero_point, lost = self.scale[:, rows], self.zero_point, self.lost
        return QuickGrids(
            scale, zero_point[:, rows], self.qmax, lost[:, rows], self.energy[rows]
        )


def quick_grids(
    rows: Tensor, bits: Sequence[int], counts: Tensor | None = None
) -> QuickGrids:
    """Return good grids of rows, (C, K), trying few ranges for all widths at once.

    ``counts``, (C, K), is 1 for weights and 0 for the padding of a row.
    """
    rule = _rules(tuple(bits), rows.device)
    pieces = _pieces(rows, _Measure(counts=counts))
    effort = _QUICKEST if len(rows) > _MANY_ROWS else _QUICK
    found = [_search(part, rule, own, effort) for part, own in pieces]
    lost, scale, zero_point = (
        torch.cat(parts, 1) for parts in zip(*found, strict=True)
    )
    return QuickGrids(scale, zero_point, rule.qmax, lost, rows.square().sum(1))


def row_stacks(
    sizes: Sequence[tuple[int, int]], device: torch.device
) -> list[list[int]]:
    """Return which weights, of these numbers of rows and columns, to search together.

    A GPU waits for calls, so there rows are padded to a few lengths; on a CPU padding
    would only cost time. Weights that are too large to be stacked stay alone.
    """
    stacks: dict[int, list[list[int]]] = {}
    room: dict[int, int] = {}
    for at, (rows, columns) in enumerate(sizes):
        length = columns
        # Long rows are sampled, and which weights are drawn depends on the length.
        if device.type == "cuda" and columns <= 2 * _SEARCHED:
            # Powers of 4: a GPU loses less by longer rows than by more calls.
            exponent = (max(FEW_WEIGHTS, columns) - 1).bit_length()
            length = 1 << (exponent + exponent % 2)
        taken = rows * length
        if room.get(length, 0) < taken:
            stacks.setdefault(length, []).append([])
            room[length] = _rows_at_once(device)
        stacks[length][-1].append(at)
        room[length] -= taken
    return [stack for several in stacks.values() for stack in several]


def stacked_rows(
    weights: Sequence[Tensor], columns: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of several weights, padded with zeros to one length, (C, K).

    Also returns 1 for weights and 0 for padding, (C, K), or None if there is none.

    Args:
        weights: Each as rows, (C, K).
        columns: For each, the number of weights in a channel. If a channel has several
            rows, the last of them is padded already.
    """
    longest = max(each.shape[1] for each in weights)
    rows = torch.cat([F.pad(each, (0, longest - each.shape[1])) for each in weights])
    lengths = np.concatenate(
        [
            np.resize(np.minimum(width, np.arange(count, 0, -width)), len(each))
            for each, count in zip(weights, columns, strict=True)
            for width in [each.shape[1]]
        ]
    )
    if lengths.min() == longest:
        return rows, None
    # Without waiting for what the device still does.
    length = torch.from_numpy(lengths).to(rows.device, non_blocking=True)[:, None]
    return rows, (torch.arange(longest, device=rows.device) < length).float()


def weight_noises(
    weight: Tensor, bits: Sequence[int], *, channel_dim: int = 0, group_size: int = 0
) -> list[float]:
    """Estimate ||W - Q(W)||^2 / ||W||^2 at each width; 0 for a weight of zeros.

    Searches like :func:`search_weight`, with fewer ranges and on a sample of weights.
    """
    rows = channel_rows(weight, channel_dim, group_size)
    counts = _counts(weight, group_size)
    if not bits:
        return []
    energy = rows.square().sum(1)
    share = energy.double() / energy.sum(dtype=torch.float64).clamp(min=TINY)
    if len(rows) > _NOISE_CHANNELS:
        # Channels are drawn in proportion to their share of the energy.
        wanted = torch.arange(_NOISE_CHANNELS, device=rows.device) + 0.5
        drawn = torch.searchsorted(share.cumsum(0), wanted / _NOISE_CHANNELS)
        drawn = drawn.clamp(max=len(rows) - 1)
        rows, counts = rows[drawn], None if counts is None else counts[drawn]
        share = share.new_full((_NOISE_CHANNELS,), 1 / _NOISE_CHANNELS)
    if counts is None:  # padded groups are small enough
        rows, counts = _sample(rows, _NOISE_WEIGHTS // len(rows))
    energy = rows.square() if counts is None else rows.square() * counts
    energy = energy.sum(1).clamp(min=TINY)
    rule = _rules(tuple(bits), rows.device)
    best = _search(rows, rule, _Measure(counts=counts), _QUICK)
    noises: list[float] = ((best.cost / energy).double() @ share).tolist()
    return noises


@cache
def _rules(bits: tuple[int, ...], device: torch.device) -> Rule:
    return Rule.of(bits, DEFAULT_KIND, device)


def elements_at_once(device: torch.device) -> int:
    """Return how many elements to process at once: a core's cache, or a full GPU."""
    return 1 << 27 if device.type == "cuda" else 1 << 18


def _rows_at_once(device: torch.device) -> int:
    """Return how many elements of rows to search at once; each is copied per width."""
    return min(elements_at_once(device), 1 << 24)


def channel_rows(weight: Tensor, channel_dim: int, group_size: int = 0) -> Tensor:
    """Return the weight as float32 of shape (channels, weights of a channel).

    With groups the shape is (channels * groups, size), and the last group of each
    channel is padded with zeros.
    """
    if weight.numel() == 0:
        raise ValueError(f"weight of shape {tuple(weight.shape)} is empty")
    rows = weight.detach().movedim(channel_dim, 0) if channel_dim else weight.detach()
    rows = rows.reshape(rows.shape[0], -1).float()
    if not group_size:
        return rows
    return F.pad(rows, (0, -rows.shape[1] % group_size)).reshape(-1, group_size)


def as_weights(rows: Tensor, shape: Sequence[int], channel_dim: int) -> Tensor:
    """Return B weights, (B, *shape), from their rows, (B, C, K).

    This is the inverse of :func:`channel_rows` for each of them.
    """
    channels, rest = shape[channel_dim], [*shape]
    del rest[channel_dim]
    count, size = rows.shape[0], math.prod(rest)
    if rows.shape[1:] != (channels, size):  # groups, the last filled up
        rows = rows.reshape(count, channels, -1)[..., :size]
    weights = rows.reshape(count, channels, *rest)
    return weights.movedim(1, 1 + channel_dim) if channel_dim else weights


def subsample(rows: Tensor, most: int) -> Tensor:
    """Return at most ``most`` evenly spread columns, in no common stride with rows."""
    width = rows.shape[1]
    if width <= most:
        return rows
    while math.gcd(most, width) > 1:
        most -= 1
    places = torch.arange(most, device=rows.device) * width // most
    return rows.index_select(1, places)


def _sample(rows: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
    """Return a sample of each channel's weights, and how many each stands for.

    It always contains the largest and smallest weights, which decide where to clip.
    """
    width = rows.shape[1]
    if width <= most:
        return rows, None
    extremes = most // 16
    low = rows.topk(extremes, largest=False).values
    high = rows.topk(extremes).values
    sample = subsample(rows, most - 2 * extremes)
    between = ((sample > low[:, -1:]) & (sample < high[:, -1:])).float()
    share = (width - 2 * extremes) / between.sum(1, keepdim=True).clamp(min=1)
    counts = [between * share, torch.ones_like(low), torch.ones_like(high)]
    return torch.cat([sample, low, high], 1), torch.cat(counts, 1)


def row_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends, (C, 1) each, of a range that contains all values and 0."""
    low = rows.amin(1, keepdim=True).clamp(max=0)
    return low, rows.amax(1, keepdim=True).clamp(min=0)


def rule_range(low: Tensor, high: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Extend a range until its zero point is the rule's, unless that is free."""
    below, above = rule.zero_point, rule.qmax - rule.zero_point
    scale = torch.maximum(high / above, -low / below)
    free = rule.zero_point.isnan()
    low = torch.where(free, low, -below * scale)
    return low, torch.where(free, high, above * scale)


def range_grid(low: Tensor, high: Tensor, qmax: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, a multiple of 0.5, of ranges that contain 0."""
    scale = ((high - low) / qmax).clamp(min=TINY)
    return scale, (low / scale * 2).round().abs() / 2


def _pieces(rows: Tensor, measure: _Measure) -> Iterator[tuple[Tensor, _Measure]]:
    """Yield a few channels at a time, each with its measure."""
    channels = max(1, _rows_at_once(rows.device) // rows.shape[1])
    for start in range(0, len(rows), channels):
        part = slice(start, start + channels)
        gram, counts = measure.gram, measure.counts
        if gram is not None and len(gram) > 1:
            gram = gram[part]
        counts = None if counts is None else counts[part]
        yield rows[part], measure._replace(gram=gram, counts=counts)


def _search(rows: Tensor, rule: Rule, measure: _Measure, effort: _Effort) -> _Best:
    """Return the grids of least cost for the channels of (C, K)."""
    refits = effort.refits
    if rows.shape[1] > 2 * _SEARCHED and measure.gram is None:
        sample, counts = _sample(rows, _SEARCHED)
        on_sample = effort if effort.refits < 2 else _ON_SAMPLE
        best = _search(sample, rule, measure._replace(counts=counts), on_sample)
        found = best.scale[None], best.zero_point[None]
        best = _best_of(None, rows, rule, measure, found)
        refits = min(refits, 2)
    else:
        best = _best_of(None, rows, rule, measure, _cut_ranges(rows, rule, effort))
        if effort.neighbours:
            near = _neighbours(best, rule, effort.neighbours)
            best = _best_of(best, rows, rule, measure, near)
    for _ in range(refits):
        fitted = _refit(best, rows, rule, measure)
        best = _best_of(best, rows, rule, measure, fitted)
    return best


def _cut_ranges(rows: Tensor, rule: Rule, effort: _Effort) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, (A, B, C, 1), of the ranges to try first."""
    free = rule.zero_point.isnan()
    count = effort.few if rows.shape[1] <= FEW_WEIGHTS else effort.many
    tries = count**2 if rule.free else 4 * count
    at = torch.arange(tries, device=rows.device)[:, None, None, None]
    # How far to cut each end, from 0 to 1. With a fixed zero point both are cut alike.
    both = at % (4 * count) / (4 * count - 1)
    ends = torch.stack([at // count, at % count]) / (count - 1)
    cut = torch.where(free, ends, both)  # (2, A, B, 1, 1)
    # For few weights a range beyond the extremes can be better.
    parts = 1.05 * (rule.smallest / 1.05) ** cut
    parts = torch.cat([torch.ones_like(parts[:, :1]), parts], 1)
    low, high = rule_range(*row_range(rows), rule)
    return range_grid(low * parts[0], high * parts[1], rule.qmax)


def _neighbours(best: _Best, rule: Rule, count: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points near the best, (A, B, C, 1)."""
    free = rule.zero_point.isnan()
    shifts = [-0.5, 0.0, 0.5] if rule.free else [0.0]
    factors = torch.linspace(0.94, 1.06, count)
    pairs = torch.cartesian_prod(factors, torch.tensor(shifts)).to(best.scale.device)
    factor, shift = pairs.T[..., None, None, None]
    zero_point = torch.minimum(best.zero_point + shift * free, rule.qmax).relu()
    return best.scale * factor, zero_point


def _refit(
    best: _Best, rows: Tensor, rule: Rule, measure: _Measure
) -> tuple[Tensor, Tensor]:
    """Fit scales to the current codes by least squares, (A, B, C, 1).

    The first keep the zero points; the second use fitted ones.
    """
    levels = (rows / best.scale).add_(best.zero_point).round_()
    levels = torch.minimum(levels, rule.qmax, out=levels).relu_().sub_(best.zero_point)
    error = rows if measure.power == 2 else best.scale * levels - rows
    ones = measure.times(torch.ones_like(rows), error)
    weighted = measure.times(levels, error)
    count = ones.sum(-1, keepdim=True)
    level, row = _dot(ones, levels), _dot(ones, rows)
    square, product = _dot(weighted, levels), _dot(weighted, rows)
    slope = (count * product - level * row) / (count * square - level.square())
    shift = ((level - row / slope) / count * 2).round() / 2
    shifted = torch.minimum(best.zero_point + shift, rule.qmax).relu()
    usable = rule.zero_point.isnan() & (slope > 0)
    shift = torch.where(usable, shifted - best.zero_point, 0)
    # Checking whether any zero point moves would synchronize with a GPU.
    moved = rule.free and (rows.is_cuda or bool(shift.any()))
    shift = torch.stack([torch.zeros_like(shift), shift][: 1 + moved])
    squares = square - 2 * shift * level + shift.square() * count
    scale = (product - shift * row) / squares
    usable = (scale > 0) & scale.isfinite()
    return torch.where(usable, scale, best.scale), best.zero_point + shift


def _best_of(
    best: _Best | None,
    rows: Tensor,
    rule: Rule,
    measure: _Measure,
    candidates: tuple[Tensor, Tensor],
) -> _Best:
    """Return the better of the best so far and candidates, (A, B, C, 1) each."""
    scale, zero_point = candidates
    if best is None:
        nothing = torch.full_like(scale[0, ..., 0], math.inf)
        best = _Best(nothing, scale[0], zero_point[0])
    size = scale.shape[1] * rows.numel()
    count = min(len(scale), max(1, elements_at_once(rows.device) // size))
    room = rows.new_empty(2, count, scale.shape[1], *rows.shape)
    for s, z in split_rows(scale, zero_point, count):
        exact, codes = room[0, : len(s)], room[1, : len(s)]
        torch.mul(rows, s.reciprocal(), out=exact).add_(z)
        torch.minimum(torch.round(exact, out=codes), rule.qmax, out=codes).relu_()
        cost, at = measure.cost(codes.sub_(exact), s).min(0)
        at, better = at[None, ..., None], (cost < best.cost)[..., None]
        best = _Best(
            torch.minimum(cost, best.cost),
            torch.where(better, s.gather(0, at)[0], best.scale),
            torch.where(better, z.gather(0, at)[0], best.zero_point),
        )
    return best


def split_rows(
    scale: Tensor, zero_point: Tensor, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the candidates, a few at a time."""
    return zip(torch.split(scale, count), torch.split(zero_point, count), strict=True)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(-1, keepdim=True)


def integer_grid(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point that put a range on a grid."""
    qmax = (1 << bits) - 1
    scale = ((high - low) / qmax).clamp(min=TINY)
    return scale, (low / scale).round().abs()
