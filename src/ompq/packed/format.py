"""The packed file: safetensors with codes, numbers and a small structure.

Version 3 has these tensors:

- ``codes`` (uint8): the weights' streams, their zero points, and buffers that are not
  float32.
- ``numbers`` (float32): scales, biases, scales and zero points of activations, and what
  stays float.
- ``structure`` (uint8): deflated JSON that names everything, in columns.
- ``multiples`` (uint8), if any: scales that are multiples of one number.
- ``halves`` (float16), if any: biases that 16 bits hold without loss.
- ``graph`` (uint8), if any: an ONNX file; see :mod:`ompq.packed.embedded_graph`.

In files with entropy-coded streams, multiples and halves are compressed if that is
smaller, and then called ``multiples.lzma`` and ``halves.lzma``. Earlier versions are
not read: save such a network again.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntFlag
from itertools import accumulate, chain, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ompq.allocation.problem import Allocation
from ompq.bit_widths import FLOAT_BITS, LARGEST_HALF_BITS, WIDTHS
from ompq.configs import parse_output
from ompq.entropy_coding.bit_packing import stream_length, unpack_bits
from ompq.entropy_coding.codec import decode, encode
from ompq.entropy_coding.compressed_bytes import (
    SQUEEZABLE,
    SQUEEZED,
    squeeze,
    with_squeezed,
)
from ompq.entropy_coding.rates import multiply_scales, scale_multiples, to_multiples
from ompq.errors import PackedFileError
from ompq.files import read_tensors, write_tensors
from ompq.grids import STREAM_BITS, Grid, like_weight
from ompq.network.graph import stored_dtype
from ompq.network.units import Choice, LayerGraph, Skipped, Unit
from ompq.packed.embedded_graph import Place, StoredUnit
from ompq.packed.structure import (
    BROKEN,
    GRAPH,
    PACKED_FORMAT,
    read_structure,
    reason_of,
)
from ompq.quantization.activation_sites import ActivationSite, Link
from ompq.quantization.equalization import Equalized
from ompq.quantization.products import OPERANDS
from ompq.quantization.record import BlockError, Quantization
from ompq.untrusted_json import Count, convert_json, record_type, row_type, whole_number

FORMAT = PACKED_FORMAT


class Encoding(IntFlag):
    """How a unit is stored; no flag is set for fixed widths without groups."""

    CODED = 1  # its stream is entropy-coded
    MULTIPLES = 2  # its scales are bytes times one number
    CENTRED = 4  # all zero points are the middle code, and not stored
    HALF_BIASES = 8  # its biases are stored in 16 bits
    FREE_ZEROS = 16  # its zero points are 32-bit floats


_FIXED = Encoding(0)
_FORMS = row_type(whole_number(0, 2 * max(Encoding) - 1), ...)


@dataclass(frozen=True, eq=False)
class PackedUnit:
    """One unit as the file stores it."""

    unit: Unit
    # Scale and zero point of each output channel, (C,), or of each group, (C, G).
    grid: Grid
    stream: Tensor  # its codes, uint8, (ceil(weights * bits / 8),) unless coded
    bias: Tensor | None  # its bias, float32, or None
    encoding: Encoding = _FIXED

    def compact(self, *, coded: bool) -> "PackedUnit":
        """Return the unit stored in fewer bytes, where possible, without loss."""
        grid, bias = self.grid, self.bias
        found = {
            Encoding.MULTIPLES: to_multiples(grid.scale).equal(grid.scale),
            Encoding.CENTRED: (grid.zero_point == _middle(grid.bits)).all(),
            Encoding.HALF_BIASES: bias is not None
            and torch.equal(bias.half().float(), bias),
            Encoding.FREE_ZEROS: not in_steps(grid.zero_point, grid.bits),
        }
        encoding = Encoding(sum(flag for flag, holds in found.items() if holds))
        if not coded:
            return replace(self, encoding=encoding)
        stream = _byte_tensor(encode(self.codes.numpy()))
        if stream.numel() < self.stream.numel():
            return replace(self, stream=stream, encoding=encoding | Encoding.CODED)
        return replace(self, encoding=encoding)

    @property
    def codes(self) -> Tensor:
        """Its codes, uint8, in the shape of the weight."""
        shape = self.unit.weight_shape
        stream = self.stream.numpy()
        if Encoding.CODED in self.encoding:
            return torch.from_numpy(decode(stream.tobytes(), shape))
        return torch.from_numpy(unpack_bits(stream, self.grid.bits, shape))

    @property
    def scales(self) -> Tensor:
        """Its scales as they are stored, or the number they are multiples of, (1,)."""
        if Encoding.MULTIPLES in self.encoding:
            return scale_multiples(self.grid.scale)[0]
        return self.grid.scale

    @property
    def multiples(self) -> Tensor:
        """The stored multiples of its scales, uint8, one each or none."""
        found = scale_multiples(self.grid.scale)[1]
        return found if Encoding.MULTIPLES in self.encoding else found[:0]

    @property
    def zero_points(self) -> Tensor:
        """Its zero points as they are stored, one each or none."""
        if Encoding.FREE_ZEROS in self.encoding:
            return self.grid.zero_point
        steps = (self.grid.zero_point / zero_step(self.grid.bits)).to(torch.uint8)
        return steps[:0] if Encoding.CENTRED in self.encoding else steps

    @property
    def biases(self) -> Tensor:
        """Its biases as they are stored, (O,) or (0,)."""
        if self.bias is None:
            return torch.empty(0)
        return self.bias.half() if Encoding.HALF_BIASES in self.encoding else self.bias


def _middle(bits: int) -> float:
    return float(1 << (bits - 1))


@dataclass(frozen=True, eq=False)
class Contents:
    """All that a packed file holds."""

    record: Quantization  # units, bits and activation sites
    units: tuple[PackedUnit, ...]  # the units that are quantized, in order
    activations: tuple[Grid, ...]  # the grid of each site
    # What is not quantized, by its key in the ``state_dict``.
    state: Mapping[str, Tensor]
    about: Mapping[str, Any]  # ``network``, ``versions`` and ``plan``: plain data
    graph: bytes = b""  # the ONNX file in it, without the codes of its weights
    # Bytes of compressed vectors in the file that was read, by name.
    squeezed: Mapping[str, int] = field(default_factory=dict)


def quantized_units(record: Quantization) -> list[Unit]:
    """Return the units that do not stay float."""
    bits = record.allocation
    return [u for u in record.graph.units if bits[u.name].weight < FLOAT_BITS]


def zero_step(bits: int) -> float:
    """Return the number that zero points of weights are multiples of."""
    return 0.5 if bits <= LARGEST_HALF_BITS else 1.0


def in_steps(zero_point: Tensor, bits: int) -> bool:
    """Return whether zero points are bytes times :func:`zero_step`."""
    steps = zero_point / zero_step(bits)
    return bool((steps == steps.to(torch.uint8)).all())


def channel_axis_of(unit: Unit) -> int:
    """Return the axis of a unit's weight along which scales differ."""
    return 1 if unit.kind == "transposed" else 0


