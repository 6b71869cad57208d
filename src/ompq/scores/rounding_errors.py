"""Rounding a unit's weights: what is left of them, and the score by noise alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.errors import ScoreError
from ompq.graph import channel_axis, norm_affine, scaled_channels
from ompq.processes import share_out
from ompq.ranges import quick_grids, search_weight, tensor_noise, weight_noises
from ompq.rates import coded_weight, rate_curve
from ompq.samples import collect, model_device
from ompq.scores.table import Needs, ScoreInputs
from ompq.units import Choice, ScoreTable, Table, Unit, by_bits

_SAMPLES = 32  # inputs from which activation noise is read


def unit_weight(model: nn.Module, unit: Unit) -> tuple[Tensor, nn.Module]:
    """Return the unit's weight with its batch norm folded in, and its module."""
    owner, _, _ = unit.parameter.rpartition(".")
    module = model.get_submodule(owner)
    weight = model.get_parameter(unit.parameter).detach()
    if unit.norm:
        norm = model.get_submodule(unit.norm)
        weight = scaled_channels(weight, norm_affine(norm)[0].detach(), module)
    return weight.to(model_device(model)), module


def called_module(model: nn.Module, unit: Unit) -> nn.Module:
    """Return the module that is called for the unit, whose input is the unit's."""
    return model.get_submodule(unit.parameter.rpartition(".")[0])


def weight_choices(choices: Sequence[Choice]) -> list[Choice]:
    """Return the different weights among choices, with float inputs, fewest bits first.

    Float weights are left out: nothing is lost by them.
    """
    return by_bits({c.with_float_input for c in choices if c.weight < FLOAT_BITS})


def rounded_weights(
    model: nn.Module, unit: Unit, choices: Sequence[Choice]
) -> Iterator[Tensor]:
    """Yield the unit's weight, its batch norm not folded in, as choices round it.

    It is rounded to the best grid; with the step that keeps the rate where it is coded;
    not at all at 32 bits.
    """
    weight = model.get_parameter(unit.parameter).detach().to(model_device(model))
    coded, module = unit_weight(model, unit)
    curve = rate_curve(coded) if any(choice.rate for choice in choices) else None
    for choice in choices:
        if choice.weight >= FLOAT_BITS:
            yield weight
        elif curve is not None and choice.rate:
            rounded = coded_weight(coded, curve.step(choice.rate))
            yield weight * _kept(rounded, coded)
        else:
            grid = search_weight(
                weight.float(),
                choice.weight,
                channel_dim=channel_axis(module),
                group_size=unit.group_size,
            )
            yield grid.fake(weight)


def quickly_rounded(
    model: nn.Module, unit: Unit, choices: Sequence[Choice]
) -> tuple[Callable[[Choice], Tensor], Tensor]:
    """Return what rounds a unit's weight to a choice, and the noise of all choices.

    The noise is ||W - Q(W)||² / ||W||² with batch norm folded in, (choices,). Grids of
    all widths are searched at once, nearly as well as for :func:`rounded_weights`.
    """
    folded, module = unit_weight(model, unit)
    folded = folded.float()
    widths = [choice.weight for choice in choices if not choice.rate]
    grids, found = quick_grids(
        folded, widths, channel_dim=channel_axis(module), group_size=unit.group_size
    )
    by_width = dict(zip(widths, grids, strict=True))
    noise = {Choice(w, FLOAT_BITS): n for w, n in zip(widths, found, strict=True)}
    curve = rate_curve(folded) if len(widths) < len(choices) else None
    for choice in choices:
        if curve is not None and choice.rate:
            noise[choice] = folded.new_tensor(curve.noise_at(choice.rate))

    def rounded(choice: Choice) -> Tensor:
        weight = unit_weight(model, unit)[0]
        folded = weight.float()
        if curve is not None and choice.rate:
            found = coded_weight(folded, curve.step(choice.rate))
        else:
            found = by_width[choice.weight].fake(folded)
        if unit.norm:
            weight = unit_weight(model, replace(unit, norm=""))[0]
            found = weight * _kept(found, folded)
        return found.to(weight.dtype)

    return rounded, torch.stack([noise[choice] for choice in choices])


