"""Errors of rounding, in weights, inputs and outputs, and the scores made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ompq.activation_ranges import tensor_noise
from ompq.bit_widths import FLOAT_BITS
from ompq.entropy_coding.rates import RateCurve, coded_weight, rate_curve
from ompq.errors import ScoreError
from ompq.network.folding import channel_axis, channel_factors, norm_scales
from ompq.network.units import Choice, Table, Unit, by_bits
from ompq.parallel import share_out
from ompq.samples import Batch, arguments, collect, map_batch, model_device
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs
from ompq.weight_ranges import (
    QuickGrids,
    as_weights,
    channel_rows,
    quick_grids,
    row_stacks,
    search_weight,
    stacked_rows,
    weight_noises,
)

_SAMPLES = 32  # inputs on which activation noise is measured
_TINY = 1e-30  # so that nothing is divided by 0


class UnitWeight(NamedTuple):
    """A unit's weight in the network."""

    parameter: nn.Parameter
    axis: int  # of its output channels
    factor: Tensor | None  # what batch norm multiplies it by; None without one
    device: torch.device  # where the network runs

    def plain(self) -> Tensor:
        """Return the weight where the network runs, batch norm not folded in."""
        return self.parameter.detach().to(self.device)

    def folded(self) -> Tensor:
        """Return the weight where the network runs, batch norm folded in."""
        return self.plain() if self.factor is None else self.plain() * self.factor


@torch.no_grad()
def stored_weights(model: nn.Module, units: Sequence[Unit]) -> list[UnitWeight]:
    """Return the weight of each unit."""
    device = model_device(model)
    norms = [model.get_submodule(unit.norm) for unit in units if unit.norm]
    scales = iter(norm_scales(norms))
    found = []
    for unit in units:
        module, factor = called_module(model, unit), None
        if unit.norm:
            scale = next(scales).to(device)
            factor = channel_factors(scale, unit.weight_shape, module)
        parameter = module.get_parameter(unit.parameter.rpartition(".")[2])
        found.append(UnitWeight(parameter, channel_axis(module), factor, device))
    return found


def called_module(model: nn.Module, unit: Unit) -> nn.Module:
    """Return the module that is called for the unit, whose input is the unit's."""
    return model.get_submodule(unit.parameter.rpartition(".")[0])


def weight_choices(choices: Sequence[Choice]) -> list[Choice]:
    """Return the distinct weight choices, with float inputs, fewest bits first.

    Float weights are left out: they lose nothing.
    """
    return by_bits({c.with_float_input for c in choices if c.weight < FLOAT_BITS})


def rounded_weights(
    model: nn.Module, unit: Unit, choices: Sequence[Choice]
) -> Iterator[Tensor]:
    """Yield the unit's weight as each choice rounds it, batch norm not folded in.

    It is rounded to the best grid or, for a coded choice, with the step that gives the
    rate; at 32 bits it is not rounded.
    """
    [stored] = stored_weights(model, [unit])
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


class _Search(NamedTuple):
    """The grids found for one unit's weight."""

    grids: QuickGrids  # of the rows of several units, batch norms folded in
    rows: slice  # its own
    errors: Tensor | None  # at the first widths, (b, *shape), if they are kept


@dataclass(frozen=True, eq=False)
class QuickRounding:
    """How several choices round a unit's weight.

    The grids are nearly as good as those of :func:`rounded_weights`.
    """

    stored: UnitWeight
    unit: Unit
    columns: Mapping[Choice, int]  # of the choices that have a grid
    found: _Search | None  # None if no choice has a grid
    curve: RateCurve | None  # None if no choice has a rate

    def errors(self, choices: tuple[Choice, ...]) -> Tensor:
        """Return rounded weights minus the weight, (choices, *shape).

        Batch norm is not folded in.
        """
        at = [self.columns.get(choice, -1) for choice in choices]
        in_a_row = at[0] >= 0 and at == [*range(at[0], at[0] + len(at))]
        if self.found is not None and in_a_row:
            grids, own, kept = self.found
            if kept is not None and at == [*range(len(kept))]:
                return kept
            axis = self.stored.axis
            rows = channel_rows(self.stored.folded(), axis, self.unit.group_size)
            found = grids.of_rows(own).errors(rows, slice(at[0], at[-1] + 1))
            found = as_weights(found, self.unit.weight_shape, axis)
        elif len(choices) == 1 and self.curve is not None:
            folded = self.stored.folded().float()
            step = self.curve.step(choices[0].rate)
            found = (coded_weight(folded, step) - folded)[None]
        else:
            return torch.cat([self.errors((choice,)) for choice in choices])
        return _unfold(found, self.stored)


def _unfold(errors: Tensor, stored: UnitWeight) -> Tensor:
    """Return the errors of a weight, given those after folding the batch norm in."""
    if stored.factor is not None:
        # A channel that the batch norm multiplies by 0 is lost anyway.
        errors = (errors / stored.factor).nan_to_num_(0.0, 0.0, 0.0)
    return errors.to(stored.parameter.dtype)


def quickly_rounded(
    model: nn.Module,
    units: Sequence[Unit],
    choices: Sequence[Choice],
    keep: Sequence[Choice] = (),
) -> list[QuickRounding]:
    """Return how the choices round the units' weights.

    Grids of several units are searched at once, for all widths.

    Args:
        keep: The first choices, if their errors are to be computed along with the
            grids and kept.
    """
    on_grids = [choice for choice in choices if not choice.rate]
    kept = len(keep) if [*keep] == on_grids[: len(keep)] else 0
    stored = stored_weights(model, units)
    found: dict[int, _Search] = {}
    if on_grids:
        widths = [choice.weight for choice in on_grids]
        for stack in row_stacks(_row_sizes(stored, units), stored[0].device):
            several = [(stored[at], units[at]) for at in stack]
            searched = _search(several, widths, kept=kept)
            found.update(zip(stack, searched, strict=True))
    columns = {choice: column for column, choice in enumerate(on_grids)}
    rated = len(on_grids) < len(choices)
    return [
        QuickRounding(
            weight,
            unit,
            columns,
            found.get(at),
            rate_curve(weight.folded().float()) if rated else None,
        )
        for at, (weight, unit) in enumerate(zip(stored, units, strict=True))
    ]


