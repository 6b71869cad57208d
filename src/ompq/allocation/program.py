"""The allocation problem: one choice for each unit, least damage within limits."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import frexp, fsum
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ompq.costs import Cost
from ompq.errors import PlanError, ScoreError, shortened
from ompq.files import read_json, write_text
from ompq.graph import Choice

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


LARGEST_DAMAGE = 1e300  # sums of more would overflow
MOST_CHOICES = 256


@dataclass(frozen=True, eq=False, repr=False)
class Allocation(Mapping[str, Choice]):
    """Bits for every unit: a mapping, unit name → Choice, that cannot be changed.

    Example:
        >>> Allocation({"stem": Choice(8, 8), "fc": Choice(4, 8)})
        Allocation(2 units: 1 × W4A8, 1 × W8A8)
    """

    bits: Mapping[str, Choice]

    def __post_init__(self) -> None:
        bits = {n: Choice(*map(index, choice)) for n, choice in self.bits.items()}
        wrong = [f"{n} {choice}" for n, choice in bits.items() if min(choice) < 1]
        if wrong:
            raise ValueError(f"bits must be positive, unlike {shortened(wrong)}")
        object.__setattr__(self, "bits", bits)

    def __getitem__(self, name: str) -> Choice:
        return self.bits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.bits)

    def __len__(self) -> int:
        return len(self.bits)

    def __hash__(self) -> int:
        return hash(frozenset(self.bits.items()))

    def __repr__(self) -> str:
        values = list(self.bits.values())
        counts = ", ".join(f"{values.count(c)} × {c}" for c in sorted(set(values)))
        return f"Allocation({len(values)} units: {counts})"

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return plain data: ``{"fc": {"weight": 4, "activation": 8}, ...}``."""
        return {name: choice._asdict() for name, choice in self.bits.items()}

    @classmethod
    def from_json(cls, data: Any) -> "Allocation":
        """Rebuild an allocation from :meth:`to_json`.

        Raises:
            PlanError: The data is something else.
        """
        if not isinstance(data, Mapping) or not data:
            raise PlanError("an allocation must map unit names to bits")
        try:
            return cls({str(name): Choice(**entry) for name, entry in data.items()})
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"the allocation is broken: {error}. "
                'Write {"conv1": {"weight": 4, "activation": 8}, ...}'
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the allocation as JSON; the file is either whole or not there."""
        write_text(
            path, json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"
        )

    @classmethod
    def load(cls, path: str | Path) -> "Allocation":
        """Read an allocation.

        Raises:
            PlanError: The file is missing or holds no allocation.
        """
        try:
            data = read_json(path)
        except ValueError as error:
            raise PlanError(f"{path} is no allocation: {error}") from error
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise PlanError(f"{path} is no allocation: {error}") from error


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything an allocation is decided from.

    Attributes:
        names: The U units.
        choices: The C columns of all tables.
        damage: Expected damage of each choice of each unit, (U, C).
        costs: Name → what each choice of each unit costs.
        allowed: Choices that each unit may get, (U, C).
        groups: Units with the same number share their choice, (U,).

    Raises:
        PlanError: A group has no choice that all of it may get.
        ScoreError: A damage is not finite.
        ValueError: Shapes disagree.
    """

    names: tuple[str, ...]
    choices: tuple[Choice, ...]
    damage: Floats
    costs: Mapping[str, Cost]
    allowed: Flags
    groups: NDArray[np.integer[Any]]

    def __post_init__(self) -> None:
        self._check_shapes()
        fine = np.abs(self.damage) <= LARGEST_DAMAGE  # NaN is not
        names = [self.names[unit] for unit in np.flatnonzero(~fine.all(1))]
        if names:
            raise ScoreError(
                f"the score is not finite for {shortened(names)}; "
                "check the network's weights and the samples"
            )
        for members, allowed in zip(self.members, self.group_allowed, strict=True):
            if not allowed.any():
                names = [self.names[unit] for unit in members]
                raise PlanError(
                    f"contradictory pins: no choice is allowed for {shortened(names)}"
                    + (" together; untie them or pin them alike" if names[1:] else "")
                )

    def _check_shapes(self) -> None:
        shape = (len(self.names), len(self.choices))
        tables = {"damage": self.damage, "allowed": self.allowed}
        tables |= {f"cost {name!r}": cost.table for name, cost in self.costs.items()}
        for name, table in tables.items():
            if table.shape != shape:
                raise ValueError(
                    f"{name} has shape {table.shape}, not units × choices = {shape}"
                )
        for name, cost in self.costs.items():
            if not np.isfinite(cost.table).all() or not np.isfinite(cost.constant):
                raise ValueError(f"cost {name!r} is not finite; check its table")
        if self.groups.shape != shape[:1]:
            raise ValueError(f"groups has shape {self.groups.shape}, not {shape[:1]}")
        if 0 in shape or shape[1] > MOST_CHOICES:
            raise ValueError(
                f"{shape[0]} units and {shape[1]} choices: there must be at least one "
                f"of each, and at most {MOST_CHOICES} choices"
            )

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The units of each group, in order of each group's first unit."""
        found: dict[int, list[int]] = {}
        for unit, group in enumerate(self.groups.tolist()):
            found.setdefault(group, []).append(unit)
        return tuple(tuple(units) for units in found.values())

    @cached_property
    def group_allowed(self) -> Flags:
        """Choices that all units of a group may get, (groups, C)."""
        return np.array([self.allowed[list(units)].all(0) for units in self.members])

    def by_group(self, table: Floats) -> Floats:
        """Return the sums of a table over groups, (groups, C)."""
        return np.array([table[list(units)].sum(0) for units in self.members])

    def program(self, limits: Mapping[str, float]) -> Program:
        """Return the integer program of the groups under limits on some costs."""
        rows = []
        for name in limits:
            row = self.by_group(self.costs[name].table)
            row[0] += self.costs[name].constant  # so that rows sum to what is limited
            rows.append(row)
        size = self.costs.get("bytes", self.costs[next(iter(limits))])
        return Program(
            damage=self.by_group(self.damage),
            rows=np.array(rows),
            limits=np.array([*limits.values()], dtype=np.float64),
            ties=self.by_group(size.table),
            allowed=self.group_allowed,
        )

    def allocation(self, columns: Columns) -> Allocation:
        """Return the allocation in which each group has its column, (groups,)."""
        column_of = np.empty(len(self.names), dtype=np.intp)
        for units, column in zip(self.members, columns, strict=True):
            column_of[list(units)] = column
        return Allocation(
            {n: self.choices[c] for n, c in zip(self.names, column_of, strict=True)}
        )

    def columns(self, allocation: Mapping[str, Choice]) -> Columns:
        """Return the column of each unit, (U,).

        Raises:
            PlanError: A unit has no bits, or bits that are none of the choices.
        """
        wrong = [n for n in self.names if allocation.get(n) not in self.choices]
        if wrong:
            raise PlanError(
                f"the allocation gives {shortened(wrong)} none of the "
                f"{len(self.choices)} choices; it may belong to another plan"
            )
        return np.array([self.choices.index(allocation[n]) for n in self.names])

    def total(self, cost: str, allocation: Mapping[str, Choice]) -> float:
        """Return what an allocation costs, its constant included."""
        columns = self.columns(allocation)
        chosen = self.costs[cost].table[np.arange(len(columns)), columns]
        return fsum([*chosen, self.costs[cost].constant])

    def damage_of(self, allocation: Mapping[str, Choice]) -> float:
        """Return the expected damage of an allocation."""
        columns = self.columns(allocation)
        return fsum(self.damage[np.arange(len(columns)), columns])
