"""The packed file: safetensors that hold codes, numbers and a small structure.

Version 2 has three tensors. ``codes`` (uint8): the weights' bit streams, their zero
points, and buffers that are not float32. ``numbers`` (float32): scales, biases, scales
and zero points of activations, and what stays float. ``structure`` (uint8): deflated
JSON that names everything, in columns. Files of version 1, which ompq 0.1 wrote, are
read too.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, chain, islice, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ompq.allocation.solver import Allocation
from ompq.costs import FLOAT_BITS
from ompq.errors import OmpqError, PackedFileError
from ompq.files import (
    json_list,
    json_object,
    json_record,
    json_text,
    json_whole,
    parse_json,
    read_tensors,
    write_tensors,
)
from ompq.graph import Choice, LayerGraph, Skipped, Unit, stored_dtype
from ompq.packing.bitstream import stream_length
from ompq.quantization import BlockError, Quantization
from ompq.quantization.equalization import Equalized
from ompq.quantization.sites import ActivationSite, Link
from ompq.quantizers import LARGEST_HALF_BITS, Grid

FORMAT = "ompq-packed/2"
_OLDEST = "ompq-packed/1"
_LARGEST_STRUCTURE = 1 << 26  # a deflated file must not fill the memory
_LONGEST_TEXT = 1000  # of any name in it
# What plain data of the wrong kind makes the code that reads it raise.
_WRONG = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
_BROKEN = (*_WRONG, OmpqError, RuntimeError, zlib.error)  # RecursionError among them


@dataclass(frozen=True, eq=False)
class PackedUnit:
    """One unit as it is in the file."""

    unit: Unit
    grid: Grid  # scale and zero point of each output channel, (C,) each
    stream: Tensor  # its codes, uint8, (ceil(weights * bits / 8),)
    bias: Tensor | None  # its bias, float32, or None


@dataclass(frozen=True, eq=False)
class Contents:
    """All that a packed file holds."""

    record: Quantization  # units, bits and activation sites
    units: tuple[PackedUnit, ...]  # the units that are quantized, in order
    activations: tuple[Grid, ...]  # the grid of each site
    # What is not quantized, by its key in the ``state_dict``.
    state: Mapping[str, Tensor]
    about: Mapping[str, Any]  # ``network``, ``versions`` and ``plan``: plain data


def quantized_units(record: Quantization) -> list[Unit]:
    """Return the units that do not stay float."""
    bits = record.allocation
    return [u for u in record.graph.units if bits[u.name].weight < FLOAT_BITS]


def zero_step(bits: int) -> float:
    """Return what zero points of weights are multiples of."""
    return 0.5 if bits <= LARGEST_HALF_BITS else 1.0


def channel_axis_of(unit: Unit) -> int:
    """Return the axis of a unit's weight that has a scale for each of its entries."""
    return 1 if unit.kind == "transposed" else 0


def broadcast_grid(grid: Grid, unit: Unit, device: torch.device) -> Grid:
    """Return a grid of (C,) shaped so that it broadcasts with the unit's weight."""
    shape = [1] * len(unit.weight_shape)
    shape[channel_axis_of(unit)] = -1
    scale, zero_point = grid.scale.to(device), grid.zero_point.to(device)
    return Grid(scale.reshape(shape), zero_point.reshape(shape), grid.bits, grid.narrow)


def write_contents(path: str | Path, contents: Contents) -> None:
    """Write a packed file; the same contents give the same bytes."""
    units, grids = contents.units, contents.activations
    zeros = [one.grid.zero_point / zero_step(one.grid.bits) for one in units]
    state = {key: t.to(stored_dtype(t)) for key, t in contents.state.items()}
    others = [t for t in state.values() if t.dtype != torch.float32]
    text = json.dumps(_structure(contents, state), separators=(",", ":"))
    deflated = zlib.compress(text.encode(), 9)
    codes = [*(one.stream for one in units), *(zero.to(torch.uint8) for zero in zeros)]
    codes += [t.contiguous().flatten().view(torch.uint8) for t in others]
    numbers = [
        *(one.grid.scale for one in units),
        *(one.bias for one in units if one.bias is not None),
        *(grid.scale for grid in grids),
        *(grid.zero_point for grid in grids),
        *(t for t in state.values() if t.dtype == torch.float32),
    ]
    tensors = {
        "codes": _joined(codes, torch.uint8),
        "numbers": _joined(numbers, torch.float32),
        "structure": torch.frombuffer(bytearray(deflated), dtype=torch.uint8),
    }
    write_tensors(path, {"format": FORMAT}, tensors)