def broadcast_grid(grid: Grid, unit: Unit, device: torch.device) -> Grid:
    """Return a grid of (C,) or (C, G) shaped to broadcast with the unit's weight."""
    grouped = Choice(grid.bits, FLOAT_BITS) if grid.scale.dim() == 2 else None
    group_size = 0 if grouped is None else unit.shared_by(grouped)
    scale, zero_point = (
        like_weight(
            values.to(device), unit.weight_shape, channel_axis_of(unit), group_size
        )
        for values in (grid.scale, grid.zero_point)
    )
    return Grid(scale, zero_point, grid.bits, grid.narrow)


def write_contents(path: str | Path, contents: Contents) -> None:
    """Write a packed file; the same contents give the same bytes."""
    tensors = vectors(contents)
    if any(Encoding.CODED in one.encoding for one in contents.units):
        for name in [name for name in SQUEEZABLE if name in tensors]:
            if (smaller := squeeze(tensors[name].numpy())) is not None:
                tensors[name + SQUEEZED] = _byte_tensor(smaller)
                del tensors[name]
    text = json.dumps(_structure(contents), separators=(",", ":"))
    tensors["structure"] = _byte_tensor(zlib.compress(text.encode(), 9))
    if contents.graph:
        tensors[GRAPH] = _byte_tensor(contents.graph)
    write_tensors(path, {"format": FORMAT}, tensors, check=read_contents)


