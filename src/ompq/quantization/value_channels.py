"""Which channels of which layer an attention averages: found by numbering them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ompq.graph import Unit, makers, units_read_once
from ompq.quantization.products import OPERANDS
from ompq.recording import (
    Call,
    Recording,
    function_name,
    tensors_in,
    watch,
)
from ompq.samples import Batch, attached, model_device, to_device

_START = 2  # above all probabilities, which are operands of products, too
_NEAR = 0.1  # how far an average may be from a number; numbers are 1 apart


class Values(NamedTuple):
    """The values of an attention: neighbouring output channels of a linear layer."""

    producer: str
    first: int


def value_channels(
    model: nn.Module, recording: Recording, units: Collection[Unit], batch: Batch
) -> dict[str, Values]:
    """Return the linear units that read averages, each with the values averaged.

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
        made = {s for at in calls[position].inputs for s in makers(calls, at)}
        product = next(iter(made), -1)
        if len(made) > 1 or not _is_product(calls, product):
            continue
        if _readers(calls, consumers, product) != {position}:
            continue
        sources = {s for at in calls[product].inputs for s in makers(calls, at)}
        read = {s: _readers(calls, consumers, s) for s in sources & unit_at.keys()}
        alone = [s for s in sorted(read) if all(_is_product(calls, r) for r in read[s])]
        if alone:
            products = {order[reader] for source in alone for reader in read[source]}
            found[name] = _Attention([unit_at[source] for source in alone], products)
    return found


def _is_product(calls: Sequence[Call], at: int) -> bool:
    return at >= 0 and calls[at].function in OPERANDS


def _readers(
    calls: Sequence[Call], consumers: Mapping[int, list[int]], at: int
) -> set[int]:
    """Return the calls that read what a call made, through views and parts of it."""
    found: set[int] = set()
    for reader in consumers.get(at, ()):
        passes = reader >= 0 and makers(calls, reader) != {reader}
        found |= _readers(calls, consumers, reader) if passes else {reader}
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
