"""The packed file: safetensors, with nothing in it that could run."""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ompq.allocation.solver import Allocation
from ompq.costs import FLOAT_BITS
from ompq.errors import OmpqError, PackedFileError
from ompq.files import replacing
from ompq.graph import LayerGraph, Skipped, Unit, stored_dtype
from ompq.packing.bitstream import stream_length
from ompq.quantization import BlockError, Quantization
from ompq.quantization.equalization import Equalized
from ompq.quantization.sites import ActivationSite, Link
from ompq.quantizers import LARGEST_HALF_BITS, Grid

FORMAT = "ompq-packed/1"


def write_file(
    path: str | Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file that appears only when it is complete.

    The same header and tensors give the same bytes.

    Args:
        path: The file.
        header: Plain data.
        tensors: Contiguous, on the CPU.
    """
    entries = {"format": FORMAT, **header}
    entries["sha256"] = _digest(entries, tensors)
    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, {"ompq": _compact(entries)})


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a packed file.

    Raises:
        PackedFileError: It is missing, damaged, something else, or of a newer format.
    """
    header, tensors = _opened(path)
    digest = header.pop("sha256", None)
    if _digest(header, tensors) != digest:
        raise PackedFileError(
            f"{path} is damaged: its contents do not match its digest; copy it again"
        )
    del header["format"]
    return header, tensors


def _opened(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, (file.metadata() or {}).get("ompq", ""))
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise PackedFileError(f"there is no file {path}") from error
    except (OSError, SafetensorError) as error:
        if Path(path).is_dir():
            raise PackedFileError(
                f"{path} is a folder; give the packed network in it, for example "
                f"{Path(path) / 'network.ompq.safetensors'}"
            ) from error
        raise PackedFileError(
            f"{path} cannot be read ({error}): it is damaged, cut short, or no "
            "safetensors file"
        ) from error


def _header(path: str | Path, text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    found = str(header.get("format")) if isinstance(header, dict) else ""
    kind, _, version = found.partition("/")
    if kind != FORMAT.partition("/")[0]:
        raise PackedFileError(
            f"{path} is a safetensors file but no packed network; "
            "give one that ompq.save wrote"
        )
    if found != FORMAT:
        raise PackedFileError(
            f"{path} has format version {version}; this ompq reads {FORMAT}: "
            "install a newer one"
        )
    assert isinstance(header, dict)
    return header


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of everything in the file that means something."""
    digest = hashlib.sha256()
    digest.update(_compact(header).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(_compact([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_STATE = "state."
_TYPES = {
    "weights": torch.uint8,
    "scales": torch.float32,
    "zero_points": torch.uint8,
    "biases": torch.float32,
    "activation_scales": torch.float32,
    "activation_zeros": torch.int32,
    "floats": torch.float32,
    "structure": torch.uint8,
}
_LARGEST_STRUCTURE = 1 << 26  # a deflated file must not fill the memory
# What plain data of the wrong kind makes the code that reads it raise.
_BROKEN = (
    OmpqError,
    AttributeError,
    LookupError,
    OverflowError,
    RuntimeError,  # RecursionError among them
    TypeError,
    ValueError,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class PackedUnit:
    """One unit as it is in the file.

    Attributes:
        unit: The unit.
        grid: Scale and zero of each output channel, (C,) each.
        stream: Its codes, uint8, (ceil(weights * bits / 8),).
        bias: Its bias, float32, or None.
    """

    unit: Unit
    grid: Grid
    stream: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Contents:
    """All that a packed file holds.

    Attributes:
        record: Units, bits and points.
        units: The units that are quantized, in order.
        activations: The grid of each point.
        state: What is not quantized, by its key in the ``state_dict``.
        about: ``network``, ``versions`` and ``plan``: plain data.
    """

    record: Quantization
    units: tuple[PackedUnit, ...]
    activations: tuple[Grid, ...]
    state: Mapping[str, Tensor]
    about: Mapping[str, Any]


def quantized_units(record: Quantization) -> list[Unit]:
    """Return the units that do not stay float."""
    bits = record.allocation
    return [u for u in record.graph.units if bits[u.name].weight < FLOAT_BITS]


def zero_step(bits: int) -> float:
    """Return what zero points of weights are multiples of."""
    return 0.5 if bits <= LARGEST_HALF_BITS else 1.0


def write_contents(path: str | Path, contents: Contents) -> None:
    """Write a packed file; the same contents give the same bytes."""
    bits = contents.record.allocation
    allocation = {name: list(bits[name]) for name in bits}
    header = {**contents.about, "allocation": allocation}
    write_file(path, header, _to_tensors(contents))


def read_contents(path: str | Path) -> Contents:
    """Return what a packed file holds; needs no network.

    Raises:
        PackedFileError: It is missing, damaged, something else, or of a newer format.
    """
    header, tensors = read_file(path)
    try:
        return _from_tensors(header, tensors)
    except _BROKEN as error:
        raise PackedFileError(
            f"{path} is a broken packed file ({error!r}); save the network again"
        ) from error


def _to_tensors(contents: Contents) -> dict[str, Tensor]:
    units, grids = contents.units, contents.activations
    floats = {k: t for k, t in contents.state.items() if t.dtype == torch.float32}
    parts = {
        "weights": [unit.stream for unit in units],
        "scales": [unit.grid.scale for unit in units],
        "zero_points": [
            unit.grid.zero_point / zero_step(unit.grid.bits) for unit in units
        ],
        "biases": [unit.bias for unit in units if unit.bias is not None],
        "activation_scales": [grid.scale.reshape(1) for grid in grids],
        "activation_zeros": [grid.zero_point.reshape(1) for grid in grids],
        "floats": [tensor.flatten() for tensor in floats.values()],
        "structure": [_structure(contents, floats)],
    }
    tensors = {
        name: torch.cat([torch.empty(0, dtype=_TYPES[name]), *some]).to(_TYPES[name])
        for name, some in parts.items()
    }
    for key, tensor in contents.state.items():
        if key not in floats:
            tensors[f"{_STATE}{key}"] = tensor.to(stored_dtype(tensor)).contiguous()
    return tensors


def _structure(contents: Contents, floats: Mapping[str, Tensor]) -> Tensor:
    record, units = contents.record, contents.units
    data = {
        "graph": record.graph.to_json(),
        "points": [list(asdict(site).values()) for site in record.sites],
        "skipped": [asdict(entry) for entry in record.skipped],
        "errors": [asdict(error) for error in record.errors],
        "links": [list(link) for link in record.links],
        "equalized": [list(one) for one in record.equalized],
        "narrow": [one.unit.name for one in units if one.grid.narrow],
        "unbiased": [one.unit.name for one in units if one.bias is None],
        "floats": {key: list(tensor.shape) for key, tensor in floats.items()},
    }
    deflated = zlib.compress(json.dumps(data).encode(), 9)
    return torch.frombuffer(bytearray(deflated), dtype=torch.uint8)


def _from_tensors(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Contents:
    for name, kind in _TYPES.items():
        if tensors[name].dtype != kind or tensors[name].dim() != 1:
            raise ValueError(f"{name} must be a vector of {kind}")
    deflated = tensors["structure"].numpy().tobytes()
    data = json.loads(zlib.decompressobj().decompress(deflated, _LARGEST_STRUCTURE))
    record = _record(data, header["allocation"])
    scales = tensors["activation_scales"]
    zeros = tensors["activation_zeros"].to(scales.dtype)
    return Contents(
        record,
        tuple(_units(record, data, tensors)),
        tuple(
            Grid(scale, zero_point, site.bits)
            for scale, zero_point, site in zip(scales, zeros, record.sites, strict=True)
        ),
        dict(_state(data["floats"], tensors)),
        {key: value for key, value in header.items() if key != "allocation"},
    )


def _record(data: Mapping[str, Any], allocation: Mapping[str, Any]) -> Quantization:
    return Quantization(
        graph=LayerGraph.from_json(data["graph"]),
        allocation=Allocation(allocation),
        sites=tuple(
            ActivationSite(tuple(positions), bits, tuple(after), tuple(before))
            for positions, bits, after, before in data["points"]
        ),
        skipped=tuple(Skipped(**entry) for entry in data["skipped"]),
        errors=tuple(BlockError(**entry) for entry in data["errors"]),
        links=tuple(Link(*entry) for entry in data["links"]),
        equalized=tuple(
            Equalized(producer, consumer, tuple(exponents))
            for producer, consumer, exponents in data.get("equalized", ())
        ),
    )


def _state(
    shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    parts = _parts(tensors, "floats", [prod(shape) for shape in shapes.values()])
    for (key, shape), part in zip(shapes.items(), parts, strict=True):
        yield key, part.reshape(tuple(shape))
    for name, tensor in tensors.items():
        if name.startswith(_STATE):
            yield name.removeprefix(_STATE), tensor


def _units(
    record: Quantization, data: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[PackedUnit]:
    units = quantized_units(record)
    bits = [record.allocation[unit.name].weight for unit in units]
    channels = [unit.weight_shape[channel_axis_of(unit)] for unit in units]
    biased = [0 if u.name in data["unbiased"] else u.out_channels for u in units]
    lengths = [
        stream_length(prod(unit.weight_shape), width)
        for unit, width in zip(units, bits, strict=True)
    ]
    streams = _parts(tensors, "weights", lengths)
    scales = _parts(tensors, "scales", channels)
    zeros = _parts(tensors, "zero_points", channels)
    biases = _parts(tensors, "biases", biased)
    for i, unit in enumerate(units):
        zero_point = zeros[i].to(torch.float32) * zero_step(bits[i])
        grid = Grid(scales[i], zero_point, bits[i], unit.name in data["narrow"])
        yield PackedUnit(unit, grid, streams[i], biases[i] if biased[i] else None)


def channel_axis_of(unit: Unit) -> int:
    """Return the axis of a unit's weight that has a scale for each of its entries."""
    return 1 if unit.kind == "transposed" else 0


def broadcast_grid(grid: Grid, unit: Unit, device: torch.device) -> Grid:
    """Return a grid of (C,) shaped so that it broadcasts with the unit's weight."""
    shape = [1] * len(unit.weight_shape)
    shape[channel_axis_of(unit)] = -1
    scale, zero_point = grid.scale.to(device), grid.zero_point.to(device)
    return Grid(scale.reshape(shape), zero_point.reshape(shape), grid.bits, grid.narrow)


def _parts(
    tensors: Mapping[str, Tensor], name: str, lengths: Sequence[int]
) -> tuple[Tensor, ...]:
    found = tensors[name].numel()
    if found != sum(lengths):
        raise ValueError(f"{name} has {found} entries instead of {sum(lengths)}")
    return torch.split(tensors[name], list(lengths))
