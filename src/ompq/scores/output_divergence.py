"""Scores that measure how far a rounded layer moves the network's output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ompq.activation_ranges import fake_quantize_tensor
from ompq.bit_widths import FLOAT_BITS
from ompq.network.observation import with_first_tensor
from ompq.network.units import Choice, Table, Unit, by_bits
from ompq.parallel import share_out
from ompq.samples import (
    Batch,
    arguments,
    class_rows,
    evaluating,
    first_tensor,
    model_device,
    to_device,
)
from ompq.scores.table import Needs, ScoreInputs, ScoreTable
from ompq.scores.weight_noise import (
    called_module,
    noise_table,
    rounded_weights,
    weight_choices,
)


@dataclass(frozen=True)
class OutputDivergence:
    """KL(float ‖ quantized) of the softmax of the logits, one unit at a time.

    Only forward passes: one for each unit and width, over one batch of samples.
    Several processes share the units.

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
                output = log_probabilities(model, batch, {unit.parameter: rounded})
                by_weight[choice] = _clamped(reference, output)
            by_input = _input_divergence(model, unit, batch, reference, inputs)
            return [
                by_weight.get(c.with_float_input, 0.0) + by_input.get(c.activation, 0.0)
                for c in choices
            ]

        def report(done: int) -> None:
            given.progress(done, len(graph), f"divergence {graph.names[done - 1]}")

        with evaluating(model):
            reference = log_probabilities(model, batch, {})
            return ScoreTable(np.array(share_out(graph.units, row, report)))


def log_probabilities(
    model: nn.Module, batch: Batch, weights: Mapping[str, Tensor]
) -> Tensor:
    """Run the network with some weights replaced; return log softmax, (N, K).

    If classes are predicted at many places, such as tokens, each place is a row.
    """
    output = functional_call(model, dict(weights), *arguments(batch))
    return class_rows(first_tensor(output).float()).log_softmax(1)


def divergence(reference: Tensor, output: Tensor) -> Tensor:
    """Return the mean KL(reference ‖ output) of log probabilities, both (N, K)."""
    lost = (reference.exp() * (reference - output)).sum(1, dtype=torch.float64)
    return lost.mean()


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


@dataclass(frozen=True)
class Blend:
    """Geometric mean of output divergence and weight noise.

    Each table is first divided by its mean at 3 bits (or the middle choice). The one
    sees what the network makes of an error, the other does not depend on the samples;
    where one is wrong about a unit, the other often is right.

    Attributes:
        samples: How many inputs the divergence is measured on, at most.
    """

    samples: int = 64

    summary: ClassVar[str] = "geometric mean of output_divergence and weight_noise"
    needs: ClassVar[Needs] = Needs("one for each unit and width", seconds=130.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return geometric means, (units, choices)."""
        moved = OutputDivergence(self.samples)(given).damage
        noise, column = noise_table(given), _reference(given.choices)
        return ScoreTable(np.sqrt(_scaled(moved, column) * _scaled(noise, column)))


def _reference(choices: Sequence[Choice]) -> int:
    """Return the column of 3 bits with the widest activations, or the middle one."""
    order = [choices.index(choice) for choice in by_bits(choices)]
    threes = [i for i in order if choices[i].bits == 3]
    return threes[-1] if threes else order[(len(order) - 1) // 2]


def _scaled(table: Table, column: int) -> Table:
    mean = table[:, column].mean()
    scaled: Table = table / mean if mean > 0 else table
    return scaled
