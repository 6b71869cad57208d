"""Fisher: squared gradients of single samples, times squared errors of weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ompq.graph import Choice, LayerGraph, Unit
from ompq.samples import Progress, Samples, SamplesLike, batch_length
from ompq.scores.labels import (
    LabelledBatches,
    differentiating,
    first_labelled,
    log_probabilities,
    weighted_labels,
)
from ompq.scores.rounding_errors import (
    check_weights_only,
    weight_table,
)
from ompq.scores.table import Needs, ScoreTable


@dataclass(frozen=True)
class Fisher:
    """Sum over a unit's weights of mean squared gradient × squared error.

    Gradients are those of −log p(label) of one sample at a time. Without labelled
    batches, labels are drawn from the network's own answers, which makes the squares
    the diagonal of the Fisher information.

    Attributes:
        samples: How many inputs are used, at most.
        seed: Seed of the labels that are drawn.
        batches: Inputs and class numbers, read once.
        progress: Called after each sample.
    """

    samples: int = 32
    seed: int = 0
    batches: LabelledBatches | None = field(default=None, repr=False, compare=False)
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "squared gradients × squared error of the weights"
    needs: ClassVar[Needs] = Needs(
        "one, forward and backward, sample by sample", gradients=True, labels=True
    )

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return sums of squared gradients × squared errors, (units, choices)."""
        check_weights_only(choices, "fisher")
        batch, labels = first_labelled(model, samples, self.batches, self.samples)
        names = list(dict.fromkeys(unit.parameter for unit in graph.units))
        weights = {
            n: model.get_parameter(n).detach().clone().requires_grad_() for n in names
        }
        squares = {n: torch.zeros_like(w) for n, w in weights.items()}
        count = batch_length(batch)
        generator = torch.Generator().manual_seed(self.seed)
        with differentiating(model):
            # Not Samples.of: the batch stays on the network's device.
            for i, sample in enumerate(Samples((batch,)).batches(1)):
                log_p = log_probabilities(model, sample, weights)
                label, times = weighted_labels(log_p, generator)
                if labels is not None:
                    label, times = labels[i : i + 1], torch.ones_like(times)
                # Its gradient is squared, so that it counts as often as it should.
                loss = -(log_p.gather(1, label[:, None])[:, 0] * times.sqrt()).sum()
                self._add_squares(loss, weights, squares)
                if self.progress:
                    self.progress(i + 1, count, "squaring gradients")

        def damage(unit: Unit, rounded: Tensor) -> float:
            weight = model.get_parameter(unit.parameter).detach()
            error = (weight - rounded).square()
            lost = (squares[unit.parameter] * error).sum(dtype=torch.float64)
            return float(lost) / count

        return ScoreTable(weight_table(graph, model, choices, damage))

    @staticmethod
    def _add_squares(
        loss: Tensor, weights: dict[str, Tensor], squares: dict[str, Tensor]
    ) -> None:
        found = torch.autograd.grad(
            loss, list(weights.values()), materialize_grads=True
        )
        for name, gradient in zip(weights, found, strict=True):
            squares[name] += gradient.square()
