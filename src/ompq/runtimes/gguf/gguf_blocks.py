"""The types of GGUF files: how they hold the codes, scales and minima of weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ompq.errors import ExportError
from ompq.grids import Grid
from ompq.network.units import SUPER_BLOCK
from ompq.quantization.gguf_grids import LARGEST_MULTIPLES

BLOCK = 32  # weights that share a scale in the types without super-blocks

_Bytes: TypeAlias = NDArray[np.uint8]
_Floats: TypeAlias = NDArray[np.float64]
_ROUNDING = 1e-6  # of minima, which are products of 32-bit floats


@dataclass(frozen=True)
class BlockType:
    """How a GGUF file holds weights of one width."""

    name: str
    bits: int
    weights: int  # of a block, or of a super-block
    bytes: int  # of it
    group: int  # weights that share a scale
    # From codes (N, weights), scales and zero points (N, groups) to bytes (N, bytes).
    content: Callable[[_Bytes, _Floats, _Floats], _Bytes]

    def row_bytes(self, weights: int) -> int:
        """Return the bytes of a row of weights."""
        return self.bytes * (weights // self.weights)

    def rows(self, weight: Tensor, grid: Grid, name: str) -> _Bytes:
        """Return a weight (C, K) as bytes, (C, bytes of a row), without loss.

        Raises:
            ExportError: The type cannot hold the weight. ``name`` is the weight's.
        """
        channels, width = weight.shape
        try:
            if width % self.weights:
                raise ValueError(
                    f"its {width} inputs are not a multiple of {self.weights}"
                )
            scale, zero_point = (
                one.expand_as(weight).detach().cpu().double().numpy()[:, :: self.group]
                for one in (grid.scale, grid.zero_point)
            )
            codes = grid.quantize(weight.detach()).cpu().numpy()
            groups = self.weights // self.group
            found = self.content(
                codes.reshape(-1, self.weights),
                scale.reshape(-1, groups),
                zero_point.reshape(-1, groups),
            )
        except ValueError as error:
            raise ExportError(
                f"{name} does not fit {self.name}: {error}. Plan with target='gguf', "
                "or leave the layer in float (32 bits)"
            ) from None
        return found.reshape(channels, -1)


def _simple(pack: Callable[[_Bytes], _Bytes], bits: int) -> Callable[..., _Bytes]:
    """Return the content of a type whose blocks have a scale of 16 bits."""

    def content(codes: _Bytes, scale: _Floats, zero_point: _Floats) -> _Bytes:
        scale, codes = _signed(codes, scale, zero_point, bits)
        return np.hstack([_halves(scale), pack(codes)])

    return content


def _signed(
    codes: _Bytes, scale: _Floats, zero_point: _Floats, bits: int
) -> tuple[_Floats, _Bytes]:
    """Return scales with a sign, and codes whose zero point is the middle one.

    Where the zero point is one less, the scale becomes negative.
    """
    middle = 1 << (bits - 1)
    turned = zero_point == middle - 1
    if not (turned | (zero_point == middle)).all():
        raise ValueError(f"the code of 0 must be {middle - 1} or {middle}")
    spread = np.repeat(turned, codes.shape[1] // scale.shape[1], 1)
    codes = np.where(spread, np.uint8(2 * middle - 1) - codes, codes)
    return np.where(turned, -scale, scale), codes


def _halves(values: _Floats) -> _Bytes:
    """Return numbers (N, k) as 16-bit floats, (N, 2 k) bytes."""
    found = values.astype("<f2")
    if not (found == values).all():
        raise ValueError("its scales are not 16-bit floats")
    return found.view(np.uint8)


def _shared(values: _Floats, most: int) -> tuple[_Floats, NDArray[np.int64]]:
    """Return what scales (N, groups) are multiples of, (N, 1), and the multiples."""
    largest = np.abs(values).max(1, keepdims=True)
    shared, left = np.zeros_like(largest), np.arange(len(values))
    for multiple in range(most, 0, -1):
        one = largest[left] / multiple
        whole = values[left] / one
        holds = (whole == whole.round()).all(1) & (one == one.astype("<f2"))[:, 0]
        shared[left[holds]] = one[holds]
        left = left[~holds]
    if len(left):
        raise ValueError(f"its scales are not 1 to {most} times a 16-bit float")
    return shared, np.rint(values / shared).astype(np.int64)


def _shared_minima(values: _Floats, most: int) -> tuple[_Floats, NDArray[np.int64]]:
    """Return the same for minima, which are known up to rounding."""
    largest = values.max(1, keepdims=True)
    one = (largest / most).astype("<f2").astype(np.float64)
    found = np.rint(values / np.where(one > 0, one, 1.0))
    close = np.abs(one * found - values) <= _ROUNDING * largest
    if not (close & (found >= 0) & (found <= most)).all():
        raise ValueError(f"its minima are not 0 to {most} times a 16-bit float")
    return one, found.astype(np.int64)


def _in_planes(codes: _Bytes, bits: int, stride: int) -> _Bytes:
    """Pack codes of few bits (N, weights): those ``stride`` apart share a byte.

    The stretch of weights that fills ``stride`` bytes is packed before the next.
    """
    count = 8 // bits
    parts = codes.reshape(len(codes), -1, count, stride).astype(np.uint16)
    shifts = (bits * np.arange(count, dtype=np.uint16))[:, None]
    found: _Bytes = (parts << shifts).sum(2).astype(np.uint8)
    return found.reshape(len(codes), -1)


def _nibbles(codes: _Bytes) -> _Bytes:
    """Return the lower four bits, those of the second half above the first's."""
    return _in_planes(codes & np.uint8(15), 4, BLOCK // 2)


def _fives(codes: _Bytes) -> _Bytes:
    fifth = np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")
    return np.hstack([fifth, _nibbles(codes)])


def _bytes(codes: _Bytes) -> _Bytes:
    return codes ^ np.uint8(0x80)  # code - 128 in two's complement


def _q2_k(codes: _Bytes, scale: _Floats, zero_point: _Floats) -> _Bytes:
    shared, scales = _shared(scale, LARGEST_MULTIPLES[2])
    least, minima = _shared_minima(scale * zero_point, LARGEST_MULTIPLES[2])
    both = (scales | minima << 4).astype(np.uint8)
    return np.hstack([both, _in_planes(codes, 2, 32), _halves(shared), _halves(least)])


def _q3_k(codes: _Bytes, scale: _Floats, zero_point: _Floats) -> _Bytes:
    signed, codes = _signed(codes, scale, zero_point, 3)
    shared, scales = _shared(signed, LARGEST_MULTIPLES[3])
    raised = (scales + 32).astype(np.uint8)
    low = raised[:, :8] & np.uint8(15) | raised[:, 8:] << np.uint8(4)
    high = _in_planes(raised >> np.uint8(4), 2, 4)
    third = _in_planes(codes >> np.uint8(2), 1, 32)
    lower = _in_planes(codes & np.uint8(3), 2, 32)
    return np.hstack([third, lower, low, high, _halves(shared)])


def _with_minima(scale: _Floats, zero_point: _Floats, bits: int) -> list[_Bytes]:
    """Return the parts of Q4_K and Q5_K before the codes."""
    shared, scales = _shared(scale, LARGEST_MULTIPLES[bits])
    least, minima = _shared_minima(scale * zero_point, LARGEST_MULTIPLES[bits])
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    packed = np.hstack([first, second, third]).astype(np.uint8)
    return [_halves(shared), _halves(least), packed]


def _q4_k(codes: _Bytes, scale: _Floats, zero_point: _Floats) -> _Bytes:
    return np.hstack([*_with_minima(scale, zero_point, 4), _in_planes(codes, 4, 32)])


def _q5_k(codes: _Bytes, scale: _Floats, zero_point: _Floats) -> _Bytes:
    fifth = _in_planes(codes >> np.uint8(4), 1, 32)
    lower = _in_planes(codes & np.uint8(15), 4, 32)
    return np.hstack([*_with_minima(scale, zero_point, 5), fifth, lower])


def _q6_k(codes: _Bytes, scale: _Floats, zero_point: _Floats) -> _Bytes:
    signed, codes = _signed(codes, scale, zero_point, 6)
    shared, scales = _shared(signed, LARGEST_MULTIPLES[6])
    lower = _in_planes(codes & np.uint8(15), 4, 64)
    upper = _in_planes(codes >> np.uint8(4), 2, 32)
    whole = scales.astype(np.int8).view(np.uint8)
    return np.hstack([lower, upper, whole, _halves(shared)])


_SIMPLE = (
    BlockType("Q4_0", 4, BLOCK, 18, BLOCK, _simple(_nibbles, 4)),
    BlockType("Q5_0", 5, BLOCK, 22, BLOCK, _simple(_fives, 5)),
    BlockType("Q8_0", 8, BLOCK, 34, BLOCK, _simple(_bytes, 8)),
)
_SUPER = (
    BlockType("Q2_K", 2, SUPER_BLOCK, 84, 16, _q2_k),
    BlockType("Q3_K", 3, SUPER_BLOCK, 110, 16, _q3_k),
    BlockType("Q4_K", 4, SUPER_BLOCK, 144, 32, _q4_k),
    BlockType("Q5_K", 5, SUPER_BLOCK, 176, 32, _q5_k),
    BlockType("Q6_K", 6, SUPER_BLOCK, 210, 16, _q6_k),
)
# By whether rows consist of super-blocks and by the width of the weights.
TYPES = {(False, one.bits): one for one in _SIMPLE}
TYPES |= {(True, one.bits): one for one in (*_SIMPLE, *_SUPER)}


def type_of(bits: int, name: str, *, super_blocks: bool) -> BlockType:
    """Return the type of weights of a width.

    Raises:
        ExportError: There is none. ``name`` is the weight's.
    """
    if (super_blocks, bits) not in TYPES:
        known = sorted(width for whole, width in TYPES if whole == super_blocks)
        raise ExportError(
            f"{name} has {bits} bits, which ompq does not write as GGUF: use "
            f"{', '.join(map(str, known))} or 32, as target='gguf' does"
        )
    return TYPES[super_blocks, bits]
