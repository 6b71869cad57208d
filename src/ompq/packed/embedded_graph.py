"""The ONNX file inside a packed file, without constants that the packed file implies.

A packed file holds each unit's codes, scales and bias. Constants of an exported ONNX
file that follow from them (bytes, planes of few bits, scales, integer biases) are left
out, and :func:`unpack` makes them again. It needs neither PyTorch nor the network. A
constant is only left out if making it again gave the same bytes.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.bit_widths import LARGEST_HALF_BITS, STRETCHED
from ompq.entropy_coding.bit_packing import unpack_bits
from ompq.entropy_coding.codec import SCALE_MULTIPLES, decode
from ompq.entropy_coding.compressed_bytes import with_squeezed
from ompq.errors import MissingExtraError, PackedFileError
from ompq.files import read_arrays, replacing
from ompq.packed.structure import BROKEN, GRAPH, MOST_NAMED, PACKED_FORMAT, reason_of
from ompq.untrusted_json import (
    Count,
    Number,
    convert_json,
    parse_json,
    record_type,
    row_type,
    whole_number,
)

_LARGEST = 1 << 28  # bytes; inflating a graph must not fill the memory
_LONGEST_TEXT = 1 << 24  # bytes of JSON that describe units and constants
_MOST_CODES = 512  # that a byte of a stream can stand for
_LARGEST_FILE = (1 << 31) - 1  # bytes; the limit of protocol buffers
Array = NDArray[Any]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Place:
    """Where values are in a packed file: in which tensor, from where, how many."""

    tensor: str
    start: int
    count: int

    def of(self, arrays: Arrays) -> Array:
        """Return the values."""
        found = arrays[self.tensor][self.start : self.start + self.count]
        if min(self.start, self.count) < 0 or len(found) != self.count:
            raise ValueError(f"{self.tensor} is too short")
        return found


_PLACES = ("stream", "scales", "multiples", "zero_points", "biases")
# Shape, axis, bits and whether it is coded, and the places.
_KINDS = [
    *(row_type(whole_number(1, _LARGEST_FILE), ...), Count),
    *(whole_number(2, 8), whole_number(0, 1)),
    *len(_PLACES) * [str, Count, Count],
]
_ROW = row_type(*_KINDS)
_LISTED = record_type(units=list[list[Any]], made=list[list[Any]])


@dataclass(frozen=True)
class StoredUnit:
    """Where a unit is in a packed file."""

    shape: tuple[int, ...]  # of its weight
    axis: int  # of the output channels
    bits: int
    coded: bool  # whether its stream is entropy-coded
    grouped: bool  # whether channels have several scales and zero points
    stream: Place
    scales: Place  # one for each channel or group, or one that all are multiples of
    multiples: Place  # one for each, or none
    zero_points: Place  # one for each, or none if all are the middle code
    biases: Place  # one for each channel, or none

    def to_json(self) -> list[Any]:
        """Return plain data for JSON."""
        places = [getattr(self, name) for name in _PLACES]
        own = [list(self.shape), self.axis, self.bits, int(self.coded)]
        own += [part for one in places for part in vars(one).values()]
        return [*own, 1] if self.grouped else own

    @classmethod
    def from_json(cls, data: Any) -> "StoredUnit":
        """Rebuild it from :meth:`to_json`."""
        row, grouped = data[: len(_KINDS)], len(data) > len(_KINDS)
        shape, axis, bits, coded, *rest = convert_json(row, _ROW, "a unit")
        places = [Place(*rest[i : i + 3]) for i in range(0, len(rest), 3)]
        if prod(shape) > _MOST_CODES * places[0].count:
            raise ValueError(f"{places[0].count} bytes do not hold {shape}")
        convert_json(axis, whole_number(0, len(shape) - 1), "axis")
        return cls(shape, axis, bits, bool(coded), grouped, *places)


@dataclass(frozen=True)
class Parts:
    """A unit's numbers, and the constants that an exported file makes of them."""

    unit: StoredUnit
    arrays: Arrays

    @cached_property
    def codes(self) -> NDArray[np.uint8]:
        """Its codes, in the weight's shape."""
        unit = self.unit
        stream = unit.stream.of(self.arrays)
        if unit.coded:
            return decode(stream.tobytes(), unit.shape)
        return unpack_bits(stream, unit.bits, unit.shape)

    @cached_property
    def halves(self) -> NDArray[np.int32]:
        """Distances from the zero point, in half steps up to 6 bits, else in steps.

        With groups they are distances from the middle code, since the exported file has
        the zero points of groups as constants of their own.
        """
        unit, whole = self.unit, 1 if self.unit.bits > LARGEST_HALF_BITS else 2
        # Zero points are stored in the same halves or whole steps.
        zeros = unit.zero_points.of(self.arrays).astype(np.int32)
        if unit.grouped or not len(zeros):
            zeros = np.array([self._middle], np.int32)
        shape = [1] * len(unit.shape)
        shape[unit.axis] = -1
        return self.codes.astype(np.int32) * whole - zeros.reshape(shape)

    @property
    def _middle(self) -> int:
        """The middle code, in the same units."""
        whole = 1 if self.unit.bits > LARGEST_HALF_BITS else 2
        return whole << (self.unit.bits - 1)

    @property
    def stretch(self) -> int:
        """The factor by which integer arithmetic stretches weights of few bits."""
        if self.unit.bits > LARGEST_HALF_BITS or self.unit.grouped:
            return 1
        return max(1, STRETCHED // max(1, int(np.abs(self.halves).max())))

    def made(self, recipe: str, *numbers: float) -> bytes:
        """Return the constant that a recipe makes of the unit, little-endian."""
        recipes = {
            "bytes": self._bytes,
            "plane": self._plane,
            "scale": self._scale,
            "zeros": self._zeros,
            "bias": self._bias,
        }
        found: Array = recipes[recipe](*numbers)  # type: ignore[operator]
        return found.tobytes()

    def _bytes(self, stretch: float, shift: float) -> Array:
        """Return the weight as signed bytes, or as unsigned ones, shifted by 128."""
        return (self.halves * int(stretch) + int(shift)).astype("u1")

    def _plane(self, part: float, rest: float, flipped: float) -> Array:
        """Return ``part`` bits of each code, from bit ``rest`` on, packed densely."""
        width = int(part)
        own = (self.codes.reshape(-1) >> int(rest)) & ((1 << width) - 1)
        bits = (own ^ int(flipped))[:, None] >> np.arange(width, dtype=np.uint8) & 1
        return np.packbits(bits.reshape(-1), bitorder="little")

    def _steps(self, stretch: float) -> Array:
        """Return the step of the bytes in each channel or group, float64."""
        unit = self.unit
        scales = unit.scales.of(self.arrays).astype(np.float64)
        if len(multiples := unit.multiples.of(self.arrays)):
            scales = scales * SCALE_MULTIPLES[multiples]
        part = 0.5 if unit.bits <= LARGEST_HALF_BITS else 1.0
        if not stretch >= 1:
            raise ValueError(f"weights stretched by {stretch:g}")
        if unit.grouped:
            return np.array(scales * part / stretch)
        steps: Array = np.broadcast_to(scales * part / stretch, unit.shape[unit.axis])
        return steps

    def _scale(self, stretch: float) -> Array:
        return self._steps(stretch).astype("<f4")

    def _zeros(self) -> Array:
        """Return the zero points of groups, as distances from the middle."""
        zeros = self.unit.zero_points.of(self.arrays).astype(np.int32)
        return (zeros - self._middle).astype("i1")

    def _bias(self, stretch: float, source: float) -> Array:
        """Return the bias in steps of the accumulator, for inputs of this scale."""
        biases = self.unit.biases.of(self.arrays).astype(np.float64)
        if not len(biases):
            biases = np.zeros(self.unit.shape[self.unit.axis])
        steps = source * self._steps(stretch)
        if not (steps > 0).all():
            raise ValueError(f"an input of scale {source:g}")
        return np.rint(biases / steps).astype("<i4")


def drop_weights(
    model: bytes, units: Mapping[str, StoredUnit], arrays: Arrays
) -> bytes:
    """Return an ONNX file, deflated, without constants that units can be made into.

    ``units`` says where the units are in ``arrays``, the packed file's tensors.

    Raises:
        PackedFileError: It is not an ONNX file, or has none of the packed weights.
    """
    try:
        proto = parse_onnx(model)
    except ValueError as error:
        raise PackedFileError(f"it is not an ONNX file ({error})") from error
    sources = _input_scales(proto)
    made: list[list[Any]] = []
    parts = {name: Parts(unit, arrays) for name, unit in units.items()}
    positions = {name: position for position, name in enumerate(units)}
    shared = False
    for index, constant in enumerate(proto.graph.initializer):
        name, _, role = constant.name.rpartition("/")
        if name not in parts:
            continue
        for recipe, *numbers in _recipes(parts[name], role, sources.get(name)):
            if parts[name].made(recipe, *numbers) == constant.raw_data:
                made.append([index, positions[name], recipe, *numbers])
                shared |= recipe in ("bytes", "plane")
                constant.ClearField("raw_data")
                break
    if not shared:
        raise PackedFileError("it has none of the packed weights")
    listed = {"units": [one.to_json() for one in units.values()], "made": made}
    text = json.dumps(listed, separators=(",", ":")).encode()
    return zlib.compress(text + b"\n" + proto.SerializeToString(deterministic=True), 9)


def _recipes(
    parts: Parts, role: str, source: float | None
) -> Iterator[tuple[Any, ...]]:
    """Yield the recipes that may give a constant of this role."""
    stretches = dict.fromkeys((parts.stretch, 1))
    if role == "bytes":
        yield from (("bytes", *pair) for pair in product(stretches, (0, 128)))
    elif role.startswith("plane"):
        width = int(role.removeprefix("plane"))
        rests = range(parts.unit.bits - width, -1, -1)
        yield from (("plane", width, *pair) for pair in product(rests, (0, 8)))
    elif role == "scale":
        yield from (("scale", stretch) for stretch in stretches)
    elif role == "zeros" and parts.unit.grouped:
        yield ("zeros",)
    elif role == "bias" and source is not None:
        yield from (("bias", stretch, source) for stretch in stretches)


def _input_scales(proto: Any) -> dict[str, float]:
    """Return the scale of each layer's input, a factor of its accumulator's step."""
    constants = {one.name: one for one in proto.graph.initializer}
    found = {}
    for node in proto.graph.node:
        if node.output[0].endswith("/unit") and node.input[0] in constants:
            scale = np.frombuffer(constants[node.input[0]].raw_data, "<f4")
            found[node.input[1].removesuffix("/scale")] = float(scale[0])
    return found


def unpack(path: str | Path, output: str | Path) -> int:
    """Write the ONNX file inside a packed file; return its size in bytes.

    Needs numpy, constriction and onnx; neither PyTorch nor the network.

    Args:
        path: A packed file that carries its ONNX file, by
            :func:`ompq.packed.add_onnx`.

    Raises:
        PackedFileError: The file is damaged, or carries no ONNX file.
        MissingExtraError: onnx is not installed.
    """
    try:
        _, arrays = read_arrays(path, PACKED_FORMAT)
    except ValueError as error:
        raise PackedFileError(f"{path} is not a packed network: {error}") from error
    if GRAPH not in arrays:
        raise PackedFileError(
            f"{path} carries no ONNX file; write one that does with: "
            "ompq export FOLDER --format packed --with-graph -o FILE"
        )
    try:
        content = _fill_in(with_squeezed(arrays))
    except MissingExtraError:
        raise
    except BROKEN as error:
        raise PackedFileError(
            f"the ONNX file in {path} is broken ({reason_of(error)}); export the "
            "network again"
        ) from error
    with replacing(output) as temporary:
        temporary.write_bytes(content)
    return len(content)


def _fill_in(arrays: Arrays) -> bytes:
    """Return the complete ONNX file from a packed file's tensors."""
    deflated = arrays[GRAPH].astype(np.uint8).tobytes()
    whole = zlib.decompressobj().decompress(deflated, _LARGEST)
    text, _, rest = whole.partition(b"\n")
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"{len(text)} bytes describe its units")
    listed = convert_json(parse_json(text.decode(), MOST_NAMED), _LISTED, "graph")
    proto = parse_onnx(rest)
    units = [StoredUnit.from_json(one) for one in listed.units]
    by_unit: dict[int, list[Any]] = {}
    for index, unit, recipe, *numbers in listed.made:
        given = convert_json(numbers, list[Number], recipe)
        by_unit.setdefault(unit, []).append((index, recipe, given))
    size = len(rest)
    for unit, constants in by_unit.items():  # only one unit's codes are in memory
        parts = Parts(units[unit], arrays)
        for index, recipe, given in constants:
            constant = proto.graph.initializer[index]
            constant.raw_data = parts.made(recipe, *given)
            size += len(constant.raw_data)
            if size > _LARGEST_FILE:
                raise ValueError("it would exceed 2 GiB")
    return bytes(proto.SerializeToString(deterministic=True))


def parse_onnx(content: bytes) -> Any:
    """Parse an ONNX file; a ValueError says what is wrong with it."""
    try:
        from google.protobuf.message import (  # type: ignore[import-untyped]
            DecodeError,
        )
        from onnx import ModelProto
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "onnx") from error
    try:
        return ModelProto.FromString(content)
    except DecodeError as error:
        raise ValueError(str(error)) from error
