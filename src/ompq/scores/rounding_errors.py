"""What scores need of a unit: its weight, its module, its weight rounded."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.errors import ScoreError
from ompq.graph import (
    Choice,
    LayerGraph,
    Unit,
    by_bits,
    channel_axis,
    norm_affine,
    scaled_channels,
)
from ompq.processes import share_out
from ompq.ranges import quick_grids, search_weight
from ompq.rates import coded_weight, rate_curve
from ompq.scores.table import Table


def unit_weight(model: nn.Module, unit: Unit) -> tuple[Tensor, nn.Module]:
    """Return the unit's weight with its batch norm folded in, and its module."""
    owner, _, _ = unit.parameter.rpartition(".")
    module = model.get_submodule(owner)
    weight = model.get_parameter(unit.parameter).detach()
    if unit.norm:
        norm = model.get_submodule(unit.norm)
        weight = scaled_channels(weight, norm_affine(norm)[0].detach(), module)
    return weight, module


def called_module(model: nn.Module, unit: Unit) -> nn.Module:
    """Return the module that is called for the unit, whose input is the unit's."""
    owner, _, _ = unit.parameter.rpartition(".")
    if unit.kind == "attention" and owner.endswith("out_proj"):
        # It is never called itself: its input stands inside the attention.
        owner, _, _ = owner.rpartition(".")
    return model.get_submodule(owner)


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
    weight = model.get_parameter(unit.parameter).detach()
    coded, module = unit_weight(model, unit)
    curve = rate_curve(coded) if any(choice.rate for choice in choices) else None
    for choice in choices:
        if choice.weight >= FLOAT_BITS:
            yield weight
        elif curve is not None and choice.rate:
            rounded = coded_weight(coded, curve.step(choice.rate))
            yield weight * _kept(rounded, coded)
        else:
            axis = channel_axis(module)
            grid = search_weight(weight.float(), choice.weight, channel_dim=axis)
            yield grid.fake(weight)


def quickly_rounded(
    model: nn.Module, unit: Unit, choices: Sequence[Choice], wanted: Sequence[Choice]
) -> tuple[list[Tensor], Tensor]:
    """Return weights as the wanted choices round them, and the noise of all choices.

    The noise is ||W - Q(W)||² / ||W||² with batch norm folded in, (choices,). Grids of
    all widths are searched at once, nearly as well as for :func:`rounded_weights`.
    """
    folded, module = unit_weight(model, unit)
    folded = folded.float()
    widths = [choice.weight for choice in choices if not choice.rate]
    grids, found = quick_grids(folded, widths, channel_dim=channel_axis(module))
    by_width = dict(zip(widths, grids, strict=True))
    noise = {Choice(w, FLOAT_BITS): n for w, n in zip(widths, found, strict=True)}
    rounded = {c: by_width[c.weight].fake(folded) for c in wanted if not c.rate}
    if len(widths) < len(choices):
        curve = rate_curve(folded)
        for choice in choices:
            if choice.rate:
                noise[choice] = folded.new_tensor(curve.noise_at(choice.rate))
            if choice.rate and choice in wanted:
                rounded[choice] = coded_weight(folded, curve.step(choice.rate))
    weight = model.get_parameter(unit.parameter).detach()
    kept = [weight * _kept(rounded[choice], folded) for choice in wanted]
    return kept, torch.stack([noise[choice] for choice in choices])


def _kept(rounded: Tensor, folded: Tensor) -> Tensor:
    """Return what is kept of each weight before the batch norm scales it."""
    # A channel that the batch norm multiplies by 0 is lost anyway.
    return torch.where(folded == 0, 1.0, rounded / folded)


def weight_table(
    graph: LayerGraph,
    model: nn.Module,
    choices: Sequence[Choice],
    damage: Callable[[Unit, Tensor], float],
) -> Table:
    """Return the damage of each unit's rounded weights, (units, choices).

    Args:
        graph: The network's units.
        model: The network.
        choices: Columns of the table.
        damage: Called with every unit and each of its rounded weights; float weights
            do none. Processes share the units.
    """
    weights = weight_choices(choices)

    def row(unit: Unit) -> list[float]:
        several = rounded_weights(model, unit, weights)
        found = {c: damage(unit, w) for c, w in zip(weights, several, strict=True)}
        return [found.get(c.with_float_input, 0.0) for c in choices]

    return np.array(share_out(graph.units, row), dtype=np.float64)


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
