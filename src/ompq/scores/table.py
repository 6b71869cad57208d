"""What a score is, what it needs and what it returns, checked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from torch import nn

from ompq.errors import ScoreError, shortened
from ompq.graph import Choice, LayerGraph
from ompq.samples import Samples
from ompq.score_tables import ScoreTable as ScoreTable, Table as Table

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