def _row_sizes(
    stored: Sequence[UnitWeight], units: Sequence[Unit]
) -> list[tuple[int, int]]:
    """Return how many rows each weight has, and how long they are."""
    sizes = []
    for weight, unit in zip(stored, units, strict=True):
        channels = unit.weight_shape[weight.axis]
        count = prod(unit.weight_shape) // channels
        length = unit.group_size or count
        sizes.append((channels * ceil(count / length), length))
    return sizes


def _search(
    several: Sequence[tuple[UnitWeight, Unit]], widths: Sequence[int], *, kept: int
) -> list[_Search]:
    """Search the grids of several weights, batch norms folded in, at once."""
    weights = [
        channel_rows(stored.folded(), stored.axis, unit.group_size)
        for stored, unit in several
    ]
    shapes = [(unit.weight_shape, stored.axis) for stored, unit in several]
    columns = [prod(shape) // shape[axis] for shape, axis in shapes]
    rows, counts = stacked_rows(weights, columns)
    grids = quick_grids(rows, widths, counts)
    lengths = [own.shape[0] for own in weights]
    parts = [slice(*both) for both in pairwise(accumulate(lengths, initial=0))]
    if not kept:
        return [_Search(grids, part, None) for part in parts]
    found = []
    every = torch.split(grids.errors(rows, slice(kept)), lengths, 1)
    for (stored, unit), part, own, its in zip(
        several, parts, weights, every, strict=True
    ):
        errors = its[..., : own.shape[1]] if own.shape[1] < its.shape[2] else its
        errors = as_weights(errors, unit.weight_shape, stored.axis)
        found.append(_Search(grids, part, _unfold(errors, stored)))
    return found


def noise_ratios(several: Sequence[QuickRounding], choices: Sequence[Choice]) -> Table:
    """Return ||W − Q(W)||² / ||W||², batch norms folded in, (units, choices)."""
    table = np.zeros((len(several), len(choices)))
    for column, choice in enumerate(choices):
        if choice.rate:
            table[:, column] = [
                one.curve.noise_at(choice.rate) for one in several if one.curve
            ]
    on_grids = [column for column, choice in enumerate(choices) if not choice.rate]
    if not on_grids:
        return table
    found = [one.found for one in several if one.found]
    stacks = {id(own.grids): own.grids for own in found}
    # One transfer for all: each makes the host wait for a GPU.
    sums = [torch.cat([grids.lost, grids.energy[None]]) for grids in stacks.values()]
    read = torch.cat(sums, 1).double().cpu().numpy()  # (widths + 1, rows)
    ends = np.cumsum([part.shape[1] for part in sums])[:-1]
    by_stack = dict(zip(stacks, np.split(read, ends, 1), strict=True))
    places = [several[0].columns[choices[column]] for column in on_grids]
    for row, own in zip(table, found, strict=True):
        mine = by_stack[id(own.grids)][:, own.rows]
        *lost, energy = np.add.reduceat(mine, [0], axis=1)[:, 0]
        row[on_grids] = np.array(lost)[places] / max(energy, _TINY)
    return table


def _kept(rounded: Tensor, folded: Tensor) -> Tensor:
    """Return the ratio of rounded to folded weights; 1 where there is nothing left."""
    # A channel that the batch norm multiplies by 0 is lost anyway.
    return torch.where(folded == 0, 1.0, rounded / folded)


def weight_table(given: ScoreInputs, damage: Callable[[Unit, Tensor], float]) -> Table:
    """Return the damage of each unit's rounded weights, (units, choices).

    Args:
        damage: Called with every unit and each of its rounded weights; float weights
            do no damage. Processes share the units.
    """
    weights = weight_choices(given.choices)

    def row(unit: Unit) -> list[float]:
        several = rounded_weights(given.model, unit, weights)
        found = {c: damage(unit, w) for c, w in zip(weights, several, strict=True)}
        return [found.get(c.with_float_input, 0.0) for c in given.choices]

    return np.array(share_out(given.graph.units, row), dtype=np.float64)


def check_weights_only(choices: Sequence[Choice], score: str) -> None:
    """Refuse to choose activation bits by a score that sees only weights.

    Pairs such as W4A4 and W8A8 are fine: there the weights decide, as in HAWQ-V3.

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
    needs: ClassVar[Needs] = Needs(
        "none, or one where activation bits are chosen", seconds=0.03
    )

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return noise-to-signal ratios, (units, choices)."""
        return ScoreTable(noise_table(given))


def noise_table(given: ScoreInputs) -> Table:
    """Return noise-to-signal ratios of weights, plus those of inputs if chosen."""
    graph, choices = given.graph, given.choices
    weights = weight_choices(choices)
    widths = [choice.weight for choice in weights if not choice.rate]
    rates = [choice.rate for choice in weights if choice.rate]
    table = np.zeros((len(graph), len(choices)))
    found_weights = stored_weights(given.model, graph.units)
    for row, unit, stored in zip(table, graph.units, found_weights, strict=True):
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


def output_with(model: nn.Module, batch: Batch, weights: Mapping[str, Tensor]) -> Any:
    """Run the network with some weights replaced; return its output."""
    own = map_batch(batch, torch.clone)  # it may change its input in place
    return functional_call(model, dict(weights), *arguments(own))
