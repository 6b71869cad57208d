"""Memory at run time: which activations are alive at once, and what they take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ompq.files import json_list, json_whole
from ompq.units import Choice

Floats = NDArray[np.float64]
_FLOAT_BITS, _SUM_BITS = 32, 8  # of what is returned; of what only sums read


class LiveTensor(NamedTuple):
    """An activation and when it is alive, in positions of the recorded calls."""

    values: int  # of one input
    first: int  # the call that makes it
    last: int  # the last call that reads it
    readers: tuple[int, ...]  # units that read it, and so decide its bits
    returned: bool  # whether the network returns it, as float


@dataclass(frozen=True, eq=False)
class Memory:
    """What the activations alive at one moment take, at most, by the units' choices."""

    tensors: tuple[LiveTensor, ...]
    choices: tuple[Choice, ...]
    units: int
    inputs: tuple[int, ...] = ()  # bits of each unit's input if they are fixed, or 0

    @cached_property
    def _widths(self) -> Floats:
        """Bits of each unit's input by its choice, (units, choices)."""
        inputs = self.inputs or (0,) * self.units
        rows = [[bits or c.activation for c in self.choices] for bits in inputs]
        return np.array(rows, dtype=float)

    @cached_property
    def _fixed(self) -> Floats:
        """Bits of each tensor that no unit's choice changes."""
        sums = _SUM_BITS if self._widths.min() < _FLOAT_BITS else _FLOAT_BITS
        return np.array([_FLOAT_BITS if t.returned else sums for t in self.tensors])

    def alive(self, columns: NDArray[np.intp]) -> Floats:
        """Return the bytes of activations at each moment, (moments,)."""
        bits = self._widths[np.arange(len(columns)), columns]
        change = np.zeros(self.tensors[-1].first + self._longest + 2)
        for tensor, fixed in zip(self.tensors, self._fixed, strict=True):
            width = max(bits[list(tensor.readers)], default=fixed)
            size = np.ceil(tensor.values * width / 8)
            change[tensor.first] += size
            change[tensor.last + 1] -= size
        return change.cumsum()

    @cached_property
    def _longest(self) -> int:
        return max(tensor.last for tensor in self.tensors)

    def peak(self, columns: NDArray[np.intp]) -> tuple[float, int]:
        """Return the most bytes alive at once, and at which moment."""
        alive = self.alive(columns)
        moment = int(alive.argmax())
        return float(alive[moment]), moment

    def moment(self, moment: int) -> tuple[Floats, float]:
        """Return what choices cost at one moment, (units, choices), and a constant.

        Of a tensor that several units read the widest decides; the sum of what each
        takes beyond the narrowest is never less.
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


def memory_to_json(tensors: Sequence[LiveTensor]) -> list[Any]:
    """Return plain data for JSON."""
    return [[*one[:3], list(one.readers), int(one.returned)] for one in tensors]


def memory_from_json(data: Any, units: int) -> tuple[LiveTensor, ...]:
    """Rebuild tensors from :func:`memory_to_json`; a ValueError says what is wrong."""
    found, start = [], 0
    for entry in json_list(data, "activations"):
        row = json_list(entry, "an activation", 5)
        if len(row) != 5:
            raise ValueError("an activation must have five entries")
        values, first, last = (json_whole(one, "an activation") for one in row[:3])
        readers = [
            json_whole(one, "readers", 0, units - 1)
            for one in json_list(row[3], "readers")
        ]
        if not start <= first <= last < 1 << 24:
            raise ValueError("activations must be in order of the calls that make them")
        start = first
        found.append(LiveTensor(values, first, last, tuple(readers), bool(row[4])))
    return tuple(found)
