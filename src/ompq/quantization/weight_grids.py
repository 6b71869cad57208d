"""The grid of each weight, and its codes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ompq.allocation.problem import Allocation
from ompq.configs import QuantizeConfig
from ompq.costs import can_be_coded, coded_bytes
from ompq.entropy_coding.rates import coded_grid, to_multiples
from ompq.errors import QuantizationError
from ompq.grids import Grid, like_weight, of_groups
from ompq.network.units import Choice, LayerGraph, Unit
from ompq.progress import Progress
from ompq.quantization.equalization import Equalized, channel_factor
from ompq.quantization.error_feedback import (
    PLAIN_RIDGE,
    channel_grams,
    coded_with_feedback,
    feedback_error,
    input_grams,
    round_with_feedback,
)
from ompq.quantization.gguf_grids import gguf_grid
from ompq.samples import Samples
from ompq.weight_ranges import channel_rows, minmax_weight, search_weight, shrunk_weight

# Called as weight_grid(unit, weight, axis of the output channels), perhaps with a ridge
# for error feedback; returns the grid and the weight that the layer stores and rounds.
WeightGrid: TypeAlias = Callable[..., tuple[Grid, Tensor]]

ROUNDING = "rounding weights"

_LARGEST_FEEDBACK_BITS = 6  # above, rounding to nearest loses next to nothing


def weight_grams(
    model: nn.Module,
    graph: LayerGraph,
    allocation: Allocation,
    samples: Samples,
    config: QuantizeConfig,
    report: Progress,
) -> dict[str, Tensor]:
    """Return input Gram matrices of the units that are rounded with error feedback."""
    return input_grams(
        model,
        [unit for unit in graph.units if _is_fed_back(allocation[unit.name], config)],
        samples,
        centred=config.restore_moments,
        batch_size=config.batch_size,
        report=lambda done, total: report(done, total, ROUNDING),
    )


def _is_fed_back(choice: Choice, config: QuantizeConfig) -> bool:
    """Return whether a weight is rounded with error feedback."""
    if not config.output_error:
        return False
    if choice.rate:
        return choice.rate <= _LARGEST_FEEDBACK_BITS
    squared = config.weight_range == "search" and config.weight_power == 2
    return squared and choice.weight <= _LARGEST_FEEDBACK_BITS


def find_weight_grids(
    allocation: Allocation,
    grams: Mapping[str, Tensor],
    factors: Sequence[Equalized],
    config: QuantizeConfig,
    report: Progress,
) -> WeightGrid:
    """Return the function that finds the grid of a unit's weight."""
    done = count(1)

    def weight_grid(
        unit: Unit, weight: Tensor, axis: int, ridge: float = PLAIN_RIDGE
    ) -> tuple[Grid, Tensor]:
        report(next(done), len(allocation), ROUNDING)
        choice, kind = allocation[unit.name], config.weight_grid
        gram = grams.get(unit.name)
        if choice.rate:
            # A single step suits the channels best as they were before equalization.
            factor = channel_factor(unit, weight, axis, factors)
            return _coded_weight(unit, choice, weight, axis, factor, gram, ridge)
        grid = _searched_grid(unit, choice, weight, axis, gram, config)
        size = unit.shared_by(choice)
        # Scales of groups must stay what a file holds.
        free = not (size or kind == "gguf")
        if size and kind != "gguf":
            grid = replace(grid, scale=_byte_scales(grid.scale, weight, size))
        if gram is None:
            return grid, weight
        return round_with_feedback(weight, grid, gram, refit=free, ridge=ridge)

    return weight_grid


def _searched_grid(
    unit: Unit,
    choice: Choice,
    weight: Tensor,
    axis: int,
    gram: Tensor | None,
    config: QuantizeConfig,
) -> Grid:
    """Return the grid of a weight of fixed width, as the settings search for it."""
    bits, size, kind = choice.weight, unit.shared_by(choice), config.weight_grid
    if kind == "gguf":
        whole = unit.super_blocks
        return gguf_grid(weight.float(), bits, group_size=size, super_blocks=whole)
    options: Any = {"channel_dim": axis, "group_size": size}
    if config.weight_range == "shrink":
        return shrunk_weight(weight, bits, **options)
    if config.weight_range == "minmax":
        return minmax_weight(weight, bits, kind=kind, **options)
    options |= {"kind": kind, "power": config.weight_power}
    if gram is not None and not size:
        options["gram"] = channel_grams(gram, unit.out_channels)
    return search_weight(weight.float(), bits, **options)


def _byte_scales(scale: Tensor, weight: Tensor, size: int) -> Tensor:
    """Round scales of groups so that they take a byte in a packed file."""
    scale = of_groups(scale, size)
    # An all-zero group has an arbitrary scale, which must not become the largest.
    nonzero = channel_rows(weight, 0, size).any(1).view_as(scale)
    if nonzero.any():
        scale = torch.where(nonzero, scale, scale[nonzero].max())
    return like_weight(to_multiples(scale), weight.shape, group_size=size)


def _coded_weight(  # noqa: PLR0913
    unit: Unit,
    choice: Choice,
    weight: Tensor,
    axis: int,
    factor: Tensor,
    gram: Tensor | None,
    ridge: float,
) -> tuple[Grid, Tensor]:
    """Return a grid that meets a unit's rate, and the weight that rounds to it."""
    if not can_be_coded(unit, choice):
        raise QuantizationError(
            f"{unit.name}: its {unit.weights} weights are too few to be coded at "
            f"{choice.rate:g} bits; raise the rate or give it a fixed width"
        )
    given, limit = weight / factor, coded_bytes(unit.weights, choice.rate)
    found = [coded_grid(given, limit, channel_dim=axis)]
    if gram is not None:
        # At one bit a weight, feedback may move more weights off zero than it is worth.
        rounding = partial(coded_with_feedback, gram=gram, ridge=ridge)
        found.append(coded_grid(given, limit, channel_dim=axis, rounding=rounding))
        found.sort(key=lambda each: feedback_error(each[0].fake(each[1]) - given, gram))
    grid, moved = found[0]
    return replace(grid, scale=grid.scale * factor), moved * factor
