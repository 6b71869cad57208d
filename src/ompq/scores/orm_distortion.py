"""ORM distortion: orthogonality as a weight on the noise of rounding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from ompq.graph import Choice, LayerGraph
from ompq.samples import Progress, SamplesLike
from ompq.scores.orm import OrmSettings, measure_orm
from ompq.scores.table import Needs, ScoreTable
from ompq.scores.weight_noise import noise_table


@dataclass(frozen=True)
class OrmDistortion:
    """ORM coefficient × noise-to-signal of the rounded weights (and inputs).

    The distortion falls about fourfold a bit, as rate-distortion theory says; ORM says
    how much each layer's distortion matters.

    Attributes:
        settings: How ORM is measured; gamma is taken per function by default.
        progress: Called after each function.
    """

    settings: OrmSettings = OrmSettings(per_function=True)
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "orthogonality of layers × weight_noise"
    needs: ClassVar[Needs] = Needs("one")

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return coefficient × noise-to-signal, (units, choices)."""
        orm = measure_orm(graph, model, samples, self.settings, progress=self.progress)
        noise = noise_table(graph, model, samples, choices)
        return orm.table(orm.importance[:, None] * noise)
