"""Sizes of ONNX files and packed graphs before they are written, for budgets.

A skeleton of the file is made once, with all weights at 4 bits. With other bits, only
the containers of the weights differ from it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import nn

from ompq.allocation.problem import Allocation, Problem
from ompq.bit_widths import FLOAT_BITS, LARGEST_HALF_BITS
from ompq.configs import QuantizeConfig
from ompq.cost_tables import Cost
from ompq.costs import cost_tables
from ompq.errors import ExportError
from ompq.integer.arithmetic import IntegerWeight
from ompq.integer.lowering import lower
from ompq.layers import activation_quantizers
from ompq.network.units import Choice, LayerGraph, Unit
from ompq.packed.packed_files import graph_bytes
from ompq.quantization.pipeline import quantize
from ompq.runtimes.onnx.onnx_graph import OnnxGraph, as_integers, libraries
from ompq.runtimes.onnx.traced_graph import traced_model
from ompq.runtimes.onnx.weight_containers import (
    StoredWeight,
    Unpacking,
    as_tensor,
    grid_names,
)
from ompq.samples import Samples

_OPSET = 21  # of export_onnx
_BITS, _BYTE = 4, 8  # of the skeleton's weights; of those that need no planes
_SAMPLES = 8  # only their shapes matter
_QUICKLY = QuantizeConfig(
    weight_range="minmax", equalize=False, activation_range="minmax"
)
# For what the file says of itself, and for lengths with one digit more.
_ABOUT_BYTES = 640
# A graph is deflated, so its size is known only approximately.
_DEFLATED, _GRAPH_BYTES = 1.03, 480
_FACTOR, _TABLE = re.compile(r"times/\d+/\d"), re.compile(r"/?table/")
_STAGE = re.compile(r"/s\d|shape/one")  # numbers that the stages wait for
_LATE = re.compile(r"/l\d")  # computed from them, for all weights of a stage


def file_costs(
    model: nn.Module,
    samples: Samples,
    graph: LayerGraph,
    problem: Problem,
    names: Sequence[str],
) -> tuple[Cost, ...]:
    """Return costs of a network's files: ``onnx_bytes``, ``graph_bytes`` or both.

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
    """The content of a file that was made to measure its size."""

    model: Any
    weights: Sequence[StoredWeight]
    network: nn.Module  # the network it was made from
    unsigned_from: int  # bits from which weights may be stored as unsigned bytes


