"""Baselines for other scores: random bits, and bits for the smallest layers first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ompq.network.units import Choice, LayerGraph, Table
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs


@dataclass(frozen=True)
class SmallestFirst:
    """Gives bits to small layers first: they cost least.

    A bit is worth the same everywhere, so the budget is spent where bits are cheap.
    """

    summary: ClassVar[str] = "bits to the smallest layers first"
    needs: ClassVar[Needs] = Needs("none")

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return −bits for every unit, (units, choices)."""
        bits = [float(c.bits + c.activation) for c in given.choices]
        return ScoreTable(-np.tile(np.array(bits), (len(given.graph), 1)))


@dataclass(frozen=True)
class Random:
    """Gives each unit a random importance; distortion falls fourfold per bit."""

    seed: int = 0

    summary: ClassVar[str] = "random importance, as a baseline"
    needs: ClassVar[Needs] = Needs("none")

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return worth · 4^−bits, (units, choices)."""
        return ScoreTable(self.worth(given.graph, given.choices))

    def worth(self, graph: LayerGraph, choices: Sequence[Choice]) -> Table:
        """Return the table itself, which depends on neither network nor samples."""
        worth = np.random.default_rng(self.seed).lognormal(sigma=2.0, size=len(graph))
        fall = np.array([4.0**-c.bits + 4.0**-c.activation for c in choices])
        table: Table = worth[:, None] * fall
        return table