def _kept(rounded: Tensor, folded: Tensor) -> Tensor:
    """Return what is kept of each weight before the batch norm scales it."""
    # A channel that the batch norm multiplies by 0 is lost anyway.
    return torch.where(folded == 0, 1.0, rounded / folded)


def weight_table(given: ScoreInputs, damage: Callable[[Unit, Tensor], float]) -> Table:
    """Return the damage of each unit's rounded weights, (units, choices).

    Args:
        damage: Called with every unit and each of its rounded weights; float weights
            do none. Processes share the units.
    """
    weights = weight_choices(given.choices)

    def row(unit: Unit) -> list[float]:
        several = rounded_weights(given.model, unit, weights)
        found = {c: damage(unit, w) for c, w in zip(weights, several, strict=True)}
        return [found.get(c.with_float_input, 0.0) for c in given.choices]

    return np.array(share_out(given.graph.units, row), dtype=np.float64)


def check_weights_only(choices: Sequence[Choice], score: str) -> None:
    """Refuse a choice of activation bits, for a score that cannot tell them apart.

    Pairs such as W4A4 and W8A8 leave none: there the weights decide, as in HAWQ-V3.

    Raises:
        ScoreError: Some weights may have several activation widths.
    """
    widths = sorted({choice.activation for choice in choices})
    if len({(c.weight, c.rate) for c in choices}) < len({*choices}):
        raise ScoreError(
            f"{score} judges only weights, but activations may have {widths} bits: "
            "allow one width, or use output_divergence, weight_noise or orm_distortion"
        )


@dataclass(frozen=True)
class WeightNoise:
    """||W − Q_b(W)||² / ||W||² of each unit, batch norm folded in.

    When several activation widths are allowed, the same ratio of the unit's input is
    added.
    """

    summary: ClassVar[str] = "noise-to-signal ratio of the rounded weights"
    needs: ClassVar[Needs] = Needs("none, or one where activation bits are chosen")

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return noise-to-signal ratios, (units, choices)."""
        return ScoreTable(noise_table(given))


def noise_table(given: ScoreInputs) -> Table:
    """Return noise-to-signal of weights, and of inputs where their bits are chosen."""
    graph, choices = given.graph, given.choices
    weights = weight_choices(choices)
    widths = [choice.weight for choice in weights if not choice.rate]
    rates = [choice.rate for choice in weights if choice.rate]
    table = np.zeros((len(graph), len(choices)))
    for row, unit in zip(table, graph.units, strict=True):
        weight, module = unit_weight(given.model, unit)
        axis = channel_axis(module)
        noises = weight_noises(
            weight.float(), widths, channel_dim=axis, group_size=unit.group_size
        )
        found: dict[float, float] = dict(zip(widths, noises, strict=True))
        coded: dict[float, float] = {}
        if rates:
            curve = rate_curve(weight)
            coded = {rate: curve.noise_at(rate) for rate in rates}
        row[:] = [
            coded[c.rate] if c.rate else found.get(c.weight, 0.0) for c in choices
        ]
    if len({choice.activation for choice in choices}) > 1:
        table += _input_noise(given)
    return table


def _input_noise(given: ScoreInputs) -> Table:
    graph, model, choices = given.graph, given.model, given.choices
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
    collect(model, given.samples.first(_SAMPLES), watched, batch_size=_SAMPLES)
    means = [torch.stack(rows[name]).mean(0) for name in graph.names]
    table = torch.stack(means).double().cpu().numpy()
    noise = dict(zip(widths, table.T, strict=True))
    noise[FLOAT_BITS] = np.zeros(len(graph))
    return np.stack([noise[choice.activation] for choice in choices], axis=1)
