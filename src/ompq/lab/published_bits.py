"""Published bit lists, by name: ``ptq-mobilenet_v2-0.9`` and the like.

Those of the OMPQ authors begin with ``ptq`` or ``qat``, then network, size in MiB and,
for training, the bits of activations. Those of HAWQ-V3 begin with ``hawq-v3``. Layers
have torchvision's names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ompq.allocation.problem import Allocation
from ompq.errors import PlanError, shorten, suggestion
from ompq.network.units import Choice
from ompq.untrusted_json import read_json

_FILE = Path(__file__).with_name("data") / "published_bits.json"


@dataclass(frozen=True)
class PublishedBits:
    """A published list, with the size and the bit-operations published with it."""

    network: str
    allocation: Allocation
    mib: float | None
    giga_bit_ops: float | None


@cache
def published_lists() -> Mapping[str, PublishedBits]:
    """Return all lists by name."""
    return MappingProxyType(
        {
            name: PublishedBits(
                entry["network"], bits, entry["mib"], entry["giga_bit_ops"]
            )
            for name, bits, entry in read_lists(_FILE)
        }
    )


def read_lists(path: Path) -> Iterator[tuple[str, Allocation, Mapping[str, Any]]]:
    """Yield name, bits and entry of each list in a file that comes with ompq."""
    data = read_json(path)
    for name, entry in data["lists"].items():
        units = data["layers"][entry["network"]]
        rows = zip(units, entry["weights"], entry["inputs"], strict=True)
        yield (
            name,
            Allocation({unit: Choice(int(w), int(a)) for unit, w, a in rows}),
            entry,
        )


def published_bits(name: str) -> Allocation:
    """Return the bits of a published list.

    Raises:
        PlanError: There is no list of this name.
    """
    known = published_lists()
    if name not in known:
        raise PlanError(
            f"there is no published list {name!r}{suggestion(name, known)}; there are "
            f"{shorten([*known])}"
        )
    return known[name].allocation
