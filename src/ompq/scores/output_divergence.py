"""Output divergence: how far the logits move when one unit alone is quantized."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.graph import Choice, LayerGraph, Unit
from ompq.processes import share_out
from ompq.ranges import fake_quantize_tensor
from ompq.recording import with_first_tensor
from ompq.samples import (
    Batch,
    Progress,
    Samples,
    SamplesLike,
    evaluating,
    model_device,
    to_device,
)
from ompq.scores.labels import divergence, log_probabilities
from ompq.scores.rounding_errors import (
    called_module,
    rounded_weights,
    weight_choices,
)
from ompq.scores.table import Needs, ScoreTable


@dataclass(frozen=True)
class OutputDivergence:
    """KL(float ‖ quantized) of the softmax of the logits, one unit at a time.

    Only forward passes: one for each unit and width, over one batch of samples.
    Several processes share the units.

    Attributes:
        samples: How many inputs are used, at most.
        progress: Called after each unit.
    """

    samples: int = 64
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "divergence of the outputs when one unit is rounded"
    needs: ClassVar[Needs] = Needs("one for each unit and width")

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return mean divergences, (units, choices)."""
        given = Samples.of(samples).first_batch(self.samples)
        batch = to_device(given, model_device(model))
        weights = weight_choices(choices)
        inputs = sorted({c.activation for c in choices})
        if len(inputs) == 1:
            inputs = []  # the same for all choices
        inputs = [bits for bits in inputs if bits < FLOAT_BITS]

        def row(unit: Unit) -> list[float]:
            by_weight = {}
            several = rounded_weights(model, unit, weights)
            for choice, rounded in zip(weights, several, strict=True):
                output = log_probabilities(model, batch, {unit.parameter: rounded})
                by_weight[choice] = _clamped(reference, output)
            by_input = _input_divergence(model, unit, batch, reference, inputs)
            return [
                by_weight.get(c.with_float_input, 0.0) + by_input.get(c.activation, 0.0)
                for c in choices
            ]

        def report(done: int) -> None:
            if self.progress:
                name = graph.names[done - 1]
                self.progress(done, len(graph), f"divergence {name}")

        with evaluating(model):
            reference = log_probabilities(model, batch, {})
            return ScoreTable(np.array(share_out(graph.units, row, report)))


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
            output = log_probabilities(model, batch, {})
        found[bits] = _clamped(reference, output)
    return found


def _clamped(reference: Tensor, output: Tensor) -> float:
    return float(divergence(reference, output).clamp_min(0))
