"""What each choice of bits costs: bytes, bit-operations, milliseconds."""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ompq.bit_widths import FLOAT_BITS
from ompq.configs import Accounting, LatencyTable
from ompq.cost_tables import ActivationMemory, Cost
from ompq.errors import BudgetError, check_known, shorten
from ompq.network.units import Choice, LayerGraph, LiveTensor, Table, Unit
from ompq.untrusted_json import Number, convert_json, read_json


@dataclass(frozen=True)
class Bytes:
    """The bytes of one unit in a packed file, item by item."""

    weights: int = 0
    scales: int = 0
    zero_points: int = 0
    biases: int = 0
    activations: int = 0
    metadata: int = 0  # what the header says only about coded units

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(vars(self).values())

    @staticmethod
    def by_item(units: "Sequence[Bytes]") -> dict[str, int]:
        """Return the sum of each item over units."""
        return {f.name: sum(getattr(u, f.name) for u in units) for f in fields(Bytes)}


def coded_bytes(weights: int, bits: float) -> int:
    """Return the bytes that coded weights may take in a packed file."""
    return ceil(weights * bits / 8)


_LEAST_STREAM = 64  # bytes below which a coded stream has no room for its own header


def can_be_coded(unit: Unit, choice: Choice) -> bool:
    """Return whether a unit has enough weights for the choice's rate, if it has one."""
    return not choice.rate or coded_bytes(unit.weights, choice.rate) >= _LEAST_STREAM


def least_rate(unit: Unit) -> float:
    """Return the lowest rate, in bits per weight, at which a unit can be coded."""
    return 8 * (_LEAST_STREAM - 1) / unit.weights


def unit_bytes(unit: Unit, choice: Choice) -> Bytes:
    """Return the bytes of a unit in a packed file.

    Weights are a dense stream of bits. Each output channel has a float32 scale, a zero
    point of one byte and a 32-bit bias, which holds the folded batch norm and the
    correction of rounding. The input has a float32 scale and a 32-bit zero point.

    The scales of groups are multiples of one float32 number and take a byte each. So do
    the scales of a coded unit; its codes take what the rate promises, its biases have
    16 bits, and its zero point is known. Compressed scales and biases take less.
    """
    channels = unit.out_channels
    scales, grouped = channels * unit.scales(choice), unit.shared_by(choice) > 0
    activations = 0 if choice.activation >= FLOAT_BITS else 8
    biased = unit.norm != "" or unit.bias_parameters > 0
    if choice.weight >= FLOAT_BITS:
        size = unit.element_size
        biases = size * channels if biased else 0
        return Bytes(size * unit.weights, biases=biases, activations=activations)
    return Bytes(
        weights=coded_bytes(unit.weights, choice.bits),
        scales=scales + 4 if choice.rate or grouped else 4 * scales,
        zero_points=0 if choice.rate else scales,
        biases=(2 if choice.rate else 4) * channels * (biased or unit.replaced),
        activations=activations,
        metadata=_STREAM_BYTES if choice.rate else 0,
    )


# Upper bounds, in bytes, on what a packed file holds besides weights:
_STREAM_BYTES = 8  # a rate and the length of a stream
_HEADER_BYTES = 768  # the header and what it says about the network
_BLOCK_BYTES, _LINK_BYTES = 24, 6  # a reconstructed block; a finalized unit
_TENSOR_BYTES = 16  # an activation's quantizer, or the name of a float tensor
# The factor of a channel; its factor and shift. They are deflated: on average factors
# of depthwise layers take 0.33 bytes, and factors and shifts of DeiT-tiny 0.9.
_FACTOR_BYTES, _MOVE_BYTES = 0.5, 1.5


def overhead_bytes(graph: LayerGraph, choices: Iterable[Choice]) -> int:
    """Return an upper bound on a packed file without units and float parameters.

    It counts the header, all names and shapes, activations that only sums read and, if
    a choice quantizes activations, the changes of channels by equalization. Whatever is
    not known before the network is quantized counts with its largest size.
    """
    rounded = any(choice.activation < FLOAT_BITS for choice in choices)
    structure = len(zlib.compress(json.dumps(graph.to_json()).encode()))
    factors = sum(u.out_channels for u in graph.units if u.kind == "depthwise")
    return (
        _HEADER_BYTES
        + structure
        + _BLOCK_BYTES * len(graph.blocks)
        + _LINK_BYTES * len(graph)
        + _TENSOR_BYTES * graph.other_tensors
        + int(_FACTOR_BYTES * factors + rounded * _MOVE_BYTES * graph.movable_channels)
    )