def _byte_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def vectors(contents: Contents) -> dict[str, Tensor]:
    """Return the vectors of a packed file, none of them compressed."""
    units, grids, state = contents.units, contents.activations, contents.state.values()
    others = [t for t in map(_kept, state) if t.dtype != torch.float32]
    zeros = [one.zero_points for one in units]
    codes = [one.stream for one in units]
    codes += [values for values in zeros if values.dtype == torch.uint8]
    codes += [t.contiguous().flatten().view(torch.uint8) for t in others]
    own = [one.scales for one in units] + [one.biases for one in units]
    halves = [values for values in own if values.dtype == torch.float16]
    numbers = [
        *(values for values in zeros if values.dtype == torch.float32),
        *(values for values in own if values.dtype == torch.float32),
        *(grid.scale for grid in grids),
        *(grid.zero_point for grid in grids),
        *(t for t in map(_kept, state) if t.dtype == torch.float32),
    ]
    found = {
        "codes": _join(codes, torch.uint8),
        "numbers": _join(numbers, torch.float32),
        "multiples": _join([one.multiples for one in units], torch.uint8),
        "halves": _join(halves, torch.float16),
    }
    always = ("codes", "numbers")
    return {name: t for name, t in found.items() if len(t) or name in always}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.to(stored_dtype(tensor))


_VECTOR = {torch.uint8: "codes", torch.float32: "numbers", torch.float16: "halves"}


def stored_units(units: Sequence[PackedUnit]) -> dict[str, StoredUnit]:
    """Return the places of each unit in :func:`vectors`, by the unit's name."""
    ends: Counter[str] = Counter()

    def place(one: PackedUnit, item: str) -> Place:
        values: Tensor = getattr(one, item)
        own = item == "multiples" and values.numel() > 0
        name = item if own else _VECTOR[values.dtype]
        ends[name] += values.numel()
        return Place(name, ends[name] - values.numel(), values.numel())

    items = ("stream", "zero_points", "multiples", "scales", "biases")
    places = {item: [place(one, item) for one in units] for item in items}
    return {
        one.unit.name: StoredUnit(
            shape=one.unit.weight_shape,
            axis=channel_axis_of(one.unit),
            bits=one.grid.bits,
            coded=Encoding.CODED in one.encoding,
            grouped=one.grid.scale.dim() == 2,
            **{item: places[item][index] for item in items},
        )
        for index, one in enumerate(units)
    }


def _join(parts: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=kind), *(p.flatten() for p in parts)])


def _structure(contents: Contents) -> dict[str, Any]:
    record, units = contents.record, contents.units
    graph = record.graph.to_json()
    return {
        "about": dict(contents.about),
        "graph": {**graph, "units": _unit_columns(graph["units"])},
        "bits": [record.allocation[name].to_json() for name in record.graph.names],
        "sites": _columns([asdict(site) for site in record.sites]),
        "skipped": [entry.to_json() for entry in record.skipped],
        "errors": _columns([asdict(error) for error in record.errors]),
        "links": [list(link) for link in record.links],
        "equalized": [list(one) for one in record.equalized],
        "narrow": [one.unit.name for one in units if one.grid.narrow],
        "unbiased": [one.unit.name for one in units if one.bias is None],
        **({} if record.output == "classes" else {"output": record.output}),
        **_forms(units),
        "state": [
            [key, _kind(_kept(t)), list(t.shape)] for key, t in contents.state.items()
        ],
    }


