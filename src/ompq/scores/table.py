"""What a score is, what it needs and what it returns, checked."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ompq.errors import ScoreError, shortened
from ompq.files import json_list, json_object, json_table, json_text
from ompq.graph import Choice, LayerGraph
from ompq.samples import Samples

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
    """Return the upper triangle, which says all, as base64 of little-endian float32."""
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


Score: TypeAlias = Callable[
    [LayerGraph, nn.Module, Samples, Sequence[Choice]], ScoreTable | Any
]


class Needs(NamedTuple):
    """What computing a score takes.

    Attributes:
        passes: Runs of the network over the samples, in words.
        gradients: Whether the network must be differentiable.
        labels: Whether labelled batches are used where they are given.
    """

    passes: str
    gradients: bool = False
    labels: bool = False


def checked(
    result: ScoreTable | Any, graph: LayerGraph, choices: Sequence[Choice]
) -> ScoreTable:
    """Return a score's result as a ScoreTable.

    Raises:
        ScoreError: It is no finite table of units × choices.
    """
    table = result if isinstance(result, ScoreTable) else ScoreTable(_array(result))
    wanted = (len(graph), len(choices))
    if table.damage.shape != wanted:
        raise ScoreError(
            f"the score returned shape {table.damage.shape}; "
            f"{wanted[0]} units × {wanted[1]} choices need {wanted}"
        )
    broken = [
        name
        for name, row in zip(graph.names, table.damage, strict=True)
        if not np.isfinite(row).all()
    ]
    if broken:
        raise ScoreError(f"the score is NaN or infinite for {shortened(broken)}")
    return replace(
        table,
        damage=_rounded(table.damage),
        orm=None if table.orm is None else np.round(table.orm, 9),  # of 0 to 1
        gamma=_rounded(table.gamma),
        importance=_rounded(table.importance),
    )


@overload
def _rounded(values: Table) -> Table: ...
@overload
def _rounded(values: Table | None) -> Table | None: ...
def _rounded(values: Table | None) -> Table | None:
    """Keep nine digits: the others depend on how threads share the sums."""
    if values is None:
        return None
    digits = [float(f"{value:.9g}") for value in values.flat]
    return np.array(digits, dtype=np.float64).reshape(values.shape)


def _array(result: Any) -> Table:
    try:
        return np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ScoreError(
            f"the score returned {type(result).__name__}, "
            "not a table of units × choices"
        ) from error