def bytes_by_item(
    graph: LayerGraph, bits: Mapping[str, Choice], choices: Iterable[Choice]
) -> dict[str, int]:
    """Return the planned bytes of a packed file by item: weights, scales, ...

    Args:
        bits: Unit → its choice.
        choices: All that the plan offers, which decide what the header may take.
    """
    items = Bytes.by_item([unit_bytes(unit, bits[unit.name]) for unit in graph.units])
    metadata = items.pop("metadata") + overhead_bytes(graph, choices)
    return {**items, "float": graph.float_bytes, "metadata": metadata}


def paper_bytes(unit: Unit, choice: Choice) -> float:
    """Return the unit's size as the paper's released code counts it.

    Weights, bias and the affine parameters of batch norm all count at the unit's bits.
    """
    count = unit.weights + unit.norm_parameters + unit.bias_parameters
    return count * choice.bits / 8


def cost_tables(
    graph: LayerGraph,
    choices: Sequence[Choice],
    *,
    accounting: Accounting = "packed",
    latency: LatencyTable | None = None,
    activations: Sequence[LiveTensor] = (),
    files: Sequence[Cost] = (),
) -> dict[str, Cost]:
    """Return every cost that a budget may limit, by name.

    Args:
        accounting: ``packed`` counts all of a packed file; ``paper`` is the published
            convention, for comparison with its tables.
        files: Sizes of files other than the packed one, where known.
    """
    floats = sum(
        u.element_size * (u.weights + u.bias_parameters + u.norm_parameters)
        for u in graph.units
    )
    check_known("accounting", accounting, get_args(Accounting))
    if accounting == "paper":
        size, constant = _table(graph, choices, paper_bytes), 0.0
    else:
        size = _table(graph, choices, lambda u, c: unit_bytes(u, c).total)
        constant = float(graph.float_bytes + overhead_bytes(graph, choices))
    costs = [
        Cost("bytes", size, constant, float(floats + graph.float_bytes)),
        Cost(
            "bit_ops",
            _table(graph, choices, lambda u, c: u.macs * c.weight * c.activation),
        ),
        Cost(
            "weight_bits",
            _table(graph, choices, lambda u, c: u.weights * c.bits),
            reference=float(sum(unit.weights for unit in graph.units)),
        ),
    ]
    if latency is not None:
        costs.append(Cost("milliseconds", _latency(graph, choices, latency)))
    if activations:
        inputs = tuple(unit.input_bits for unit in graph.units)
        memory = ActivationMemory(
            tuple(activations), tuple(choices), len(graph), inputs
        )
        costs.append(Cost.of_memory("activation_bytes", memory, None))
        costs.append(Cost.of_memory("total_bytes", memory, costs[0]))
    return {cost.name: cost for cost in (*costs, *files)}


def load_latency(path: str | Path) -> LatencyTable:
    """Read a latency table: JSON, unit → {"W4A8": milliseconds, ...}."""
    try:
        return latency_table(read_json(path))
    except ValueError as error:
        raise BudgetError(
            f"{path} is not a latency table: {error}. "
            'Write JSON such as {"conv1": {"W8A8": 0.41, "W4A8": 0.40}}'
        ) from error


def latency_table(data: Any) -> LatencyTable:
    """Return a latency table from JSON."""
    table: LatencyTable = {
        unit: {
            choice: convert_json(ms, Number, f"{unit} {choice}")
            for choice, ms in convert_json(row, dict[str, Any], unit).items()
        }
        for unit, row in convert_json(data, dict[str, Any], "a latency table").items()
    }
    for unit, row in table.items():
        for choice, ms in row.items():
            if ms < 0:
                raise ValueError(f"{unit} {choice} takes {ms:g} ms; give 0 or more")
    return table


def _table(
    graph: LayerGraph, choices: Sequence[Choice], cost: Callable[[Unit, Choice], float]
) -> Table:
    rows = [
        [cost(unit, choice.with_input(unit.input_bits)) for choice in choices]
        for unit in graph.units
    ]
    return np.array(rows, dtype=np.float64)


def _latency(
    graph: LayerGraph, choices: Sequence[Choice], latency: LatencyTable
) -> Table:
    missing = [
        f"{unit.name} {choice}"
        for unit in graph.units
        for choice in dict.fromkeys(
            c.computed.with_input(unit.input_bits) for c in choices
        )
        if str(choice) not in latency.get(unit.name, {})
    ]
    if missing:
        raise BudgetError(
            f"the latency table lacks {shorten(missing)}; measure these too"
        )
    return _table(graph, choices, lambda u, c: latency[u.name][str(c.computed)])