def _forms(units: Sequence[PackedUnit]) -> dict[str, Any]:
    """Return encodings and lengths of coded streams, unless no unit has a flag."""
    forms = [int(one.encoding) for one in units]
    coded = [one.stream.numel() for one in units if Encoding.CODED in one.encoding]
    return {"forms": forms, "streams": coded} if any(forms) else {}


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def _rows(columns: Any, what: str) -> list[dict[str, Any]]:
    lists = convert_json(columns, dict[str, list[Any]], what).values()
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _unit_columns(units: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return units as columns that deflate well: what names imply is left out."""
    features = pairwise([0, *(unit["feature"] for unit in units)])
    rows = []
    for unit, (before, after) in zip(units, features, strict=True):
        usual = _usual(unit["name"]).items()
        implied = {key: None for key, value in usual if unit[key] == value}
        rows.append({**unit, **implied, "feature": after - before})
    return _columns(rows)


def _unit_rows(columns: Any) -> list[dict[str, Any]]:
    rows = _rows(columns, "units")
    features = accumulate(row["feature"] for row in rows)
    for row, feature in zip(rows, features, strict=True):
        usual = _usual(row["name"])
        row |= {key: usual[key] for key in usual if row[key] is None}
        row["feature"] = feature
    return rows


def _usual(name: str) -> dict[str, str]:
    return {"parameter": f"{name}.weight", "block": name, "group": name}


def read_contents(path: str | Path) -> Contents:
    """Return the contents of a packed file; needs no network."""
    try:
        _, tensors = read_tensors(path, FORMAT)
    except ValueError as error:
        raise PackedFileError(
            f"{path} is not a packed network: {error}. Give a file that ompq.save "
            "wrote, for example out/network.ompq.safetensors"
        ) from error
    try:
        deflated = _Reader(tensors, "structure", torch.uint8).tensor.numpy().tobytes()
        data = read_structure(deflated)
        data["graph"]["units"] = _unit_rows(data["graph"]["units"])
        for name in ("sites", "errors"):
            data[name] = _rows(data[name], name)
        return _contents(data, _with_squeezed(tensors))
    except BROKEN as error:
        raise PackedFileError(
            f"{path} is a broken packed file ({reason_of(error)}); save the network "
            "again"
        ) from error


def _with_squeezed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    few = {name: t.numpy() for name, t in tensors.items() if name.endswith(SQUEEZED)}
    made = {name: torch.from_numpy(one) for name, one in with_squeezed(few).items()}
    return {**tensors, **made}


def _contents(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Contents:
    record = _record(data)
    convert_json(data["about"], _ABOUT, "about")
    codes = _Reader(tensors, "codes", torch.uint8)
    numbers = _Reader(tensors, "numbers", torch.float32)
    halves = _Reader(tensors, "halves", torch.float16)
    multiples = _Reader(tensors, "multiples", torch.uint8)
    units = _read_units(data, record, (codes, multiples, numbers, halves))
    steps, offsets = ([numbers.take(1) for _ in record.sites] for _ in range(2))
    state = {}
    entries = convert_json(data["state"], list[tuple[str, str, list[Count]]], "state")
    for key, name, shape in entries:
        kind, count = _dtype(name), prod(shape)
        if kind == torch.float32:
            part = numbers.take(count)
        else:
            part = codes.take(count * kind.itemsize).clone().view(kind)  # aligned
        state[key] = part.reshape(shape)
    for reader in (codes, multiples, numbers, halves):
        reader.end()
    return Contents(
        record,
        units,
        tuple(
            Grid(scale.reshape(()), zero.reshape(()), site.bits)
            for scale, zero, site in zip(steps, offsets, record.sites, strict=True)
        ),
        state,
        data["about"],
        tensors[GRAPH].numpy().tobytes() if GRAPH in tensors else b"",
        {n: len(tensors[n + SQUEEZED]) for n in SQUEEZABLE if n + SQUEEZED in tensors},
    )


class _Reader:
    """Reads a vector piece by piece."""

    def __init__(
        self, tensors: Mapping[str, Tensor], name: str, kind: torch.dtype
    ) -> None:
        self.name, self.read = name, 0
        none = torch.empty(0, dtype=kind) if name in SQUEEZABLE else None
        tensor = tensors.get(name, none)
        if tensor is None or tensor.dtype != kind or tensor.dim() != 1:
            raise ValueError(f"{name} must be a vector of {kind}")
        self.tensor = tensor

    def take(self, count: int) -> Tensor:
        """Return the next entries."""
        self.read += count
        if self.read > self.tensor.numel():
            raise ValueError(f"{self.name} is too short: {self.tensor.numel()} entries")
        return self.tensor[self.read - count : self.read]

    def end(self) -> None:
        """Raise a ValueError if something has not been read."""
        if self.read < self.tensor.numel():
            raise ValueError(f"{self.name} is too long: {self.tensor.numel()} entries")


def _read_units(
    data: Mapping[str, Any],
    record: Quantization,
    readers: tuple[_Reader, _Reader, _Reader, _Reader],
) -> tuple[PackedUnit, ...]:
    codes, multiples, numbers, halves = readers
    units = quantized_units(record)
    unbiased, narrow = set(data["unbiased"]), set(data["narrow"])
    forms = convert_json(data.get("forms", [0] * len(units)), _FORMS, "forms")
    lengths = iter(convert_json(data.get("streams", []), list[Count], "streams"))
    found = []
    for unit, encoding in zip(units, map(Encoding, forms), strict=True):
        bits = record.allocation[unit.name].weight
        size = stream_length(unit.weights, bits)
        if Encoding.CODED in encoding:
            size = convert_json(
                next(lengths, None), whole_number(0, size), "length of a stream"
            )
        found.append((unit, bits, encoding, codes.take(size)))
    # The file has zero points of all units, then scales of all, then biases of all.
    shapes = [_grid_shape(unit, record.allocation[unit.name]) for unit in units]
    zeros = [
        (numbers if Encoding.FREE_ZEROS in encoding else codes).take(
            0 if Encoding.CENTRED in encoding else prod(shape)
        )
        for (_, _, encoding, _), shape in zip(found, shapes, strict=True)
    ]
    grids = []
    for (unit, bits, how, _), shape, zero in zip(found, shapes, zeros, strict=True):
        zero_point = _zero_point(zero, bits, how, shape)
        if Encoding.MULTIPLES in how:
            places = multiples.take(prod(shape))
            scale = multiply_scales(numbers.take(1), places)
        else:
            scale = numbers.take(prod(shape))
        grid = Grid(scale.reshape(shape), zero_point, bits, unit.name in narrow)
        grids.append(grid)
    packed = []
    for (unit, _, how, stream), grid in zip(found, grids, strict=True):
        held = halves if Encoding.HALF_BIASES in how else numbers
        bias = None if unit.name in unbiased else held.take(unit.out_channels).float()
        packed.append(PackedUnit(unit, grid, stream, bias, how))
    return tuple(packed)


def _zero_point(
    stored: Tensor, bits: int, how: Encoding, shape: tuple[int, ...]
) -> Tensor:
    if Encoding.CENTRED in how:
        return torch.full(shape, _middle(bits))
    step = 1.0 if Encoding.FREE_ZEROS in how else zero_step(bits)
    return stored.reshape(shape).to(torch.float32) * step


def _grid_shape(unit: Unit, choice: Choice) -> tuple[int, ...]:
    """Return the shape of a unit's scales: (C,), or (C, G) with groups."""
    channels = unit.weight_shape[channel_axis_of(unit)]
    grouped = unit.shared_by(choice) > 0
    return (channels, unit.scales(choice)) if grouped else (channels,)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.40} is not a type of numbers")
    return found


