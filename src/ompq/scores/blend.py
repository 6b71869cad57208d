"""Blend: output divergence and weight noise, half of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import nn

from ompq.graph import Choice, LayerGraph, by_bits
from ompq.samples import Progress, Samples, SamplesLike
from ompq.scores.output_divergence import OutputDivergence
from ompq.scores.table import Needs, ScoreTable, Table
from ompq.scores.weight_noise import noise_table


@dataclass(frozen=True)
class Blend:
    """Geometric mean of output divergence and weight noise.

    Each table is divided by its mean at 3 bits (or the middle choice) first. One sees
    what the network makes of an error, the other does not depend on the samples; where
    one is wrong about a unit, the other often is not.

    Attributes:
        samples: How many inputs the divergence is measured on, at most.
        progress: Called after each unit.
    """

    samples: int = 64
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "geometric mean of output_divergence and weight_noise"
    needs: ClassVar[Needs] = Needs("one for each unit and width")

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return geometric means, (units, choices)."""
        samples = Samples.of(samples)
        measured = OutputDivergence(self.samples, self.progress)
        divergence = measured(graph, model, samples, choices).damage
        noise = noise_table(graph, model, samples, choices)
        column = _reference(choices)
        return ScoreTable(np.sqrt(_scaled(divergence, column) * _scaled(noise, column)))


def _reference(choices: Sequence[Choice]) -> int:
    """Return the column of 3 bits with the widest activations, or the middle one."""
    order = [choices.index(choice) for choice in by_bits(choices)]
    threes = [i for i in order if choices[i].bits == 3]
    return threes[-1] if threes else order[(len(order) - 1) // 2]


def _scaled(table: Table, column: int) -> Table:
    mean = table[:, column].mean()
    scaled: Table = table / mean if mean > 0 else table
    return scaled
