"""A packed file in a few lines, read without PyTorch: what it holds, layer by layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ompq.errors import PackedFileError
from ompq.files import read_arrays
from ompq.packed.structure import (
    BROKEN,
    GRAPH,
    PACKED_FORMAT,
    read_structure,
    reason_of,
)
from ompq.untrusted_json import Count, Number, convert_json, record_type


class _Bits(NamedTuple):
    weight: Count
    activation: Count
    rate: Number = 0.0


# What is read of a file's structure.
_STRUCTURE = record_type(
    about=record_type(
        network=str, versions=dict[str, str], plan=record_type(budget=str) | None
    ),
    graph=record_type(
        units=record_type(
            name=list[str], kind=list[str], weight_shape=list[tuple[Count, ...]]
        )
    ),
    bits=list[_Bits],
)


@dataclass(frozen=True)
class LayerSummary:
    """A layer whose weight has bits of its own."""

    name: str
    kind: str
    shape: tuple[int, ...]  # of its weight
    weight_bits: float  # 32 for a layer that stays float; a rate if it is coded
    activation_bits: int


@dataclass(frozen=True)
class PackedSummary:
    """What a packed file holds."""

    network: str
    versions: Mapping[str, str]  # of the libraries that wrote it
    budget: str  # of its plan, or ""
    file_bytes: int
    tensor_bytes: Mapping[str, int]  # of each tensor in the file
    layers: tuple[LayerSummary, ...]

    @property
    def has_graph(self) -> bool:
        """Whether :func:`ompq.packed.unpack` finds an ONNX file in it."""
        return GRAPH in self.tensor_bytes

    def lines(self) -> Iterator[str]:
        """Yield the summary as lines of text."""
        yield f"network   {self.network or 'without a name'}"
        yield f"written   {', '.join(' '.join(one) for one in self.versions.items())}"
        if self.budget:
            yield f"budget    {self.budget}"
        yield f"file      {self.file_bytes:,} bytes"
        for name, size in self.tensor_bytes.items():
            yield f"  {name:<14} {size:>12,}"
        yield f"ONNX file {'inside: unpack it' if self.has_graph else 'not inside'}"
        for one in self.layers:
            bits = f"W{one.weight_bits:g}A{one.activation_bits}"
            yield f"  {bits:<8} {one.name} ({one.kind}, {list(one.shape)})"


def summarize(path: str | Path) -> PackedSummary:
    """Return what a packed file holds; needs neither PyTorch nor the network.

    Raises:
        PackedFileError: It is missing, damaged, something else, or of another version.
    """
    try:
        _, arrays = read_arrays(path, PACKED_FORMAT)
    except ValueError as error:
        raise PackedFileError(f"{path} is not a packed network: {error}") from error
    try:
        data = read_structure(arrays["structure"].tobytes())
        found = convert_json(data, _STRUCTURE, "structure")
        about, units = found.about, found.graph.units
        rows = zip(units.name, units.kind, units.weight_shape, found.bits, strict=True)
        return PackedSummary(
            about.network,
            about.versions,
            about.plan.budget if about.plan else "",
            Path(path).stat().st_size,
            {name: array.nbytes for name, array in sorted(arrays.items())},
            tuple(
                LayerSummary(
                    name, kind, shape, bits.rate or bits.weight, bits.activation
                )
                for name, kind, shape, bits in rows
            ),
        )
    except BROKEN as error:
        raise PackedFileError(
            f"{path} is a broken packed file ({reason_of(error)}); save the network "
            "again"
        ) from error
