"""Rounding a unit's weights: what is left of them, and the score by noise alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.errors import ScoreError
from ompq.graph import channel_axis, channel_factors, norm_scale
from ompq.processes import share_out
from ompq.ranges import (
    QuickGrids,
    as_weights,
    channel_rows,
    quick_grids,
    row_stacks,
    search_weight,
    stacked_rows,
    tensor_noise,
    weight_noises,
)
from ompq.rates import RateCurve, coded_weight, rate_curve
from ompq.samples import collect, model_device
from ompq.scores.table import Needs, ScoreInputs
from ompq.units import Choice, ScoreTable, Table, Unit, by_bits

_SAMPLES = 32  # inputs from which activation noise is read
_TINY = 1e-30  # so that nothing is divided by 0


class StoredWeight(NamedTuple):
    """A unit's weight in the network."""

    parameter: nn.Parameter
    axis: int  # of its output channels
    factor: Tensor | None  # what batch norm multiplies it by; None without one
    device: torch.device  # where the network runs

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, unit: Unit) -> "StoredWeight":
        """Find the weight of a unit."""
        module, device = called_module(model, unit), model_device(model)
        parameter = module.get_parameter(unit.parameter.rpartition(".")[2])
        factor = None
        if unit.norm:
            scale = norm_scale(model.get_submodule(unit.norm)).to(device)
            factor = channel_factors(scale, unit.weight_shape, module)
        return cls(parameter, channel_axis(module), factor, device)

    def plain(self) -> Tensor:
        """Return the weight where the network runs, batch norm not folded in."""
        return self.parameter.detach().to(self.device)

    def folded(self) -> Tensor:
        """Return the weight where the network runs, batch norm folded in."""
        return self.plain() if self.factor is None else self.plain() * self.factor


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
    stored = StoredWeight.of(model, unit)
    weight, coded = stored.plain(), stored.folded()
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
                channel_dim=stored.axis,
                group_size=unit.group_size,
            )
            yield grid.fake(weight)


class _Searched(NamedTuple):
    """What was found for one unit's weight."""

    grids: QuickGrids  # of the rows of several units, batch norms folded in
    rows: slice  # its own
    noise: list[float]  # ||W - Q(W)||² / ||W||² at each width
    errors: Tensor | None  # of its rows at the first widths, (b, C, K), if kept


@dataclass(frozen=True, eq=False)
class QuickRounding:
    """How a unit's weight is rounded to several choices.

    Grids are nearly as good as for :func:`rounded_weights`.
    """

    stored: StoredWeight
    unit: Unit
    columns: Mapping[Choice, int]  # of the choices that have a grid
    found: _Searched | None  # None if no choice has a grid
    curve: RateCurve | None  # None if no choice has a rate
    # ||W - Q(W)||² / ||W||² of each choice, batch norm folded in.
    noise: Mapping[Choice, float]

    def errors(self, choices: tuple[Choice, ...]) -> Tensor:
        """Return what choices change the weight by, (choices, *shape).

        Batch norm is not folded in.
        """
        at = [self.columns.get(choice, -1) for choice in choices]
        in_a_row = at[0] >= 0 and at == [*range(at[0], at[0] + len(at))]
        if self.found is not None and in_a_row:
            found = self._grid_errors(self.found, at)
        elif len(choices) == 1 and self.curve is not None:
            folded = self.stored.folded().float()
            step = self.curve.step(choices[0].rate)
            found = (coded_weight(folded, step) - folded)[None]
        else:
            return torch.cat([self.errors((choice,)) for choice in choices])
        if self.stored.factor is not None:
            # A channel that the batch norm multiplies by 0 is lost anyway.
            found = (found / self.stored.factor).nan_to_num_(0.0, 0.0, 0.0)
        return found.to(self.stored.parameter.dtype)

    def _grid_errors(self, searched: _Searched, at: Sequence[int]) -> Tensor:
        axis, found = self.stored.axis, searched.errors
        if found is None or at != [*range(len(found))]:
            rows = channel_rows(self.stored.folded(), axis, self.unit.group_size)
            grids = searched.grids.of_rows(searched.rows)
            found = grids.errors(rows, slice(at[0], at[-1] + 1))
        return as_weights(found, self.unit.weight_shape, axis)


def quickly_rounded(
    model: nn.Module,
    units: Sequence[Unit],
    choices: Sequence[Choice],
    keep: Sequence[Choice] = (),
) -> list[QuickRounding]:
    """Return how the units' weights are rounded to the choices.

    Grids of several units, at all widths, are searched at once.

    Args:
        keep: The first choices, if their errors are to be computed with the grids.
    """
    on_grids = [choice for choice in choices if not choice.rate]
    kept = len(keep) if [*keep] == on_grids[: len(keep)] else 0
    stored = [StoredWeight.of(model, unit) for unit in units]
    searched: Sequence[_Searched | None] = [None] * len(units)
    if on_grids:
        widths = [choice.weight for choice in on_grids]
        searched = _searched(stored, units, widths, kept=kept)
    columns = {choice: column for column, choice in enumerate(on_grids)}
    rated = [choice for choice in choices if choice.rate]
    rounding = []
    for weight, unit, found in zip(stored, units, searched, strict=True):
        curve, noise = (
            None,
            dict(zip(on_grids, found.noise if found else (), strict=True)),
        )
        if rated:
            curve = rate_curve(weight.folded().float())
            noise |= {choice: curve.noise_at(choice.rate) for choice in rated}
        rounding.append(QuickRounding(weight, unit, columns, found, curve, noise))
    return rounding


def _searched(
    stored: Sequence[StoredWeight],
    units: Sequence[Unit],
    widths: Sequence[int],
    *,
    kept: int,
) -> list[_Searched]:
    """Return grids of the rows of each unit's weight, batch norm folded in."""
    columns, sizes = [], []
    for weight, unit in zip(stored, units, strict=True):
        channels = unit.weight_shape[weight.axis]
        columns.append(count := prod(unit.weight_shape) // channels)
        length = unit.group_size or count
        sizes.append((channels * ceil(count / length), length))
    parts: dict[int, tuple[QuickGrids, slice, Tensor | None]] = {}
    sums = []
    for stack in row_stacks(sizes, stored[0].device):
        several = [
            channel_rows(stored[at].folded(), stored[at].axis, units[at].group_size)
            for at in stack
        ]
        rows, counts = stacked_rows(several, [columns[at] for at in stack])
        grids = quick_grids(rows, widths, counts)
        errors = grids.errors(rows, slice(kept)) if kept else None
        sums.append(torch.cat([grids.lost, grids.energy[None]]))
        start = 0
        for at, own in zip(stack, several, strict=True):
            part = slice(start, start := start + len(own))
            its = None if errors is None else errors[:, part, : own.shape[1]]
            parts[at] = grids, part, its
    # One transfer for all: each makes the host wait for a GPU.
    table = torch.cat(sums, 1).double().cpu().numpy()  # (widths + 1, all rows)
    starts = np.cumsum([0, *(sizes[at][0] for at in parts)])[:-1]
    *lost, energy = np.add.reduceat(table, starts, axis=1)
    noise = (np.array(lost) / np.maximum(energy, _TINY)).T.tolist()
    found = {
        at: _Searched(grids, part, n, errors)
        for (at, (grids, part, errors)), n in zip(parts.items(), noise, strict=True)
    }
    return [found[at] for at in range(len(units))]


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
        stored = StoredWeight.of(given.model, unit)
        weight, axis = stored.folded(), stored.axis
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