_OPERANDS = {"", *chain.from_iterable(OPERANDS.values())}


def _record(data: Mapping[str, Any]) -> Quantization:
    graph = LayerGraph.from_json(data["graph"])
    sites = convert_json(data["sites"], tuple[ActivationSite, ...], "sites")
    for site in sites:
        if site.bits not in (*WIDTHS, STREAM_BITS) or not (site.after or site.before):
            raise ValueError(f"an activation of {site.bits} bits at {site.after[:3]}")
        if site.operand not in _OPERANDS or (site.operand and not site.before):
            raise ValueError(f"an operand {site.operand:.40} of {site.before[:3]}")
    bits = zip(graph.names, convert_json(data["bits"], list, "bits"), strict=True)
    return Quantization(
        graph=graph,
        allocation=Allocation(
            {name: Choice.from_json(pair, "bits") for name, pair in bits}
        ),
        sites=sites,
        skipped=convert_json(data["skipped"], tuple[Skipped, ...], "skipped"),
        errors=convert_json(data["errors"], tuple[BlockError, ...], "errors"),
        links=convert_json(data["links"], tuple[Link, ...], "links"),
        equalized=convert_json(data["equalized"], tuple[Equalized, ...], "equalized"),
        output=parse_output(data.get("output", "classes")),
    )


# Entries that are shown, and must be texts.
_PLAN = dict.fromkeys(("hash", "budget", "score", "method", "accounting"), str)
_ABOUT = record_type(
    network=str, versions=dict[str, str], plan=record_type(**_PLAN) | None
)
