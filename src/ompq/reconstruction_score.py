"""Reconstruction as a score: the damage that learned rounding cannot undo."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import nn

from ompq.allocation.program import Allocation
from ompq.costs import FLOAT_BITS
from ompq.graph import Choice, LayerGraph
from ompq.measurement import Meter, split
from ompq.samples import Progress, Samples, SamplesLike
from ompq.scores import SCORES, Needs, ScoreTable

__all__ = ["SCORES", "ReconstructionScore"]


@dataclass(frozen=True)
class ReconstructionScore:
    """Divergence of the outputs after a short reconstruction, one unit at a time.

    One unit is quantized and its block reconstructed; all others stay float. The first
    half of the samples calibrates and reconstructs, the other measures.
    """

    iterations: int = 50  # steps of the reconstruction
    samples: int = 64  # how many inputs are used, at most
    seed: int = 0  # of the order of samples
    # called after each unit and choice
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "divergence after one unit's block is reconstructed"
    needs: ClassVar[Needs] = Needs(
        "a short reconstruction for each unit and choice", gradients=True
    )

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return mean divergences, (units, choices)."""
        learned, judges = split(Samples.of(samples).first(self.samples), 0.5)
        meter = Meter(
            model, learned, judges, iterations=self.iterations, seed=self.seed
        )
        untouched = dict.fromkeys(graph.names, Choice(FLOAT_BITS, FLOAT_BITS))
        table = np.zeros((len(graph), len(choices)))
        for place, (row, column) in enumerate(np.ndindex(*table.shape), 1):
            name, choice = graph.names[row], choices[column]
            if choice.weight < FLOAT_BITS or choice.activation < FLOAT_BITS:
                alone = Allocation({**untouched, name: choice})
                table[row, column] = meter.divergence(meter.quantized(alone))
            if self.progress:
                self.progress(place, table.size, f"reconstructing {name}")
        return ScoreTable(table.clip(min=0.0))


# All the others stand above, since they do not quantize.
SCORES["reconstruction"] = ReconstructionScore()
