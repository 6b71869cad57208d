"""A score of how much the sum of ORM changes when one unit is rounded."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ompq.network.observation import copy_network
from ompq.network.units import Unit
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs
from ompq.scores.orthogonality import measure_orm
from ompq.scores.weight_noise import check_weights_only, weight_table


@dataclass(frozen=True)
class OrmShift:
    """|sum of ORM with one unit rounded − sum of ORM|, uncentred.

    Takes the paper at its word: a network must keep the orthogonality of its layers, so
    a unit needs the bits without which it would be lost.

    Attributes:
        samples: How many inputs are used, at most.
    """

    samples: int = 32

    summary: ClassVar[str] = "change of the sum of ORM when one unit is rounded"
    needs: ClassVar[Needs] = Needs("one for each unit and width", seconds=56.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return absolute changes of the sum of ORM, (units, choices)."""
        check_weights_only(given.choices, "orm_shift")
        few = given.samples.first(self.samples)
        other = copy_network(given.model)
        before = measure_orm(given.graph, other, few).matrix.sum()
        done = 0

        def shift(unit: Unit, rounded: Tensor) -> float:
            nonlocal done
            weight = other.get_parameter(unit.parameter)
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.copy_(rounded)
                after = measure_orm(given.graph, other, few).matrix.sum()
                weight.copy_(kept)
            done += 1
            given.progress(done, None, f"ORM without {unit.name}")
            return float(abs(after - before))

        return ScoreTable(weight_table(given, shift))


ORM_SHIFT = OrmShift()
