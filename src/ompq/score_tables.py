"""Score tables: the damage expected of each choice, unit by unit."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ompq.network.units import Table
from ompq.untrusted_json import json_list, json_object, json_table, json_text


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
        return replace(self, orm=_unpacked_orm(_packed_orm(self.orm), len(self.orm)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        tables = {n: getattr(self, n) for n in ("damage", "gamma", "importance")}
        return {
            **{n: None if t is None else t.tolist() for n, t in tables.items()},
            "orm": _packed_orm(self.orm),
            "orm_labels": list(self.orm_labels),
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], units: int, choices: int
    ) -> "ScoreTable":
        """Rebuild a table; malformed data raises a KeyError or a ValueError."""
        labels = json_list(data["orm_labels"], "orm_labels")
        gamma, importance = (
            None if data[n] is None else np.array(json_table(data[n], n, (units,)))
            for n in ("gamma", "importance")
        )
        return cls(
            damage=np.array(json_table(data["damage"], "damage", (units, choices))),
            orm=_unpacked_orm(data["orm"], len(labels)),
            orm_labels=tuple(json_text(label, "orm_labels") for label in labels),
            gamma=gamma,
            importance=importance,
        )


# A larger ORM is not saved: with 3,000 units it alone would take 24 MB.
_LARGEST_ORM = 700


def _packed_orm(orm: Table | None) -> Any:
    """Return the upper triangle as base64 of little-endian float32."""
    if orm is None or len(orm) > _LARGEST_ORM:
        return None
    triangle = orm[np.triu_indices(len(orm))].astype("<f4")
    return {"float32": base64.b64encode(triangle.tobytes()).decode()}


def _unpacked_orm(data: Any, count: int) -> Table | None:
    if data is None:
        return None
    text = json_text(json_object(data, "orm").get("float32"), "orm")
    numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")
    if len(numbers) != count * (count + 1) // 2 or not np.isfinite(numbers).all():
        raise ValueError(f"orm must be finite numbers for {count} labels")
    orm = np.zeros((count, count))
    orm[np.triu_indices(count)] = numbers
    return orm + np.triu(orm, 1).T
