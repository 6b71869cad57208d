"""The allocation program: one choice for each unit, of least damage within limits.

    minimise   sum_u damage[u, x_u]
    subject to sum_u rows[k, u, x_u] <= limits[k]   for every budget k

with one choice ``x_u`` out of C for each of U units. Pure arrays, no names; the exact
solution is in :mod:`ompq.allocation.search`, the linear relaxation in
:mod:`ompq.allocation.relaxations`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp, fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Columns = NDArray[np.intp]

EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Program:
    """One choice for each unit, of least damage within the limits.

    Attributes:
        damage: What each choice does, (U, C).
        rows: What each choice costs, one table for each budget, (K, U, C).
        limits: The most that each row may sum to, (K,).
        ties: Of equally good allocations the one with the least sum wins, (U, C).
        allowed: Choices that may be taken, (U, C).
    """

    damage: Floats
    rows: Floats
    limits: Floats
    ties: Floats
    allowed: Flags

    def used(self, columns: Columns) -> Floats:
        """Return what an allocation costs, correctly rounded, (K,)."""
        return np.array(
            [fsum(row[np.arange(len(columns)), columns]) for row in self.rows]
        )

    def value(self, columns: Columns) -> float:
        """Return the damage of an allocation, correctly rounded."""
        return fsum(self.damage[np.arange(len(columns)), columns])

    @cached_property
    def least(self) -> Floats:
        """The least that each unit costs, (K, U)."""
        return least_allowed(self.rows, self.allowed)

    @property
    def open(self) -> bool:
        """Whether every unit has an allowed choice."""
        return bool(self.allowed.any(1).all())

    def affordable(self) -> "Program":
        """Return the program without choices that fit in no allocation."""
        total = np.array([fsum(row) for row in self.least])
        # Slack for rounding; what is left of it the exact search decides.
        room = self.limits - total + 4 * EPSILON * np.abs(total)
        extra = self.rows - self.least[:, :, None]
        fits = self.allowed & (extra <= room[:, None, None]).all(0)
        return replace(self, allowed=fits)


class Core(NamedTuple):
    """A program in whole steps above each unit's least; float64 sums them exactly.

    A step of damage is ``2**exponent``.
    """

    program: Program
    exponent: int

    @classmethod
    def of(cls, program: Program, *, cautious: bool) -> "Core":
        """Round a program to steps of one part in 2**52 of what is undecided.

        Args:
            program: With an allowed choice for each unit.
            cautious: Whether costs are rounded up. Otherwise those that are no whole
                steps (milliseconds, say) are rounded to the nearest, and the limits
                leave room for that: check the sums afterwards.
        """
        allowed = program.allowed
        low = least_allowed(program.damage, allowed)
        damage, exponent = _in_steps(program.damage - low[:, None], allowed)
        ties, _ = _in_steps(program.ties, allowed)
        rows = np.empty_like(program.rows)
        limits = np.empty_like(program.limits)
        for k, (table, limit) in enumerate(
            zip(program.rows, program.limits, strict=True)
        ):
            row, size = _in_steps(table, allowed, up=cautious)
            exact = cautious or (np.ldexp(row, size) == table)[allowed].all()
            room = np.floor(np.ldexp(limit, -size)) + (0 if exact else len(allowed))
            least = least_allowed(row, allowed)
            rows[k] = np.where(allowed, row - least[:, None], 0.0)
            # Room beyond what can be spent is worth nothing and would blur the bounds.
            limits[k] = min(room - least.sum(), rows[k].max(1).sum())
        ties = np.where(allowed, ties - least_allowed(ties, allowed)[:, None], 0.0)
        return cls(Program(damage, rows, limits, ties, allowed), exponent)

    @property
    def grain(self) -> int:
        """Every sum of damage is a multiple of this many steps."""
        return max(int(np.gcd.reduce(self.program.damage.astype(np.int64), None)), 1)

    def gap(self, value: float, bound: float) -> float:
        """Return by how many steps an allocation could be better than a value."""
        return 0.0 if bound > value - self.grain else value - bound


def _in_steps(table: Floats, allowed: Flags, *, up: bool = False) -> tuple[Floats, int]:
    """Return a table in whole steps, and the step's exponent: 2**52 reach any sum."""
    table = np.where(allowed, table, 0.0)
    exponent = frexp(np.abs(table).max(1).sum())[1] - 52
    return (np.ceil if up else np.rint)(np.ldexp(table, -exponent)), exponent


def least_allowed(table: Floats, allowed: Flags) -> Floats:
    """Return each unit's least allowed value; of (..., U, C), (..., U)."""
    least: Floats = np.where(allowed, table, np.inf).min(-1)
    return least
