"""Hessian: how curved the loss is at a unit's weights, times their error (HAWQ-V2)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ompq.graph import Choice, LayerGraph, Unit
from ompq.samples import Progress, SamplesLike
from ompq.scores.labels import (
    LabelledBatches,
    differentiating,
    first_labelled,
    log_probabilities,
    mean_loss,
)
from ompq.scores.rounding_errors import (
    check_weights_only,
    weight_table,
)
from ompq.scores.table import Needs, ScoreTable


@dataclass(frozen=True)
class Hessian:
    """Mean of the Hessian's trace over a unit's weights × ||W − Q(W)||².

    The trace is Hutchinson's estimate: the mean of vᵀHv over random signs v, of all
    units at once. The loss is the cross entropy with the labels, where batches are
    given, else with the network's own answers.

    Attributes:
        samples: How many inputs are used, at most.
        probes: How many random vectors; the error falls with their square root.
        seed: Seed of the vectors.
        batches: Inputs and class numbers, read once.
        progress: Called after each vector.
    """

    samples: int = 32
    probes: int = 16
    seed: int = 0
    batches: LabelledBatches | None = field(default=None, repr=False, compare=False)
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "mean Hessian trace × squared error of the weights"
    needs: ClassVar[Needs] = Needs(
        "one, and a double backward pass a probe (16)", gradients=True, labels=True
    )

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return mean traces × squared errors, (units, choices)."""
        check_weights_only(choices, "hessian")
        batch, labels = first_labelled(model, samples, self.batches, self.samples)
        names = list(dict.fromkeys(unit.parameter for unit in graph.units))
        weights = [
            model.get_parameter(n).detach().clone().requires_grad_() for n in names
        ]
        with differentiating(model):
            log_p = log_probabilities(
                model, batch, dict(zip(names, weights, strict=True))
            )
            traces = self._traces(mean_loss(log_p, labels), weights)
        curvature = dict(zip(names, traces, strict=True))

        def damage(unit: Unit, rounded: Tensor) -> float:
            weight = model.get_parameter(unit.parameter).detach()
            error = (weight - rounded).double().square().sum()
            # An estimate may be below 0, which would make fewer bits the better ones.
            mean = max(curvature[unit.parameter], 0.0) / weight.numel()
            return mean * float(error)

        return ScoreTable(weight_table(graph, model, choices, damage))

    def _traces(self, loss: Tensor, weights: Sequence[Tensor]) -> list[float]:
        """Return the estimated trace of the Hessian of each weight."""
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        generator = torch.Generator().manual_seed(self.seed)
        traces = [0.0] * len(weights)
        for probe in range(self.probes):
            signs = [
                (torch.randint(2, w.shape, generator=generator) * 2 - 1).to(w)
                for w in weights
            ]
            products = torch.autograd.grad(
                gradients, weights, signs, retain_graph=True, materialize_grads=True
            )
            for i, (sign, product) in enumerate(zip(signs, products, strict=True)):
                traces[i] += float((sign * product).sum(dtype=torch.float64))
            if self.progress:
                self.progress(probe + 1, self.probes, "estimating curvature")
        return [trace / self.probes for trace in traces]
