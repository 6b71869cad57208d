"""Output divergence: how far the logits move when one unit alone is quantized."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ompq.costs import FLOAT_BITS
from ompq.graph import Choice, LayerGraph, Unit, channel_axis
from ompq.ranges import fake_quantize_tensor, search_weight
from ompq.recording import with_first_tensor
from ompq.samples import (
    Batch,
    Progress,
    Samples,
    SamplesLike,
    evaluating,
    first_tensor,
    model_device,
    to_device,
)
from ompq.scores.table import ScoreTable
from ompq.scores.weight_noise import called_module


@dataclass(frozen=True)
class OutputDivergence:
    """KL(float ‖ quantized) of the softmax of the logits, one unit at a time.

    Only forward passes: one for each unit and width, over one batch of samples.

    Attributes:
        samples: How many inputs are used, at most.
        progress: Called after each unit.
    """

    samples: int = 64
    progress: Progress | None = None

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return mean divergences, (units, choices)."""
        batch = to_device(
            Samples.of(samples).first_batch(self.samples), model_device(model)
        )
        weights = sorted({c.weight for c in choices if c.weight < FLOAT_BITS})
        activations = {c.activation for c in choices}
        searched = len(activations) > 1
        inputs = sorted(activations - {FLOAT_BITS})
        table = np.zeros((len(graph), len(choices)))
        with evaluating(model):
            reference = _log_probabilities(model, batch, {})
            for row, unit in enumerate(graph.units):
                by_weight = _weight_divergence(model, unit, batch, reference, weights)
                by_input = (
                    _input_divergence(model, unit, batch, reference, inputs)
                    if searched
                    else {}
                )
                table[row] = [
                    by_weight.get(c.weight, 0.0) + by_input.get(c.activation, 0.0)
                    for c in choices
                ]
                if self.progress:
                    self.progress(row + 1, len(graph), f"divergence {unit.name}")
        return ScoreTable(table)


def _weight_divergence(
    model: nn.Module,
    unit: Unit,
    batch: Batch,
    reference: Tensor,
    widths: Sequence[int],
) -> dict[int, float]:
    weight = model.get_parameter(unit.parameter)
    axis = channel_axis(model.get_submodule(unit.parameter.rpartition(".")[0]))
    found = {}
    for bits in widths:
        rounded = search_weight(weight.float(), bits, channel_dim=axis).fake(weight)
        output = _log_probabilities(model, batch, {unit.parameter: rounded})
        found[bits] = _divergence(reference, output)
    return found


def _input_divergence(
    model: nn.Module,
    unit: Unit,
    batch: Batch,
    reference: Tensor,
    widths: Sequence[int],
) -> dict[int, float]:
    module = called_module(model, unit)
    found = {}
    for bits in widths:

        def quantize(_m: nn.Module, args: Any, kwargs: Any, bits: int = bits) -> Any:
            rounded = partial(fake_quantize_tensor, bits=bits)
            return with_first_tensor((args, kwargs), rounded)

        with module.register_forward_pre_hook(quantize, with_kwargs=True):
            output = _log_probabilities(model, batch, {})
        found[bits] = _divergence(reference, output)
    return found


def _log_probabilities(
    model: nn.Module, batch: Batch, replaced: dict[str, Tensor]
) -> Tensor:
    """Run the network with some parameters replaced; nothing in it is changed."""
    args = (batch,) if isinstance(batch, Tensor) else batch
    kwargs = batch if isinstance(batch, dict) else None
    output = functional_call(model, replaced, () if kwargs else args, kwargs)
    return first_tensor(output).float().flatten(1).log_softmax(1)


def _divergence(reference: Tensor, output: Tensor) -> float:
    """Return the mean KL(reference ‖ output) of log probabilities, both (N, K)."""
    lost = (reference.exp() * (reference - output)).sum(1, dtype=torch.float64)
    return float(lost.mean().clamp_min(0))
