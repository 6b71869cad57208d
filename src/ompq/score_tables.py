"""ScoreTable: the expected damage of every choice, and what explains it."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.files import json_list, json_object, json_table, json_text

Table = NDArray[np.float64]


@dataclass(frozen=True)
class ScoreTable:
    """Expected damage of each choice, with what explains it.

    Attributes:
        damage: Expected damage, lower is better, (units, choices).
        orm: ORM between the observed functions, (L, L); None when not measured.
        orm_labels: Names of the functions: for each, the last unit it represents.
        gamma: Sum of each unit's ORM with all other functions, (units,).
        importance: What a bit of each unit is worth, (units,).
    """

    damage: Table
    orm: Table | None = None
    orm_labels: tuple[str, ...] = ()
    gamma: Table | None = None
    importance: Table | None = None

    def as_saved(self) -> "ScoreTable":
        """Return what a file gives back: an ORM of single precision."""
        if self.orm is None or len(self.orm) > _LARGEST_ORM:
            return self
        return replace(self, orm=_unpacked_orm(_packed_orm(self.orm), len(self.orm)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "damage": self.damage.tolist(),
            "gamma": None if self.gamma is None else self.gamma.tolist(),
            "importance": None if self.importance is None else self.importance.tolist(),
            "orm": _packed_orm(self.orm),
            "orm_labels": list(self.orm_labels),
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], units: int, choices: int
    ) -> "ScoreTable":
        """Rebuild a table; anything else is a KeyError or a ValueError."""
        labels = json_list(data["orm_labels"], "orm_labels")
        return cls(
            damage=np.array(json_table(data["damage"], "damage", (units, choices))),
            orm=_unpacked_orm(data["orm"], len(labels)),
            orm_labels=tuple(json_text(label, "orm_labels") for label in labels),
            gamma=_unit_values(data, "gamma", units),
            importance=_unit_values(data, "importance", units),
        )


# A larger ORM is left out of files: at 3,000 units it alone would take 24 MB.
_LARGEST_ORM = 700


def _unit_values(data: Mapping[str, Any], name: str, count: int) -> Table | None:
    values = data[name]
    return None if values is None else np.array(json_table(values, name, (count,)))


def _packed_orm(orm: Table | None) -> Any:
    """Return the upper triangle as base64 of little-endian float32."""
    if orm is None or len(orm) > _LARGEST_ORM:
        return None
    triangle = orm[np.triu_indices(len(orm))].astype("<f4")
    return {"float32": base64.b64encode(triangle.tobytes()).decode()}


def _unpacked_orm(data: Any, count: int) -> Table | None:
    if data is None:
        return None
    if isinstance(data, list):  # written by the first format of plans
        return np.array(json_table(data, "orm", (count, count)))
    text = json_text(json_object(data, "orm").get("float32"), "orm")
    numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")
    if len(numbers) != count * (count + 1) // 2 or not np.isfinite(numbers).all():
        raise ValueError(f"orm must be finite numbers for {count} labels")
    orm = np.zeros((count, count))
    orm[np.triu_indices(count)] = numbers
    return orm + np.triu(orm, 1).T
