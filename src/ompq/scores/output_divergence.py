"""Scores that measure how far a rounded layer moves the network's output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import nn

from ompq.activation_ranges import fake_quantize_tensor
from ompq.bit_widths import FLOAT_BITS
from ompq.network.observation import with_first_tensor
from ompq.network.units import Unit
from ompq.parallel import share_out
from ompq.samples import Batch, batch_length, evaluating, model_device, to_device
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs
from ompq.scores.weight_noise import (
    called_module,
    output_with,
    rounded_weights,
    weight_choices,
)


@dataclass(frozen=True)
class OutputDivergence:
    """Divergence from the float network's output, one unit at a time.

    For classes it is KL(float ‖ quantized) of the softmax; :mod:`ompq.outputs` lists
    the others. Only forward passes: one for each unit and width, over one batch of
    samples. Several processes share the units.

    Attributes:
        samples: How many inputs are used, at most.
    """

    samples: int = 64

    summary: ClassVar[str] = "divergence of the outputs when one unit is rounded"
    needs: ClassVar[Needs] = Needs("one for each unit and width", seconds=130.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return mean divergences, (units, choices)."""
        graph, model, choices = given.graph, given.model, given.choices
        first = given.samples.first_batch(self.samples)
        batch = to_device(first, model_device(model))
        weights = weight_choices(choices)
        inputs = sorted({c.activation for c in choices})
        if len(inputs) == 1:
            inputs = []  # the same for all choices
        inputs = [bits for bits in inputs if bits < FLOAT_BITS]

        def row(unit: Unit) -> list[float]:
            by_weight = {}
            several = rounded_weights(model, unit, weights)
            for choice, rounded in zip(weights, several, strict=True):
                output = output_with(model, batch, {unit.parameter: rounded})
                by_weight[choice] = divergence(output)
            by_input = _input_divergence(model, unit, batch, divergence, inputs)
            return [
                by_weight.get(c.with_float_input, 0.0) + by_input.get(c.activation, 0.0)
                for c in choices
            ]

        def report(done: int) -> None:
            given.progress(done, len(graph), f"divergence {graph.names[done - 1]}")

        outputs = given.outputs
        with evaluating(model):
            reference = outputs.read(output_with(model, batch, {}))

            def divergence(output: Any) -> float:
                found = outputs.divergences(
                    reference, outputs.read(output), batch_length(batch)
                )
                return float(found.mean().clamp_min(0))

            return ScoreTable(np.array(share_out(graph.units, row, report)))


def _input_divergence(
    model: nn.Module,
    unit: Unit,
    batch: Batch,
    divergence: Callable[[Any], float],
    widths: Sequence[int],
) -> dict[int, float]:
    module = called_module(model, unit)
    found = {}
    for bits in widths:

        def quantize(_m: nn.Module, args: Any, kwargs: Any, bits: int = bits) -> Any:
            rounded = partial(fake_quantize_tensor, bits=bits)
            return with_first_tensor((args, kwargs), rounded)

        with module.register_forward_pre_hook(quantize, with_kwargs=True):
            found[bits] = divergence(output_with(model, batch, {}))
    return found
