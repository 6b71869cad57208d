"""Corrected targets: layers make up for the errors of the layers before them.

A layer of a quantized network reads other inputs than in the float network. For these,
another weight than its own gives outputs nearer to the float layer's: it is fitted by
least squares, and held-out samples decide how far a layer goes towards it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ompq.entropy_coding.rates import ZERO
from ompq.grids import Grid, of_groups
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.network.folding import channel_axis, fold_norm, output_module
from ompq.network.observation import Visited, visit_twins
from ompq.network.units import Unit
from ompq.quantization.error_feedback import (
    coded_with_feedback,
    ridged,
    round_with_feedback,
    sampled_columns,
)
from ompq.quantization.moments import (
    batch_runs,
    channel_moments,
    most_paused,
    restored_outputs,
)
from ompq.quantization.weight_grids import WeightGrid
from ompq.samples import Report, Samples, evaluating

# What is tried: how far to go, with how much regard for errors that no input shows.
_RIDGES = (0.03, 0.3)
_STRENGTHS = (0.0, 0.5, 1.0)
_JUDGING = 4  # every fourth batch judges what was fitted on the others
_CHANNELS = 64  # that are rounded to judge a target; those of a layer are alike
# Positions that targets are fitted on, for each weight of a channel and at least, and
# positions to judge by: so many, or as many as have so many values.
_PER_WEIGHT, _FEWEST = 8, 1 << 14
_JUDGED, _JUDGED_VALUES = 1 << 13, 1 << 25


@dataclass(frozen=True, eq=False)
class CorrectionPass:
    """A pass in which each layer makes up for the errors of those before it."""

    model: nn.Module
    quantized: nn.Module
    units: Sequence[Unit]
    grams: Mapping[str, Tensor]  # of the inputs of layers that may change, by name
    weight_grid: WeightGrid  # finds a grid for a weight, and rounds it

    @torch.no_grad()
    def run(self, samples: Samples, batch_size: int, report: Report) -> None:
        """Round layers anew where that helps, and restore the moments of all.

        Both networks run side by side on the samples, and each layer is changed as
        they reach it, so that later layers read what it returns in the end.
        """
        model, quantized, done = self.model, self.quantized, count(1)
        layers = quantized_layers(quantized)
        units = {u.name: u for u in self.units if u.name in layers and u.calls == 1}
        outputs_of = {n: output_module(model, unit) for n, unit in units.items()}
        modules: list[dict[str, nn.Module]] = [
            {name: model.get_submodule(other) for name, other in outputs_of.items()},
            {name: layers[name] for name in units},
        ]

        def visit(name: str, twins: Sequence[Sequence[Visited]]) -> Sequence[Tensor]:
            report(next(done), len(units))
            layer, (own, read) = layers[name], twins
            outputs = [one.output for one in read]
            wanted = [one.output for one in own]
            corrected = self._correct(units[name], layer, wanted, read)
            if corrected:
                outputs = [layer(one.input) for one in read]
            # A target of least squares has the spread that it should have.
            moments = channel_moments(layer, wanted)
            return restored_outputs(layer, outputs, moments, spread=not corrected)

        with evaluating(model, quantized):
            runs = [
                batch_runs(network, samples, batch_size, len(samples))
                for network in (model, quantized)
            ]
            visit_twins(runs, modules, visit, limit=most_paused(modules[1]))

    def _correct(
        self,
        unit: Unit,
        layer: QuantizedLayer,
        wanted: Sequence[Tensor],
        read: Sequence[Visited],
    ) -> bool:
        """Round a layer anew; return whether held-out samples gain from it."""
        gram = self.grams.get(unit.name)
        if gram is None or gram.shape[1] > 1 or len(read) < 2:
            return False
        module = self.model.get_submodule(unit.name)
        weight = cast(Tensor, module.weight)
        if unit.norm:
            weight, _ = fold_norm(module, self.model.get_submodule(unit.norm))
        target = corrected_target(layer, weight, gram, wanted, read)
        if target is None:
            return False
        axis = channel_axis(layer)
        grid, stored = self.weight_grid(unit, target.weight, axis, target.ridge)
        layer.weight.copy_(stored)
        for old, new in (
            (layer.weight_scale, grid.scale),
            (layer.weight_zero_point, grid.zero_point),
        ):
            old.copy_(of_groups(new, layer.group_size).view_as(old))
        return True


class WantedWeight(NamedTuple):
    """What a layer should round instead of its own weight, and with which ridge."""

    weight: Tensor
    ridge: float


@torch.no_grad()
def corrected_target(
    layer: QuantizedLayer,
    weight: Tensor,
    gram: Tensor,
    wanted: Sequence[Tensor],
    read: Sequence[Visited],
) -> WantedWeight | None:
    """Return the target whose rounded weight is best for held-out samples.

    None if that is the layer's weight as it is rounded already, or if the layer's
    outputs have another shape than the float layer's.

    Args:
        weight: The float layer's, with its batch norm folded, (C, ...).
        gram: Of the float layer's inputs, (groups, 1, K, K).
        wanted: The float layer's outputs, by batch.
        read: What the quantized layer read and returned, by batch.
    """
    if any(
        one.shape != other.output.shape for one, other in zip(wanted, read, strict=True)
    ):
        return None
    seen = _Differences(layer, weight.flatten(1).float())
    seen.read(wanted, read)
    matrices = torch.cat([ridged(gram, ridge) for ridge in _RIDGES])
    rounded = _rounded(layer, seen.candidates(matrices), seen.rows, matrices)
    errors = seen.errors(rounded.transpose(1, 2).reshape(-1, *seen.few.shape))
    least = int(errors.argmin())
    before = layer.rounded_weight().flatten(1)[seen.rows]
    if not errors[least] < seen.errors(before[None].float())[0]:
        return None
    ridge, strength = [*product(_RIDGES, _STRENGTHS)][least]
    shift = seen.shift(ridged(gram, ridge), judging=True)
    return WantedWeight((seen.weight + strength * shift).view_as(weight), ridge)


def _rounded(
    layer: QuantizedLayer, targets: Tensor, rows: Tensor, matrices: Tensor
) -> Tensor:
    """Round targets, (ridges, groups, strengths, C, K), on the layer's present grid."""
    whole = layer.grid_like_weight()
    scale, zero_point = (
        values.expand_as(layer.weight)
        .flatten(1)[rows]
        .view(targets.shape[1], 1, *targets.shape[3:])
        .expand_as(targets)
        .flatten(0, 3)
        for values in (whole.scale, whole.zero_point)
    )
    flat = targets.flatten(0, 3)
    if layer.rate:
        codes = coded_with_feedback(flat / scale, 1.0, matrices, ridge=0.0)
        return ((codes.float() - ZERO) * scale).view_as(targets)
    fitting = not layer.group_size
    if fitting:
        scale, zero_point = scale[:, :1], zero_point[:, :1]
    grid = Grid(scale, zero_point, whole.bits, whole.narrow)
    grid, stored = round_with_feedback(flat, grid, matrices, refit=fitting, ridge=0.0)
    return grid.fake(stored).view_as(targets)


