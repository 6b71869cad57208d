"""The widths that codes may have."""

from collections.abc import Sequence

WIDTHS = range(2, 9)  # bits that a code may have
SMALLEST_BITS, LARGEST_BITS = min(WIDTHS), max(WIDTHS)
# Up to this width twice a code, less twice a zero, fits into a signed byte.
LARGEST_HALF_BITS = 6


def check_bits(bits: int, more: Sequence[int] = ()) -> int:
    """Return the bits if they are an integer from 2 to 8, or one of a few more.

    Raises:
        ValueError: They are not.
    """
    if bits not in (*WIDTHS, *more):
        raise ValueError(
            f"bits={bits} is not supported: use an integer from "
            f"{SMALLEST_BITS} to {LARGEST_BITS}"
        )
    return int(bits)


# Weights of few bits are stretched to bytes of at most this magnitude. The sum of two
# products with codes up to 255 then fits into 16 bits, as the 8-bit kernels of
# processors without VNNI require.
STRETCHED = 64

FLOAT_BITS = 32  # the width of a unit that stays float

SUM_BITS = 8  # bits of an activation that only sums read, as in int8 runtimes

CODED_BITS = 8  # width of a coded unit's codes before entropy coding

GROUP_SIZES = (32, 64, 128)  # the usual ones, which other tools support as well
