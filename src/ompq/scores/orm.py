"""ORM scores: the paper's, linear in bits, and ORM as a weight on a distortion."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from ompq.graph.units import Choice, LayerGraph
from ompq.samples import Progress, Samples
from ompq.scores.measure import OrmSettings, measure_orm
from ompq.scores.noise import noise_table
from ompq.scores.table import ScoreTable


@dataclass(frozen=True)
class Orm:
    """The paper's score: −bits × coefficient, linear in bits.

    Attributes:
        settings: How ORM is measured; the paper's settings by default.
        progress: Called after each function.
    """

    settings: OrmSettings = OrmSettings()
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: Samples,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return −bits × coefficient, (units, choices)."""
        orm = measure_orm(graph, model, samples, self.settings, progress=self.progress)
        # Units tied by a residual sum are one decision of the paper's, and count once.
        sharing = [
            sum(graph.units[j].feature == u.feature for j in graph.groups[u.group])
            for u in graph.units
        ]
        bits = np.array([_bits(choice, choices) for choice in choices])
        return orm.table(-np.outer(orm.importance / np.array(sharing), bits))


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

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: Samples,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return coefficient × noise-to-signal, (units, choices)."""
        orm = measure_orm(graph, model, samples, self.settings, progress=self.progress)
        noise = noise_table(graph, model, samples, choices)
        return orm.table(orm.importance[:, None] * noise)


def _bits(choice: Choice, choices: Sequence[Choice]) -> float:
    """Return the bits that the objective counts: activations only if chosen."""
    searched = len({c.activation for c in choices}) > 1
    return float(choice.weight + (choice.activation if searched else 0))
