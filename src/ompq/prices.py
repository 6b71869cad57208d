"""What codes cost once they are entropy-coded, and rounding that minds it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ompq.quantizers import LARGEST_BITS

ZERO = 1 << (LARGEST_BITS - 1)  # the code of 0 in a coded layer
_CODES = 1 << LARGEST_BITS

# Squared steps that a bit is worth. Rounding to a fine step s errs by D = s²/12, and a
# bit more halves s: dD/dR = -2 ln 2 · s²/12. A weight that saves a bit for less error
# than this does better than another step would. On four layers each of ResNet-18 and
# MobileNetV2, from 0.75 to 4 bits, the error at equal entropy was within 0.12 dB of the
# best of six factors from 0.05 to 0.25; on some layers a larger one was the best.
PRICE = math.log(2) / 6

# How far from its code a weight is put that would be nearer to another one.
_REACH = 0.49
_LEAST_SAVED = 1e-6  # bits; codes that save none move last


def code_bits(codes: Tensor, classes: Tensor | None = None) -> Tensor:
    """Return the bits that each code costs by its frequency among ``codes``, (256,).

    Codes that do not occur cost as if they occurred half a time. Where each code is of
    a class, frequencies are those within it, (classes, 256).
    """
    return _bits(_counts(codes, classes))


def between_codes(position: Tensor) -> Tensor:
    """Return what codes cost at places between them, with a gradient, in bits.

    Each weight costs what lies between its two neighbours, these by how often weights
    are rounded to each code. ``position`` is as for :func:`cheapest_codes`. Nothing
    waits for the device, so that a CUDA graph can hold it.
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
    """Return the bits that codes cost in all, each by its frequency (in its class)."""
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
    importance: Tensor | float = 1.0,
    *,
    price: float = PRICE,
    rounds: int = 3,
) -> Tensor:
    """Round to whichever neighbour has the least error and price together.

    Each weight takes the code below or above it with the least ``importance * error² +
    price * bits``, where bits follow from how often codes are taken, again and again.

    Args:
        position: Weights in steps of the grid, 0 at code 128, of any shape.
        importance: Of each weight's error, 1 on average; broadcasts.
        price: Squared steps that a bit is worth; 0 rounds to nearest.
        rounds: How often codes are chosen; frequencies hardly change after three.

    Returns:
        The codes, uint8, of the same shape.
    """
    position = position.clamp(0, _CODES - 1)
    codes = position.round()
    low = position.floor().clamp_max(_CODES - 2)
    up = position - low
    # What the upper neighbour errs less by.
    gain = importance * (2 * up - 1)
    index = low.long()
    for _ in range(rounds if price else 0):
        bits = code_bits(codes)
        dearer = (bits[1:] - bits[:-1])[index]
        codes = low + (gain > price * dearer)
    return codes.to(torch.uint8)


def lowered_codes(
    codes: Tensor,
    position: Tensor,
    importance: Tensor | float,
    *,
    size: Callable[[Tensor], int],
    limit: int,
) -> Tensor:
    """Move codes towards zero until they take at most ``limit`` bytes.

    Those move that add the least error for a bit they save, as few as will do.

    Args:
        codes: uint8, of any shape.
        position: Where each weight should be, as for :func:`cheapest_codes`.
        importance: Of each weight's error; broadcasts.
        size: Returns the bytes that codes take.
        limit: At least what zeros alone take.
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
    """Return the codes one step nearer to zero, and in which order they should move."""
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


def pulled_to(codes: Tensor, position: Tensor) -> Tensor:
    """Return positions that round to these codes, each as near to its own as it can.

    A layer rounds its weight to nearest whenever it runs. So a weight whose code is not
    the nearest one is put just inside that code's reach, where learning finds it.
    """
    return torch.clamp(position, codes - _REACH, codes + _REACH)
