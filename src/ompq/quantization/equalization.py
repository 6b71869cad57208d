"""Corrections of channels: equalized ranges before rounding, restored moments after it.

*Equalization.* The channels of a LayerNorm's output differ a lot in mean and range, and
one grid must hold them all. Shifts and factors can be folded into the norm and undone
by the linear layer after it. Attention averages its values, so the layer that computes
the values and the layer that reads the averages can be equalized in the same way.
Inputs of depthwise convolutions get factors only.

*Moments.* Rounding shrinks weights a little, and with them the spread of a layer's
outputs. Restoring the mean alone with a bias makes that worse: before a ReLU the mean
is mostly negative, so with a smaller spread more values are cut to zero, and the signal
fades with depth. So both moments are restored, as re-estimating a batch norm would do.
The spread is the mean absolute deviation: a few large values dominate the standard
deviation, and where a grid clips them, which is often right, channels would be
stretched to compensate. Both moments are measured on a few samples, with and without
rounding, and corrected only as far as the difference is statistically significant.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from ompq.activation_ranges import fake_quantize_tensor
from ompq.bit_widths import FLOAT_BITS
from ompq.network.dataflow import OUTSIDE, Dataflow, call_flow, is_view, units_read_once
from ompq.network.folding import channel_axis, scaled_channels
from ompq.network.observation import (
    Call,
    Recording,
    copy_network,
    function_name,
    tensors_in,
    watch,
)
from ompq.network.units import Choice, Unit
from ompq.quantization.products import OPERANDS
from ompq.samples import (
    Batch,
    Collector,
    Report,
    Samples,
    attached,
    collect,
    model_device,
    to_device,
)
from ompq.untrusted_json import Count
from ompq.weight_ranges import search_weight

_SAMPLES = 64  # enough to estimate the largest value of each channel
# How far ranges are equalized, as a fraction of the exponents. Going all the way would
# leave no room below a clip at 6 for values above the largest one seen.
_STRENGTH = 0.75
_LARGEST_EXPONENT = 6  # a channel with 1/64 of the largest range is all but 0
# After a LayerNorm these are tried, since the weights that undo the factors are harder
# to round. The error is measured on this many rows per sample and output channels.
_STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROWS, _OUTPUTS = 16, 256
SHIFT_STEP = 1 / 16  # shifts are whole multiples of it, which a file holds in a byte
# Scaling their input scales their output; for relu6, as far as it does not clip.
_SCALING = {"relu", "relu6", "leaky_relu"}
_PRODUCERS = {"conv", "depthwise", "pointwise", "grouped"}

# The exponents and shifts that a file may hold.
_Power = Annotated[int, Meta(ge=-(1 << 15), le=1 << 15)]


class Equalized(NamedTuple):
    """A tensor whose channels were shifted, perhaps, and multiplied by factors."""

    producer: str  # name of the unit, or of the norm after it, that computes the tensor
    consumer: str  # name of the depthwise or linear unit that reads the tensor
    exponents: tuple[_Power, ...]  # each channel is multiplied by two to this power
    shifts: tuple[_Power, ...] = ()  # subtracted beforehand, in steps of 1/16
    first: Count = 0  # index of the producer's channel that has the first factor


class Pair(NamedTuple):
    """Two layers between which channels can be rescaled."""

    producer: str
    consumer: str
    choice: Choice | None = None  # of a linear layer after a LayerNorm or attention
    first: int = 0  # index of the producer's channel that the consumer reads first


def find_pairs(
    model: nn.Module,
    recording: Recording,
    units: Collection[Unit],
    bits: Mapping[str, Choice],
    least_bits: int,
    batch: Batch,
) -> list[Pair]:
    """Return the pairs of layers that can be equalized.

    The consumer is a depthwise convolution, if both layers have at least ``least_bits``
    weight bits, or a linear layer after a LayerNorm or attention, with any bits. The
    batch shows which channels an attention averages.
    """
    wide = [unit for unit in units if bits[unit.name].weight >= least_bits]
    rounded = [unit for unit in units if bits[unit.name].activation < FLOAT_BITS]
    pairs = [Pair(*names) for names in _depthwise_pairs(model, recording, wide)]
    norms = _norm_pairs(model, recording, rounded)
    pairs += [Pair(norm, name, bits[name]) for norm, name in norms]
    values = _value_channels(model, recording, rounded, batch)
    return pairs + [Pair(by, name, bits[name], first) for by, name, first in values]


def find_factors(
    model: nn.Module,
    pairs: Sequence[Pair],
    samples: Samples,
    *,
    batch_size: int,
    report: Report = lambda _done, _total: None,
) -> tuple[Equalized, ...]:
    """Return factors, from 64 samples, that bring the ranges of channels together."""
    seen: dict[str, list[Tensor]] = {pair.consumer: [] for pair in pairs}

    def collector(pair: Pair) -> Collector:
        def keep(layer: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            x = next(tensors_in((args, kwargs)))
            if isinstance(layer, _ConvNd):  # the largest value of each channel, (1, C)
                axis = x.dim() - 1 - len(layer.kernel_size)
                kept = x.abs().movedim(axis, 0).flatten(1).amax(1)[None]
            else:
                every = max(1, x.shape[:-1].numel() // (_ROWS * len(x)))
                kept = x.flatten(0, -2)[::every].float()
            seen[pair.consumer].append(kept)

        return keep

    if not pairs:
        return ()
    collectors = [(model.get_submodule(p.consumer), collector(p)) for p in pairs]
    first = samples.first(_SAMPLES)
    collect(model, first, collectors, batch_size=batch_size, report=report)
    found = []
    for producer, name, choice, start in pairs:
        rows = torch.cat(seen.pop(name))
        if choice is None:
            found.append(Equalized(producer, name, _exponents(rows.amax(0), _STRENGTH)))
        else:
            layer = cast(nn.Linear, model.get_submodule(name))
            biases = (layer.bias, model.get_submodule(producer).bias)
            shiftable = all(bias is not None for bias in biases)
            best = _best_factors(rows, layer, choice, shiftable=shiftable)
            found.append(Equalized(producer, name, *best, start))
    return tuple(one for one in found if any(one.exponents) or any(one.shifts))


def _best_factors(
    rows: Tensor, layer: nn.Linear, choice: Choice, *, shiftable: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the exponents and shifts with the least error of a layer's output.

    ``rows`` are its inputs, (rows, C); shifts need biases in both layers.
    """
    weight = layer.weight.detach().to(rows)[:: -(-len(layer.weight) // _OUTPUTS)]
    steps = (rows.mean(0) / SHIFT_STEP).round()
    # Coded weights have one step for all channels, which factors would spoil.
    strengths = (0.0,) if choice.rate else _STRENGTHS
    unchanged = torch.zeros_like(steps)
    best_error, best = float("inf"), (unchanged, unchanged)
    for shift in (unchanged, steps)[: 1 + shiftable]:
        centred = rows - shift * SHIFT_STEP
        expected = centred @ weight.T
        for strength in strengths:
            exponents = torch.tensor(_exponents(centred.abs().amax(0), strength))
            factor = exponents.to(rows).exp2()
            inputs = fake_quantize_tensor(centred * factor, choice.activation)
            rounded = weight / factor
            if choice.weight < FLOAT_BITS:
                grid = search_weight(rounded, choice.weight, channel_dim=0)
                rounded = grid.fake(rounded)
            error = float((inputs @ rounded.T - expected).square().sum())
            if error < best_error:
                best_error, best = error, (exponents, shift)
    exponents, shift = best
    return tuple(map(int, exponents.tolist())), tuple(map(int, shift.tolist()))


@torch.no_grad()
def equalize_channels(model: nn.Module, factors: Sequence[Equalized]) -> nn.Module:
    """Return a network with rescaled channels that computes the same function."""
    if not factors:
        return model
    result = copy_network(model)
    for producer, consumer, exponents, shifts, first in factors:
        source, layer = (result.get_submodule(name) for name in (producer, consumer))
        if isinstance(layer, nn.Linear) and any(shifts):
            shift = torch.tensor(shifts).to(layer.weight) * SHIFT_STEP
            cast(Tensor, source.bias)[first : first + len(shift)].sub_(shift)
            layer.bias.add_(layer.weight @ shift)
        enlarge(source, exponents, first=first)
        if isinstance(layer, nn.Linear):
            layer.weight.div_(torch.tensor(exponents).to(layer.weight).exp2())
            continue
        # Each input channel feeds one or more consecutive output channels.
        multiplier = len(cast(Tensor, layer.weight)) // len(exponents)
        inverse = [-exponent for exponent in exponents for _ in range(multiplier)]
        enlarge(layer, inverse, bias=False)
    return result


def channel_factor(
    unit: Unit, weight: Tensor, axis: int, factors: Sequence[Equalized]
) -> Tensor:
    """Return the factor on each output channel, shaped to broadcast with the weight."""
    exponents = torch.zeros(weight.shape[axis])
    for producer, consumer, each, _, first in factors:
        if producer in (unit.norm, unit.name):
            exponents[first : first + len(each)] += torch.tensor(each)
        if consumer == unit.name and unit.kind != "linear":
            multiplier = len(weight) // len(each)
            exponents -= torch.tensor(each).repeat_interleave(multiplier)
    shape = [1] * weight.dim()
    shape[axis] = -1
    return exponents.to(weight).exp2().reshape(shape)


@torch.no_grad()
def enlarge(
    module: nn.Module, exponents: Sequence[int], *, bias: bool = True, first: int = 0
) -> None:
    """Multiply output channels, from ``first`` on, by powers of two, in place."""
    weight = cast(Tensor, module.weight)
    factor = weight.new_ones(weight.shape[channel_axis(module)])
    factor[first : first + len(exponents)] = torch.tensor(exponents).to(weight).exp2()
    weight.copy_(scaled_channels(weight, factor, module))
    if bias and isinstance(module.bias, Tensor):
        module.bias.mul_(factor)


def _norm_pairs(
    model: nn.Module, recording: Recording, units: Collection[Unit]
) -> Iterator[tuple[str, str]]:
    """Yield each LayerNorm whose output only one linear unit reads, with that unit."""
    dataflow = call_flow(recording)
    call_counts = Counter(call.name for call in recording.module_calls)
    linear = {unit.name for unit in units if unit.kind == "linear"}
    for call in recording.calls:
        if call.function != "layer_norm":
            continue
        reader = dataflow.only_reader(call.position)
        if reader is None or not _is_affine(model.get_submodule(call.module)):
            continue
        unit = recording.calls[reader].module
        if unit in linear and call_counts[call.module] == call_counts[unit] == 1:
            yield call.module, unit


def _is_affine(norm: nn.Module) -> bool:
    """Whether a norm has a weight and a bias for each element of its last axis."""
    if not isinstance(norm, nn.LayerNorm) or norm.bias is None:
        return False
    return norm.weight is not None and norm.weight.dim() == 1


def _depthwise_pairs(
    model: nn.Module, recording: Recording, units: Collection[Unit]
) -> Iterator[tuple[str, str]]:
    """Yield each unit or norm that only one depthwise unit reads, with that unit."""
    unit_at = units_read_once(recording, units)
    for position, consumer in unit_at.items():
        if consumer.kind != "depthwise":
            continue
        source, norm = _producer(call_flow(recording), position)
        producer = unit_at.get(source)
        if producer is None or producer.kind not in _PRODUCERS or producer.norm != norm:
            continue
        if isinstance(model.get_submodule(norm or producer.name).weight, Tensor):
            yield norm or producer.name, consumer.name


def _producer(dataflow: Dataflow[Call], position: int) -> tuple[int, str]:
    """Go back from a call, through activation and batch norm, to its producer.

    Return the position of the producing call and the norm's name. The position is -1 at
    the network's input and at tensors that other calls read too.
    """
    at, norm, calls = position, "", dataflow.operations
    while len(calls[at].inputs) == 1:
        (source,) = calls[at].inputs
        if source == OUTSIDE or dataflow.only_reader(source) != at:
            return OUTSIDE, norm
        at, function = source, calls[source].function
        if function == "batch_norm" and not norm:
            norm = calls[at].module
        elif norm or function not in _SCALING:
            break
    return at, norm


def _exponents(largest: Tensor, strength: float) -> tuple[int, ...]:
    """Return the exponent of each channel's factor from its largest value, (C,)."""
    exponents = (largest.max() / largest).log2() * strength
    # A channel that was always 0 says nothing about its range and stays as it is.
    whole = exponents.floor().clamp(max=_LARGEST_EXPONENT).where(largest > 0, 0)
    return tuple(int(exponent) for exponent in whole.tolist())


_FIRST_LABEL = 2  # above all probabilities, which are operands of products too
_TOLERANCE = 0.1  # of an averaged label; labels are 1 apart


def _value_channels(
    model: nn.Module, recording: Recording, units: Collection[Unit], batch: Batch
) -> Iterator[tuple[str, str, int]]:
    """Yield the layers that compute attention values and that read their averages.

    Also the first of the neighbouring output channels that are the values. Nothing
    else reads these values or anything between the two layers, so the second can undo a
    change of the first. To find the channels, every output of the first layers is
    replaced by a label of its channel. Averages of equal labels are the label itself,
    so the labels that arrive at the second layer name the channels it reads.
    """
    attentions = _attentions(recording, units)
    if not attentions:
        return
    probe = _Probe(model, attentions)
    with attached(probe.hooks()):
        watch(model, to_device(batch, model_device(model)), probe.visit)
    for name in attentions:
        source, first = probe.values(name)
        if source:
            yield source, name, first


class _Attention(NamedTuple):
    """A product whose result a linear layer reads."""

    sources: list[str]  # linear layers whose outputs are read only by products
    products: set[int]  # these products, numbered in order of execution


def _attentions(recording: Recording, units: Collection[Unit]) -> dict[str, _Attention]:
    """Return the linear units that are sole readers of a product of other outputs."""
    calls, dataflow = recording.calls, call_flow(recording)

    def origins(at: int) -> set[int]:
        return {*dataflow.back(calls[at].inputs, is_view).ends}

    def readers(at: int) -> set[int]:
        return {*dataflow.ahead(at, is_view).ends}

    found_at = units_read_once(recording, units).items()
    unit_at = {at: unit.name for at, unit in found_at if unit.kind == "linear"}
    positions = [call.position for call in calls if call.function in OPERANDS]
    order = {position: number for number, position in enumerate(positions)}
    found: dict[str, _Attention] = {}
    for position, name in unit_at.items():
        inputs = origins(position)
        product = next(iter(inputs), OUTSIDE)
        if len(inputs) > 1 or not _is_product(calls, product):
            continue
        if readers(product) != {position}:
            continue
        read = {source: readers(source) for source in origins(product) & unit_at.keys()}
        only = [s for s in sorted(read) if all(_is_product(calls, r) for r in read[s])]
        if only:
            products = {order[at] for source in only for at in read[source]}
            found[name] = _Attention([unit_at[source] for source in only], products)
    return found


def _is_product(calls: Sequence[Call], at: int) -> bool:
    return at != OUTSIDE and calls[at].function in OPERANDS


class _Probe:
    """Labels the channels of layers and follows the labels through the network."""

    def __init__(self, model: nn.Module, attentions: Mapping[str, _Attention]) -> None:
        self.model, self.attentions = model, attentions
        self.labels: dict[str, Tensor] = {}  # of each layer's output channels, (C,)
        for attention in attentions.values():
            start = _FIRST_LABEL
            for name in attention.sources:
                width = len(cast(Tensor, model.get_submodule(name).weight))
                self.labels[name] = torch.arange(start, start + width)
                start += width
        self.inputs: dict[str, Tensor] = {}  # of layers after products, (rows, C)
        # Of products, in order. Positions are of no use: labelling adds calls.
        self.operands: list[list[Tensor]] = []

    def hooks(self) -> Iterator[RemovableHandle]:
        for name in self.labels:
            layer = self.model.get_submodule(name)
            yield layer.register_forward_hook(partial(self._label, name))
        for name in self.attentions:
            layer = self.model.get_submodule(name)
            keep = partial(self._keep, name)
            yield layer.register_forward_pre_hook(keep, with_kwargs=True)

    def _label(self, name: str, _layer: nn.Module, _args: Any, output: Tensor) -> Any:
        return self.labels[name].to(output).expand_as(output)

    def _keep(self, name: str, _layer: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(tensors_in((args, kwargs))).detach()
        self.inputs[name] = x.flatten(0, -2).double().cpu()

    def visit(
        self, _at: int, function: Any, args: Any, kwargs: Any, _output: Any
    ) -> None:
        """Keep the operands of products."""
        if function_name(function) in OPERANDS:
            self.operands.append([t.detach() for t in tensors_in((args, kwargs))])

    def values(self, name: str) -> tuple[str, int]:
        """Return the layer, or "", and the channel whose averages a layer reads."""
        rows, attention = self.inputs[name], self.attentions[name]
        low, high = rows[0, 0].round(), rows[0, 0].round() + rows.shape[1]
        # One operand alone may have these labels: keys and queries must not read them.
        holding = sum(
            bool(((tensor >= low) & (tensor < high)).any())
            for product in attention.products
            for tensor in self.operands[product]
        )
        expected = low + torch.arange(rows.shape[1])
        if holding != 1 or not (rows - expected).abs().max() < _TOLERANCE:
            return "", 0
        (source,) = (s for s in attention.sources if low in self.labels[s])
        return source, int(low) - int(self.labels[source][0])
