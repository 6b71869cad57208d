"""Sizes of GGUF files before they are written, for budgets."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch import nn

from ompq.allocation.problem import Problem
from ompq.bit_widths import FLOAT_BITS
from ompq.cost_tables import Cost
from ompq.errors import ExportError
from ompq.network.units import LayerGraph, Table, Unit
from ompq.runtimes.gguf.gguf_blocks import BLOCK, type_of
from ompq.runtimes.gguf.gguf_files import open_writer
from ompq.runtimes.gguf.gguf_metadata import tokenizer_of
from ompq.runtimes.gguf.gguf_tensors import named_tensors

_ALIGNMENT, _FLOAT_BYTES = 32, 4


def gguf_cost(model: nn.Module, graph: LayerGraph, problem: Problem) -> Cost:
    """Return the exact size of a network's GGUF file, for every choice of bits.

    Raises:
        ExportError: The network cannot be written as GGUF.
        MissingExtraError: gguf is not installed.
    """
    sizes = {}
    with TemporaryDirectory() as folder:
        path = Path(folder, "header")
        with open_writer(model, path, tokenizer_of(model), FLOAT_BITS) as writer:
            for one in named_tensors(model):
                size = sizes[one.name] = one.content.nbytes
                writer.add_tensor_info(one.name, one.shape, one.content.dtype, size)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        header = _aligned(path.stat().st_size)
    table = np.array([_row(unit, problem) for unit in graph.units], dtype=float)
    constant = header + sum(map(_aligned, sizes.values()))
    constant -= sum(_aligned(_FLOAT_BYTES * unit.weights) for unit in graph.units)
    return Cost("gguf_bytes", table, float(constant))


def _row(unit: Unit, problem: Problem) -> list[float]:
    allowed: Table = problem.allowed[problem.names.index(unit.name)]
    row = []
    for choice, offered in zip(problem.choices, allowed, strict=True):
        size = _FLOAT_BYTES * unit.weights
        if offered and choice.weight < FLOAT_BITS:
            width, whole = unit.weight_shape[1], unit.super_blocks
            if width % BLOCK:
                raise ExportError(
                    f"{unit.name} has {width} inputs, not a multiple of {BLOCK}, which "
                    "a GGUF block holds: pin it to 32 bits"
                )
            kind = type_of(choice.weight, unit.name, super_blocks=whole)
            size = unit.weight_shape[0] * kind.row_bytes(width)
        row.append(float(_aligned(size)))
    return row


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
