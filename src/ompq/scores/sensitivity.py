"""Sensitivity: the noise of rounding, weighed by how much of it reaches the answers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.offload import visiting
from ompq.recording import (
    Watch,
    function_name,
    is_linear_map,
    tensors_in,
    with_first_tensor,
    with_tensors,
)
from ompq.samples import (
    arguments,
    batch_length,
    class_rows,
    first_tensor,
    model_device,
    to_device,
)
from ompq.scores.derivatives import differentiating, weighted_labels
from ompq.scores.orm import OrmSettings, measure_orm, sample_rows
from ompq.scores.rounding_errors import noise_table, quickly_rounded, weight_choices
from ompq.scores.table import Needs, ScoreInputs
from ompq.units import Choice, ScoreTable, Table

# Above this width errors are so small that the divergence follows the noise.
_WIDEST_MEASURED = 4

# Samples that run forward and backward together on a CPU, or as many as take so many
# multiply-accumulates; a GPU takes all.
_CPU_BATCH, _CPU_MACS = 16, 1 << 24
# Of the largest ratio of expected divergence to noise: smaller ones count as much.
_VANISHED = 1e-12
# Of a unit's weight.
_OTHER_READERS = ("embedding", "lstm", "gru", "rnn_tanh", "rnn_relu")

# Rounded weights are kept for the next batch if they are at most this many.
_KEPT = 1 << 27
Rounding: TypeAlias = Callable[[], Tensor]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sensitivity:
    """Weighted geometric mean of weight noise and the divergence expected of it.

    To second order the divergence from the float network is half the mean of
    (gradient · error)². The error is the change of a unit's output; the gradient is
    that of one sample's log likelihood of an answer that the network itself draws (the
    Fisher information). Errors of different channels are taken to be independent, and
    their means to be restored, as quantizing does. Answers do not depend on what all
    channels of a classifier have in common: for units with one output for each sample,
    it is the geometric mean of taking channels as independent and as a whole. One
    backward pass serves all units.
    The noise alone knows nothing of the network behind a unit, the expectation alone
    trusts few samples and small errors; together they decide better than either.

    Attributes:
        samples: How many inputs are used, at most.
        power: Of the expectation; the noise has the power that is left to 1.
        seed: Seed of the answers that are drawn.
        orm: How ORM is measured, for the report; the damage does not depend on it.
    """

    samples: int = 64
    power: float = 0.7
    seed: int = 0
    orm: OrmSettings = OrmSettings(per_function=True)

    summary: ClassVar[str] = "weight_noise × what of it is expected at the output"
    needs: ClassVar[Needs] = Needs(
        "about three for all units, one for each width", gradients=True
    )

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return geometric means, (units, choices)."""
        graph, model, choices = given.graph, given.model, given.choices
        weights = weight_choices(choices)
        measured = _measured(weights)
        wanted = [weights[column] for column in measured]
        found = [quickly_rounded(model, unit, weights) for unit in graph.units]
        noise = torch.stack([one for _, one in found]).double().cpu().numpy()
        keys = [id(model.get_parameter(unit.parameter)) for unit in graph.units]
        # Of a large network, one layer's rounded weights exist at a time.
        few = len(wanted) * sum(unit.weights for unit in graph.units) <= _KEPT
        keep: Any = cache if few else lambda one: one
        several: Any = ([partial(keep(one), c) for c in wanted] for one, _ in found)
        try:
            rows = self._expected(given, dict(zip(keys, several, strict=True)))
            expected, alone = np.array([rows[key] for key in keys]), noise[:, measured]
            ratio = np.divide(
                expected, alone, out=np.zeros_like(expected), where=alone > 0
            )
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning("no gradients, so only the noise decides: %s", error)
            ratio = np.ones((len(graph), len(measured)))
        factor = self._factor(ratio, weights, measured)
        by_weight = np.concatenate([noise * factor, np.zeros((len(graph), 1))], 1)
        columns = dict(zip(weights, range(len(weights)), strict=True))
        table = by_weight[:, [columns.get(c.with_float_input, -1) for c in choices]]
        if len({c.activation for c in choices}) > 1:
            inputs = [Choice(FLOAT_BITS, c.activation) for c in choices]
            table = table + factor[:, :1] * noise_table(replace(given, choices=inputs))
        return measure_orm(graph, model, given.samples, self.orm).table(table)

    def _factor(
        self, ratio: Table, weights: Sequence[Choice], measured: Sequence[int]
    ) -> Table:
        """Return what noise is multiplied by, (units, weights), about 1 on average."""
        # Where no gradient is left, at the far end of a deep chain, noise decides.
        ratio = np.nan_to_num(ratio)
        ratio = np.maximum(ratio, _VANISHED * (ratio.max() or 1.0))
        places = np.array([c.bits + 99 * (c.rate > 0) for c in weights])
        nearest = np.abs(places[:, None] - places[measured]).argmin(1)
        factor = ratio[:, nearest] ** self.power
        normalised: Table = factor / factor[:, 0].mean()
        return normalised

    def _expected(
        self, given: ScoreInputs, rounded: Mapping[int, list[Rounding]]
    ) -> dict[int, list[float]]:
        """Return half the mean of (gradient · error)² of each weight's roundings."""
        model, samples = given.model, given.samples.first(self.samples)
        device = model_device(model)
        macs = sum(unit.macs for unit in given.graph.units)
        few = max(_CPU_BATCH, _CPU_MACS // max(macs, 1))
        size = len(samples) if device.type == "cuda" else few
        generator = torch.Generator().manual_seed(self.seed)
        totals, done = [], 0
        with differentiating(model):
            for batch in samples.batches(size):
                args, kwargs = arguments(to_device(batch, device))
                count = batch_length(batch)
                watch = _Errors(model, rounded, count)
                with watch:
                    output = model(*args, **kwargs)
                log_p = class_rows(first_tensor(output).float()).log_softmax(1)
                labels, counts = weighted_labels(log_p, generator, count)
                loss = -log_p.gather(1, labels[:, None]).sum()
                torch.autograd.grad(loss, watch.zero)
                totals.append(watch.squares(counts))
                done += count
                given.progress(done, len(samples), "expecting divergence")
        mean = torch.stack(totals).sum(0).prod(0).sqrt() / (2 * len(samples))
        return dict(zip(rounded, mean.tolist(), strict=True))


class _Errors(Watch):
    """Multiplies the errors that rounded weights cause by the gradients they meet."""

    def __init__(
        self, model: nn.Module, rounded: Mapping[int, list[Rounding]], count: int
    ) -> None:
        super().__init__()
        self.model, self.rounded, self.count = model, rounded, count
        # What gradients are asked of, so that they pass all outputs and no weight.
        self.zero = torch.zeros((), device=model_device(model), requires_grad=True)
        # Of each weight and number of channels, which a weight that is tied may have
        # two of: gradient · error of each sample and channel, (choices, N, C).
        self.products: dict[tuple[int, int], Tensor] = {}
        self.single: set[int] = set()  # weights with one output for each sample

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        output = super().__torch_function__(func, types, *given)
        weights = [t for t in tensors_in(given) if id(t) in self.rounded]
        name = function_name(func)
        if not weights or not (is_linear_map(name) or name in _OTHER_READERS):
            return output
        plain = next(tensors_in(output)).detach()

        def hook(gradient: Tensor) -> None:
            products = self._products(name, gradient)
            for weight in weights:
                found = []
                for rounding in self.rounded[id(weight)]:
                    other = rounding()
                    tensors = (other if t is weight else t for t in tensors_in(given))
                    moved_args, moved = with_tensors(given, tensors)
                    # A GPU's backward pass has a thread of its own.
                    with visiting(self.model):
                        moved_to = next(tensors_in(func(*moved_args, **moved)))
                    found.append(products(moved_to - plain))
                several = torch.stack(found)
                if several[0].numel() == plain.numel():
                    self.single.add(id(weight))
                key = id(weight), several.shape[2]
                self.products[key] = self.products.get(key, 0.0) + several

        def hooked(tensor: Tensor) -> Tensor:
            # A sum, so that no later call changes in place what was kept.
            tensor = tensor + self.zero.to(tensor.dtype)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            return tensor

        return with_first_tensor(output, hooked)

    def _products(self, function: str, gradient: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what multiplies errors by the gradient, to (N, C).

        The mean of the error in each channel is taken off first.
        """
        conv = function.startswith("conv")  # (N, C, ...), not (..., C)
        channel = 1 if conv else gradient.ndim - 1
        channels = gradient.shape[channel]
        others = [dim for dim in range(gradient.ndim) if dim != channel]

        def by_channel(values: Tensor) -> Tensor:
            if values.shape == (self.count, channels):
                return values
            summed = values.flatten(2).sum(2) if conv else values
            rows = sample_rows(summed, self.count)
            return rows.reshape(self.count, -1, channels).sum(1)

        slope = by_channel(gradient)

        def products(error: Tensor) -> Tensor:
            return by_channel(gradient * error) - error.mean(others) * slope

        return products

    def squares(self, counts: Tensor) -> Tensor:
        """Return sums over samples, counted so often: (2, weights, choices).

        First of the squares of all channels, then, where samples have one output each,
        of the squares of their sums. Weights that no gradient reached have 0.
        """
        choices = len(next(iter(self.rounded.values())))
        total = counts.new_zeros(2, len(self.rounded), choices)
        rows = {key: row for row, key in enumerate(self.rounded)}
        for (key, _), found in self.products.items():
            products = found.double()  # (choices, N, C)
            independent = products.square().sum(2) @ counts
            whole = products.sum(2).square() @ counts
            total[0, rows[key]] += independent
            total[1, rows[key]] += whole if key in self.single else independent
        return total


def _measured(weights: Sequence[Choice]) -> list[int]:
    """Return the columns that are measured: each takes memory for all weights.

    Rates lie so close together that one in each bit is enough.
    """
    found = {
        (choice.rate > 0, ceil(choice.bits)): column
        for column, choice in enumerate(weights)
        if choice.bits <= _WIDEST_MEASURED
    }
    return sorted(found.values()) or [0]
