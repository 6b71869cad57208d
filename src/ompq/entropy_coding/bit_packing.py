"""Bit packing: codes of a fixed width, without gaps."""

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.bit_widths import check_bits
from ompq.entropy_coding.codec import Codes

# Codes of a fixed width are a dense stream without gaps. Code i takes bits ``i * bits``
# to ``(i + 1) * bits - 1`` of the stream; bit k is bit ``k % 8`` of byte ``k // 8``. So
# eight codes take exactly ``bits`` bytes and are moved together in one 64-bit word:
#
#     one code a byte → two codes in 16 bits → four in 32 → eight, without gaps, in 64
_TOGETHER = 8  # codes in one word
_WORD = np.dtype("<u8")  # the stream is the same whatever the machine's byte order
_LOWER_BYTES = np.uint64(0x00FF_00FF_00FF_00FF)
_LOWER_PAIRS = np.uint64(0x0000_FFFF_0000_FFFF)
_LOWER_HALF = np.uint64(0x0000_0000_FFFF_FFFF)
# Words at a time, few enough for a processor's cache.
_CHUNK = 1 << 14


def stream_length(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes take."""
    return ceil(count * bits / 8)


def pack_bits(codes: Codes, bits: int) -> Codes:
    """Return codes of any shape as a dense stream, (ceil(n * bits / 8),).

    The bits after the last code are 0.

    Example:
        >>> pack_bits(np.array([1, 2, 3], np.uint8), bits=2)
        array([57], dtype=uint8)
    """
    check_bits(bits)
    flat = codes.reshape(-1)
    if flat.size and int(flat.max()) >> bits:
        raise ValueError(
            f"code {flat.max()} does not fit into {bits} bits: "
            f"the largest that does is {(1 << bits) - 1}"
        )
    words = ceil(flat.size / _TOGETHER)
    packed = np.empty((words, bits), np.uint8)
    for start in range(0, words, _CHUNK):
        part = flat[start * _TOGETHER : (start + _CHUNK) * _TOGETHER]
        word = _squeeze(_pad(part, _TOGETHER).view(_WORD), bits)
        packed[start : start + _CHUNK] = word.view(np.uint8).reshape(-1, 8)[:, :bits]
    return packed.reshape(-1)[: stream_length(flat.size, bits)]


def unpack_bits(packed: Codes, bits: int, shape: Sequence[int]) -> Codes:
    """Return the codes of a dense stream in their shape."""
    check_bits(bits)
    count = prod(shape)
    if len(packed) != stream_length(count, bits):
        raise ValueError(
            f"a stream of {len(packed)} bytes does not hold {count} codes of "
            f"{bits} bits, which take {stream_length(count, bits)}"
        )
    words = ceil(count / _TOGETHER)
    codes = np.empty(words * _TOGETHER, np.uint8)
    for start in range(0, words, _CHUNK):
        part = _pad(packed[start * bits : (start + _CHUNK) * bits], bits)
        word = np.zeros((len(part) // bits, 8), np.uint8)
        word[:, :bits] = part.reshape(-1, bits)
        spread = _spread(word.reshape(-1).view(_WORD), bits)
        codes[start * _TOGETHER : (start + _CHUNK) * _TOGETHER] = spread.view(np.uint8)
    return codes[:count].reshape(shape)


def _squeeze(word: NDArray[Any], bits: int) -> NDArray[Any]:
    """Move the codes of each word, one a byte, together; (W,) → (W,)."""
    word = (word & _LOWER_BYTES) | ((word & ~_LOWER_BYTES) >> np.uint64(8 - bits))
    word = (word & _LOWER_PAIRS) | ((word & ~_LOWER_PAIRS) >> np.uint64(16 - 2 * bits))
    return (word & _LOWER_HALF) | ((word & ~_LOWER_HALF) >> np.uint64(32 - 4 * bits))


def _spread(word: NDArray[Any], bits: int) -> NDArray[Any]:
    """Move the codes of each word apart, one a byte; (W,) → (W,)."""
    for step in (32, 16, 8):
        held = step * bits // 8  # bits that hold codes, of ``step`` bits
        # The lowest ``held`` bits of each lane of ``2 * step`` bits.
        low = np.uint64(sum(((1 << held) - 1) << at for at in range(0, 64, 2 * step)))
        high = (word << np.uint64(step - held)) & (low << np.uint64(step))
        word = (word & low) | high
    return word


def _pad(values: Codes, multiple: int) -> Codes:
    missing = -len(values) % multiple
    return np.pad(values, (0, missing)) if missing else values
