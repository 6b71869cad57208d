"""What bits cost: bytes, item by item; bit-operations; milliseconds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ompq.errors import BudgetError, shortened
from ompq.files import read_json
from ompq.graph.units import Choice, LayerGraph, Unit

Table = NDArray[np.float64]
Accounting = Literal["packed", "paper"]
LatencyTable = Mapping[str, Mapping[str, float]]  # unit → "W4A8" → milliseconds

FLOAT_BITS = 32  # the width of a unit that stays float


@dataclass(frozen=True)
class Cost:
    """What each choice of each unit costs.

    Attributes:
        name: ``bytes``, ``bit_ops``, ``weight_bits`` or ``milliseconds``.
        table: Cost of each choice, (units, choices).
        constant: What no choice changes, such as parameters that stay float.
        reference: What relative budgets refer to: the float network's bytes for
            ``bytes``, the number of weights for ``weight_bits``.
    """

    name: str
    table: Table
    constant: float = 0.0
    reference: float = 0.0


@dataclass(frozen=True)
class Bytes:
    """The bytes of one unit in a packed file, item by item."""

    weights: int = 0
    scales: int = 0
    zero_points: int = 0
    biases: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All items together."""
        return (
            self.weights
            + self.scales
            + self.zero_points
            + self.biases
            + self.activations
        )


def unit_bytes(unit: Unit, choice: Choice) -> Bytes:
    """Return what the unit takes in a packed file.

    Weights are a dense stream of bits; each output channel has a float32 scale, a
    zero point of one byte and a 32-bit bias (batch norm and the correction of rounding
    end up there); the input has a float32 scale and a 32-bit zero point.
    """
    channels = unit.out_channels
    if choice.weight >= FLOAT_BITS:
        return Bytes(weights=4 * unit.weights, biases=4 * channels)
    return Bytes(
        weights=ceil(unit.weights * choice.weight / 8),
        scales=4 * channels,
        zero_points=channels,
        biases=4 * channels,
        activations=8,
    )


def paper_bytes(unit: Unit, choice: Choice) -> float:
    """Return the unit's size as the paper's released code counts it.

    Weights, bias and the affine parameters of batch norm all count at the unit's bits.
    """
    count = unit.weights + unit.norm_parameters + unit.bias_parameters
    return count * choice.weight / 8


def cost_tables(
    graph: LayerGraph,
    choices: Sequence[Choice],
    *,
    accounting: Accounting = "packed",
    latency: LatencyTable | None = None,
) -> dict[str, Cost]:
    """Return every cost that a budget may limit, by name.

    Args:
        graph: The network's units.
        choices: Columns of the tables.
        accounting: ``packed`` is exact for our files; ``paper`` is the published
            convention, for comparison with its tables.
        latency: Milliseconds of each unit at each choice, where known.
    """
    floats = sum(u.weights + u.bias_parameters + u.norm_parameters for u in graph.units)
    if accounting == "paper":
        size, constant = _table(graph, choices, paper_bytes), 0.0
    elif accounting == "packed":
        size = _table(graph, choices, lambda u, c: unit_bytes(u, c).total)
        constant = 4.0 * graph.float_parameters
    else:
        raise ValueError(f"accounting={accounting!r} is unknown; use packed or paper")
    costs = [
        Cost("bytes", size, constant, 4.0 * (floats + graph.float_parameters)),
        Cost(
            "bit_ops",
            _table(graph, choices, lambda u, c: u.macs * c.weight * c.activation),
        ),
        Cost(
            "weight_bits",
            _table(graph, choices, lambda u, c: u.weights * c.weight),
            reference=float(sum(unit.weights for unit in graph.units)),
        ),
    ]
    if latency is not None:
        costs.append(Cost("milliseconds", _latency(graph, choices, latency)))
    return {cost.name: cost for cost in costs}


def load_latency(path: str | Path) -> LatencyTable:
    """Read a latency table: JSON, unit → {"W4A8": milliseconds, ...}.

    Raises:
        BudgetError: The file is missing or is no such table.
    """
    try:
        table = read_json(path)
        if not isinstance(table, dict):
            raise ValueError(f"it is a {type(table).__name__}")
        return {
            str(unit): {str(key): float(ms) for key, ms in row.items()}
            for unit, row in table.items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BudgetError(
            f"{path} is no latency table: {error}. "
            'Write JSON such as {"conv1": {"W8A8": 0.41, "W4A8": 0.40}}'
        ) from error


def _table(
    graph: LayerGraph,
    choices: Sequence[Choice],
    cost: Callable[[Unit, Choice], float],
) -> Table:
    return np.array(
        [[cost(unit, choice) for choice in choices] for unit in graph.units],
        dtype=np.float64,
    )


def _latency(
    graph: LayerGraph, choices: Sequence[Choice], latency: LatencyTable
) -> Table:
    missing = [
        f"{unit.name} {choice}"
        for unit in graph.units
        for choice in choices
        if str(choice) not in latency.get(unit.name, {})
    ]
    if missing:
        raise BudgetError(
            f"the latency table lacks {shortened(missing)}; measure these as well"
        )
    return _table(graph, choices, lambda u, c: latency[u.name][str(c)])
