"""Codes of 2 to 8 bits as a dense stream: nothing is left between two codes.

Code number i takes bits ``i * bits`` to ``(i + 1) * bits - 1`` of the stream; bit k is
bit ``k % 8`` of byte ``k // 8``. So eight codes take exactly ``bits`` bytes, and eight
at a time are moved together inside one 64-bit word:

    one code a byte → two codes in 16 bits → four in 32 → eight, without gaps, in 64
"""

from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ompq.quantizers import check_bits

_CODES = 8  # in one word
_WORD = np.dtype("<u8")  # the stream is the same whatever the machine's byte order
_LOWER_BYTES = np.uint64(0x00FF_00FF_00FF_00FF)
_LOWER_PAIRS = np.uint64(0x0000_FFFF_0000_FFFF)
_LOWER_HALF = np.uint64(0x0000_0000_FFFF_FFFF)
# Words at a time: few enough for a processor's cache, where most of the time goes.
_CHUNK = 1 << 14


def stream_length(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes take."""
    return ceil(count * bits / 8)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Return codes of any shape as a dense stream, uint8, (ceil(n * bits / 8),).

    The bits after the last code are 0.

    Example:
        >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.uint8), bits=2)
        tensor([57], dtype=torch.uint8)
    """
    check_bits(bits)
    flat = codes.detach().cpu().contiguous().flatten().numpy()
    if flat.size and int(flat.max()) >> bits:
        raise ValueError(
            f"code {flat.max()} does not fit into {bits} bits: "
            f"the largest that does is {(1 << bits) - 1}"
        )
    words = ceil(flat.size / _CODES)
    stream = np.empty((words, bits), np.uint8)
    for start in range(0, words, _CHUNK):
        part = flat[start * _CODES : (start + _CHUNK) * _CODES]
        word = _squeezed(_padded(part, _CODES).view(_WORD), bits)
        stream[start : start + _CHUNK] = word.view(np.uint8).reshape(-1, 8)[:, :bits]
    return torch.from_numpy(stream.reshape(-1)[: stream_length(flat.size, bits)])


def unpack_bits(stream: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes of a dense stream (ceil(count * bits / 8),), uint8, (count,)."""
    check_bits(bits)
    if stream.numel() != stream_length(count, bits):
        raise ValueError(
            f"a stream of {stream.numel()} bytes does not hold {count} codes of "
            f"{bits} bits, which take {stream_length(count, bits)}"
        )
    flat = stream.cpu().contiguous().flatten().numpy()
    words = ceil(count / _CODES)
    codes = np.empty(words * _CODES, np.uint8)
    for start in range(0, words, _CHUNK):
        part = _padded(flat[start * bits : (start + _CHUNK) * bits], bits)
        word = np.zeros((len(part) // bits, 8), np.uint8)
        word[:, :bits] = part.reshape(-1, bits)
        spread = _spread(word.reshape(-1).view(_WORD), bits)
        codes[start * _CODES : (start + _CHUNK) * _CODES] = spread.view(np.uint8)
    return torch.from_numpy(codes[:count])


def _squeezed(word: NDArray[Any], bits: int) -> NDArray[Any]:
    """Move the codes of each word, one a byte, together; (W,) → (W,)."""
    word = (word & _LOWER_BYTES) | ((word & ~_LOWER_BYTES) >> np.uint64(8 - bits))
    word = (word & _LOWER_PAIRS) | ((word & ~_LOWER_PAIRS) >> np.uint64(16 - 2 * bits))
    return (word & _LOWER_HALF) | ((word & ~_LOWER_HALF) >> np.uint64(32 - 4 * bits))


def _spread(word: NDArray[Any], bits: int) -> NDArray[Any]:
    """Move the codes of each word apart, one a byte; (W,) → (W,)."""
    for step in (32, 16, 8):
        held = step * bits // 8  # bits that hold codes, of ``step`` bits
        low = _every(held, 2 * step)
        high = (word << np.uint64(step - held)) & (low << np.uint64(step))
        word = (word & low) | high
    return word


def _every(held: int, lane: int) -> np.uint64:
    """Return the mask of the lowest ``held`` bits of each lane of ``lane`` bits."""
    return np.uint64(sum(((1 << held) - 1) << at for at in range(0, 64, lane)))


def _padded(values: NDArray[np.uint8], multiple: int) -> NDArray[np.uint8]:
    missing = -len(values) % multiple
    return np.pad(values, (0, missing)) if missing else values
