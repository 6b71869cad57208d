"""The allocation problem: one choice for each unit, least damage within limits."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from itertools import product
from math import floor, frexp, fsum
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.cost_tables import Cost
from ompq.errors import PlanError, ScoreError, shorten, suggestion
from ompq.files import write_text
from ompq.network.units import Choice, by_bits
from ompq.untrusted_json import convert_json, read_json

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Columns = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Program:
    """An integer program: one choice for each unit, least damage within K limits."""

    damage: Floats  # damage of each choice of each unit, (U, C)
    rows: Floats  # each choice's cost in whole steps, for each limit, (K, U, C)
    limits: Floats  # the most steps that each row may sum to, (K,)
    ties: Floats  # of equally good allocations the one with the least sum wins, (U, C)
    allowed: Flags  # choices that may be taken, (U, C)
    scales: Floats  # steps in one unit of each cost, (K,)

    def used(self, columns: Columns) -> Floats:
        """Return the steps that an allocation takes, (K,); exact below 2**53."""
        used: Floats = self.rows[:, np.arange(len(columns)), columns].sum(1)
        return used

    def value(self, columns: Columns) -> float:
        """Return the damage of an allocation, correctly rounded."""
        return fsum(self.damage[np.arange(len(columns)), columns])

    @cached_property
    def least(self) -> Floats:
        """Cost of each unit's cheapest allowed choice, (K, U)."""
        return least_allowed(self.rows, self.allowed)

    def affordable(self) -> "Program | None":
        """Drop choices that exceed a limit even if all other units cost their least.

        Returns None if a unit has no choice left.
        """
        if not self.allowed.any(1).all():
            return None
        room = self.limits - self.least.sum(1)
        extra = self.rows - self.least[:, :, None]
        fits = self.allowed & (extra <= room[:, None, None]).all(0)
        return replace(self, allowed=fits) if fits.any(1).all() else None


def least_allowed(table: Floats, allowed: Flags) -> Floats:
    """Return each unit's smallest allowed value, (..., U), of a table (..., U, C)."""
    least: Floats = np.where(allowed, table, np.inf).min(-1)
    return least


_NEGLIGIBLE = 1e-3  # shared costs below this fraction are always counted as paid
LARGEST_DAMAGE = 1e300  # sums of larger damages could overflow
MOST_CHOICES = 256  # columns are stored as uint8


@dataclass(frozen=True, eq=False, repr=False)
class Allocation(Mapping[str, Choice]):
    """Bits for every unit: an immutable mapping, unit name → Choice.

    Attributes:
        bits: Unit name → bits.
        gap: Upper bound on how much less damage another allocation within the budget
            could do; 0 if this one is proved optimal. Equality ignores it.

    Example:
        >>> Allocation({"stem": Choice(8, 8), "fc": Choice(4, 8)})
        Allocation(2 units: 1 × W4A8, 1 × W8A8)
    """

    bits: Mapping[str, Choice]
    gap: float = 0.0

    def __post_init__(self) -> None:
        bits = {}
        for name, (weight, activation, *rate) in self.bits.items():
            choice = Choice(index(weight), index(activation), *map(float, rate))
            try:
                bits[name] = choice.checked()
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
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
        counts = ", ".join(f"{values.count(c)} × {c}" for c in by_bits(set(values)))
        gap = f"; within {self.gap:.2g} of the least damage" if self.gap else ""
        return f"Allocation({len(values)} units: {counts}{gap})"

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return plain data: ``{"fc": {"weight": 4, "activation": 8}, ...}``.

        A coded unit also has a ``rate``.
        """
        return {
            name: dict(zip(Choice._fields, choice.to_json(), strict=False))
            for name, choice in self.bits.items()
        }

    @classmethod
    def from_json(cls, data: Any) -> "Allocation":
        """Rebuild an allocation from :meth:`to_json`.

        Raises:
            PlanError: The data is not an allocation.
        """
        try:
            entries = convert_json(data, dict[str, Any], "an allocation")
            if not entries:
                raise ValueError("it must map unit names to bits")
            bits = {}
            for name, entry in entries.items():
                given = convert_json(entry, dict[str, Any], f"the bits of {name}")
                if {*given, "rate"} != {*Choice._fields}:
                    raise ValueError(
                        f"the bits of {name} must be exactly weight and activation, "
                        "and the rate of coded weights"
                    )
                numbers = [given[field] for field in Choice._fields if field in given]
                bits[name] = Choice.from_json(numbers, f"the bits of {name}")
        except ValueError as error:
            raise PlanError(
                f"the allocation is not valid: {error}. "
                'Write {"conv1": {"weight": 4, "activation": 8}, ...}'
            ) from error
        return cls(bits)

    def check_units(self, names: Iterable[str]) -> None:
        """Check that there are bits for exactly these units.

        Raises:
            PlanError: A unit has no bits, or there are bits for unknown units.
        """
        wanted = dict.fromkeys(names)
        missing = [name for name in wanted if name not in self.bits]
        if missing:
            raise PlanError(
                f"no bits for {len(missing)} of {len(wanted)} units: "
                f"{shorten(missing)}. Give bits for every unit, or plan with these "
                "pinned"
            )
        unknown = [name for name in self.bits if name not in wanted]
        if unknown:
            raise PlanError(
                f"bits for {shorten(unknown)}, which the network does not have"
                f"{suggestion(unknown[0], wanted)}. "
                "Remove them, or give the network that they are for"
            )

    def save(self, path: str | Path) -> None:
        """Write the allocation as JSON, atomically."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        write_text(path, f"{text}\n")

    @classmethod
    def load(cls, path: str | Path) -> "Allocation":
        """Read an allocation.

        Raises:
            PlanError: The file is missing or holds no allocation.
        """
        try:
            return cls.from_json(read_json(path))
        except (ValueError, PlanError) as error:
            raise PlanError(f"{path} is not an allocation: {error}") from error


