"""The blocks of a GGUF file: 32 weights, their codes and one 16-bit scale."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ompq.errors import ExportError
from ompq.grids import Grid

BLOCK = 32  # weights that share a scale


@dataclass(frozen=True)
class BlockType:
    """How a GGUF file holds weights of one width."""

    name: str
    bits: int
    bytes: int  # of a block
    codes: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]  # (N, 32) to (N, bytes - 2)

    def row_bytes(self, weights: int) -> int:
        """Return the bytes of a row of weights."""
        return self.bytes * (weights // BLOCK)

    def rows(self, weight: Tensor, grid: Grid, name: str) -> NDArray[np.uint8]:
        """Return a weight (C, K) as bytes, (C, bytes of a row), without loss.

        Raises:
            ExportError: The type cannot hold the weight. ``name`` is the weight's.
        """
        channels, width = weight.shape
        scale = grid.scale.expand_as(weight).detach().cpu().numpy()[:, ::BLOCK]
        halves = scale.astype("<f2")
        self._check(width, grid, name, exact=bool((halves == scale).all()))
        codes = grid.quantize(weight.detach()).cpu().numpy().reshape(-1, BLOCK)
        scales = halves.reshape(-1, 1).view(np.uint8)
        return np.hstack([scales, self.codes(codes)]).reshape(channels, -1)

    def _check(self, width: int, grid: Grid, name: str, *, exact: bool) -> None:
        middle = 1 << (self.bits - 1)
        problem = ""
        if width % BLOCK:
            problem = f"its {width} inputs are not a multiple of {BLOCK}"
        elif not (grid.zero_point == middle).all():
            problem = f"the code of 0 must be {middle} everywhere"
        elif not exact:
            problem = "its scales are no 16-bit floats"
        if problem:
            raise ExportError(
                f"{name} does not fit {self.name}: {problem}. Plan with "
                "target='gguf', or leave the layer in float (32 bits)"
            )


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the lower four bits, those of the second half above the first's."""
    half = BLOCK // 2
    return (codes[:, :half] & np.uint8(15)) | (codes[:, half:] << np.uint8(4))


def _fives(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    fifth = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return np.hstack([fifth, _nibbles(codes)])


def _signed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return codes ^ np.uint8(0x80)  # code - 128 in two's complement


# By the width of the weights.
TYPES = {
    one.bits: one
    for one in (
        BlockType("Q4_0", 4, 18, _nibbles),
        BlockType("Q5_0", 5, 22, _fives),
        BlockType("Q8_0", 8, 34, _signed),
    )
}


def type_of(bits: int, name: str) -> BlockType:
    """Return the type of weights of a width.

    Raises:
        ExportError: There is none. ``name`` is the weight's.
    """
    if bits not in TYPES:
        raise ExportError(
            f"{name} has {bits} bits, which ompq does not write as GGUF: use "
            f"{', '.join(map(str, TYPES))} or 32, as target='gguf' does"
        )
    return TYPES[bits]
