"""Gradient: what a unit's bits would win at the network of the fewest bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.graph import Choice, LayerGraph, Unit, by_bits
from ompq.samples import SamplesLike
from ompq.scores.labels import (
    LabelledBatches,
    differentiating,
    divergence,
    first_labelled,
    log_probabilities,
    mean_loss,
)
from ompq.scores.rounding_errors import (
    check_weights_only,
    rounded_weights,
    weight_table,
)
from ompq.scores.table import Needs, ScoreTable


@dataclass(frozen=True)
class Gradient:
    """First-order change of the loss when a unit gets more than the fewest bits.

    Every unit is rounded to the fewest bits; there, one backward pass gives the
    gradient g of the loss, and the score is g · (Q_b(W) − Q_fewest(W)). The loss is the
    divergence from the float network, or the cross entropy with labels, where batches
    are given. More bits may score worse than fewer: it is only the first order.

    Attributes:
        samples: How many inputs are used, at most.
        batches: Inputs and class numbers, read once.
    """

    samples: int = 32
    batches: LabelledBatches | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "first-order gain of more bits at the low-bit network"
    needs: ClassVar[Needs] = Needs(
        "two forward and one backward", gradients=True, labels=True
    )

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return first-order changes of the loss, (units, choices)."""
        check_weights_only(choices, "gradient")
        batch, labels = first_labelled(model, samples, self.batches, self.samples)
        fewest = by_bits(choices)[:1]
        low = {}
        for unit in graph.units:
            [rounded] = rounded_weights(model, unit, fewest)
            low[unit.parameter] = rounded.clone().requires_grad_()
        with differentiating(model):
            log_p = log_probabilities(model, batch, low)
            if labels is None:
                with torch.no_grad():
                    reference = log_probabilities(model, batch, {})
                loss = divergence(reference, log_p)
            else:
                loss = mean_loss(log_p, labels)
            found = torch.autograd.grad(
                loss, list(low.values()), materialize_grads=True
            )
        gradients = dict(zip(low, found, strict=True))

        def change(unit: Unit, rounded: Tensor) -> float:
            moved = rounded - low[unit.parameter].detach()
            product = gradients[unit.parameter] * moved
            return float(product.sum(dtype=torch.float64))

        table = weight_table(graph, model, choices, change)
        weights = (model.get_parameter(u.parameter).detach() for u in graph.units)
        floats = [change(u, w) for u, w in zip(graph.units, weights, strict=True)]
        for column, choice in enumerate(choices):
            if choice.weight >= FLOAT_BITS:
                table[:, column] = floats
        return ScoreTable(table)
