"""Sensitivity: the noise of rounding, weighed by how much of it reaches the answers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.graph import Choice, LayerGraph
from ompq.samples import Batch, Progress, Samples, SamplesLike, model_device, to_device
from ompq.scores.labels import differentiating, drawn_labels, log_probabilities
from ompq.scores.orm import OrmSettings, measure_orm
from ompq.scores.rounding_errors import rounded_weight
from ompq.scores.table import Needs, ScoreTable, Table
from ompq.scores.weight_noise import noise_table

# Above this width errors are so small that the divergence follows the noise.
_WIDEST_MEASURED = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sensitivity:
    """Geometric mean of weight noise and the divergence expected of it.

    To second order the divergence from the float network is half the mean of
    (gradient · error)², where the gradient is that of one sample's log likelihood of an
    answer that the network itself draws (the Fisher information along the error). That
    takes one backward pass a sample instead of a forward pass for each unit and width.
    The noise alone knows nothing of the network behind a unit, the expectation alone
    trusts few samples; half of each decides better than either.

    Attributes:
        samples: How many inputs are used, at most.
        seed: Seed of the answers that are drawn.
        orm: How ORM is measured, for the report; it is no part of the damage.
        progress: Called after each sample.
    """

    samples: int = 64
    seed: int = 0
    orm: OrmSettings = OrmSettings(per_function=True)
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "weight_noise × what of it is expected at the output"
    needs: ClassVar[Needs] = Needs(
        "two, one of them backward, sample by sample", gradients=True
    )

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return geometric means, (units, choices)."""
        given = Samples.of(samples)
        widths = sorted({c.weight for c in choices if c.weight < FLOAT_BITS})
        weights = [Choice(bits, FLOAT_BITS) for bits in widths]
        noise = noise_table(graph, model, given, weights)  # (units, widths)
        factor = self._factor(graph, model, given, widths, noise)
        columns = {bits: column for column, bits in enumerate(widths)}
        by_weight = np.concatenate([noise * factor, np.zeros((len(graph), 1))], 1)
        table = by_weight[:, [columns.get(c.weight, -1) for c in choices]]
        if len({c.activation for c in choices}) > 1:
            inputs = [Choice(FLOAT_BITS, c.activation) for c in choices]
            table = table + factor[:, :1] * noise_table(graph, model, given, inputs)
        orm = measure_orm(graph, model, given, self.orm)
        return orm.table(table)

    def _factor(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: Samples,
        widths: Sequence[int],
        noise: Table,
    ) -> Table:
        """Return the root of expected divergence over noise, (units, widths)."""
        measured = [b for b in widths if b <= _WIDEST_MEASURED] or widths[:1]
        few = samples.first(self.samples)
        try:
            expected = self._expected(graph, model, few, measured)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning("no gradients, so that noise alone decides: %s", error)
            return np.ones_like(noise)
        ratio = expected / np.maximum(noise[:, : len(measured)], 1e-30)
        last = np.repeat(ratio[:, -1:], len(widths) - len(measured), 1)
        root: Table = np.sqrt(np.concatenate([ratio, last], 1))
        scale = root[:, 0].mean()
        return root / scale if scale > 0 else np.ones_like(noise)

    def _expected(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: Samples,
        widths: Sequence[int],
    ) -> Table:
        """Return half the mean of (gradient · error)², (units, widths)."""
        names = [unit.parameter for unit in graph.units]
        weights = {
            name: model.get_parameter(name).detach().clone().requires_grad_()
            for name in dict.fromkeys(names)
        }
        errors = [
            [
                rounded_weight(model, u, bits) - weights[u.parameter].detach()
                for bits in widths
            ]
            for u in graph.units
        ]
        device = model_device(model)
        total = torch.zeros(len(graph), len(widths), dtype=torch.float64, device=device)
        with differentiating(model):
            for number, sample in enumerate(samples.batches(1)):
                found = self._gradients(
                    model, to_device(sample, device), weights, number
                )
                gradients = dict(zip(weights, found, strict=True))
                products = [
                    (gradients[name] * error).sum(dtype=torch.float64)
                    for name, row in zip(names, errors, strict=True)
                    for error in row
                ]
                total += torch.stack(products).square().view_as(total)
                if self.progress:
                    self.progress(number + 1, len(samples), "expecting divergence")
        table: Table = (total / (2 * len(samples))).cpu().numpy()
        return table

    def _gradients(
        self, model: nn.Module, sample: Batch, weights: dict[str, Tensor], number: int
    ) -> tuple[Tensor, ...]:
        log_p = log_probabilities(model, sample, weights)
        label = drawn_labels(log_p, self.seed + number)
        loss = -log_p.gather(1, label[:, None]).sum()
        return torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
