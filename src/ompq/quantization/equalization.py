"""Cross-layer equalization of what a depthwise convolution or a linear layer reads.

The channels of a LayerNorm's output differ in mean and size by far more than others do,
and one grid must hold them all: the norm can carry shifts and factors that the linear
layer after it undoes. An attention averages values, so the layer that makes these can
carry them for the layer that reads the averages.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ompq.costs import FLOAT_BITS
from ompq.graph import Choice, Unit, channel_axis, scaled_channels, units_read_once
from ompq.quantization.value_channels import value_channels
from ompq.ranges import fake_quantize_tensor, search_weight
from ompq.recording import Call, Recording, copied, tensors_in
from ompq.samples import Batch, Collector, Report, Samples, collect

_SAMPLES = 64  # tell the largest value of each channel well enough
# How far channels go towards one size, as a part of the exponent. Going all the way
# would leave a clip at 6 no room above the largest value seen.
_PART = 0.75
_LARGEST_EXPONENT = 6
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
