"""A small zoo: bits of well-known networks at a few sizes, by name.

``zoo:resnet18-4.0MiB`` goes where a plan goes. Layers have the names of the library
that the network comes from. ``benchmarks/zoo_plans.py`` makes the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ompq.allocation.problem import Allocation
from ompq.amounts import in_bytes
from ompq.cli.console import Column, View
from ompq.errors import PlanError, shorten, suggestion
from ompq.lab.published_bits import read_lists

_FILE = Path(__file__).with_name("data") / "zoo.json"


@dataclass(frozen=True)
class ZooPlan:
    """Bits for a network, and what is known about them.

    Attributes:
        bytes: Size of the packed file.
        trained: Whether trained weights were at hand when the bits were chosen; without
            them, only the shapes of the layers decided.
        divergence: From the float network after rounding, without learning; None if not
            measured.
        drop: Of top-1, in points.
        images: How many images these were measured on.
    """

    network: str
    allocation: Allocation
    bytes: int
    average_bits: float
    trained: bool
    divergence: float | None = None
    drop: float | None = None
    images: int = 0


@cache
def zoo_plans() -> Mapping[str, ZooPlan]:
    """Return all plans by name."""
    return MappingProxyType(
        {
            name: ZooPlan(
                allocation=bits,
                **{k: v for k, v in entry.items() if k not in ("weights", "inputs")},
            )
            for name, bits, entry in read_lists(_FILE)
        }
    )


def zoo_bits(name: str) -> Allocation:
    """Return the bits of a plan in the zoo.

    Raises:
        PlanError: There is no plan of this name.
    """
    known = zoo_plans()
    if name not in known:
        raise PlanError(
            f"there is no plan {name!r} in the zoo{suggestion(name, known)}; there are "
            f"{shorten([*known])}, see ompq zoo"
        )
    return known[name].allocation


def run_zoo(network: str | None) -> View:
    """List the plans of the zoo, perhaps only those of one network."""
    known = zoo_plans()
    shown = {
        name: one
        for name, one in known.items()
        if network is None or network in one.network
    }
    if not shown:
        names = list(dict.fromkeys(one.network for one in known.values()))
        raise PlanError(
            f"the zoo has no {network!r}{suggestion(str(network), names)}; it has "
            f"{', '.join(names)}"
        )
    columns = [
        Column("plan", [f"zoo:{name}" for name in shown], "left"),
        Column("network", [one.network for one in shown.values()], "left", rank=2),
        Column("file", [in_bytes(one.bytes) for one in shown.values()]),
        Column("mean bits", [f"{one.average_bits:.2f}" for one in shown.values()]),
        Column("loss of top-1", [_measured(one.drop) for one in shown.values()]),
        Column("divergence", [_measured(one.divergence) for one in shown.values()]),
        Column("images", [str(one.images or "-") for one in shown.values()], rank=1),
        Column(
            "chosen by",
            ["weights" if one.trained else "shapes" for one in shown.values()],
            "left",
        ),
    ]
    data = [_plain(name, one) for name, one in shown.items()]
    return View(data, f"{len(data)} plans", [columns])


def _measured(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"


def _plain(name: str, plan: ZooPlan) -> dict[str, Any]:
    bits = {unit: str(choice) for unit, choice in plan.allocation.items()}
    return {"name": name, **vars(plan), "allocation": bits}