def _joined(parts: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=kind), *(p.flatten() for p in parts)])


def _structure(contents: Contents, state: Mapping[str, Tensor]) -> dict[str, Any]:
    record, units = contents.record, contents.units
    graph = record.graph.to_json()
    return {
        "about": dict(contents.about),
        "graph": {**graph, "units": _unit_columns(graph["units"])},
        "bits": [list(record.allocation[name]) for name in record.graph.names],
        "sites": _columns([asdict(site) for site in record.sites]),
        "skipped": [asdict(entry) for entry in record.skipped],
        "errors": _columns([asdict(error) for error in record.errors]),
        "links": [list(link) for link in record.links],
        "equalized": [list(one) for one in record.equalized],
        "narrow": [one.unit.name for one in units if one.grid.narrow],
        "unbiased": [one.unit.name for one in units if one.bias is None],
        "state": [[key, _kind(t), list(t.shape)] for key, t in state.items()],
    }


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def _rows(columns: Any, what: str) -> list[dict[str, Any]]:
    lists = [json_list(one, what) for one in json_object(columns, what).values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _unit_columns(units: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return units as columns, without what follows from the name: it deflates well."""
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
    """Return what a packed file holds; needs no network."""
    try:
        header, tensors = read_tensors(path, FORMAT, _OLDEST)
    except ValueError as error:
        raise PackedFileError(
            f"{path} is not a packed network: {error}. Give a file that ompq.save "
            "wrote, for example out/network.ompq.safetensors"
        ) from error
    try:
        deflated = _vector(tensors, "structure", torch.uint8).numpy().tobytes()
        text = zlib.decompressobj().decompress(deflated, _LARGEST_STRUCTURE)
        data = json_object(parse_json(text.decode()), "structure")
        if header["format"] == _OLDEST:
            data, tensors = _from_oldest(header, data, tensors)
        else:
            data["graph"]["units"] = _unit_rows(data["graph"]["units"])
            for name in ("sites", "errors"):
                data[name] = _rows(data[name], name)
        if not all(map(_is_plain, _texts(data))):
            raise ValueError("a text is not printable, or too long")
        return _contents(data, tensors)
    except _BROKEN as error:
        reason = ascii(f"{type(error).__name__}: {error}"[:300])[1:-1]
        raise PackedFileError(
            f"{path} is a broken packed file ({reason}); save the network again"
        ) from error


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, list | dict):
        values = data if isinstance(data, list) else chain(data, data.values())
        yield from chain.from_iterable(map(_texts, values))


def _is_plain(text: str) -> bool:
    return len(text) <= _LONGEST_TEXT and text.isprintable()


def _from_oldest(
    header: Mapping[str, Any], data: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the structure and tensors of a file of version 1 as version 2 has them."""
    bits, prefix = header["allocation"], "state."
    others = {key: t for key, t in tensors.items() if key.startswith(prefix)}
    state = [[key, "float32", shape] for key, shape in data["floats"].items()]
    for key, tensor in others.items():
        state.append([key.removeprefix(prefix), _kind(tensor), list(tensor.shape)])
    places = [field.name for field in fields(ActivationSite)]
    structure = {
        **data,
        "about": {key: header[key] for key in ("network", "versions", "plan")},
        "bits": [bits[unit["name"]] for unit in data["graph"]["units"]],
        "sites": [dict(zip(places, one, strict=True)) for one in data["points"]],
        "equalized": data.get("equalized", []),
        "state": state,
    }
    byte, number = torch.uint8, torch.float32
    codes = [_vector(tensors, name, byte) for name in ("weights", "zero_points")]
    codes += [t.flatten().view(byte) for t in others.values()]
    numbers = [
        _vector(tensors, name, torch.int32 if name == "activation_zeros" else number)
        for name in (
            "scales", "biases", "activation_scales", "activation_zeros", "floats"
        )
    ]  # fmt: skip
    return structure, {
        "codes": _joined(codes, byte),
        "numbers": _joined(numbers, number).to(number),
    }


def _vector(tensors: Mapping[str, Tensor], name: str, kind: torch.dtype) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != kind or tensor.dim() != 1:
        raise ValueError(f"{name} must be a vector of {kind}")
    return tensor


def _contents(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Contents:
    record = _record(data)
    units, sites = quantized_units(record), record.sites
    bits = [record.allocation[unit.name].weight for unit in units]
    channels = [unit.weight_shape[channel_axis_of(unit)] for unit in units]
    unbiased, narrow = set(data["unbiased"]), set(data["narrow"])
    biases = [0 if u.name in unbiased else u.out_channels for u in units]
    state = [
        (json_text(key, "key"), _dtype(kind), [json_whole(n, "size") for n in shape])
        for key, kind, shape in json_list(data["state"], "state")
    ]
    floats = [entry for entry in state if entry[1] == torch.float32]
    others = [entry for entry in state if entry[1] != torch.float32]
    streams, zeros, raw = _cut(
        _vector(tensors, "codes", torch.uint8),
        [stream_length(u.weights, b) for u, b in zip(units, bits, strict=True)],
        channels,
        [prod(shape) * kind.itemsize for _, kind, shape in others],
    )
    scales, shifts, steps, offsets, values = _cut(
        _vector(tensors, "numbers", torch.float32),
        channels,
        biases,
        [1] * len(sites),
        [1] * len(sites),
        [prod(shape) for _, _, shape in floats],
    )
    grids = [
        Grid(scale, zero.to(torch.float32) * zero_step(width), width, u.name in narrow)
        for scale, zero, width, u in zip(scales, zeros, bits, units, strict=True)
    ]
    packed = zip(units, grids, streams, shifts, strict=True)
    aligned = [part.clone() for part in raw]
    parts = zip([*floats, *others], [*values, *aligned], strict=True)
    return Contents(
        record,
        tuple(PackedUnit(u, g, s, b if len(b) else None) for u, g, s, b in packed),
        tuple(
            Grid(scale.reshape(()), zero.reshape(()), site.bits)
            for scale, zero, site in zip(steps, offsets, sites, strict=True)
        ),
        {key: part.view(kind).reshape(shape) for (key, kind, shape), part in parts},
        _about(data["about"]),
    )


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, json_text(name, "type"), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.40} is not a type of numbers")
    return found


def _cut(tensor: Tensor, *groups: Sequence[int]) -> list[list[Tensor]]:
    """Cut a vector into groups of parts of these lengths."""
    total = sum(map(sum, groups))
    if tensor.numel() != total or min([0, *chain(*groups)]) < 0:
        raise ValueError(f"{tensor.numel()} entries instead of {total}")
    parts = iter(torch.split(tensor, [*chain(*groups)]))
    return [list(islice(parts, len(lengths))) for lengths in groups]


def _record(data: Mapping[str, Any]) -> Quantization:
    graph = LayerGraph.from_json(data["graph"])
    sites = [json_record(ActivationSite, one) for one in data["sites"]]
    for site in sites:
        if site.bits not in range(2, 9) or not (site.after or site.before):
            raise ValueError(f"an activation of {site.bits} bits at {site.after[:3]}")
    bits = zip(graph.names, json_list(data["bits"], "bits"), strict=True)
    equalized = [
        Equalized(
            json_text(producer, "producer"),
            json_text(consumer, "consumer"),
            tuple(json_whole(one, "exponent", -128, 128) for one in exponents),
        )
        for producer, consumer, exponents in json_list(data["equalized"], "equalized")
    ]
    return Quantization(
        graph=graph,
        allocation=Allocation({name: Choice(*pair) for name, pair in bits}),
        sites=tuple(sites),
        skipped=tuple(json_record(Skipped, one) for one in data["skipped"]),
        errors=tuple(json_record(BlockError, one) for one in data["errors"]),
        links=tuple(
            Link(*(json_text(name, "link") for name in names))
            for names in json_list(data["links"], "links")
        ),
        equalized=tuple(equalized),
    )


_PLAN = ("hash", "budget", "score", "method", "accounting")


def _about(data: Any) -> dict[str, Any]:
    """Return what a file says of itself: the entries that are shown are texts."""
    about = json_object(data, "about")
    json_text(about["network"], "network")
    for version in json_object(about["versions"], "versions").values():
        json_text(version, "version")
    if about["plan"] is not None:
        plan = json_object(about["plan"], "plan")
        for name in _PLAN:
            json_text(plan[name], name)
    return about
