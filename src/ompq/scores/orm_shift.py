"""ORM shift: how much the ORM of a network changes when one unit is quantized."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ompq.graph import Choice, LayerGraph, Unit
from ompq.samples import Progress, Samples, SamplesLike
from ompq.scores.orm import measure_orm
from ompq.scores.rounding_errors import (
    check_weights_only,
    weight_table,
)
from ompq.scores.table import Needs, ScoreTable


@dataclass(frozen=True)
class OrmShift:
    """|sum of ORM with one unit rounded − sum of ORM|, uncentred.

    The paper's claim taken at its word: orthogonality between layers is what a network
    must keep, so a unit needs the bits without which it would be lost.

    Attributes:
        samples: How many inputs are used, at most.
        progress: Called after each unit and width.
    """

    samples: int = 32
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "change of the sum of ORM when one unit is rounded"
    needs: ClassVar[Needs] = Needs("one for each unit and width")

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return absolute changes of the sum of ORM, (units, choices)."""
        check_weights_only(choices, "orm_shift")
        few = Samples.of(samples).first(self.samples)
        other = deepcopy(model)
        before = measure_orm(graph, other, few).matrix.sum()
        done = 0

        def shift(unit: Unit, rounded: Tensor) -> float:
            nonlocal done
            weight = other.get_parameter(unit.parameter)
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.copy_(rounded)
                after = measure_orm(graph, other, few).matrix.sum()
                weight.copy_(kept)
            done += 1
            if self.progress:
                self.progress(done, None, f"ORM without {unit.name}")
            return float(abs(after - before))

        return ScoreTable(weight_table(graph, model, choices, shift))
