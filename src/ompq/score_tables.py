"""Score tables: the damage expected of each choice, unit by unit."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ompq.network.units import Table
from ompq.untrusted_json import convert_json, number_table, record_type


@dataclass(frozen=True)
class ScoreTable:
    """Expected damage of each choice, with what explains it.

    Attributes:
        damage: Expected damage, lower is better, (units, choices).
        orm: ORM between the observed functions, (L, L); None when not measured.
        orm_labels: Names of the functions: for each, the last unit it represents.
        gamma: Sum of each unit's ORM with all other functions, (units,).
        importance: How much one more bit would help each unit, (units,).
        seconds: Time that the score took when it was computed; not part of a plan.
    """

    damage: Table
    orm: Table | None = None
    orm_labels: tuple[str, ...] = ()
    gamma: Table | None = None
    importance: Table | None = None
    seconds: float | None = None

    def __repr__(self) -> str:
        units, choices = self.damage.shape
        orm = "" if self.orm is None else f", ORM of {len(self.orm)} functions"
        return f"ScoreTable({units} units × {choices} choices{orm})"

    def as_saved(self) -> "ScoreTable":
        """Return the table as a file would restore it: with a float32 ORM."""
        if self.orm is None or len(self.orm) > _LARGEST_ORM:
            return self
        return replace(self, orm=_from_triangle(_triangle(self.orm), len(self.orm)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        tables = {n: getattr(self, n) for n in ("damage", "gamma", "importance")}
        orm = None
        if self.orm is not None and len(self.orm) <= _LARGEST_ORM:
            orm = {"float32": base64.b64encode(_triangle(self.orm)).decode()}
        return {
            **{n: None if t is None else t.tolist() for n, t in tables.items()},
            "orm": orm,
            "orm_labels": list(self.orm_labels),
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], units: int, choices: int
    ) -> "ScoreTable":
        """Rebuild a table; a ValueError says what is wrong."""
        column = number_table(units) | None
        record = record_type(
            damage=number_table(units, choices),
            gamma=column,
            importance=column,
            orm=record_type(float32=bytes) | None,
            orm_labels=tuple[str, ...],
        )
        given = convert_json(data, record, "scores")
        labels, orm = given.orm_labels, given.orm
        return cls(
            damage=np.array(given.damage),
            orm=None if orm is None else _from_triangle(orm.float32, len(labels)),
            orm_labels=labels,
            gamma=None if given.gamma is None else np.array(given.gamma),
            importance=None if given.importance is None else np.array(given.importance),
        )


# A larger ORM is not saved: with 3,000 units it alone would take 24 MB.
_LARGEST_ORM = 700


def _triangle(orm: Table) -> bytes:
    """Return the upper triangle in little-endian float32."""
    return orm[np.triu_indices(len(orm))].astype("<f4").tobytes()


def _from_triangle(triangle: bytes, count: int) -> Table:
    numbers = np.frombuffer(triangle, dtype="<f4")
    if len(numbers) != count * (count + 1) // 2 or not np.isfinite(numbers).all():
        raise ValueError(f"orm must be finite numbers for {count} labels")
    orm = np.zeros((count, count))
    orm[np.triu_indices(count)] = numbers
    return orm + np.triu(orm, 1).T
