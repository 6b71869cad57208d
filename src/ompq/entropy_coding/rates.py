"""Coded weights: the bits that entropy-coded weights take, and steps for a given rate.

A coded layer has one step for all its weights, and codes of 8 bits around 128. The step
alone determines how many bits the codes take and how large the error is.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ompq.bit_widths import LARGEST_BITS
from ompq.entropy_coding.codec import SCALE_MULTIPLES, coded_size, rows_are_alike
from ompq.grids import Grid
from ompq.weight_ranges import subsample

ZERO = 1 << (LARGEST_BITS - 1)  # the code of 0 in a coded layer
_CODES = 1 << LARGEST_BITS  # how many codes there are

# Squared steps that a bit is worth. Rounding to a fine step s has the error D = s²/12,
# and one more bit halves s: dD/dR = -2 ln 2 · s²/12. A weight that saves a bit for less
# error than this saves it more cheaply than a coarser step would. On four layers of
# ResNet-18 and four of MobileNetV2, at 0.75 to 4 bits, the error at equal entropy was
# within 0.12 dB of the best of six factors from 0.05 to 0.25, a larger one on some.
PRICE = math.log(2) / 6

# How far a weight lies from its code at most if another code would be nearer.
_REACH = 0.49
_LEAST_SAVED = 1e-6  # bits, so that codes that save none move last


def code_bits(codes: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return the bits of each code by its frequency among ``codes``, (256,).

    A code that does not occur counts as half an occurrence. With ``classes``, one for
    each code, frequencies are those within a class, (classes, 256).
    """
    return _bits(_counts(codes, classes))


def between_codes(position: Tensor) -> Tensor:
    """Return the bits of weights, interpolated between codes, with a gradient.

    The bits of a code follow from how many weights are rounded to it. ``position`` is
    as for :func:`cheapest_codes`. Nothing synchronises with the device, so that a CUDA
    graph can contain it.
    """
    position = position.clamp(0, _CODES - 1)
    low = position.detach().floor().clamp_max(_CODES - 2)
    codes = position.detach().round().double()
    bits = _bits(torch.histc(codes, _CODES, 0, _CODES - 1))
    below, above = bits[low.long()], bits[low.long() + 1]
    return below + (position - low) * (above - below)


def _bits(counts: Tensor) -> Tensor:
    counts = counts.clamp_min(0.5)
    return (counts.sum(-1, keepdim=True).log2() - counts.log2()).to(torch.float32)


def entropy(codes: Tensor, classes: Tensor | None = None) -> float:
    """Return the total bits of codes by their frequencies (in each class)."""
    counts = _counts(codes, classes)
    total = counts.sum(-1, keepdim=True)
    return float((counts * (total / counts.clamp_min(1)).clamp_min(1).log2()).sum())


def _counts(codes: Tensor, classes: Tensor | None) -> Tensor:
    if classes is None:
        return torch.bincount(codes.flatten().long(), minlength=_CODES).double()
    index = classes.flatten().long() * _CODES + codes.flatten()
    counts = torch.bincount(index, minlength=_CODES * (int(classes.max()) + 1))
    return counts.view(-1, _CODES).double()


def cheapest_codes(
    position: Tensor,
    *,
    price: float = PRICE,
    rounds: int = 3,
) -> Tensor:
    """Round each weight up or down, whichever has the least ``error² + price * bits``.

    The bits of a code follow from its frequency, which is counted again in each round.

    Args:
        position: Weights in steps of the grid, 0 at code 128, of any shape.
        price: Squared steps that a bit is worth; 0 rounds to nearest.
        rounds: Frequencies hardly change after three.

    Returns:
        The codes, uint8, of the same shape.
    """
    codes = position.clamp(0, _CODES - 1).round()
    for _ in range(rounds if price else 0):
        codes = cheapest_neighbours(position, code_bits(codes), price)
    return codes.to(torch.uint8)


def cheapest_neighbours(
    position: Tensor, bits: Tensor, price: Tensor | float
) -> Tensor:
    """Round up or down, whichever has the least ``error² + price * bits``.

    ``bits`` are those of each code, (256,); the price may differ from weight to weight.
    """
    position = position.clamp(0, _CODES - 1)
    low = position.floor().clamp_max_(_CODES - 2)
    dearer = (bits[1:] - bits[:-1])[low.long()]
    # How much smaller the squared error of the upper neighbour is.
    gain = 2 * (position - low) - 1
    return low + (gain > price * dearer)


def lowered_codes(
    codes: Tensor,
    position: Tensor,
    importance: Tensor | float,
    *,
    size: Callable[[Tensor], int],
    limit: int,
) -> Tensor:
    """Move codes towards zero until they take at most ``limit`` bytes.

    As few codes as possible move: those that add the least error, times its importance,
    for each bit saved. Positions are those of :func:`cheapest_codes`; ``size`` returns
    the bytes of codes. If even zeros alone exceed the limit, all codes become zero.
    """
    while size(codes) > limit and (codes != ZERO).any():
        less, rank = _lowest_damage(codes, position, importance)
        few, enough = 0, int((codes != ZERO).sum())
        while enough - few > max(1, few >> 6):
            middle = (few + enough) // 2
            fits = size(torch.where(rank < middle, less, codes)) <= limit
            few, enough = (few, middle) if fits else (middle, enough)
        codes = torch.where(rank < enough, less, codes)
    return codes


