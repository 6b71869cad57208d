"""Scales as integers: a multiplier of at most 31 bits and a right shift."""

from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLIER_BITS = 31
_FLOAT_BITS = 24  # of a float32's significand
# A product of 32 and 31 bits, and the half that rounds it, stay below 2^63.
_LARGEST_SHIFT = 61


@dataclass(frozen=True, eq=False)
class Dyadic:
    """The ratio ``multiplier / 2^shift``.

    Attributes:
        multiplier: int64, of any shape; below 2^31.
        shift: int64, of the same shape or ().
    """

    multiplier: Tensor
    shift: Tensor


def dyadic(ratio: Tensor, *, together: bool = False) -> Dyadic:
    """Return the nearest multiplier and shift of each ratio.

    Args:
        ratio: Positive float64 of any shape.
        together: Whether all get the shift of the largest, so that products can be
            added before they are shifted.

    Example:
        >>> found = dyadic(torch.tensor(0.75, dtype=torch.float64))
        >>> found.multiplier.item() / 2 ** found.shift.item()
        0.75
    """
    largest = ratio.max() if together else ratio
    exponent = torch.frexp(largest).exponent.long()  # ratio < 2^exponent
    shift = (_MULTIPLIER_BITS - exponent).clamp(1, _LARGEST_SHIFT)
    # Rounding may reach 2^31 itself; what is larger than that saturates any code.
    limit = float((1 << _MULTIPLIER_BITS) - 1)
    multiplier = torch.ldexp(ratio, shift).round().clamp(max=limit)
    return Dyadic(multiplier.long(), shift)


def float_dyadic(ratio: Tensor) -> Dyadic:
    """Return float32 ratios exactly: 24 bits of each, and the shift.

    Args:
        ratio: Positive float32 of any shape.
    """
    mantissa, exponent = torch.frexp(ratio)
    shift = _FLOAT_BITS - exponent.long()
    # Below 2^-38 a ratio takes every 32-bit sum to 0, as a multiplier of 0 does.
    tiny = shift > _LARGEST_SHIFT
    multiplier = torch.ldexp(mantissa.double(), torch.tensor(_FLOAT_BITS)).long()
    return Dyadic(multiplier.masked_fill(tiny, 0), shift.clamp(0, _LARGEST_SHIFT))


def float_rescaled(sums: Tensor, ratio: Dyadic, zero: int = 0) -> Tensor:
    """Return ``sums * ratio + zero`` as float32 arithmetic rounds it, int64.

    The sum becomes 24 bits wide, so does its product with the ratio, and that is
    rounded to a whole number: what 8-bit kernels do with floats, done with integers.

    Args:
        sums: Integers of any shape, below 2^31 in magnitude.
        ratio: From :func:`float_dyadic`; broadcasts against the sums.
        zero: Whole number that is added at the end.
    """
    product = _narrowed(_narrowed(sums.long()) * ratio.multiplier)
    return rescaled(product, ratio.shift) + zero


def _narrowed(values: Tensor) -> Tensor:
    """Round to 24 significant bits, half to even."""
    powers = torch.ones(63, dtype=torch.int64) << torch.arange(63)
    width = torch.bucketize(values.abs().contiguous(), powers, right=True)
    excess = (width - _FLOAT_BITS).clamp(min=0)
    return rescaled(values, excess) << excess


def rescaled(product: Tensor, shift: Tensor, zero: int = 0) -> Tensor:
    """Return ``product / 2^shift + zero`` rounded half to even, int64.

    Args:
        product: int64 of any shape, below 2^62 in magnitude.
        shift: int64, not negative, that broadcasts against it.
        zero: Whole number that is added before rounding, which decides on halves.

    Example:
        >>> rescaled(torch.tensor([1, 3, 5, 6]), torch.tensor(1))
        tensor([0, 2, 2, 3])
    """
    one = torch.ones_like(shift)
    whole = one << shift
    raised = product + (whole >> 1)
    result = (raised >> shift) + zero
    halves = ((raised & (whole - 1)) == 0) & (shift > 0)
    return result - (halves & (result & 1).bool()).long()