class _Differences:
    """Where the float layer's outputs differ from those of its weight here.

    The differences are (groups, C / groups, positions), and the inputs that they belong
    to, those of the quantized network, (groups, K, positions).
    """

    def __init__(self, layer: nn.Module, weight: Tensor) -> None:
        self.layer, self.weight = layer, weight
        self.groups = int(getattr(layer, "groups", 1))
        apart = -(-len(weight) // _CHANNELS) if self.groups == 1 else 1
        self.rows = torch.arange(0, len(weight), apart, device=weight.device)
        self.few = weight[self.rows]  # the channels that targets are judged by
        self._generator = torch.Generator().manual_seed(0)
        self._fitting, self._judging = _Products(), _Products()
        self._judged: list[tuple[Tensor, Tensor]] = []  # inputs, differences of few

    def read(self, wanted: Sequence[Tensor], read: Sequence[Visited]) -> None:
        """Read all batches."""
        batches, width = len(read), self.weight.shape[1]
        fewest = max(_FEWEST, _PER_WEIGHT * width)
        judged = min(_JUDGED, _JUDGED_VALUES // (width * self.groups))
        every = min(_JUDGING, batches)
        for at, (outputs, one) in enumerate(zip(wanted, read, strict=True), 1):
            judging = at % every == 0
            share = max(batches // every, 1)
            few = -(-judged // share) if judging else -(-fewest // (batches - share))
            for columns, lost in self._sampled(outputs, one.input, few):
                (self._judging if judging else self._fitting).add(columns, lost)
                if judging:
                    some = lost[:, self.rows] if self.groups == 1 else lost
                    self._judged.append((columns, some))

    def _sampled(self, outputs: Tensor, x: Tensor, count: int) -> Any:
        """Yield inputs and differences at some positions of a batch."""
        axis = -1 if isinstance(self.layer, nn.Linear) else 1
        weight = self._grouped(self.weight)
        for columns, places in sampled_columns(
            self.layer, x.float(), outputs.shape, count, self._generator
        ):
            found = outputs.movedim(axis, -1)[places].float()  # (positions, C)
            found = found.reshape(len(found), self.groups, -1).permute(1, 2, 0)
            yield columns, found - weight @ columns

    def _grouped(self, rows: Tensor) -> Tensor:
        return rows.view(self.groups, -1, rows.shape[-1])

    def candidates(self, matrices: Tensor) -> Tensor:
        """Return what to try, (ridges, groups, strengths, C / groups, K)."""
        found = []
        for matrix in torch.split(matrices, self.groups):
            shift = self._grouped(self.shift(matrix, judging=False)[self.rows])
            weight = self._grouped(self.few)
            found.append(torch.stack([weight + s * shift for s in _STRENGTHS], 1))
        return torch.stack(found)

    def shift(self, matrix: Tensor, *, judging: bool) -> Tensor:
        """Return what the least squares add to the weight, (C, K).

        ``judging`` uses the samples that judge, too.
        """
        products = self._fitting.covariance()
        if judging:
            share = self._judging.count / (self._fitting.count + self._judging.count)
            products = torch.lerp(products, self._judging.covariance(), share)
        factor = torch.linalg.cholesky(matrix[:, 0])
        return torch.cholesky_solve(products.mT, factor).mT.flatten(0, 1)

    def errors(self, rounded: Tensor) -> Tensor:
        """Return the squared error of outputs of weights, (T, C, K), for each, (T,)."""
        change = (rounded - self.few).view(
            len(rounded), self.groups, -1, rounded.shape[2]
        )
        lost = torch.cat([one - change @ columns for columns, one in self._judged], -1)
        # The bias gives each channel its mean.
        return lost.sub_(lost.mean(-1, keepdim=True)).square_().sum((1, 2, 3))


class _Products:
    """Sums over inputs and differences, and over their products."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, columns: Tensor, lost: Tensor) -> None:
        """Add some positions."""
        if not self.count:  # about a mean, since single precision is short
            self._shift = columns.mean(-1, keepdim=True)
            self._sums: tuple[Tensor | float, ...] = (0.0, 0.0, 0.0)
        columns = columns - self._shift
        new = columns.sum(-1), lost.sum(-1), lost @ columns.mT
        self._sums = tuple(a + b for a, b in zip(self._sums, new, strict=True))
        self.count += columns.shape[-1]

    def covariance(self) -> Tensor:
        """Return the mean product of differences and inputs, about their means."""
        x, y, products = (torch.as_tensor(each) / self.count for each in self._sums)
        return products - y[..., None] * x[:, None]
