"""Cost tables, as data: one number for each unit and choice."""

from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from math import ceil, fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.bit_widths import FLOAT_BITS, SUM_BITS
from ompq.network.units import Choice, LiveTensor, Table
from ompq.untrusted_json import (
    Count,
    convert_json,
    number_table,
    record_type,
    row_type,
    whole_number,
)

# Costs that only the network itself can tell.
FILES = ("onnx_bytes", "graph_bytes", "gguf_bytes")
# What messages add to a number of bytes that is not the size of the packed file.
PURPOSES = {
    "activation_bytes": " for activations",
    "total_bytes": " in total",
    "onnx_bytes": " as ONNX",
    "graph_bytes": " with its graph",
    "gguf_bytes": " as GGUF",
}

_PLACES = 13  # largest number of decimals of a cost that is summed exactly


@dataclass(frozen=True, eq=False)
class ActivationMemory:
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
    # ``total_bytes``, ``onnx_bytes``, ``graph_bytes`` or ``gguf_bytes``
    name: str
    table: Table  # cost of each choice, (units, choices)
    constant: float = 0.0  # what no choice changes, such as parameters that stay float
    # What relative budgets refer to: the float network's bytes for ``bytes``, the
    # number of weights for ``weight_bits``.
    reference: float = 0.0
    # Memory of activations, in addition to ``base``. Table and constant are then those
    # of one moment, and the total is that of the moment with the largest.
    memory: ActivationMemory | None = None
    base: "Cost | None" = None
    # Amounts that are paid once if any unit has one of these columns.
    shared: tuple[tuple[float, tuple[int, ...]], ...] = ()

    @classmethod
    def of_memory(
        cls,
        name: str,
        memory: ActivationMemory,
        base: "Cost | None",
        moment: int | None = None,
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
        columns = row_type(whole_number(0, shape[1] - 1), ...)
        record = record_type(
            name=str,
            table=number_table(*shape),
            constant=Count,
            shared=row_type(row_type(Count, columns), ...),
        )
        given = convert_json(data, record, "a file's bytes")
        if given.name not in FILES:
            raise ValueError(f"files must be of {', '.join(FILES)}")
        constant, table = float(given.constant), np.array(given.table)
        return cls(given.name, table, constant, shared=given.shared)

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
    return f"{plain_number(Decimal(ceil(100 * value / scale)) / 100)}{unit}"


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


def plain_number(value: Decimal) -> str:
    """Return a number in full, without an exponent or trailing zeros."""
    return format(value.normalize(), "f")