@dataclass(frozen=True, eq=False)
class _Skeletons:
    model: nn.Module
    samples: Samples
    graph: LayerGraph
    problem: Problem

    @cached_property
    def offered(self) -> dict[str, list[Choice]]:
        """The choices of each unit."""
        problem = self.problem
        return {
            name: [problem.chosen(name, int(c)) for c in np.flatnonzero(row)]
            for name, row in zip(problem.names, problem.allowed, strict=True)
        }

    def quantized(self, widths: Sequence[int]) -> nn.Module:
        """Return the network with these bits in turn, and the fewest input bits."""
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
            # From this width on, products of asymmetric weights may saturate.
            unsigned_from = LARGEST_HALF_BITS
            return _File(traced.model, traced.weights, quantized, unsigned_from)
        graph = OnnxGraph(lower(network, samples), _OPSET)
        return _File(graph.model(), graph.weights, network, _BYTE)

    def onnx_cost(self) -> Cost:
        """Return the size of an ONNX file."""
        quantized = self.quantized([_BITS])
        found = [self.sized(self.file(quantized))]
        inputs = {c.activation for offered in self.offered.values() for c in offered}
        if FLOAT_BITS in inputs and len(inputs) > 1:
            # If the inputs of some layers are float, the network is not all integers.
            found.append(self.sized(self.file(quantized, integers=False)))
        table = np.maximum.reduce([cost.table for cost in found])
        return replace(max(found, key=lambda cost: cost.constant), table=table)

    def sized(self, file: _File) -> Cost:
        """Return the sizes of files like this one, with other bits."""
        constants = {one.name: one for one in file.model.graph.initializer}
        rest = file.model.ByteSize() + _ABOUT_BYTES + _more_grids(file, constants)
        rest -= sum(_entry(one) for n, one in constants.items() if _FACTOR.match(n))
        table = np.zeros((len(self.graph), len(self.problem.choices)))
        shared: dict[str, tuple[int, set[int]]] = {}
        units = self.graph.units
        positions = {unit.name: at for at, unit in enumerate(units)}
        # A weight has its unit's name, or that with the number of a call.
        places = [
            positions.get(one.name, positions.get(one.name.rpartition(".")[0], 0))
            for one in file.weights
        ]
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
        # Tables of the same choices are added up, so that few cases are left to solve.
        together: dict[tuple[int, ...], float] = {}
        for size, own in shared.values():
            columns = tuple(sorted(own))
            together[columns] = together.get(columns, 0.0) + size
        kept = tuple((size, columns) for columns, size in together.items())
        return Cost("onnx_bytes", table, float(rest), shared=kept)

    def graph_cost(self) -> Cost:
        """Return the size of a packed file that carries its ONNX graph."""
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
    """Sizes of the containers of one weight."""

    unit: Unit
    name: str  # the first part of its constants' names
    number: int
    unpacking: Unpacking  # of all weights
    constants: Mapping[str, Any]  # of the skeleton
    known: dict[tuple[int, bool], dict[str, int]] = field(default_factory=dict)

    def entries(self, bits: int, *, unsigned: bool = False) -> dict[str, int]:
        """Return the bytes of each constant and node of a container, by name."""
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
        rows = 0 if offset is None else int(offset.dims[0])
        phases = rows // self.unit.out_channels
        if self.unit.kind == "transposed" and phases:  # it is stored as a convolution
            shape = (rows, shape[0], *(side // isqrt(phases) for side in shape[2:]))
        channels = [1] * len(shape) if offset is None else list(offset.dims)
        stretch = torch.ones(channels, dtype=torch.int32)
        if f"{self.name}/stretch" in self.constants:
            stretch.view(-1)[0] = 0  # as for a channel whose weights are all 0
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
        """Return the bytes that the weight adds to a file with everything shared."""
        return self._sum(bits, _FACTOR, _TABLE, _STAGE, _LATE)

    def _sum(
        self, bits: int, *left_out: re.Pattern[str], unsigned: bool = False
    ) -> int:
        return sum(
            size
            for key, size in self.entries(bits, unsigned=unsigned).items()
            if not any(pattern.match(key) for pattern in left_out)
        )

    def most(self, bits: int, *, unsigned: bool) -> int:
        """Return the most bytes, without tables and the skeleton's stages.

        If ``unsigned``, the weight may be stored as unsigned bytes.
        """
        both = (False, True) if unsigned else (False,)
        most = max(self._sum(bits, _TABLE, _STAGE, unsigned=one) for one in both)
        zeros = f"{self.name}/zeros"
        if not unsigned or zeros in self.constants:
            return most
        # Zero points of unsigned bytes are written.
        blank = np.zeros(self.unit.out_channels, np.uint8)
        return most + _entry(as_tensor(zeros, blank)) + len(zeros) + 2

    def tables(self, bits: int) -> dict[str, int]:
        """Return the bytes of tables that it shares with other weights, by name."""
        return {key: n for key, n in self.entries(bits).items() if _TABLE.match(key)}


def _more_grids(file: _File, constants: Mapping[str, Any]) -> int:
    """Return the bytes of grids that tensors happen to share in this file."""
    found, sites = 0, len(activation_quantizers(file.network))
    blanks = (np.array(1, np.float32), np.array(0, np.uint8))
    for name, blank in zip(grid_names(1.0, 0), blanks, strict=True):
        kind = f"{name.partition('/')[0]}/"
        there = sum(one.startswith(kind) for one in constants)
        found += max(sites - there, 0) * _entry(as_tensor(name, blank))
    return found


def _entry(proto: Any) -> int:
    """Return the bytes of a node or constant: a tag, its length and itself."""
    size = int(proto.ByteSize())
    return 1 + max(1, -(-size.bit_length() // 7)) + size