def _lowest_damage(
    codes: Tensor, position: Tensor, importance: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return the codes one step nearer to zero, and the rank in which each moves."""
    level = codes.float() - ZERO
    less = level - level.sign() + ZERO
    bits = code_bits(codes)
    saved = (bits[codes.long()] - bits[less.long()]).clamp_min(_LEAST_SAVED)
    damage = (less - position).square() - (codes - position.float()).square()
    ratio = importance * damage.clamp_min(0) / saved
    ratio = torch.where(level == 0, math.inf, ratio)
    order = ratio.flatten().argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return less.to(torch.uint8), rank.view_as(codes)


def pull_to(codes: Tensor, position: Tensor) -> Tensor:
    """Return the positions nearest to the given ones that round to these codes.

    A layer rounds its weight to nearest in every forward pass. So a weight whose code
    is not the nearest one is moved to where it just rounds to that code.
    """
    return torch.clamp(position, codes - _REACH, codes + _REACH)


# A curve has steps half an octave apart, in units of the weights' root mean square, and
# is measured on a sample of so many weights. What the coder saves by looking at
# neighbours is measured at three of the steps, on rows of so many weights in total, or
# on all rows if they are alike.
_OCTAVES = np.arange(-6.5, 3.5, 0.5)
_SAMPLED, _CODED = 1 << 13, 1 << 16
_CODED_AT = (1.0, 2.5, 5.0)  # bits
# A step is good enough if its codes take at least this part of the bytes they may take.
_FILLED = 0.998
_TRIES = 8  # steps that are tried at most, if one of them fits
LARGEST_HALF = 65504.0  # the largest float of 16 bits
_SMALLEST = 1e-30  # the least that the largest scale of a layer counts as
_MULTIPLES = torch.from_numpy(SCALE_MULTIPLES)
_UNIT_BITS = 12  # of the number that is multiplied, so that float32 holds the products


class RateCurve(NamedTuple):
    """Bits and error of a layer's weights at steps from fine to coarse, (S,) each."""

    steps: NDArray[np.float64]
    bits: NDArray[np.float64]  # bits per weight in a file
    noise: NDArray[np.float64]  # ||W - Q(W)||² / ||W||²

    def step(self, rate: float) -> float:
        """Return the step at which weights take about this many bits."""
        return self._read(rate, self.steps)

    def noise_at(self, rate: float) -> float:
        """Return the noise-to-signal ratio at that step."""
        return self._read(rate, self.noise)

    def _read(self, rate: float, values: NDArray[np.float64]) -> float:
        logs = np.log2(np.maximum(values, 1e-30))
        return float(2 ** np.interp(-rate, -self.bits, logs))


def rate_curve(weight: Tensor) -> RateCurve:
    """Return a folded weight's curve; its bits are within about 2 % of a file's."""
    rows = weight.detach().float().reshape(len(weight), -1)
    size = float(rows.square().mean().sqrt())
    steps = size * 2**_OCTAVES
    finest = float(rows.abs().max()) / (ZERO - 1)
    steps = np.array([finest, *steps[steps > finest]])
    if size == 0:
        return RateCurve(np.ones(1), np.zeros(1), np.zeros(1))
    sample = subsample(rows.reshape(1, -1), _SAMPLED)
    bits, noise = np.array([_rate_and_noise(sample, step) for step in steps]).T
    bits *= _coder_gain(weight, steps, bits)
    # Interpolation needs bits that never rise.
    return RateCurve(steps, np.minimum.accumulate(bits), noise)


def _rate_and_noise(sample: Tensor, step: float) -> tuple[float, float]:
    """Return bits per weight, by frequency, and the noise-to-signal ratio."""
    codes = coded_codes(sample, step)
    error = (codes.float() - ZERO) * step - sample
    noise = float(error.square().sum() / sample.square().sum().clamp_min(1e-30))
    return entropy(codes) / sample.numel(), noise


def _coder_gain(
    weight: Tensor, steps: NDArray[np.float64], bits: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the ratio of the coder's bits to those by frequency, at each step."""
    every = min(-(-weight.numel() // _CODED), len(weight))
    alike = every > 1 and rows_are_alike(weight.detach().float().cpu().numpy())
    part = weight.detach()[:: 1 if alike else every]
    places = sorted({int(np.abs(bits - wanted).argmin()) for wanted in _CODED_AT})
    ratios = []
    for place in places:
        codes = coded_codes(part, float(steps[place]))
        ratios.append(8 * code_bytes(codes) / max(entropy(codes), 1.0))
    found: NDArray[np.float64] = np.interp(-bits, -bits[places], ratios)
    return found


def coded_codes(weight: Tensor, step: float) -> Tensor:
    """Return the codes, uint8, with the least error and price of bits together."""
    return cheapest_codes(weight.float() / step + ZERO)


def coded_weight(weight: Tensor, step: float) -> Tensor:
    """Return the weight rounded with one step."""
    return ((coded_codes(weight, step).float() - ZERO) * step).to(weight.dtype)


def code_bytes(codes: Tensor) -> int:
    """Return the bytes that codes take in a file."""
    return coded_size(codes.cpu().numpy())


def coded_grid(
    weight: Tensor,
    limit: int,
    *,
    channel_dim: int,
    rounding: Callable[[Tensor, float], Tensor] = coded_codes,
) -> tuple[Grid, Tensor]:
    """Return a grid of one step whose codes take at most ``limit`` bytes.

    Also returns a weight that rounds to these codes, which are not all the nearest.
    ``rounding`` returns the codes of a weight for a step.
    """
    rate = 8 * limit / weight.numel()
    search = _StepSearch(rate)
    step = to_multiples(torch.tensor([rate_curve(weight).step(rate)]))
    while True:
        tried = rounding(weight, float(step))
        used = 8 * code_bytes(tried) / weight.numel()
        # Nothing takes less than zeros, so they count as fitting.
        if search.fits(float(step), used, least=not (tried != ZERO).any()):
            codes, best = tried, step
        if search.done:
            break
        step = to_multiples(torch.tensor([search.guess()]))
    shape = [1] * weight.dim()
    shape[channel_dim] = weight.shape[channel_dim]
    scale = best.to(weight.device).expand(shape).clone()
    grid = Grid(scale, torch.full_like(scale, ZERO), LARGEST_BITS)
    position = weight.float() / scale + ZERO
    return grid, ((pull_to(codes, position) - ZERO) * scale).to(weight.dtype)


class _StepSearch:
    """Looks for the finest step whose codes take at most ``rate`` bits a weight."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.wanted = rate * (1 + _FILLED) / 2
        self.tried: list[tuple[float, float]] = []  # octaves of steps, and their bits
        self.too_fine: tuple[float, float] | None = None
        self.fitting: tuple[float, float] | None = None

    def fits(self, step: float, used: float, *, least: bool) -> bool:
        """Return whether this is the finest step so far that fits."""
        point = math.log2(step), used
        self.tried.append(point)
        if used > self.rate and not least:
            if self.too_fine is None or point[0] > self.too_fine[0]:
                self.too_fine = point
            return False
        if self.fitting is not None and point[0] >= self.fitting[0]:
            return False
        self.fitting = point
        return True

    @property
    def done(self) -> bool:
        """Whether the step found is good enough, or the search is long enough."""
        if self.fitting is None:
            return False
        return self.fitting[1] >= self.rate * _FILLED or len(self.tried) >= _TRIES

    def guess(self) -> float:
        """Return the step to try next."""
        if self.too_fine is not None and self.fitting is not None:
            low, high = self.too_fine, self.fitting
            part = (low[1] - self.wanted) / max(low[1] - high[1], 1e-12)
            return float(2 ** (low[0] + (high[0] - low[0]) * min(max(part, 0.1), 0.9)))
        octave, used = self.tried[-1]
        slope = -1.0  # a step of half the size takes about one bit more
        if len(self.tried) > 1:
            before = self.tried[-2]
            slope = (used - before[1]) / ((octave - before[0]) or 1.0)
        # Coarse steps that leave few weights but zeros save less.
        return float(2 ** (octave + (self.wanted - used) / min(max(slope, -2), -0.2)))


def scale_multiples(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales as multiples of a number: that, float32 (1,), and uint8 (C,).

    The five lower bits of a byte are a mantissa and the three upper ones an exponent,
    since scales of equalized channels differ greatly. Scales that are such multiples
    already are reproduced bit for bit.
    """
    known = _MULTIPLES.to(scales.device)
    mantissa, exponent = torch.frexp(
        scales.double().max().clamp_min(_SMALLEST) / known[-1]
    )
    whole = (mantissa * 2.0**_UNIT_BITS).round()
    unit = torch.ldexp(whole, exponent - _UNIT_BITS)
    between = (known[1:] + known[:-1]) / 2
    places = torch.bucketize(scales.double() / unit, between)
    return unit.float().reshape(1), places.to(torch.uint8)


def multiply_scales(unit: Tensor, places: Tensor) -> Tensor:
    """Return the scales that :func:`scale_multiples` describes, float32 (C,)."""
    return unit * _MULTIPLES.to(unit)[places.long()]


def to_multiples(scales: Tensor) -> Tensor:
    """Return scales (C,), rounded to what a packed file holds for a coded layer."""
    return multiply_scales(*scale_multiples(scales)).to(scales.dtype)
