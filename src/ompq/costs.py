"""What bits cost: bytes, bit-operations, milliseconds; and budgets that limit them."""

import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import cached_property
from math import ceil, floor, fsum, isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ompq.errors import BudgetError, check_known, shortened, suggestion
from ompq.files import (
    json_list,
    json_number,
    json_object,
    json_table,
    json_whole,
    read_json,
)
from ompq.units import Choice, LayerGraph, LiveTensor, Table, Unit

Accounting = Literal["packed", "paper"]
LatencyTable = Mapping[str, Mapping[str, float]]  # unit → "W4A8" → milliseconds

FILES = ("onnx_bytes", "graph_bytes")  # costs that only the network itself can tell
# What messages add to a number of bytes that is not the size of the packed file.
PURPOSES = {
    "activation_bytes": " for activations",
    "total_bytes": " in total",
    "onnx_bytes": " as ONNX",
    "graph_bytes": " with its graph",
}
FLOAT_BITS = 32  # the width of a unit that stays float
_PLACES = 13  # largest number of decimals of a cost that is summed exactly
SUM_BITS = 8  # bits of an activation that only sums read, as in int8 runtimes


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of activations, which depends on the choices of all units."""

    tensors: tuple[LiveTensor, ...]
    choices: tuple[Choice, ...]
    units: int
    inputs: tuple[int, ...] = ()  # bits of each unit's input if they are fixed, or 0

    @cached_property
    def _widths(self) -> Table:
        """Bits of each unit's input at each choice, (units, choices)."""
        inputs = self.inputs or (0,) * self.units
        rows = [[bits or c.activation for c in self.choices] for bits in inputs]
        return np.array(rows, dtype=float)

    @cached_property
    def _fixed(self) -> Table:
        """Bits of each tensor if no unit reads it."""
        sums = SUM_BITS if self._widths.min() < FLOAT_BITS else FLOAT_BITS
        return np.array([FLOAT_BITS if t.returned else sums for t in self.tensors])

    def alive(self, columns: NDArray[np.intp]) -> Table:
        """Return the bytes of activations at each moment, (moments,)."""
        bits = self._widths[np.arange(len(columns)), columns]
        change = np.zeros(self.tensors[-1].first + self._last + 2)
        for tensor, fixed in zip(self.tensors, self._fixed, strict=True):
            width = max(bits[list(tensor.readers)], default=fixed)
            size = np.ceil(tensor.values * width / 8)
            change[tensor.first] += size
            change[tensor.last + 1] -= size
        return change.cumsum()

    @cached_property
    def _last(self) -> int:
        return max(tensor.last for tensor in self.tensors)

    def peak(self, columns: NDArray[np.intp]) -> tuple[float, int]:
        """Return the largest number of bytes alive at once, and at which moment."""
        alive = self.alive(columns)
        moment = int(alive.argmax())
        return float(alive[moment]), moment

    def moment(self, moment: int) -> tuple[Table, float]:
        """Return what choices cost at one moment, (units, choices), and a constant.

        A tensor that several units read has the bits of the widest. The table adds up
        what each unit takes beyond the narrowest, which is never less.
        """
        table, constant = np.zeros(self._widths.shape), 0.0
        for tensor, fixed in zip(self.tensors, self._fixed, strict=True):
            if not tensor.first <= moment <= tensor.last:
                continue
            if not tensor.readers:
                constant += np.ceil(tensor.values * fixed / 8)
                continue
            sizes = np.ceil(tensor.values * self._widths[list(tensor.readers)] / 8)
            constant += sizes.min()
            table[list(tensor.readers)] += sizes - sizes.min()
        return table, float(constant)


