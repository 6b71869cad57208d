"""What scores need of a unit: its weight, its module, its weight rounded."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.costs import FLOAT_BITS
from ompq.errors import ScoreError
from ompq.graph import (
    Choice,
    LayerGraph,
    Unit,
    channel_axis,
    norm_affine,
    scaled_channels,
)
from ompq.ranges import search_weight
from ompq.scores.table import Table


def unit_weight(model: nn.Module, unit: Unit) -> tuple[Tensor, nn.Module]:
    """Return the unit's weight with its batch norm folded in, and its module."""
    owner, _, _ = unit.parameter.rpartition(".")
    module = model.get_submodule(owner)
    weight = model.get_parameter(unit.parameter).detach()
    if unit.norm:
        norm = model.get_submodule(unit.norm)
        assert isinstance(norm, _BatchNorm)  # the trace found it to be one
        weight = scaled_channels(weight, norm_affine(norm)[0].detach(), module)
    return weight, module


def called_module(model: nn.Module, unit: Unit) -> nn.Module:
    """Return the module that is called for the unit, whose input is the unit's."""
    owner, _, _ = unit.parameter.rpartition(".")
    if unit.kind == "attention" and owner.endswith("out_proj"):
        # It is never called itself: its input stands inside the attention.
        owner, _, _ = owner.rpartition(".")
    return model.get_submodule(owner)


def rounded_weight(model: nn.Module, unit: Unit, bits: int) -> Tensor:
    """Return the unit's weight rounded to the best grid; as it is at 32 bits."""
    weight = model.get_parameter(unit.parameter).detach()
    if bits >= FLOAT_BITS:
        return weight
    axis = channel_axis(model.get_submodule(unit.parameter.rpartition(".")[0]))
    return search_weight(weight.float(), bits, channel_dim=axis).fake(weight)


def weight_table(
    graph: LayerGraph, choices: Sequence[Choice], damage: Callable[[Unit, int], float]
) -> Table:
    """Return the damage of each unit's weight bits, (units, choices).

    Args:
        graph: The network's units.
        choices: Columns of the table.
        damage: Called once for every unit and width; float weights do none.
    """
    widths = sorted({c.weight for c in choices if c.weight < FLOAT_BITS})
    rows = []
    for unit in graph.units:
        found = {FLOAT_BITS: 0.0, **{bits: damage(unit, bits) for bits in widths}}
        rows.append([found[choice.weight] for choice in choices])
    return np.array(rows, dtype=np.float64)


def check_weights_only(choices: Sequence[Choice], score: str) -> None:
    """Refuse a choice of activation bits, for a score that cannot tell them apart.

    Raises:
        ScoreError: There are several activation widths.
    """
    widths = sorted({choice.activation for choice in choices})
    if len(widths) > 1:
        raise ScoreError(
            f"{score} judges only weights, but activations may have {widths} bits: "
            "allow one width, or use output_divergence, weight_noise or orm_distortion"
        )
