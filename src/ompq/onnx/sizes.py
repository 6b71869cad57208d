"""What files with an ONNX graph take, known before they are written: for budgets.

A skeleton of the file is made once, with all weights at 4 bits. Whatever the bits, only
the weights' containers differ from it; what these take, their writer says.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import nn

from ompq.allocation.program import Allocation, Problem
from ompq.costs import FLOAT_BITS, Cost, cost_tables
from ompq.errors import ExportError
from ompq.integer import lower
from ompq.integer.arithmetic import IntegerWeight
from ompq.layers import activation_quantizers
from ompq.onnx.containers import StoredWeight, Unpacking, as_tensor, grid_names
from ompq.onnx.export import OnnxGraph, as_integers, libraries
from ompq.onnx.traced import traced_model
from ompq.packing import graph_bytes
from ompq.quantization import QuantizeConfig, quantize
from ompq.samples import Samples
from ompq.streams import LARGEST_HALF_BITS
from ompq.units import Choice, LayerGraph, Unit

_OPSET = 21  # of export_onnx
_BITS, _BYTE = 4, 8  # of the skeleton's weights; of those that need no planes
_SAMPLES = 8  # sizes do not depend on the inputs; a few show the shapes
_QUICKLY = QuantizeConfig(
    weight_range="minmax", equalize=False, activation_range="minmax"
)
# Bytes for the network's name, and for lengths that take a digit more.
_NAME_BYTES = 160
# A graph is deflated, so that its size is only nearly known.
_DEFLATED, _GRAPH_BYTES = 1.03, 160
_FACTOR, _TABLE = re.compile(r"times/\d+/\d"), re.compile(r"/?table/")
_STAGE = re.compile(r"/s\d|shape/one")  # the numbers that stages wait for ...
_LATE = re.compile(r"/l\d")  # ... and what is made of them for all weights of a stage


def file_costs(
    model: nn.Module,
    samples: Samples,
    graph: LayerGraph,
    problem: Problem,
    names: Sequence[str],
) -> tuple[Cost, ...]:
    """Return costs of a network's files, by name: ``onnx_bytes``, ``graph_bytes``.

    Raises:
        ExportError: The network cannot be written as ONNX.
        MissingExtraError: onnx is not installed.
    """
    libraries()
    skeletons = _Skeletons(model, samples.first(_SAMPLES), graph, problem)
    made = {"onnx_bytes": skeletons.onnx_cost, "graph_bytes": skeletons.graph_cost}
    try:
        return tuple(made[name]() for name in names)
    except ExportError as error:
        raise ExportError(
            f"the budget limits the ONNX file, which cannot be made: {error}"
        ) from error


@dataclass(frozen=True)
class _File:
    """The content of a file that was made to be weighed."""

    model: Any
    weights: Sequence[StoredWeight]
    network: nn.Module  # what it was made of
    unsigned_from: int  # bits from which weights may be stored as unsigned bytes


@dataclass(frozen=True, eq=False)
class _Skeletons:
    model: nn.Module
    samples: Samples
    graph: LayerGraph
    problem: Problem

    @cached_property
    def offered(self) -> dict[str, list[Choice]]:
        """What each unit may get."""
        problem = self.problem
        return {
            name: [problem.chosen(name, int(c)) for c in np.flatnonzero(row)]
            for name, row in zip(problem.names, problem.allowed, strict=True)
        }

    def quantized(self, widths: Sequence[int]) -> nn.Module:
        """Return the network with these bits in turn, and inputs of the fewest bits."""
        bits, turns = {}, cycle(widths)
        for name, offered in self.offered.items():
            least = min(choice.activation for choice in offered)
            stays = all(choice.weight == FLOAT_BITS for choice in offered)
            bits[name] = Choice(FLOAT_BITS if stays else next(turns), least)
        config = replace(_QUICKLY, group_size=self.graph.group_size or None)
        return quantize(self.model, Allocation(bits), self.samples, config)

    def file(self, quantized: nn.Module, *, integers: bool = True) -> _File:
        """Return the file of a quantized network, as it is exported."""
        network, samples = None, self.samples
        if integers:
            network, _ = as_integers(quantized, samples, saturation_safe=True)
        if network is None:
            traced = traced_model(quantized, samples, _OPSET)
            lopsided = LARGEST_HALF_BITS  # from here on, such weights may saturate
            return _File(traced.model, traced.weights, quantized, lopsided)
        graph = OnnxGraph(lower(network, samples), _OPSET)
        return _File(graph.model(), graph.weights, network, _BYTE)

    def onnx_cost(self) -> Cost:
        """Return what an ONNX file takes."""
        quantized = self.quantized([_BITS])
        found = [self.weighed(self.file(quantized))]
        inputs = {c.activation for offered in self.offered.values() for c in offered}
        if FLOAT_BITS in inputs and len(inputs) > 1:
            # Integers do not cover a network if some of its inputs are float.
            found.append(self.weighed(self.file(quantized, integers=False)))
        table = np.maximum.reduce([cost.table for cost in found])
        return replace(max(found, key=lambda cost: cost.constant), table=table)

    def weighed(self, file: _File) -> Cost:
        """Return what files of other bits than this one take."""
        constants = {one.name: one for one in file.model.graph.initializer}
        rest = file.model.ByteSize() + _NAME_BYTES + _more_grids(file, constants)
        rest -= sum(_entry(one) for n, one in constants.items() if _FACTOR.match(n))
        table = np.zeros((len(self.graph), len(self.problem.choices)))
        shared: dict[str, tuple[int, set[int]]] = {}
        places, units = self._places(file), self.graph.units
        unpacking = Unpacking(_OPSET, [units[place].weights for place in places])
        for number, stored in enumerate(file.weights):
            unit = places[number]
            sizes = _Sizes(units[unit], stored.name, number, unpacking, constants)
            planes = stored.container.startswith("planes")
            rest -= sizes.alone(_BITS if planes else _BYTE)
            for column, choice in enumerate(self.problem.choices):
                if choice.weight != FLOAT_BITS:
                    bits = choice.weight if planes else _BYTE
                    unsigned = bits >= file.unsigned_from
                    table[unit, column] += sizes.most(bits, unsigned=unsigned)
                    for key, size in sizes.tables(bits).items():
                        shared.setdefault(key, (size, set()))[1].add(column)
        # Tables of the same choices are paid together: few cases are left to solve.
        together: dict[tuple[int, ...], float] = {}
        for size, own in shared.values():
            columns = tuple(sorted(own))
            together[columns] = together.get(columns, 0.0) + size
        kept = tuple((size, columns) for columns, size in together.items())
        return Cost("onnx_bytes", table, float(rest), shared=kept)

    def _places(self, file: _File) -> list[int]:
        """Return the positions of the units that weights of a file belong to."""
        positions = {name: at for at, name in enumerate(self.graph.names)}
        return [
            # A weight has its unit's name, or that with the number of a call.
            positions.get(one.name, positions.get(one.name.rpartition(".")[0], 0))
            for one in file.weights
        ]

    def graph_cost(self) -> Cost:
        """Return what a packed file takes that carries its ONNX graph."""
        every = {c.weight for offered in self.offered.values() for c in offered}
        widths = sorted(every - {FLOAT_BITS})
        largest = 0
        for bits in (*([one] for one in widths), widths):
            file = self.file(self.quantized(bits))
            content = file.model.SerializeToString()
            largest = max(largest, graph_bytes(file.network, content))
        size = cost_tables(self.graph, self.problem.choices)["bytes"]
        most = size.constant + round(_DEFLATED * largest) + _GRAPH_BYTES
        return replace(size, name="graph_bytes", constant=most)


@dataclass(eq=False)
class _Sizes:
    """What the containers of one weight take."""

    unit: Unit
    name: str  # what its constants are called
    number: int
    unpacking: Unpacking  # of all weights
    constants: Mapping[str, Any]  # of the skeleton
    known: dict[tuple[int, bool], dict[str, int]] = field(default_factory=dict)

    def entries(self, bits: int, *, unsigned: bool = False) -> dict[str, int]:
        """Return what a container is made of, by name, with its bytes."""
        key = (bits, unsigned)
        if key not in self.known:
            unpacking = self.unpacking.alone(self.number)
            blank = self._blank(bits)
            constants, nodes = unpacking.store(self.name, blank, unsigned=unsigned)
            found = {name: as_tensor(name, one) for name, one in constants.items()}
            found |= {node.output[0]: node for node in nodes}
            self.known[key] = {name: _entry(one) for name, one in found.items()}
        return self.known[key]

    def _blank(self, bits: int) -> IntegerWeight:
        """Return a weight of zeros, with offsets and stretches as the file has them."""
        shape, halves = self.unit.weight_shape, 2 - (bits > LARGEST_HALF_BITS)
        offset, middle = self.constants.get(f"{self.name}/offset"), 1 << (bits - 1)
        channels = [1] * len(shape) if offset is None else list(offset.dims)
        stretch = torch.ones(channels, dtype=torch.int32)
        if f"{self.name}/stretch" in self.constants:
            stretch.view(-1)[0] = 0  # a channel without weights is unlike the others
        return IntegerWeight(
            codes=torch.full(shape, middle, dtype=torch.uint8),
            bits=bits,
            unit=halves,
            offset=torch.full(channels, middle * halves, dtype=torch.int32),
            stretch=stretch,
            values=torch.zeros(shape, dtype=torch.int8),
            scale=torch.ones(()),
            bias=torch.zeros(()),
        )

    def alone(self, bits: int) -> int:
        """Return what the weight takes in a file that has all that is shared."""
        return sum(
            size
            for key, size in self.entries(bits).items()
            if not any(one.match(key) for one in (_FACTOR, _TABLE, _STAGE, _LATE))
        )

    def most(self, bits: int, *, unsigned: bool) -> int:
        """Return the most that it takes, if it may be unsigned.

        This is apart from tables, and from stages, which the skeleton has.
        """
        both = (False, True) if unsigned else (False,)
        found = [
            sum(
                n
                for key, n in self.entries(bits, unsigned=one).items()
                if not _TABLE.match(key) and not _STAGE.match(key)
            )
            for one in both
        ]
        zeros = f"{self.name}/zeros"
        if not unsigned or zeros in self.constants:
            return max(found)
        # Zero points of unsigned bytes are written.
        blank = np.zeros(self.unit.out_channels, np.uint8)
        return max(found) + _entry(as_tensor(zeros, blank)) + len(zeros) + 2

    def tables(self, bits: int) -> dict[str, int]:
        """Return the tables that it shares with others, by name."""
        return {key: n for key, n in self.entries(bits).items() if _TABLE.match(key)}


def _more_grids(file: _File, constants: Mapping[str, Any]) -> int:
    """Return the bytes of grids that tensors share in this file by chance."""
    found, sites = 0, len(activation_quantizers(file.network))
    blanks = (np.array(1, np.float32), np.array(0, np.uint8))
    for name, blank in zip(grid_names(1.0, 0), blanks, strict=True):
        kind = f"{name.partition('/')[0]}/"
        there = sum(one.startswith(kind) for one in constants)
        found += max(sites - there, 0) * _entry(as_tensor(name, blank))
    return found


def _entry(proto: Any) -> int:
    """Return what a node or a constant takes: a tag, its length and itself."""
    size = int(proto.ByteSize())
    return 1 + max(1, -(-size.bit_length() // 7)) + size
