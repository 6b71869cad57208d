"""Sensitivity: rounding noise, weighted by how much of it reaches the output."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from operator import add
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from ompq.bit_widths import FLOAT_BITS
from ompq.configs import OrmSettings
from ompq.network.observation import (
    Watch,
    function_name,
    is_linear_map,
    tensors_in,
    with_first_tensor,
    with_tensors,
)
from ompq.network.units import Choice, Table, Unit
from ompq.offload import visiting
from ompq.samples import (
    arguments,
    batch_length,
    cudnn_kernels,
    evaluating,
    fitting_batch,
    model_device,
    to_device,
)
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs
from ompq.scores.orthogonality import (
    ORM_BATCH,
    BatchProducts,
    Grams,
    OrmResult,
    measure_orm,
    orm_result,
    sample_rows,
)
from ompq.scores.weight_noise import (
    QuickRounding,
    noise_ratios,
    noise_table,
    quickly_rounded,
    weight_choices,
)
from ompq.weight_ranges import elements_at_once

# Above this width errors are so small that the divergence follows the noise.
_WIDEST_MEASURED = 4

# Samples that run forward and backward together on a CPU, or as many as take so many
# multiply-accumulates; a GPU takes all.
_CPU_BATCH, _CPU_MACS = 16, 1 << 24
# Ratios of expected divergence to noise are at least this share of the largest.
_VANISHED = 1e-12
# Functions that read a unit's weight and are no linear maps.
_OTHER_READERS = ("embedding", "lstm", "gru", "rnn_tanh", "rnn_relu")

# How many output errors, of several choices, a device computes at once; a CPU takes one
# choice at a time.
_AT_ONCE = {"cuda": 1 << 28}
# From so many positions of a sample's output on, gradients of the weight cost less than
# the outputs of its errors.
_FEWEST_POSITIONS = 128
# Their values for several samples, together.
_AT_ONCE_ON_CPU = 1 << 22
_CONV_GRADIENTS: Mapping[str, Callable[..., Tensor]] = {
    "conv1d": conv1d_weight,
    "conv2d": conv2d_weight,
    "conv3d": conv3d_weight,
}
# Errors of weights are kept for the next batch if there are at most this many.
_KEPT = 1 << 27
# Returns how several choices change a weight, (choices, *shape).
WeightErrors: TypeAlias = Callable[[], Tensor]

logger = logging.getLogger(__name__)


@contextmanager
def differentiating(model: nn.Module) -> Iterator[None]:
    """Enable repeatable gradients of a network in eval mode."""
    # The fast kernels of attention have no second derivative.
    with (
        evaluating(model),
        torch.enable_grad(),
        cudnn_kernels(repeatable=True),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


@dataclass(frozen=True)
class Sensitivity:
    """Weighted geometric mean of weight noise and the divergence expected from it.

    To second order, the divergence from the float network is half the mean of
    (gradient · error)². The error is the change of a unit's output; the gradient is
    that of the log likelihood of an answer drawn from the network's own output, one
    sample at a time (the Fisher information; see :mod:`ompq.outputs`). Errors of
    different channels are assumed to be independent, and their means to be corrected,
    as quantizing does. A classifier's answer does not depend on what all its channels
    have in common: for units with one output per sample, the expectation is the
    geometric mean of treating channels as independent and as one sum. One backward pass
    serves all units.

    Noise alone knows nothing about the network behind a unit; the expectation alone
    relies on few samples and on small errors. Together they decide better than either.

    Both are about rounding to nearest, which error feedback and reconstruction improve
    on, most of all in convolutions that read several positions: neighbouring inputs are
    alike, so errors of the weights can cancel. Nothing improves on it in tables that
    are looked up (embeddings): each of their weights is an output.

    Attributes:
        samples: How many inputs are used, at most.
        power: Exponent of the expectation; the noise has the exponent 1 − power.
        spatial: How much of the damage reconstruction leaves in a convolution over
            several positions and channels, relative to other layers.
        tables: How much of it remains in a table that is looked up, relative to other
            layers.
        seed: Seed for drawing classes.
        orm: How ORM is measured for the report; the damage does not depend on it. It
            is estimated from pairs of samples within the batches of the same pass.
    """

    samples: int = 64
    power: float = 0.7
    spatial: float = 0.7
    tables: float = 10.0
    seed: int = 0
    orm: OrmSettings = OrmSettings(per_function=True)

    summary: ClassVar[str] = "weight_noise × its expected effect on the output"
    needs: ClassVar[Needs] = Needs(
        "about three for all units and widths", gradients=True, seconds=4.8
    )

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return geometric means, (units, choices)."""
        graph, model, choices = given.graph, given.model, given.choices
        weights = weight_choices(choices)
        measured = _measured_columns(weights)
        wanted = tuple(weights[column] for column in measured)
        # In a large network, errors exist for one layer and one choice at a time.
        few = len(wanted) * sum(unit.weights for unit in graph.units) <= _KEPT
        found = quickly_rounded(model, graph.units, weights, wanted if few else ())
        expected, orm = None, None
        try:
            errors = _weight_errors(found, wanted, keep=few)
            rows, orm = self._expected(given, errors, choices=len(wanted))
            expected = np.array([rows[id(one.stored.parameter)] for one in found])
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning("no gradients, so only the noise decides: %s", error)
        # Read last: until then, the host queues work without waiting for a GPU.
        noise = noise_ratios(found, weights)
        ratio = np.ones((len(graph), len(measured)))
        if expected is not None:
            alone, nothing = noise[:, measured], np.zeros_like(expected)
            ratio = np.divide(expected, alone, out=nothing, where=alone > 0)
        factor = self._factor(ratio, weights, measured)
        by_weight = np.concatenate([noise * factor, np.zeros((len(graph), 1))], 1)
        columns = dict(zip(weights, range(len(weights)), strict=True))
        table = by_weight[:, [columns.get(c.with_float_input, -1) for c in choices]]
        if len({c.activation for c in choices}) > 1:
            inputs = [Choice(FLOAT_BITS, c.activation) for c in choices]
            table = table + factor[:, :1] * noise_table(replace(given, choices=inputs))
        left = np.array([self._left(unit) for unit in graph.units])
        orm = orm or measure_orm(graph, model, given.samples, self.orm)
        return orm.table(left[:, None] * table)

    def _left(self, unit: Unit) -> float:
        """Return how much of its damage later steps leave, relative to most layers."""
        return {"conv": self.spatial, "embedding": self.tables}.get(unit.kind, 1.0)

    def _factor(
        self, ratio: Table, weights: Sequence[Choice], measured: Sequence[int]
    ) -> Table:
        """Return the factors that noise is multiplied by, (units, weights).

        They are about 1 on average.
        """
        # Where gradients have vanished, as at the start of a deep chain, noise decides.
        ratio = np.nan_to_num(ratio)
        ratio = np.maximum(ratio, _VANISHED * (ratio.max() or 1.0))
        places = np.array([c.bits + 99 * (c.rate > 0) for c in weights])
        nearest = np.abs(places[:, None] - places[measured]).argmin(1)
        factor = ratio[:, nearest] ** self.power
        normalised: Table = factor / factor[:, 0].mean()
        return normalised

    def _expected(
        self,
        given: ScoreInputs,
        rounded: Mapping[int, list[WeightErrors]],
        *,
        choices: int,
    ) -> tuple[dict[int, list[float]], OrmResult | None]:
        """Return half the mean of (gradient · error)² for each weight and choice.

        Also return ORM if there are samples to compare.
        """
        model, samples = given.model, given.samples.first(self.samples)
        outputs = given.outputs
        device, size = model_device(model), _batch_size(given, len(samples))
        generator = torch.Generator().manual_seed(self.seed)
        totals, done, shared = [], 0, list[BatchProducts]()
        with differentiating(model), _frozen(model):
            for batch in samples.batches(size):
                args, kwargs = arguments(to_device(batch, device))
                count = batch_length(batch)
                errors = _Errors(model, rounded, choices=choices, count=count)
                paired = 2 <= count <= ORM_BATCH
                grams = Grams(given.graph, model, self.orm, count) if paired else None
                watch = grams or Watch()
                watch.change = errors.hooked
                with watch:
                    output = model(*args, **kwargs)
                loss = outputs.drawn_loss(outputs.read(output), generator, count)
                torch.autograd.grad(loss, errors.zero)
                totals.append(errors.squares())
                if grams is not None:
                    shared.append(BatchProducts.of(grams.matrices()))
                done += count
                given.progress(done, len(samples), "expecting divergence")
        mean = np.sqrt(np.sum(totals, 0).prod(0)) / (2 * len(samples))
        if not mean.any():
            logger.warning(
                "no error of a weight reaches the output, which was read as %s, so the "
                "noise of the weights alone decides",
                outputs,
            )
        orm = None
        if shared:
            products = reduce(add, shared).products
            orm = orm_result(given.graph, self.orm, products)
        return dict(zip(rounded, mean.tolist(), strict=True)), orm