@dataclass(frozen=True, eq=False)
class Problem:
    """Damage and costs of every choice of every unit, from which to allocate bits.

    Raises:
        PlanError: The units of a group have no choice that all of them may get.
        ScoreError: A damage is not finite.
    """

    names: tuple[str, ...]  # the U units
    choices: tuple[Choice, ...]  # the C columns of all tables
    damage: Floats  # expected damage of each choice of each unit, (U, C)
    costs: Mapping[str, Cost]  # by name; their tables are (U, C)
    allowed: Flags  # choices that each unit may get, (U, C)
    groups: NDArray[np.integer[Any]]  # units with the same number share bits, (U,)
    # Bits of the inputs of units for which they are fixed, whatever is chosen.
    inputs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_shapes()
        finite = np.abs(self.damage) <= LARGEST_DAMAGE  # False for NaN
        names = [self.names[unit] for unit in np.flatnonzero(~finite.all(1))]
        if names:
            raise ScoreError(
                f"the score is not finite for {shorten(names)}; "
                "check the network's weights and the samples"
            )
        for members, allowed in zip(self.members, self.group_allowed, strict=True):
            if not allowed.any():
                names = [self.names[unit] for unit in members]
                raise PlanError(
                    f"contradictory pins: no choice is allowed for {shorten(names)}"
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
        """The units of each group; groups are ordered by their first unit."""
        by_group: dict[int, list[int]] = {}
        for unit, group in enumerate(self.groups.tolist()):
            by_group.setdefault(group, []).append(unit)
        return tuple(tuple(units) for units in by_group.values())

    @cached_property
    def group_of(self) -> Columns:
        """The position of each unit's group in ``members``, (U,)."""
        positions = np.empty(len(self.names), dtype=np.intp)
        for group, units in enumerate(self.members):
            positions[list(units)] = group
        return positions

    @cached_property
    def group_allowed(self) -> Flags:
        """Choices allowed for every unit of a group, (groups, C)."""
        return np.array([self.allowed[list(units)].all(0) for units in self.members])

    def by_group(self, table: Floats) -> Floats:
        """Return the sums of a table over groups, (groups, C)."""
        sums = np.zeros((len(self.members), len(self.choices)))
        np.add.at(sums, self.group_of, table)
        return sums

    def program(self, limits: Mapping[str, float], slack: float = 0.0) -> Program:
        """Return the integer program over groups with limits on some costs.

        Costs that are not short decimals are rounded to steps, with an error of at most
        half a step per unit. Their limits are raised by ``slack`` steps per unit.
        """
        rows, steps, scales = [], [], []
        for name, limit in limits.items():
            cost = self.costs[name]
            scale = cost.scale or self._fine_scale(cost, limit)
            row = self.by_group(np.rint(cost.table * scale))
            # The first group carries the constant and all shared costs.
            constant = cost.constant + sum(amount for amount, _ in cost.shared)
            row[0] += round(constant * scale)
            rows.append(row)
            scales.append(scale)
            steps.append(floor(Decimal(repr(float(limit))) * Decimal(scale)))
            if cost.scale is None:
                # Half a step for each unit and the constant; flooring took another one.
                steps[-1] += floor(slack * (len(self.names) + 3))
        size = self.costs.get("bytes", self.costs[next(iter(limits))])
        return Program(
            damage=self.by_group(self.damage),
            rows=np.array(rows),
            limits=np.array(steps, dtype=np.float64),
            ties=self.by_group(size.table),
            allowed=self.group_allowed,
            scales=np.array(scales),
        )

    def cases(self, names: Iterable[str]) -> Iterator["Problem"]:
        """Split the problem by which shared costs are paid.

        A shared cost is paid once if any unit has one of its columns. A case that does
        not pay it forbids these columns. The first case pays everything; it is the only
        one if the shared costs are negligible.
        """
        name = next((name for name in names if self.costs[name].shared), None)
        if name is None:
            yield self
            return
        cost = self.costs[name]
        least = cost.constant + least_allowed(cost.table, self.allowed).sum()
        subsets = [(True,) * len(cost.shared)]
        if sum(amount for amount, _ in cost.shared) > _NEGLIGIBLE * least:
            subsets = [*product((True, False), repeat=len(cost.shared))]
        for subset in subsets:
            allowed, constant = self.allowed.copy(), cost.constant
            for (amount, columns), paid in zip(cost.shared, subset, strict=True):
                constant += amount * paid
                allowed[:, list(columns)] &= paid
            costs = {**self.costs, name: replace(cost, constant=constant, shared=())}
            try:
                case = replace(self, allowed=allowed, costs=costs)
            except PlanError:  # a unit has no choice without what is not paid
                continue
            yield case

    def _fine_scale(self, cost: Cost, limit: float) -> float:
        """Return the power of 2 by which sums up to a limit take 52 bits in steps."""
        least = least_allowed(cost.table, self.allowed)
        room = limit - cost.constant - least.sum()
        affordable = self.allowed & (cost.table - least[:, None] <= max(room, 0.0))
        most = np.where(affordable, np.abs(cost.table), 0.0).max(1).sum()
        return float(np.ldexp(1.0, 52 - frexp(max(most, abs(limit), 1e-290))[1]))

    def allocation(self, columns: Columns) -> Allocation:
        """Return the allocation for one column per group, (groups,)."""
        return self.unit_allocation(columns[self.group_of])

    def unit_allocation(self, columns: NDArray[np.integer[Any]]) -> Allocation:
        """Return the allocation for one column per unit, (U,)."""
        pairs = zip(self.names, columns.tolist(), strict=True)
        return Allocation({name: self.chosen(name, column) for name, column in pairs})

    def chosen(self, name: str, column: int) -> Choice:
        """Return the bits that a unit gets from a column."""
        return self.choices[column].with_input(self.inputs.get(name, 0))

    def columns(self, allocation: Mapping[str, Choice]) -> Columns:
        """Return the column of each unit, (U,)."""
        found = [self._column(name, allocation.get(name)) for name in self.names]
        wrong = [n for n, c in zip(self.names, found, strict=True) if c is None]
        if wrong:
            raise PlanError(
                f"the allocation's bits for {shorten(wrong)} are not among the "
                f"{len(self.choices)} choices; it may belong to another plan"
            )
        return np.array(found, dtype=np.intp)

    def _column(self, name: str, choice: Choice | None) -> int | None:
        if name not in self.inputs:
            return self._column_of.get(choice)
        # With a fixed input several columns may mean the same; prefer an allowed one.
        allowed = self.allowed[self.names.index(name)]
        same = [c for c in range(len(allowed)) if self.chosen(name, c) == choice]
        return next((c for c in same if allowed[c]), next(iter(same), None))

    @cached_property
    def _column_of(self) -> dict[Choice | None, int]:
        return {choice: column for column, choice in enumerate(self.choices)}

    def total(self, cost: str, allocation: Mapping[str, Choice]) -> float:
        """Return what an allocation costs, including the constant."""
        return self.costs[cost].total(self.columns(allocation))

    def damage_of(self, allocation: Mapping[str, Choice]) -> float:
        """Return the expected damage of an allocation."""
        columns = self.columns(allocation)
        return fsum(self.damage[np.arange(len(columns)), columns])
