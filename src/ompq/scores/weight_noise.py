"""Weight noise: the noise-to-signal ratio of rounding, from the weights alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.graph import Choice, LayerGraph, channel_axis
from ompq.ranges import tensor_noise, weight_noises
from ompq.rates import rate_curve
from ompq.samples import Samples, SamplesLike, collect
from ompq.scores.rounding_errors import called_module, unit_weight, weight_choices
from ompq.scores.table import Needs, ScoreTable, Table

_SAMPLES = 32  # inputs from which activation noise is read


@dataclass(frozen=True)
class WeightNoise:
    """||W − Q_b(W)||² / ||W||² of each unit, batch norm folded in.

    When several activation widths are allowed, the same ratio of the unit's input is
    added.
    """

    summary: ClassVar[str] = "noise-to-signal ratio of the rounded weights"
    needs: ClassVar[Needs] = Needs("none, or one where activation bits are chosen")

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return noise-to-signal ratios, (units, choices)."""
        return ScoreTable(noise_table(graph, model, samples, choices))


def noise_table(
    graph: LayerGraph, model: nn.Module, samples: SamplesLike, choices: Sequence[Choice]
) -> Table:
    """Return noise-to-signal of weights, and of inputs where their bits are chosen."""
    table = _weight_table(graph, model, choices)
    if len({choice.activation for choice in choices}) > 1:
        table = table + _input_table(graph, model, samples, choices)
    return table


def _weight_table(
    graph: LayerGraph, model: nn.Module, choices: Sequence[Choice]
) -> Table:
    weights = weight_choices(choices)
    widths = [choice.weight for choice in weights if not choice.rate]
    rates = [choice.rate for choice in weights if choice.rate]
    table = np.zeros((len(graph), len(choices)))
    for row, unit in zip(table, graph.units, strict=True):
        weight, module = unit_weight(model, unit)
        axis = channel_axis(module)
        noises = weight_noises(weight.float(), widths, channel_dim=axis)
        found: dict[float, float] = dict(zip(widths, noises, strict=True))
        coded: dict[float, float] = {}
        if rates:
            curve = rate_curve(weight)
            coded = {rate: curve.noise_at(rate) for rate in rates}
        row[:] = [
            coded[c.rate] if c.rate else found.get(c.weight, 0.0) for c in choices
        ]
    return table


def _input_table(
    graph: LayerGraph, model: nn.Module, samples: SamplesLike, choices: Sequence[Choice]
) -> Table:
    widths = sorted({c.activation for c in choices if c.activation < FLOAT_BITS})
    rows: dict[str, list[Tensor]] = {}  # of each batch: their shapes may differ

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            given = next(iter(args), None)
            given = next(iter(kwargs.values())) if given is None else given
            found = tensor_noise(given.float(), widths)
            rows.setdefault(name, []).append(found)

        return hook

    watched = [(called_module(model, unit), watch(unit.name)) for unit in graph.units]
    collect(model, Samples.of(samples).first(_SAMPLES), watched, batch_size=_SAMPLES)
    means = [torch.stack(rows[name]).mean(0) for name in graph.names]
    table = torch.stack(means).double().cpu().numpy()
    noise = dict(zip(widths, table.T, strict=True))
    noise[FLOAT_BITS] = np.zeros(len(graph))
    return np.stack([noise[choice.activation] for choice in choices], axis=1)
