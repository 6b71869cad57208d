"""The account of a packed file: where its bytes go."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ompq.costs import Bytes, bytes_by_item, unit_bytes
from ompq.network.graph import bias_key
from ompq.network.units import Choice, Unit
from ompq.packed.format import Contents, Encoding, read_contents
from ompq.packed.structure import GRAPH


@dataclass(frozen=True)
class UnitAccount:
    """The bytes of one unit."""

    unit: Unit
    bits: Choice  # of its weight and its input
    coded: bool  # whether its weights are entropy-coded
    # Its bytes in the file. Activations are shared between units, so they are counted
    # only for the whole network.
    bytes: Bytes
    planned: Bytes  # its bytes in the plan


@dataclass(frozen=True)
class Account:
    """The bytes of a packed file."""

    path: Path
    file_bytes: int  # its size on disk
    items: Mapping[str, int]  # bytes by item; they add up to the file's size
    planned: Mapping[str, int]  # bytes by item as the plan counts them
    units: tuple[UnitAccount, ...]  # the same for each unit
    about: Mapping[str, Any]  # ``network``, ``versions`` and ``plan``, as saved

    def __repr__(self) -> str:
        return (
            f"Account({self.path.name}: {self.file_bytes:,} bytes, {len(self.units)} "
            f"units, {self.average_bits:.2f} bits a weight)"
        )

    @property
    def planned_bytes(self) -> int:
        """The most that the file takes by the plan, whatever accounting that used."""
        return sum(self.planned.values())

    @property
    def average_bits(self) -> float:
        """Bits per weight, averaged over all weights."""
        total = sum(one.bits.bits * one.unit.weights for one in self.units)
        return total / sum(one.unit.weights for one in self.units)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "path": str(self.path),
            **self.about,
            "file_bytes": self.file_bytes,
            "planned_bytes": self.planned_bytes,
            "average_bits": self.average_bits,
            "items": dict(self.items),
            "planned": dict(self.planned),
            "units": [_unit_json(one) for one in self.units],
        }


def inspect_file(path: str | Path) -> Account:
    """Return the bytes of a packed file by item; needs no network.

    Raises:
        PackedFileError: It is missing, damaged, something else, or of a newer format.
    """
    contents = read_contents(path)
    size = Path(path).stat().st_size
    units = tuple(_unit_accounts(contents))
    items = Bytes.by_item([one.bytes for one in units])
    bits = contents.record.allocation
    planned = bytes_by_item(contents.record.graph, bits, bits.values())
    items["activations"] = 8 * len(contents.activations)
    rest = sum(_size(tensor) for tensor in contents.state.values())
    floats = [one for one in units if one.bytes.scales == 0]
    items["float"] = rest - sum(one.bytes.total for one in floats)
    if contents.graph:
        items[GRAPH] = len(contents.graph)
        planned[GRAPH] = 0
    items["metadata"] = size - sum(items.values())
    return Account(Path(path), size, items, planned, units, contents.about)


def _unit_accounts(contents: Contents) -> list[UnitAccount]:
    coded = {one.unit.name: Encoding.CODED in one.encoding for one in contents.units}
    taken, bits = _taken(contents), contents.record.allocation
    state = contents.state  # of units that stay float
    return [
        UnitAccount(
            unit,
            bits[unit.name],
            coded.get(unit.name, False),
            taken.get(unit.name)
            or Bytes(
                _size(state.get(unit.parameter)),
                biases=_size(state.get(bias_key(unit))),
            ),
            unit_bytes(unit, bits[unit.name]),
        )
        for unit in contents.record.graph.units
    ]


def _taken(contents: Contents) -> dict[str, Bytes]:
    """Return each quantized unit's bytes, with its share of compressed vectors."""
    units, squeezed = contents.units, contents.squeezed
    multiples = [_size(one.multiples) for one in units]
    whole = [one.biases if one.biases.dtype == torch.float32 else None for one in units]
    halves = [_size(one.biases) - _size(w) for one, w in zip(units, whole, strict=True)]
    shared = zip(
        _shares(multiples, squeezed.get("multiples")),
        _shares(halves, squeezed.get("halves")),
        strict=True,
    )
    return {
        one.unit.name: Bytes(
            weights=_size(one.stream),
            scales=_size(one.scales) + multiple,
            zero_points=_size(one.zero_points),
            biases=_size(wide) + half,
        )
        for one, wide, (multiple, half) in zip(units, whole, shared, strict=True)
    }


def _shares(sizes: Sequence[int], total: int | None) -> Sequence[int]:
    """Divide a total in proportion to sizes; without a total return the sizes."""
    if total is None:
        return sizes
    ends = [end * total // sum(sizes) for end in accumulate(sizes, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _unit_json(one: UnitAccount) -> dict[str, Any]:
    return {
        "name": one.unit.name,
        "kind": one.unit.kind,
        "shape": list(one.unit.weight_shape),
        "weight_bits": one.bits.bits,
        "coded": one.coded,
        "activation_bits": one.bits.activation,
        "bytes": {**asdict(one.bytes), "total": one.bytes.total},
        "planned": {**asdict(one.planned), "total": one.planned.total},
    }
