"""A score that combines two: output divergence and weight noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ompq.network.units import Choice, Table, by_bits
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs
from ompq.scores.output_divergence import OutputDivergence
from ompq.scores.weight_noise import noise_table


@dataclass(frozen=True)
class Blend:
    """Geometric mean of output divergence and weight noise.

    Each table is first divided by its mean at 3 bits (or the middle choice). The one
    sees what the network makes of an error, the other does not depend on the samples;
    where one is wrong about a unit, the other often is right.

    Attributes:
        samples: How many inputs the divergence is measured on, at most.
    """

    samples: int = 64

    summary: ClassVar[str] = "geometric mean of output_divergence and weight_noise"
    needs: ClassVar[Needs] = Needs("one for each unit and width", seconds=130.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return geometric means, (units, choices)."""
        moved = OutputDivergence(self.samples)(given).damage
        noise, column = noise_table(given), _reference(given.choices)
        return ScoreTable(np.sqrt(_scaled(moved, column) * _scaled(noise, column)))


def _reference(choices: Sequence[Choice]) -> int:
    """Return the column of 3 bits with the widest activations, or the middle one."""
    order = [choices.index(choice) for choice in by_bits(choices)]
    threes = [i for i in order if choices[i].bits == 3]
    return threes[-1] if threes else order[(len(order) - 1) // 2]


def _scaled(table: Table, column: int) -> Table:
    mean = table[:, column].mean()
    scaled: Table = table / mean if mean > 0 else table
    return scaled


BLEND = Blend()
