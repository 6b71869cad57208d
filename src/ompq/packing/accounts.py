"""What a packed file takes, item by item, next to what its plan promised."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ompq.costs import Bytes, unit_bytes
from ompq.graph.units import Choice, Unit
from ompq.packing.contents import Contents, PackedUnit, read_contents
from ompq.quantization.assembly import bias_key

# A file may take this much more than its plan: metadata, mostly.
PROMISED_SHARE = 0.01
PROMISED_BYTES = 16 << 10


@dataclass(frozen=True)
class UnitAccount:
    """What one unit takes.

    Attributes:
        unit: The unit.
        bits: Of its weight and its input.
        bytes: What it takes in the file. Activations are shared between units, so
            they are counted for the whole network only.
        planned: What it takes in the plan.
    """

    unit: Unit
    bits: Choice
    bytes: Bytes
    planned: Bytes


@dataclass(frozen=True)
class Account:
    """What a file takes.

    Attributes:
        path: The file.
        file_bytes: Its size on disk.
        items: Bytes by item; they sum up to the file.
        planned: Bytes by item as the plan counts them.
        units: The same for each unit.
        about: ``network``, ``versions`` and ``plan``, as saved.
    """

    path: Path
    file_bytes: int
    items: Mapping[str, int]
    planned: Mapping[str, int]
    units: tuple[UnitAccount, ...]
    about: Mapping[str, Any]

    @property
    def planned_bytes(self) -> int:
        """What the plan promised, scales and all, whatever its own accounting."""
        return sum(self.planned.values())

    @property
    def promised_bytes(self) -> int:
        """What the file may take at most: the plan, 1 % and 16 KiB."""
        return int(self.planned_bytes * (1 + PROMISED_SHARE)) + PROMISED_BYTES

    @property
    def average_bits(self) -> float:
        """Bits a weight, averaged over all weights."""
        total = sum(one.bits.weight * one.unit.weights for one in self.units)
        return total / sum(one.unit.weights for one in self.units)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "path": str(self.path),
            **self.about,
            "file_bytes": self.file_bytes,
            "planned_bytes": self.planned_bytes,
            "promised_bytes": self.promised_bytes,
            "average_bits": self.average_bits,
            "items": dict(self.items),
            "planned": dict(self.planned),
            "units": [_unit_json(one) for one in self.units],
        }


def inspect_file(path: str | Path) -> Account:
    """Return what a packed file takes; needs no network.

    Raises:
        PackedFileError: It is missing, damaged, something else, or of a newer format.
    """
    contents = read_contents(path)
    size = Path(path).stat().st_size
    units = tuple(_unit_accounts(contents))
    items = {
        name: sum(getattr(one.bytes, name) for one in units)
        for name in Bytes.__dataclass_fields__
    }
    items["activations"] = 8 * len(contents.activations)
    held = sum(_size(tensor) for tensor in contents.state.values())
    floats = [one for one in units if one.bytes.scales == 0]
    items["float"] = held - sum(one.bytes.total for one in floats)
    items["metadata"] = size - sum(items.values())
    planned = {
        name: sum(getattr(one.planned, name) for one in units)
        for name in Bytes.__dataclass_fields__
    }
    planned["float"] = 4 * contents.record.graph.float_parameters
    planned["metadata"] = 0
    return Account(Path(path), size, items, planned, units, contents.about)


def _unit_accounts(contents: Contents) -> list[UnitAccount]:
    packed = {one.unit.name: one for one in contents.units}
    bits = contents.record.allocation
    return [
        UnitAccount(
            unit,
            bits[unit.name],
            _taken(unit, packed.get(unit.name), contents.state),
            unit_bytes(unit, bits[unit.name]),
        )
        for unit in contents.record.graph.units
    ]


def _taken(unit: Unit, packed: PackedUnit | None, state: Mapping[str, Tensor]) -> Bytes:
    if packed is None:  # it stays float
        return Bytes(
            weights=_size(state.get(unit.parameter)),
            biases=_size(state.get(bias_key(unit))),
        )
    return Bytes(
        weights=_size(packed.stream),
        scales=_size(packed.grid.scale),
        zero_points=packed.grid.zero.numel(),
        biases=_size(packed.bias),
    )


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _unit_json(one: UnitAccount) -> dict[str, Any]:
    return {
        "name": one.unit.name,
        "kind": one.unit.kind,
        "shape": list(one.unit.weight_shape),
        "weight_bits": one.bits.weight,
        "activation_bits": one.bits.activation,
        "bytes": {**asdict(one.bytes), "total": one.bytes.total},
        "planned": {**asdict(one.planned), "total": one.planned.total},
    }
