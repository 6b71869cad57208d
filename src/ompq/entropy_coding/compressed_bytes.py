"""Plain bytes, such as scales and biases, compressed by lzma."""

import lzma
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.errors import PackedFileError

# For the numbers of channels, of which few repeat: bytes are compressed independently.
_FILTERS: list[dict[str, Any]] = [
    {"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20, "lc": 0, "pb": 0}
]
_LARGEST_SQUEEZED = 1 << 26  # bytes; a compressed file must not fill the memory
SQUEEZED = ".lzma"  # at the end of the name of a tensor that is compressed
# Tensors that may be compressed, and the type of their entries.
SQUEEZABLE: dict[str, np.dtype[Any]] = {
    "multiples": np.dtype("u1"),
    "halves": np.dtype("<f2"),
}


def squeeze(values: NDArray[Any]) -> bytes | None:
    """Return numbers compressed without loss, or None if that is no smaller."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize).T
    found = lzma.compress(planes.tobytes(), lzma.FORMAT_RAW, filters=_FILTERS)
    fewer = len(found) + len(SQUEEZED) < values.nbytes <= _LARGEST_SQUEEZED
    return found if fewer else None


def with_squeezed(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the tensors of a packed file, with compressed ones decompressed.

    Raises:
        PackedFileError: One of them is damaged.
    """
    found = dict(arrays)
    for name, kind in SQUEEZABLE.items():
        if (given := found.pop(name + SQUEEZED, None)) is None:
            continue
        decoder = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS)
        try:
            data = decoder.decompress(given.tobytes(), _LARGEST_SQUEEZED)
        except (lzma.LZMAError, EOFError) as error:
            raise PackedFileError(f"{name} are damaged: {error}") from error
        if not decoder.eof or decoder.unused_data or len(data) % kind.itemsize:
            raise PackedFileError(f"{name} are damaged: they do not end")
        planes = np.frombuffer(data, np.uint8).reshape(kind.itemsize, -1)
        found[name] = planes.T.reshape(-1).copy().view(kind)
    return found
