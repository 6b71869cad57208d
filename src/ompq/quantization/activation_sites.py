"""Activation sites: where activations are quantized, and what they see there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from ompq.bit_widths import FLOAT_BITS, SUM_BITS
from ompq.network.dataflow import OUTSIDE, call_flow, is_sum, unit_calls
from ompq.network.observation import Call, Recording
from ompq.network.passive import CLIPS, MERGES, MOVES
from ompq.network.units import Choice, LayerGraph, Skipped
from ompq.quantization.products import OPERANDS, find_products

_AVERAGES = {"avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
             "mean"}  # fmt: skip
# Their outputs have a long tail, which a grid of powers may represent better.
_LONG_TAILED = {"gelu"}
_FLOAT_NORMS = {"layer_norm", "rms_norm", "group_norm"}
_UNPLACED = "no single module returns or reads this tensor: it stays float"


@dataclass(frozen=True)
class ActivationSite:
    """A quantized tensor, or several that share a grid."""

    # Calls whose outputs are quantized; -1 is the network's input.
    positions: tuple[int, ...]
    bits: int
    after: tuple[str, ...]  # modules whose outputs are quantized
    before: tuple[str, ...]  # modules whose inputs are quantized; "" is the network
    # For an operand of a product inside the module ``before[0]``: the number of the
    # product within the module, and the operand.
    product: int = 0
    operand: str = ""
    # Whether the grid consists of powers; before calibration, whether it may.
    powers: bool = False
    shift: float = 0.0  # added to the values before they are rounded to powers


class Link(NamedTuple):
    """A layer that computes with integers, made by :func:`ompq.finalize`."""

    layer: str
    source: str  # name of the quantizer of its input
    target: str  # name of the quantizer of its output; "" for logits


def find_sites(
    model: nn.Module,
    recording: Recording,
    graph: LayerGraph,
    bits: Mapping[str, Choice],
    sum_bits: int = SUM_BITS,
) -> tuple[list[ActivationSite], list[Skipped]]:
    """Return the sites of a network, and the tensors that stay float.

    With ``sum_bits`` above 8, whatever residual sums read and return has that many
    bits, and the layers that read it round it once more, to their own.
    """
    # If all activations stay float, there is no integer arithmetic to prepare.
    if all(choice.activation >= FLOAT_BITS for choice in bits.values()):
        return [], []
    finder = _Finder(model, recording, graph, sum_bits)
    widths: dict[int, int] = {}  # source → bits
    for call in recording.calls:
        unit = finder.unit_of.get(call.position)
        if unit is None and not (is_sum(call) or call.function in _AVERAGES):
            continue
        if unit is None and call.position in finder.ends_in_float:
            continue
        width = bits[unit].activation if unit else 0
        for source in finder.read_by(call):
            widths[source] = max(widths.get(source, 0), width)
    sites, skipped = finder.sites(widths)
    return [*sites, *_product_sites(finder, recording, bits)], skipped


def _product_sites(
    finder: "_Finder", recording: Recording, bits: Mapping[str, Choice]
) -> list[ActivationSite]:
    """Return a site for each operand of a product of activations.

    It gets the most activation bits of the layers in its module. With few bits,
    probabilities need a grid of powers: most are small, and their sum matters.
    """
    sites = []
    for module, number, call in find_products(recording):
        inside = [b for name, b in bits.items() if name.startswith(f"{module}.")]
        width = max(choice.activation for choice in inside or bits.values())
        if width >= FLOAT_BITS:
            continue
        as_powers = {"probabilities", "left" if finder.left_is_softmax(call) else ""}
        sites += [
            ActivationSite(
                (call.position,),
                width,
                (),
                (module,),
                number,
                operand,
                powers=operand in as_powers and width < SUM_BITS,
            )
            for operand in OPERANDS[call.function]
        ]
    return sites


class _Finder:
    def __init__(
        self, model: nn.Module, recording: Recording, graph: LayerGraph, sum_bits: int
    ) -> None:
        self.model, self.sum_bits = model, sum_bits
        self.calls = recording.calls
        self.dataflow = call_flow(recording)
        self.call_counts: dict[str, int] = {}
        self.producers: dict[int, list[str]] = {}  # position → modules that return it
        for call in recording.module_calls:
            self.call_counts[call.name] = self.call_counts.get(call.name, 0) + 1
            if call.output is not None:
                self.producers.setdefault(call.output, []).append(call.name)
        found = unit_calls(recording, graph.units).items()
        self.unit_of = {position: unit.name for position, unit in found}
        self.parent: dict[int, int] = {}  # union-find: sources that share a grid
        self.ends_in_float = self._ends_in_float()

    def _ends_in_float(self) -> set[int]:
        """Return the positions of tensors that reach a float norm through sums.

        Such sums are not computed in integers: a transformer's residual stream stays
        float.
        """
        read = [s for c in self.calls if c.function in _FLOAT_NORMS for s in c.inputs]
        walk = self.dataflow.back(
            read, lambda call: is_sum(call) or call.function in MOVES
        )
        return {*walk.ends, *walk.passed}

    def left_is_softmax(self, call: Call) -> bool:
        """Whether the first operand of a product comes from a softmax."""
        sources = self._sources(call.inputs[:1])
        return [self.calls[at].function for at in sources if at >= 0] == ["softmax"]

    def read_by(self, call: Call) -> list[int]:
        """Return the sources that a call reads, directly or through passive calls."""
        return self._sources(call.inputs)

    def _sources(self, read: Sequence[int]) -> list[int]:
        """Return the calls that computed tensors' values; merged ones share a grid."""
        walk = self.dataflow.back(read, self._passes_on)
        for at in walk.passed:
            if self.calls[at].function in MERGES:
                first, *others = self._sources(self.calls[at].inputs) or [at]
                for source in others:
                    self.parent[self._root(source)] = self._root(first)
        # What is computed from parameters alone is a constant.
        return [at for at in walk.ends if at == OUTSIDE or self.calls[at].inputs]

    def _passes_on(self, call: Call) -> bool:
        """Whether a call returns values of its inputs."""
        if call.function in MERGES or len(call.inputs) != 1:
            return call.function in MERGES
        (source,) = call.inputs
        same_shape = source != OUTSIDE and self.calls[source].shape == call.shape
        # An adaptive pool that keeps the shape averages single values.
        averages = same_shape and call.function.startswith("adaptive_avg_pool")
        return averages or call.function in MOVES

    def _root(self, source: int) -> int:
        while (parent := self.parent.get(source, source)) != source:
            source = parent
        return source

    def sites(
        self, widths: Mapping[int, int]
    ) -> tuple[list[ActivationSite], list[Skipped]]:
        groups: dict[int, list[int]] = {}
        for source in sorted(widths):
            groups.setdefault(self._root(source), []).append(source)
        sites, skipped = [], []
        for members in groups.values():
            bits = max(widths[source] for source in members)
            if bits >= FLOAT_BITS:
                continue
            placed = [s for s in members if self._after(s) or self._before(s)]
            unplaced = [self.calls[s] for s in members if s not in placed]
            skipped += [
                Skipped(f"{call.module or '(network)'}.{call.function}()", _UNPLACED)
                for call in unplaced
            ]
            if placed and self.sum_bits > SUM_BITS and self._in_stream(members):
                sites += self._stream_sites(placed, bits)
            elif placed:
                sites.append(self._site(placed, bits or SUM_BITS))
        return sites, skipped

    def _in_stream(self, members: Sequence[int]) -> bool:
        """Whether residual sums read or return one of these tensors."""
        read = {at for call in self.calls if is_sum(call) for at in self.read_by(call)}
        return any(at in read or self._is_sum(at) for at in members)

    def _is_sum(self, at: int) -> bool:
        if at != OUTSIDE and self.calls[at].function in CLIPS:
            (at,) = self.calls[at].inputs[:1]
        return at != OUTSIDE and is_sum(self.calls[at])

    def _stream_sites(self, members: Sequence[int], bits: int) -> list[ActivationSite]:
        """Return the site of a residual stream, and that of the layers that read it."""
        stream = self._site(members, self.sum_bits)
        readers = tuple(dict.fromkeys(n for at in members for n in self._before(at)))
        if not bits or not readers or not stream.after:
            return [replace(stream, bits=bits or self.sum_bits)]
        return [stream, replace(stream, bits=bits, after=(), before=readers)]

    def _site(self, members: Sequence[int], bits: int) -> ActivationSite:
        after = [name for s in members for name in self._after(s)]
        before = [n for s in members if not self._after(s) for n in self._before(s)]
        functions = {self.calls[s].function if s >= 0 else "" for s in members}
        return ActivationSite(
            tuple(members),
            bits,
            tuple(dict.fromkeys(after)),
            tuple(dict.fromkeys(before)),
            powers=bits < SUM_BITS and functions <= _LONG_TAILED,
        )

    def _after(self, at: int) -> list[str]:
        """Return the innermost module called once that returns this tensor, if any."""
        for name in self.producers.get(at, ()):
            module = self.model.get_submodule(name)
            if self.call_counts[name] == 1 and not isinstance(module, nn.Sequential):
                return [name]
        # An activation without a module: a grid with the same range clips as well, so
        # the quantizer may come before it.
        if at != OUTSIDE and self.calls[at].function in CLIPS:
            source = self.calls[at].inputs[0]
            if self.dataflow.readers(source) == [at]:
                return self._after(source)
        return []

    def _before(self, at: int) -> list[str]:
        """Return the modules of the units that read this tensor."""
        if at == OUTSIDE:
            return [""]
        readers = self.dataflow.ahead(at, lambda call: call.function in MOVES).ends
        found = [self.calls[one].module for one in readers if one in self.unit_of]
        return [name for name in found if self.call_counts.get(name) == 1]