def _weight_errors(
    found: Sequence[QuickRounding], wanted: tuple[Choice, ...], *, keep: bool
) -> dict[int, list[WeightErrors]]:
    """Return functions that compute the errors of each weight, by the weight's id.

    To ``keep`` errors, all choices are computed together, once; otherwise one choice
    at a time, each time they are needed.
    """
    parts = [wanted] if keep else [(choice,) for choice in wanted]
    by_weight: dict[int, list[WeightErrors]] = {}
    for one in found:
        several: list[Any] = [partial(one.errors, part) for part in parts]
        by_weight[id(one.stored.parameter)] = (
            [*map(cache, several)] if keep else several
        )
    return by_weight


def _batch_size(given: ScoreInputs, samples: int) -> int:
    """Return how many samples run forward and backward at once."""
    if model_device(given.model).type == "cuda":
        return samples
    macs = sum(unit.macs for unit in given.graph.units)
    size = max(_CPU_BATCH, _CPU_MACS // max(macs, 1))
    # A backward pass keeps all outputs, so large ones leave room for fewer samples.
    return max(fitting_batch(given.model, given.samples, 2 * size) // 2, 1)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Disable the gradients of weights within the block."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in trainable:
            # Not the attribute: it has no setter while weights are offloaded.
            weight.requires_grad_(False)  # noqa: FBT003
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_()


class _Products(NamedTuple):
    """The parts of gradient · error for one weight, N samples and C channels."""

    uncentred: Tensor  # sums of gradient · error, (choices, N, C)
    means: Tensor  # means of the errors, (choices, C)
    slopes: Tensor  # sums of gradients, (N, C)

    def centred(self) -> Tensor:
        """Return sums of gradient · (error − its mean), (choices, N, C)."""
        return self.uncentred - self.means[:, None] * self.slopes


class _Errors:
    """Multiplies the errors that rounded weights cause by the gradients they meet."""

    def __init__(
        self,
        model: nn.Module,
        rounded: Mapping[int, list[WeightErrors]],
        *,
        choices: int,
        count: int,
    ) -> None:
        self.model, self.rounded = model, rounded
        self.choices, self.count = choices, count
        device = model_device(model)
        # The only input of the pass that has a gradient: weights are frozen.
        self.zero = torch.zeros((), device=device, requires_grad=True)
        self.at_once = _AT_ONCE.get(device.type, 1)
        # By weight and number of channels: a tied weight may have two of those.
        self.products: dict[tuple[int, int], _Products] = {}
        self.single: set[int] = set()  # weights with one output per sample

    def hooked(self, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Return a call's output, with a hook on it if the call read a weight."""
        name, given = function_name(func), (args, kwargs)
        if not (is_linear_map(name) or name in _OTHER_READERS):
            return output
        weights = [t for t in tensors_in(given) if id(t) in self.rounded]
        if not weights:
            return output
        multiplied = self._multiplied(func, given, output)
        size = next(tensors_in(output)).numel()

        def hook(gradient: Tensor) -> None:
            for weight in weights:
                several = (errors() for errors in self.rounded[id(weight)])
                # A GPU's backward pass has a thread of its own.
                with visiting(self.model):
                    found = multiplied(gradient, weight, several)
                if found.slopes.numel() == size:
                    self.single.add(id(weight))
                self._add(id(weight), found)

        def with_hook(tensor: Tensor) -> Tensor:
            # Outputs of linear maps are not read again: later calls may change them.
            if not (tensor.requires_grad and is_linear_map(name)):
                tensor = tensor + self.zero.to(tensor.dtype)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            return tensor

        return with_first_tensor(output, with_hook)

    def _multiplied(
        self, func: Any, given: tuple[Any, Any], output: Any
    ) -> Callable[[Tensor, Tensor, Iterable[Tensor]], _Products]:
        """Return a function that multiplies a call's errors by gradients.

        It takes the gradient of the call's output, the weight, and errors of that.
        """
        if by_sample := _SampleGradients.of(func, given, output, self.count):
            return lambda gradient, _weight, several: by_sample.products(
                gradient, [*several]
            )
        caused, name = _caused_by(func, given, output), function_name(func)
        at_once = max(1, self.at_once // next(tensors_in(output)).numel())

        def multiplied(
            gradient: Tensor, weight: Tensor, several: Iterable[Tensor]
        ) -> _Products:
            products = self._products(name, gradient)
            return products(
                caused(weight, part)
                for each in several
                for part in _split(each, at_once)
            )

        return multiplied

    def _add(self, weight: int, found: _Products) -> None:
        key = weight, found.slopes.shape[1]
        before = self.products.get(key)
        if before is not None:  # the weight is tied
            both = before.centred() + found.centred()
            found = _Products(both, *map(torch.zeros_like, found[1:]))
        self.products[key] = found

    def _products(
        self, function: str, gradient: Tensor
    ) -> Callable[[Iterable[Tensor]], _Products]:
        """Return a function that multiplies errors by the gradient.

        It takes the errors of some choices at a time.
        """
        conv = function.startswith("conv")  # (N, C, ...), not (..., C)
        channel = 1 if conv else gradient.ndim - 1
        channels = gradient.shape[channel]
        others = [dim + 1 for dim in range(gradient.ndim) if dim != channel]
        inner = [*range(3, gradient.ndim + 1)]  # heights and widths of images

        def by_channel(values: Tensor) -> Tensor:
            summed = values.sum(inner) if conv and inner else values
            if summed.shape[1:] == (self.count, channels):
                return summed
            if not any(size % self.count == 0 for size in summed.shape[1:-1]):
                # All samples share this output, as they share positions. Their
                # gradients are independent: the expected square of the sum is the sum
                # of the squares.
                whole: Tensor = summed.flatten(1, -2).sum(1, keepdim=True)
                return (whole / math.sqrt(self.count)).expand(-1, self.count, -1)
            rows = (sample_rows(one, self.count) for one in summed)
            parts = [one.reshape(self.count, -1, channels).sum(1) for one in rows]
            return torch.stack(parts)

        slopes = by_channel(gradient[None])[0]

        def products(errors: Iterable[Tensor]) -> _Products:
            made = [(by_channel(gradient * e), e.mean(others)) for e in errors]
            uncentred, means = map(_join, zip(*made, strict=True))
            # Nothing corrects the mean error of weights that are rounded in place.
            return _Products(uncentred, means * is_linear_map(function), slopes)

        return products

    def squares(self) -> Table:
        """Return sums of squares over the samples, (2, weights, choices).

        The first are squares of each channel; the second are squares of the channels'
        sum where samples have one output each, and the same as the first elsewhere.
        Weights that no gradient reached have 0.
        """
        total = np.zeros((2, len(self.rounded), self.choices))
        rows = {key: row for row, key in enumerate(self.rounded)}
        for part in self._parts(elements_at_once(self.zero.device)):
            # Several weights at once: on a GPU, the number of calls is what counts.
            several = zip(*(self.products[key] for key in part), strict=True)
            made = _Products(*(torch.cat(column, -1) for column in several))
            products = made.centred().double()
            squared = products.square().sum(1)  # (choices, C)
            sizes = [channels for _, channels in part]
            single = [at for at, (key, _) in enumerate(part) if key in self.single]
            wholes = [
                own.sum(2).square().sum(1)
                for at, own in enumerate(torch.split(products, sizes, 2))
                if at in single
            ]
            found = torch.cat([squared, *(one[:, None] for one in wholes)], 1)
            sums = found.cpu().numpy()  # (choices, C + single)
            starts = np.cumsum([0, *sizes])
            independent = np.add.reduceat(sums[:, : starts[-1]], starts[:-1], axis=1).T
            together = independent.copy()
            together[single] = sums[:, starts[-1] :].T
            for (key, _), *both in zip(part, independent, together, strict=True):
                total[:, rows[key]] += both
        return total

    def _parts(self, most: int) -> Iterator[list[tuple[int, int]]]:
        """Yield keys of products, a limited number of elements at a time."""
        part: list[tuple[int, int]] = []
        room = most
        for key, (products, *_) in self.products.items():
            if part and products.numel() > room:
                yield part
                part, room = [], most
            part.append(key)
            room -= products.numel()
        if part:
            yield part


class _SampleGradients(NamedTuple):
    """Multiplies errors of a weight by its gradients, sample by sample.

    What many positions of an output have in common is summed up first, so that several
    errors cost little more than one.
    """

    inputs: Tensor  # (N, C, ...) of a convolution, (N, ..., K) of a linear layer
    version: int  # of the inputs, which may be changed in place later
    shape: torch.Size  # of the weight
    settings: tuple[Any, ...]  # stride, padding, dilation and groups of a convolution

    @classmethod
    def of(
        cls, func: Any, given: tuple[Any, Any], output: Any, count: int
    ) -> "_SampleGradients | None":
        """Return them for a call, or None where outputs of errors are cheaper.

        That is with few positions for each sample, and on a GPU, where one call
        computes the outputs of all errors.
        """
        (args, kwargs), name = given, function_name(func)
        result = next(tensors_in(output))
        if result.device.type != "cpu" or len(args) < 2:
            return None
        inputs, weight = args[:2]
        samples_first = len(inputs) == count == len(result)
        positions = result.numel() // (count * len(weight))
        if not samples_first or positions < _FEWEST_POSITIONS:
            return None
        if name == "linear":
            return cls(inputs.detach(), _version(inputs), weight.shape, ())
        if name not in _CONV_GRADIENTS or inputs.dim() != weight.dim():
            return None
        usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        settings = tuple(
            args[at] if at < len(args) else kwargs.get(key, default)
            for at, (key, default) in enumerate(usual.items(), start=3)
        )
        if isinstance(settings[1], str):
            return None
        return cls(inputs.detach(), _version(inputs), weight.shape, settings)

    def products(self, gradient: Tensor, several: Sequence[Tensor]) -> "_Products":
        """Return the products of gradients and errors, (choices, *shape) each."""
        if _version(self.inputs) != self.version:
            raise RuntimeError("what a layer reads is changed in place later")
        channels = self.shape[0]
        # The choices of a channel together: (C, choices, K).
        errors = _join(tuple(several)).flatten(2).transpose(0, 1).contiguous()
        few = max(1, _AT_ONCE_ON_CPU // self.shape.numel())
        found = []
        for some in torch.split(torch.arange(len(gradient)), few):
            own = [self._weight_gradient(at, gradient) for at in some.tolist()]
            stacked = torch.stack(own).permute(1, 2, 0)  # (C, K, samples)
            found.append(torch.bmm(errors, stacked))
        uncentred = torch.cat(found, 2).permute(1, 2, 0)  # (choices, N, C)
        means = torch.bmm(errors, self._mean_input(gradient)).squeeze(2).T
        others = [d for d in range(gradient.dim()) if d != 0]
        others.remove(1 if self.settings else gradient.dim() - 1)
        slopes = gradient.sum(others) if others else gradient
        return _Products(uncentred, means, slopes.reshape(len(gradient), channels))

    def _weight_gradient(self, at: int, gradient: Tensor) -> Tensor:
        """Return the gradient of the weight for one sample, (C, K)."""
        inputs, own = self.inputs[at : at + 1], gradient[at : at + 1]
        if not self.settings:
            return own.flatten(0, -2).T @ inputs.flatten(0, -2)
        gradient_of = _CONV_GRADIENTS[f"conv{gradient.dim() - 2}d"]
        return gradient_of(inputs, self.shape, own, *self.settings).flatten(1)

    def _mean_input(self, gradient: Tensor) -> Tensor:
        """Return the mean of what the weights are multiplied by, (C, K, 1)."""
        if not self.settings:
            mean = self.inputs.flatten(0, -2).mean(0)[None]
        else:
            # One channel of ones for each group: its gradient is the sum.
            groups = self.settings[-1]
            ones = gradient.new_ones(len(gradient), groups, *gradient.shape[2:])
            gradient_of = _CONV_GRADIENTS[f"conv{gradient.dim() - 2}d"]
            shape = (groups, *self.shape[1:])
            total = gradient_of(self.inputs, shape, ones, *self.settings).flatten(1)
            mean = total / (ones.numel() // groups)
        return mean.repeat_interleave(self.shape[0] // len(mean), 0)[:, :, None]


def _split(errors: Tensor, at_once: int) -> Sequence[Tensor]:
    few = errors.shape[0] <= at_once
    return (errors,) if few else torch.split(errors, at_once)


def _join(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _caused_by(
    func: Any, given: tuple[Any, Any], output: Any
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes how errors of a weight change a call's output.

    It takes the weight and its errors, (choices, ...), and returns (choices, ...).
    """
    name = function_name(func)
    if not is_linear_map(name):
        plain = next(tensors_in(output)).detach()

        def changed(weight: Tensor, errors: Tensor) -> Tensor:
            own = weight.detach().to(errors.device)
            found = [_with_weight(func, given, weight, own + one) for one in errors]
            return torch.stack(found) - plain

        return changed
    # Without its bias it maps errors to errors.
    args, kwargs = given
    args = (*args[:2], *([None] * len(args[2:3])), *args[3:])
    bare = args, {key: value for key, value in kwargs.items() if key != "bias"}
    before = [(tensor, _version(tensor)) for tensor in tensors_in(bare)]

    def caused(weight: Tensor, errors: Tensor) -> Tensor:
        if any(_version(tensor) != version for tensor, version in before):
            raise RuntimeError(f"what {name} reads is changed in place later")
        run = partial(_with_weight, func, bare, weight)
        if len(errors) == 1:
            return run(errors[0])[None]
        if _stackable(name, bare, weight):
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            return _stack(run, name, groups, errors)
        return torch.stack([run(one) for one in errors])

    return caused


def _stackable(name: str, given: tuple[Any, Any], weight: Tensor) -> bool:
    """Whether one call with stacked weights returns the stacked outputs."""
    args, _ = given
    if len(args) < 2 or args[1] is not weight:
        return False
    known = re.fullmatch(r"conv(_transpose)?[123]d", name)
    return name == "linear" or (known is not None and args[0].dim() == weight.dim())


def _stack(
    run: Callable[[Tensor], Tensor], name: str, groups: int, weights: Tensor
) -> Tensor:
    """Return the outputs of a linear map for several weights, from one call."""
    count = weights.shape[0]
    if name == "linear":
        output = run(weights.flatten(0, 1))  # (..., choices · C)
        return output.reshape(*output.shape[:-1], count, -1).movedim(-2, 0)
    if groups == 1 and "transpose" not in name:
        output = run(weights.flatten(0, 1))  # (N, choices · C, ...)
        shape = output.shape
        return output.reshape(shape[0], count, -1, *shape[2:]).transpose(0, 1)
    if "transpose" in name:  # (in, C/groups, ...)
        stacked = weights.movedim(0, 1).flatten(1, 2)
    else:  # the channels of a group stay together
        shape = weights.shape[2:]
        stacked = weights.reshape(count, groups, -1, *shape).transpose(0, 1)
        stacked = stacked.reshape(-1, *shape)
    output = run(stacked)  # (N, groups · choices · C/groups, ...)
    output = output.reshape(len(output), groups, count, -1, *output.shape[2:])
    return output.movedim(2, 0).flatten(2, 3)


def _version(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _with_weight(func: Any, given: Any, weight: Tensor, other: Tensor) -> Tensor:
    """Return the output of a call with another weight in place of one."""
    args, kwargs = given
    if len(args) > 1 and args[1] is weight:  # as modules call linear maps
        args = (args[0], other, *args[2:])
    else:
        tensors = (other if t is weight else t for t in tensors_in(given))
        args, kwargs = with_tensors(given, tensors)
    return next(tensors_in(func(*args, **kwargs)))


def _measured_columns(weights: Sequence[Choice]) -> list[int]:
    """Return the columns to measure: each takes memory for all weights.

    Rates lie so close together that one per bit is enough.
    """
    found = {
        (choice.rate > 0, math.ceil(choice.bits)): column
        for column, choice in enumerate(weights)
        if choice.bits <= _WIDEST_MEASURED
    }
    return sorted(found.values()) or [0]
