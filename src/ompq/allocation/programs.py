"""The allocation program, its linear relaxation, and the paper's rounding of it.

    minimise   sum_u damage[u, x_u]
    subject to sum_u rows[k, u, x_u] <= limits[k]   for every budget k

with one choice ``x_u`` out of C for each of U units. Pure arrays, no names; the exact
solution is in :mod:`ompq.allocation.search`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp, fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Columns = NDArray[np.intp]

EPSILON = float(np.finfo(np.float64).eps)
SHARE_TOLERANCE = 1e-6  # shares of the relaxation are as exact as the solver
MOVE_TOLERANCE = 1e-12  # a move that removes less of the excess may be rounding


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
        return _least(self.rows, self.allowed)

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


class Relaxation(NamedTuple):
    """The linear relaxation: a mixture of choices for each unit, and what limits cost.

    ``shares`` is (U, C), or None if the solver finds the limits too tight; ``prices``
    (K,) is the damage that one more unit of each limit would save.
    """

    shares: Floats | None
    prices: Floats


def relaxation(program: Program) -> Relaxation:
    """Solve the linear relaxation, in which a unit may mix its choices."""
    if not program.open:
        return Relaxation(None, np.zeros(len(program.limits)))
    units, choices = np.nonzero(program.allowed)
    low = _least(program.damage, program.allowed)
    damage = (program.damage - low[:, None])[units, choices]
    rows = (program.rows - program.least[:, :, None])[:, units, choices]
    # The solver's tolerances are absolute: every row and the objective get range 1.
    unit_damage = damage.max() or 1.0
    unit_rows = np.where(rows.max(1) > 0, rows.max(1), 1.0)
    one_each = sparse.csr_array(
        (np.ones(len(units)), (units, np.arange(len(units)))),
        shape=(len(program.damage), len(units)),
    )
    result = linprog(
        damage / unit_damage,
        A_ub=rows / unit_rows[:, None],
        b_ub=(program.limits - program.least.sum(1)) / unit_rows,
        A_eq=one_each,
        b_eq=np.ones(len(program.damage)),
        method="highs",
    )
    if result.x is None:
        return Relaxation(None, np.zeros(len(rows)))
    shares = np.zeros(program.damage.shape)
    shares[units, choices] = result.x
    prices = np.maximum(-result.ineqlin.marginals, 0) * unit_damage / unit_rows
    return Relaxation(shares, prices)


def bracket(program: Program, relaxed: Relaxation) -> tuple[Columns, Columns]:
    """Return the choices just below and just above each unit's mixture, (U,) each.

    Choices are ordered by what they spend at the relaxation's prices, which for costs
    that grow with the bits is the order of the bits: the paper's floor and ceiling. A
    unit that mixes nothing has both equal to its choice.
    """
    if relaxed.shares is None:
        raise ValueError("a relaxation without a solution has nothing to round")
    spend = np.tensordot(relaxed.prices, program.rows, 1)  # (U, C)
    at = (relaxed.shares * spend).sum(1)[:, None]
    blur = SHARE_TOLERANCE * np.ptp(spend, axis=1, keepdims=True)
    below = np.where(program.allowed & (spend <= at + blur), spend, -np.inf)
    above = np.where(program.allowed & (spend >= at - blur), spend, np.inf)
    # Of choices that spend the same, the one of least damage.
    down = np.where(below == below.max(1, keepdims=True), program.damage, np.inf)
    up = np.where(above == above.min(1, keepdims=True), program.damage, np.inf)
    return down.argmin(1), up.argmin(1)


def rounded(program: Program) -> Columns | None:
    """Solve the relaxation and round, as the paper does, but never beyond a limit.

    Each unit takes the nearer of its two bracketing choices. While a limit is exceeded,
    the unit moves that does least damage for the excess it removes.

    Returns:
        The columns, (U,), or None if no single move removes what is too much.
    """
    relaxed = relaxation(program)
    if relaxed.shares is None:
        return None
    down, up = bracket(program, relaxed)
    spend = np.tensordot(relaxed.prices, program.rows, 1)
    at = (relaxed.shares * spend).sum(1)
    units = np.arange(len(down))
    nearer_down = at - spend[units, down] <= spend[units, up] - at
    return _repaired(program, np.where(nearer_down, down, up))


def _repaired(program: Program, columns: Columns) -> Columns | None:
    units = np.arange(len(columns))
    span = np.maximum((program.rows.max(2) - program.least).sum(1), 1e-300)
    excess = _excess(program.used(columns)[:, None, None], program.limits, span)
    while excess.sum() > 0:
        change = program.rows - program.rows[:, units, columns][:, :, None]
        after = program.used(columns)[:, None, None] + change  # (K, U, C)
        removed = excess - _excess(after, program.limits, span)
        helps = program.allowed & (removed > MOVE_TOLERANCE)
        if not helps.any():
            return None
        harm = program.damage - program.damage[units, columns][:, None]
        rate = np.where(helps, harm / np.where(helps, removed, 1.0), np.inf)
        unit, choice = np.unravel_index(rate.argmin(), rate.shape)
        columns = np.where(units == unit, choice, columns)
        excess = _excess(program.used(columns)[:, None, None], program.limits, span)
    return columns


def _excess(used: Floats, limits: Floats, span: Floats) -> Floats:
    """Return how far costs (K, U, C) exceed the limits, in shares of spans, (U, C)."""
    over = np.maximum(used - limits[:, None, None], 0) / span[:, None, None]
    excess: Floats = over.sum(0)
    return excess


def floor_or_ceiling(program: Program) -> Program:
    """Return the program in which each unit has the paper's two choices.

    They bracket the unit's mixture in the relaxation; a unit that mixes nothing may
    stay or take the next cheaper choice, so that there is something to search. Without
    a solution of the relaxation every choice stays.
    """
    relaxed = relaxation(program)
    if relaxed.shares is None:
        return program
    down, up = bracket(program, relaxed)
    units = np.arange(len(down))
    spend = np.tensordot(relaxed.prices, program.rows, 1)
    cheaper = program.allowed & (spend < spend[units, down][:, None])
    kept = np.zeros_like(program.allowed)
    kept[units, down] = kept[units, up] = True
    step_down = np.where(cheaper, spend, -np.inf).argmax(1)
    free = (down == up) & cheaper.any(1)
    kept[units[free], step_down[free]] = True
    return replace(program, allowed=kept)


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
        low = _least(program.damage, allowed)
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
            least = _least(row, allowed)
            rows[k] = np.where(allowed, row - least[:, None], 0.0)
            # Room beyond what can be spent is worth nothing and would blur the bounds.
            limits[k] = min(room - least.sum(), rows[k].max(1).sum())
        ties = np.where(allowed, ties - _least(ties, allowed)[:, None], 0.0)
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


def _least(table: Floats, allowed: Flags) -> Floats:
    """Return each unit's least allowed value; of (..., U, C), (..., U)."""
    least: Floats = np.where(allowed, table, np.inf).min(-1)
    return least