@dataclass(frozen=True)
class Cost:
    """What each choice of each unit costs."""

    # ``bytes``, ``bit_ops``, ``weight_bits``, ``milliseconds``, ``activation_bytes``,
    # ``total_bytes``, ``onnx_bytes`` or ``graph_bytes``
    name: str
    table: Table  # cost of each choice, (units, choices)
    constant: float = 0.0  # what no choice changes, such as parameters that stay float
    # What relative budgets refer to: the float network's bytes for ``bytes``, the
    # number of weights for ``weight_bits``.
    reference: float = 0.0
    # Memory of activations, in addition to ``base``. Table and constant are then those
    # of one moment, and the total is that of the moment with the largest.
    memory: Memory | None = None
    base: "Cost | None" = None
    # Amounts that are paid once if any unit has one of these columns.
    shared: tuple[tuple[float, tuple[int, ...]], ...] = ()

    @classmethod
    def of_memory(
        cls, name: str, memory: Memory, base: "Cost | None", moment: int | None = None
    ) -> "Cost":
        """Return the cost of activations at a moment.

        By default it is that of the peak with the fewest bits.
        """
        if moment is None:
            least = int(np.argmin([choice.activation for choice in memory.choices]))
            moment = memory.peak(np.full(memory.units, least))[1]
        table, constant = memory.moment(moment)
        if base is not None:
            table, constant = table + base.table, constant + base.constant
        return cls(name, table, constant, memory=memory, base=base)

    @cached_property
    def scale(self) -> float | None:
        """The power of ten that makes every number whole; None if there is none.

        It makes sums exact: three times 0.1 ms is 0.3 ms. Float64 holds any decimal of
        up to 15 digits.
        """
        numbers = np.append(self.table, self.constant)
        for places in range(_PLACES):
            steps = np.rint(numbers * 10.0**places)
            if (steps / 10.0**places == numbers).all():
                most = np.abs(steps[:-1].reshape(self.table.shape)).max(1).sum()
                return 10.0**places if most + abs(steps[-1]) < 1e15 else None
        return None

    def total(self, columns: NDArray[np.intp]) -> float:
        """Return what an allocation costs, the constant included, correctly rounded."""
        if self.memory is not None:
            base = 0.0 if self.base is None else self.base.total(columns)
            return base + self.memory.peak(columns)[0]
        chosen = self.table[np.arange(len(columns)), columns]
        constant = self.constant + sum(one for one, _ in self.paid(columns))
        if self.scale is None:
            return fsum([*chosen, constant])
        steps = np.rint(chosen * self.scale).sum() + round(constant * self.scale)
        return float(steps / self.scale)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON; for costs of files, which are whole numbers."""
        return {
            "name": self.name,
            "table": self.table.astype(int).tolist(),
            "constant": int(self.constant),
            "shared": [[int(size), list(columns)] for size, columns in self.shared],
        }

    @classmethod
    def from_json(cls, data: Any, shape: tuple[int, int]) -> "Cost":
        """Rebuild the cost of a file; a ValueError says what is wrong."""
        given = json_object(data, "a file's bytes")
        if given.get("name") not in FILES:
            raise ValueError(f"files must be of {', '.join(FILES)}")
        shared = []
        for entry in json_list(given.get("shared"), "shared", 16):
            size, columns = json_list(entry, "shared", 2)
            places = (
                json_whole(one, "shared", 0, shape[1] - 1)
                for one in json_list(columns, "shared", shape[1])
            )
            shared.append((float(json_whole(size, "shared")), tuple(places)))
        table = json_table(given.get("table"), "a file's bytes", shape)
        constant = float(json_whole(given.get("constant"), "constant"))
        return cls(given["name"], np.array(table), constant, shared=tuple(shared))

    def paid(self, columns: NDArray[np.intp]) -> list[tuple[float, tuple[int, ...]]]:
        """Return the shared costs that an allocation pays."""
        return [one for one in self.shared if np.isin(columns, one[1]).any()]

    def beside(self, columns: NDArray[np.intp]) -> "Cost":
        """Return the cost for changes of one unit, without shared costs.

        Those that the allocation pays are constant; others are paid by the unit.
        """
        table, constant = self.table.copy(), self.constant
        paid = self.paid(columns)
        for one in self.shared:
            if one in paid:
                constant += one[0]
            else:
                table[:, list(one[1])] += one[0]
        return replace(self, table=table, constant=constant, shared=())


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
    """Return the bits per weight from which on a unit can be coded."""
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
        memory = Memory(tuple(activations), tuple(choices), len(graph), inputs)
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
    table = {
        unit: {
            choice: json_number(ms, f"{unit} {choice}")
            for choice, ms in json_object(row, unit).items()
        }
        for unit, row in json_object(data, "a latency table").items()
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
            f"the latency table lacks {shortened(missing)}; measure these too"
        )
    return _table(graph, choices, lambda u, c: latency[u.name][str(c.computed)])


EXAMPLES = (
    'write for example "1.5MiB", "1.6MB", "3.2bits", "75GBOPs", "12.5%" or "5ms", '
    'or several: "1.5MiB, 75GBOPs"'
)

# Multiples are Decimal, because 0.001 MB must be exactly 1000 bytes.
_ONE = Decimal(1)
_BINARY = {
    "MiB": _ONE,
    "KiB": _ONE / 2**10,
    "GiB": _ONE * 2**10,
    "B": _ONE / 2**20,
}


class _Limit(NamedTuple):
    """What a field of a budget limits, and how it is written."""

    cost: str
    scale: Decimal  # units of the cost in one unit of the field
    # Unit → how many of the field's unit it is; of two that read equally well, the
    # first is written.
    units: Mapping[str, Decimal]
    relative: bool = False  # whether it is a multiple of the cost's reference
    prefix: str = ""  # what precedes a size that is not the packed file's


_LIMITS: Mapping[str, _Limit] = {
    "size_mib": _Limit("bytes", _ONE * 2**20, _BINARY),
    "size_mb": _Limit(
        "bytes", _ONE * 10**6, {"MB": _ONE, "KB": _ONE / 1000, "GB": _ONE * 1000}
    ),
    "average_bits": _Limit("weight_bits", _ONE, {"bits": _ONE}, relative=True),
    "percent": _Limit("bytes", _ONE / 100, {"%": _ONE}, relative=True),
    "latency_ms": _Limit("milliseconds", _ONE, {"ms": _ONE}),
    **{
        f"{prefix}_mib": _Limit(cost, _ONE * 2**20, _BINARY, prefix=prefix)
        for prefix, cost in (
            ("activations", "activation_bytes"),
            ("total", "total_bytes"),
            ("onnx", "onnx_bytes"),
            ("graph", "graph_bytes"),
        )
    },
    "bit_ops": _Limit(
        "bit_ops",
        _ONE,
        {f"{k}BOPs": _ONE * 1000**n for n, k in enumerate(("", "k", "M", "G", "T"))},
    ),
}
# Unit in lower case → the field that it is for, without a prefix.
_FIELD_OF = {
    unit.lower(): name
    for name, limit in _LIMITS.items()
    if not limit.prefix
    for unit in limit.units
}
_PREFIXES = {limit.prefix: name for name, limit in _LIMITS.items() if limit.prefix}
_PART = re.compile(
    r"(?:(\w+):\s*)?([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z%]*)"
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that must all hold.

    Attributes:
        size_mib: Size in MiB, 2**20 bytes.
        size_mb: Size in MB, 10**6 bytes.
        bit_ops: Bit-operations of one input: MACs × weight bits × activation bits.
        average_bits: Weight bits, averaged over all weights.
        percent: Size in per cent of the float network's.
        latency_ms: Milliseconds according to a latency table.
        activations_mib: Peak memory of activations for one input, in MiB.
        total_mib: This memory and the packed file together, in MiB.
        onnx_mib: Size of the ONNX file in MiB.
        graph_mib: Size of a packed file with its ONNX graph in MiB.

    Example:
        >>> Budget.parse("1.5MiB, 75GBOPs")
        Budget(size_mib=1.5, size_mb=None, bit_ops=75000000000.0, average_bits=None, \
percent=None, latency_ms=None, activations_mib=None, total_mib=None, onnx_mib=None, \
graph_mib=None)
    """

    size_mib: float | None = None
    size_mb: float | None = None
    bit_ops: float | None = None
    average_bits: float | None = None
    percent: float | None = None
    latency_ms: float | None = None
    activations_mib: float | None = None
    total_mib: float | None = None
    onnx_mib: float | None = None
    graph_mib: float | None = None

    def __post_init__(self) -> None:
        if not self._given():
            raise BudgetError(f"the budget is empty; {EXAMPLES}")
        for name, value in self._given().items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not isfinite(value) or value <= 0:
                raise BudgetError(f"{name}={value!r} is not positive; {EXAMPLES}")
            object.__setattr__(self, name, float(value))

    @classmethod
    def of(cls, value: "Budget | str") -> "Budget":
        """Return a budget as it is, or parsed from text."""
        return value if isinstance(value, Budget) else cls.parse(value)

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read a budget such as ``"1.5MiB"``, ``"3.2bits"`` or ``"12.5%, 75GBOPs"``.

        Units: B, KB, KiB, MB, MiB, GB, GiB; bits (the average over all weights); BOPs
        with k, M, G or T; % of the float network's size; ms. ``activations:512KiB``
        limits the peak memory of activations, ``total:2MiB`` this plus the file,
        ``onnx:2MiB`` the ONNX file, and ``graph:2MiB`` a packed file with its graph.

        Raises:
            BudgetError: The text is not a budget.
        """
        if not isinstance(text, str):
            raise BudgetError(f"{reprlib.repr(text)} is not a budget; {EXAMPLES}")
        found: dict[str, float] = {}
        for part in text.split(","):
            name, value = _parse_part(part.strip(), text)
            if name in found:
                raise BudgetError(f"{text!r} gives {name} twice; {EXAMPLES}")
            found[name] = value
        return cls(**found)

    def __str__(self) -> str:
        given = self._given()
        return ", ".join(_best_read(n, given[n]) for n in _LIMITS if n in given)

    def limits(self, costs: Mapping[str, Cost]) -> dict[str, float]:
        """Return the limit on the total of each cost, by name.

        Raises:
            BudgetError: A limited cost is not among the costs.
        """
        found: dict[str, float] = {}
        for name, value in self._given().items():
            limited = _LIMITS[name]
            cost = costs.get(limited.cost)
            if cost is None or (limited.relative and cost.reference <= 0):
                raise BudgetError(_missing(name, value, limited.cost, costs))
            limit = Decimal(repr(value)) * limited.scale
            if limited.relative:
                limit *= Decimal(cost.reference)
            key = limited.cost
            found[key] = min(float(limit), found.get(key, float("inf")))
        return found

    def excess(self, cost: str, size: int) -> str:
        """Say by how much a file exceeds the budget; "" if it does not."""
        for name, value in self._given().items():
            limit = _LIMITS[name]
            over = size - floor(Decimal(repr(value)) * limit.scale)
            if limit.cost == cost and not limit.relative and over > 0:
                return (
                    f"the file takes {size:,} bytes, {over:,} more than the budget of "
                    f"{_best_read(name, value)}; plan again for that much less"
                )
        return ""

    def _given(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


def readable(cost: Cost, *values: float) -> tuple[str, ...]:
    """Return amounts of a cost as text, in one unit, with enough digits to differ.

    Example:
        >>> readable(Cost("bytes", np.zeros((1, 1))), 2**20, 1.5 * 2**20)
        ('1.00 MiB', '1.50 MiB')
    """
    scale, unit = _scale(cost, values)
    for digits in range(2, 12):
        texts = tuple(f"{value / scale:.{digits}f} {unit}" for value in values)
        if len(set(texts)) == len(set(values)):
            break
    return texts


def enough(cost: Cost, value: float) -> str:
    """Return the smallest budget with two decimals that allows an amount of a cost.

    Example:
        >>> enough(Cost("bytes", np.zeros((1, 1))), 29_146)
        '28.47KiB'
    """
    scale, unit = _scale(cost, (value,))
    return f"{_plain(Decimal(ceil(100 * value / scale)) / 100)}{unit}"


def _scale(cost: Cost, values: tuple[float, ...]) -> tuple[float, str]:
    if cost.name == "weight_bits" and cost.reference > 0:
        return cost.reference, "bits"
    sizes = [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")]
    scales: list[tuple[float, str]] = {
        "bit_ops": [(1e12, "TBOPs"), (1e9, "GBOPs"), (1e6, "MBOPs"), (1.0, "BOPs")],
        "milliseconds": [(1.0, "ms")],
    }.get(cost.name, sizes if cost.name.endswith("bytes") else [(1.0, cost.name)])
    largest = max(values)
    smallest = min((value for value in values if value > 0), default=0.0)
    return next(
        (s for s in scales if largest >= s[0] and smallest >= s[0] / 10), scales[-1]
    )


def _parse_part(part: str, text: str) -> tuple[str, float]:
    match = _PART.fullmatch(part)
    place = repr(part) if part == text else f"{part!r} in {text!r}"
    if match is None:
        raise BudgetError(f"{place} is not a budget; {EXAMPLES}")
    prefix, number, unit = match.groups()
    if not unit:
        raise BudgetError(f"{place} has no unit; {EXAMPLES}")
    if unit.lower() in ("b", "kb", "mb", "gb") and unit[-1] == "b":
        large = unit[:-1].upper()
        better = f"{large}iB or {large}B" if large else "B"
        raise BudgetError(
            f"{unit!r} in {text!r} may be bits or bytes: use {better}; {EXAMPLES}"
        )
    unit = "bits" if unit.lower() == "bit" else unit
    name = _FIELD_OF.get(unit.lower())
    if name is None:
        known = [unit for limit in _LIMITS.values() for unit in limit.units]
        meant = suggestion(unit, known)
        raise BudgetError(f"{unit!r} in {text!r} is not a unit{meant}; {EXAMPLES}")
    if not Decimal(number) > 0:
        raise BudgetError(f"{part!r} is not positive; {EXAMPLES}")
    units = {written.lower(): scale for written, scale in _LIMITS[name].units.items()}
    amount = Decimal(number) * units[unit.lower()]
    if prefix is None:
        return name, float(amount)
    if prefix not in _PREFIXES or not name.startswith("size"):
        raise BudgetError(
            f"{place} is not a budget: only sizes may follow "
            f"{', '.join(_PREFIXES)}; {EXAMPLES}"
        )
    mebibytes = Decimal(1) if name == "size_mib" else Decimal(10**6) / 2**20
    return _PREFIXES[prefix], float(amount * mebibytes)


def _best_read(name: str, value: float) -> str:
    """Return the shortest text that is parsed as exactly this limit.

    Example:
        >>> _best_read("size_mib", 0.0703125)
        '72KiB'
    """
    texts = []
    limit = _LIMITS[name]
    for unit, scale in limit.units.items():
        exact = Decimal(repr(value)) / scale
        # Other binary units give long decimals. A rounded one will do if it is parsed
        # as the same number, which is always possible in the field's own unit.
        for digits in range(1, 18):
            text = _plain(Decimal(f"{exact:.{digits}g}"))
            if float(Decimal(text) * scale) == value:
                texts.append(f"{text}{unit}")
                break
    return f"{limit.prefix}:" * bool(limit.prefix) + min(texts, key=len)


def _plain(value: Decimal) -> str:
    return format(value.normalize(), "f")


def _missing(name: str, value: float, cost_name: str, costs: Mapping[str, Cost]) -> str:
    if cost_name in costs:
        return (
            f"{name}={value:g} is relative, but the cost {cost_name!r} has no "
            "reference; give an absolute budget"
        )
    advice = f"use one of {', '.join(costs)}"
    if cost_name == "milliseconds":
        advice = "give a latency table, measured on your device (--latency FILE)"
    elif cost_name.endswith("_bytes"):
        advice = "plan again with such a budget: it needs the network"
    return f"{name}={value:g} limits {cost_name}, which are not known here; {advice}"
