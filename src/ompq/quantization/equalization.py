"""Cross-layer equalization of what a depthwise convolution or a linear layer reads.

The channels of a LayerNorm's output differ in mean and size by far more than others do,
and one grid must hold them all: the norm can carry shifts and factors that the linear
layer after it undoes. An attention averages values, so the layer that makes these can
carry them for the layer that reads the averages.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from ompq.costs import FLOAT_BITS
from ompq.graph import channel_axis, producers, scaled_channels, units_read_once
from ompq.quantization.sites import OPERANDS
from ompq.ranges import fake_quantize_tensor, search_weight
from ompq.recording import Call, Recording, copied, function_name, tensors_in, watch
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
from ompq.units import Choice, Unit

_SAMPLES = 64  # tell the largest value of each channel well enough
# How far channels go towards one size, as a part of the exponent. Going all the way
# would leave a clip at 6 no room above the largest value seen.
_PART = 0.75
_LARGEST_EXPONENT = 6  # of a factor of two: a channel 64 times smaller is all but 0
# After a LayerNorm, the shares that are tried: the weights that undo the factors are
# harder to round. They are judged by this many rows per sample and output channels.
_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ROWS, _OUTPUTS = 16, 256
SHIFT_STEP = 1 / 16  # shifts are whole multiples of it, which a file holds in a byte
# They give a times as much for a times as much; relu6 as far as it does not clip.
_SCALING = {"relu", "relu6", "leaky_relu"}
_PRODUCERS = {"conv", "depthwise", "pointwise", "grouped"}


class Equalized(NamedTuple):
    """A tensor whose channels got factors, and perhaps shifts before."""

    producer: str  # name of the unit, or of the batch norm after it, that makes it
    consumer: str  # name of the depthwise or linear unit that reads it
    exponents: tuple[int, ...]  # each channel of it is multiplied by two to this power
    shifts: tuple[int, ...] = ()  # what is subtracted before, in steps of 1/16
    first: int = 0  # of the producer's channels, the one that the first factor is for


class Pair(NamedTuple):
    """Two layers between which channels can change their size."""

    producer: str
    consumer: str
    choice: Choice | None = None  # of a linear layer after a LayerNorm or attention
    first: int = 0  # of the producer's channels, the one that is the consumer's first


def find_pairs(
    model: nn.Module,
    recording: Recording,
    units: Collection[Unit],
    bits: Mapping[str, Choice],
    least_bits: int,
    batch: Batch,
) -> list[Pair]:
    """Return depthwise layers after one of ``least_bits`` too, and linear layers.

    These are the ones after a LayerNorm or an attention, whatever their bits; which
    channels an attention averages is seen on the batch.
    """
    wide = [unit for unit in units if bits[unit.name].weight >= least_bits]
    read = [unit for unit in units if bits[unit.name].activation < FLOAT_BITS]
    pairs = [Pair(*names) for names in _depthwise_pairs(model, recording, wide)]
    norms = _norm_pairs(model, recording, read)
    pairs += [Pair(norm, name, bits[name]) for norm, name in norms]
    values = value_channels(model, recording, read, batch)
    return pairs + [Pair(by, n, bits[n], first) for n, (by, first) in values.items()]


def find_factors(
    model: nn.Module,
    pairs: Sequence[Pair],
    samples: Samples,
    *,
    batch_size: int,
    report: Report = lambda _done, _total: None,
) -> tuple[Equalized, ...]:
    """Return factors, from 64 samples, that bring channels nearer to one size."""
    seen: dict[str, list[Tensor]] = {pair.consumer: [] for pair in pairs}

    def collector(pair: Pair) -> Collector:
        def keep(layer: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            x = next(tensors_in((args, kwargs)))
            if isinstance(layer, _ConvNd):  # the largest of each channel, (1, C)
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
            found.append(Equalized(producer, name, _exponents(rows.amax(0), _PART)))
        else:
            layer = cast(nn.Linear, model.get_submodule(name))
            biases = (layer.bias, model.get_submodule(producer).bias)
            shifted = all(bias is not None for bias in biases)
            moves = _moves(rows, layer, choice, shifted=shifted)
            found.append(Equalized(producer, name, *moves, start))
    return tuple(one for one in found if any(one.exponents) or any(one.shifts))


def _moves(
    rows: Tensor, layer: nn.Linear, choice: Choice, *, shifted: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return exponents and shifts that leave the output of a layer the least error.

    Args:
        rows: What it reads, (rows, C).
        shifted: Whether there are biases for shifts.
    """
    weight = layer.weight.detach().to(rows)[:: -(-len(layer.weight) // _OUTPUTS)]
    steps = (rows.mean(0) / SHIFT_STEP).round()
    parts = (0.0,) if choice.rate else _PARTS  # coded weights have one step for all
    best: tuple[float, Tensor, Tensor] | None = None
    for shift in (torch.zeros_like(steps), steps)[: 1 + shifted]:
        centred = rows - shift * SHIFT_STEP
        expected = centred @ weight.T
        for part in parts:
            exponents = torch.tensor(_exponents(centred.abs().amax(0), part))
            factor = exponents.to(rows).exp2()
            inputs = fake_quantize_tensor(centred * factor, choice.activation)
            rounded = weight / factor
            if choice.weight < FLOAT_BITS:
                grid = search_weight(rounded, choice.weight, channel_dim=0)
                rounded = grid.fake(rounded)
            error = float((inputs @ rounded.T - expected).square().sum())
            if best is None or error < best[0]:
                best = error, exponents, shift
    assert best is not None
    _, exponents, shift = best
    return tuple(exponents.tolist()), tuple(int(one) for one in shift.tolist())


@torch.no_grad()
def equalized(model: nn.Module, factors: Sequence[Equalized]) -> nn.Module:
    """Return a network that computes the same, its channels of other sizes."""
    if not factors:
        return model
    result = copied(model)
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
        # Each input channel gives one output channel, or several next to each other.
        each = len(cast(Tensor, layer.weight)) // len(exponents)
        opposite = [-exponent for exponent in exponents for _ in range(each)]
        enlarge(layer, opposite, bias=False)
    return result


def channel_factor(unit: Unit, weight: Tensor, factors: Sequence[Equalized]) -> Tensor:
    """Return what each output channel was multiplied by, shaped to go with a weight."""
    exponents = torch.zeros(len(weight))
    for producer, consumer, each, _, first in factors:
        if producer in (unit.norm, unit.name):
            exponents[first : first + len(each)] += torch.tensor(each)
        if consumer == unit.name and unit.kind != "linear":
            times = len(weight) // len(each)
            exponents -= torch.tensor(each).repeat_interleave(times)
    shape = (-1, *[1] * (weight.dim() - 1))
    return exponents.to(weight).exp2().reshape(shape)


@torch.no_grad()
def enlarge(
    module: nn.Module, exponents: Sequence[int], *, bias: bool = True, first: int = 0
) -> None:
    """Multiply output channels of a layer or norm by powers of two, in place."""
    weight = cast(Tensor, module.weight)
    factor = weight.new_ones(weight.shape[channel_axis(module)])
    factor[first : first + len(exponents)] = torch.tensor(exponents).to(weight).exp2()
    weight.copy_(scaled_channels(weight, factor, module))
    if bias and isinstance(module.bias, Tensor):
        module.bias.mul_(factor)


def _norm_pairs(
    model: nn.Module, recording: Recording, units: Collection[Unit]
) -> Iterator[tuple[str, str]]:
    """Yield linear units, each after the LayerNorm whose output it alone reads."""
    consumers = recording.consumers()
    times = Counter(call.name for call in recording.module_calls)
    linear = {unit.name for unit in units if unit.kind == "linear"}
    for call in recording.calls:
        readers = [
            recording.calls[at].module for at in consumers.get(call.position, ())
        ]
        if call.function != "layer_norm" or call.position in recording.returned:
            continue
        norm = model.get_submodule(call.module)
        if len(readers) != 1 or readers[0] not in linear or not _is_plain(norm):
            continue
        if times[call.module] == times[readers[0]] == 1:
            yield call.module, readers[0]


def _is_plain(norm: nn.Module) -> bool:
    """Whether a norm ends with factors, one for each of its last axis."""
    if not isinstance(norm, nn.LayerNorm) or norm.weight is None:
        return False
    return norm.bias is not None and norm.weight.dim() == 1


def _depthwise_pairs(
    model: nn.Module, recording: Recording, units: Collection[Unit]
) -> Iterator[tuple[str, str]]:
    """Yield depthwise units, each after the unit or norm that it alone reads."""
    consumers = recording.consumers(caller=True)
    unit_at = units_read_once(recording, units)
    for position, consumer in unit_at.items():
        if consumer.kind != "depthwise":
            continue
        source, norm = _producer(recording.calls, consumers, position)
        producer = unit_at.get(source)
        if producer is None or producer.kind not in _PRODUCERS or producer.norm != norm:
            continue
        if isinstance(model.get_submodule(norm or producer.name).weight, Tensor):
            yield norm or producer.name, consumer.name


def _producer(
    calls: Sequence[Call], consumers: Mapping[int, list[int]], position: int
) -> tuple[int, str]:
    """Go back from a call to the one that made the tensor that it alone reads.

    Return the position of that call, before activation and batch norm, and the norm's
    name; -1 where factors would not pass through.
    """
    at, norm = position, ""
    while len(calls[at].inputs) == 1:
        (source,) = calls[at].inputs
        if source < 0 or consumers[source] != [at]:
            return -1, norm
        at, function = source, calls[source].function
        if function == "batch_norm" and not norm:
            norm = calls[at].module
        elif norm or function not in _SCALING:
            break
    return at, norm


def _exponents(largest: Tensor, part: float) -> tuple[int, ...]:
    """Return the exponent of each channel's factor from its largest value, (C,)."""
    below = (largest.max() / largest).log2() * part
    # A channel that is always 0, of which nothing is known, stays as it is.
    whole = below.floor().clamp(max=_LARGEST_EXPONENT).where(largest > 0, 0)
    return tuple(int(exponent) for exponent in whole.tolist())


_START = 2  # above all probabilities, which are operands of products, too
_NEAR = 0.1  # how far an average may be from a number; numbers are 1 apart


class Values(NamedTuple):
    """The values of an attention: neighbouring output channels of a linear layer."""

    producer: str
    first: int


def value_channels(
    model: nn.Module, recording: Recording, units: Collection[Unit], batch: Batch
) -> dict[str, Values]:
    """Return the linear units that read averages of values, each with these values.

    Nothing else reads these values, nor what is between the two layers: the second can
    undo what the first does to them. Every output of the first layers is replaced by
    the number of its channel. Averages of equal numbers arrive at the second as they
    are and tell which channels they were.
    """
    attentions = _attentions(recording, units)
    if not attentions:
        return {}
    probe = _Probe(model, attentions)
    with attached(probe.hooks()):
        watch(model, to_device(batch, model_device(model)), probe.visit)
    found = ((name, probe.values(name)) for name in attentions)
    return {name: values for name, values in found if values}


class _Attention(NamedTuple):
    """What a linear layer reads, if it is a product."""

    sources: list[str]  # linear layers whose outputs only products read
    products: set[int]  # these products, numbered in order of execution


def _attentions(recording: Recording, units: Collection[Unit]) -> dict[str, _Attention]:
    """Return the linear units that alone read a product of what others return."""
    calls, consumers = recording.calls, recording.consumers(caller=True)
    found_at = units_read_once(recording, units).items()
    unit_at = {at: unit.name for at, unit in found_at if unit.kind == "linear"}
    every = [call.position for call in calls if call.function in OPERANDS]
    order = {position: number for number, position in enumerate(every)}
    found: dict[str, _Attention] = {}
    for position, name in unit_at.items():
        made = {s for at in calls[position].inputs for s in producers(calls, at)}
        product = next(iter(made), -1)
        if len(made) > 1 or not _is_product(calls, product):
            continue
        if _consumers(calls, consumers, product) != {position}:
            continue
        sources = {s for at in calls[product].inputs for s in producers(calls, at)}
        read = {s: _consumers(calls, consumers, s) for s in sources & unit_at.keys()}
        alone = [s for s in sorted(read) if all(_is_product(calls, r) for r in read[s])]
        if alone:
            products = {order[reader] for source in alone for reader in read[source]}
            found[name] = _Attention([unit_at[source] for source in alone], products)
    return found


def _is_product(calls: Sequence[Call], at: int) -> bool:
    return at >= 0 and calls[at].function in OPERANDS


def _consumers(
    calls: Sequence[Call], consumers: Mapping[int, list[int]], at: int
) -> set[int]:
    """Return the calls that read what a call made, through views and parts of it."""
    found: set[int] = set()
    for reader in consumers.get(at, ()):
        passes = reader >= 0 and producers(calls, reader) != {reader}
        found |= _consumers(calls, consumers, reader) if passes else {reader}
    return found


class _Probe:
    """Numbers the channels of layers and looks where the numbers go."""

    def __init__(self, model: nn.Module, attentions: Mapping[str, _Attention]) -> None:
        self.model, self.attentions = model, attentions
        self.numbers: dict[str, Tensor] = {}  # of a layer's output channels, (C,)
        for attention in attentions.values():
            start = _START
            for name in attention.sources:
                width = len(cast(Tensor, model.get_submodule(name).weight))
                self.numbers[name] = torch.arange(start, start + width)
                start += width
        self.read: dict[str, Tensor] = {}  # what layers after products read, (rows, C)
        # Of products, in order. Their positions would count the numbering's calls, too.
        self.operands: list[list[Tensor]] = []

    def hooks(self) -> Iterator[RemovableHandle]:
        for name in self.numbers:
            layer = self.model.get_submodule(name)
            yield layer.register_forward_hook(partial(self._number, name))
        for name in self.attentions:
            layer = self.model.get_submodule(name)
            keep = partial(self._keep, name)
            yield layer.register_forward_pre_hook(keep, with_kwargs=True)

    def _number(self, name: str, _layer: nn.Module, _args: Any, output: Tensor) -> Any:
        return self.numbers[name].to(output).expand_as(output)

    def _keep(self, name: str, _layer: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(tensors_in((args, kwargs))).detach()
        self.read[name] = x.flatten(0, -2).double().cpu()

    def visit(
        self, _at: int, function: Any, args: Any, kwargs: Any, _output: Any
    ) -> None:
        """Keep the operands of products."""
        if function_name(function) in OPERANDS:
            self.operands.append([t.detach() for t in tensors_in((args, kwargs))])

    def values(self, name: str) -> Values | None:
        """Return the values whose averages a layer reads, if it does."""
        rows, attention = self.read[name], self.attentions[name]
        low, high = rows[0, 0].round(), rows[0, 0].round() + rows.shape[1]
        # Keys and queries must not be made from the same channels.
        holding = sum(
            bool(((tensor >= low) & (tensor < high)).any())
            for product in attention.products
            for tensor in self.operands[product]
        )
        arrived = low + torch.arange(rows.shape[1])
        if holding != 1 or not (rows - arrived).abs().max() < _NEAR:
            return None
        (source,) = (s for s in attention.sources if low in self.numbers[s])
        return Values(source, int(low) - int(self.numbers[source][0]))
