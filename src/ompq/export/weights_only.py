"""An ONNX file of a network whose weights alone are quantized.

PyTorch writes the graph, with any operators that it knows. Then each quantized
weight gives way to its codes at their true width, and to the nodes that turn them into
the very same floats. All that these read is constant, so that a runtime does this once,
when it loads the file: the file is smaller, and as fast as the float one.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.errors import ExportError, QuantizationError
from ompq.export.containers import (
    DOMAIN,
    Array,
    StoredWeight,
    plane_parts,
    planes,
    unpack_function,
)
from ompq.export.onnx_graph import INPUT, OUTPUT
from ompq.graph.observation import tensors_in
from ompq.graph.units import Unit
from ompq.integer.steps import IntegerWeight
from ompq.packing.contents import broadcast_grid
from ompq.quantization.layers import QuantizedLayer, quantized_layers
from ompq.quantization.quantizing import quantization_of
from ompq.quantizers.grids import Grid, integer_weight
from ompq.samples import Samples, evaluating, first_samples, to_device

_CPU = torch.device("cpu")


def weights_only_model(
    quantized: nn.Module, samples: Samples, opset: int
) -> tuple[Any, list[StoredWeight]]:
    """Return the content of a file, and how it stores each weight.

    Args:
        quantized: A network whose activations are all float; it takes one tensor.
        samples: Inputs; two are run.
        opset: Version of the standard operators.

    Raises:
        QuantizationError: The network takes several inputs.
        ExportError: PyTorch cannot write the graph, or a weight is not in it.
    """
    record = quantization_of(quantized)
    model = _written(_plain(quantized), samples, opset)
    _strip(model)
    state = quantized.state_dict()
    constants = {one.name: one for one in model.graph.initializer}
    stored = []
    for unit in record.graph.units:
        bits = record.allocation[unit.name].weight
        if bits < FLOAT_BITS:
            weight, grid = _whole(state, unit, bits)
            stored.append(_replace(model, constants, unit, weight, grid))
    widths = {one.bits for one in stored if one.container != "int8"}
    model.functions.extend(unpack_function(width, opset) for width in sorted(widths))
    if widths:
        model.opset_import.add(domain=DOMAIN, version=1)
    return model, stored


def float_model(model: nn.Module, samples: Samples, opset: int = 21) -> Any:
    """Return the content of an ONNX file of a float network, as PyTorch writes it.

    Args:
        model: The network; it takes one tensor.
        samples: Inputs; two are run.
        opset: Version of the standard operators.

    Raises:
        QuantizationError: The network takes several inputs.
        ExportError: PyTorch cannot write the graph.
    """
    written = _written(copy.deepcopy(model).cpu(), samples, opset)
    _strip(written)
    return written


def _plain(quantized: nn.Module) -> nn.Module:
    """Return a copy whose layers are PyTorch's own, with rounded weights."""
    result = copy.deepcopy(quantized).cpu()
    with torch.no_grad():
        for layer in quantized_layers(result).values():
            layer.weight.copy_(layer.rounded_weight())
            layer.__class__ = _replaced_class(layer)
    return result


def _replaced_class(layer: QuantizedLayer) -> type[Any]:
    return type(layer).__mro__[2]


def _written(network: nn.Module, samples: Samples, opset: int) -> Any:
    images, *more = tensors_in(to_device(first_samples(samples, 2), _CPU))
    if more:
        raise QuantizationError(
            f"the network takes {1 + len(more)} inputs: export covers one"
        )
    try:
        with evaluating(network), _quiet():
            program: Any = torch.onnx.export(
                network,
                (images,),
                None,
                dynamo=True,
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"PyTorch cannot write the network as ONNX: {first}"
        ) from error
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's exporter warns of itself, on several ways."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _strip(model: Any) -> None:
    """Remove what tells of the machine that wrote it: traces, paths, comments."""
    model.producer_name, model.producer_version = "ompq", ""
    model.doc_string = ""
    del model.metadata_props[:]
    graph = model.graph
    graph.name, graph.doc_string = "network", ""
    del graph.metadata_props[:]
    del graph.value_info[:]
    for part in (graph.node, graph.initializer, graph.input, graph.output):
        for one in part:
            one.doc_string = ""
            del one.metadata_props[:]


def _whole(
    state: Mapping[str, Tensor], unit: Unit, bits: int
) -> tuple[IntegerWeight, Grid]:
    """Return a unit's weight as whole numbers that give its very floats."""
    scale, zero = (
        state[f"{unit.parameter}_{name}"].detach().cpu() for name in ("scale", "zero")
    )
    grid = broadcast_grid(Grid(scale, zero, bits), unit, _CPU)
    codes = grid.quantize(state[unit.parameter].detach().cpu())
    values, factor = integer_weight(codes, grid.zero, bits)
    ones = torch.ones(len(zero), dtype=torch.int32)
    weight = IntegerWeight(
        codes=codes,
        bits=bits,
        unit=round(1 / factor),
        offset=(grid.zero / factor).int(),
        stretch=ones,
        values=values,
        scale=grid.scale * factor,
        bias=0 * ones,
    )
    return weight, grid


def _replace(
    model: Any,
    constants: Mapping[str, Any],
    unit: Unit,
    weight: IntegerWeight,
    grid: Grid,
) -> StoredWeight:
    """Put nodes in the place of the constants that hold a unit's weight."""
    from onnx import TensorProto, helper, numpy_helper

    floats = grid.dequantize(weight.codes).numpy()
    places = list(_places(constants, floats))
    if not places:
        raise ExportError(
            f"{unit.name}: its weight {tuple(floats.shape)} is not among the constants "
            "that PyTorch wrote; pin it to 32 bits to keep it float"
        )
    name = unit.name
    arrays, nodes = _bytes(name, weight)
    arrays[f"{name}/scale"] = weight.scale.numpy()
    made = helper.make_node
    nodes += [
        made("Cast", [f"{name}/bytes"], [f"{name}/levels"], to=TensorProto.FLOAT),
        made("Mul", [f"{name}/levels", f"{name}/scale"], [f"{name}/weight"]),
    ]
    for place, turned in places:
        kind = "Transpose" if turned else "Identity"
        nodes.append(made(kind, [f"{name}/weight"], [place]))
        model.graph.initializer.remove(constants[place])
    for key, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, key))
    everything = [*nodes, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(everything)
    parts = plane_parts(weight)
    container = f"planes {'+'.join(map(str, parts))}" if parts else "int8"
    size = sum(array.nbytes for array in arrays.values())
    return StoredWeight(name, weight.bits, container, size)


def _places(constants: Mapping[str, Any], floats: Array) -> Iterator[tuple[str, bool]]:
    """Yield the constants that equal a weight, and whether they are its transpose."""
    from onnx import numpy_helper

    for name, tensor in constants.items():
        shape = tuple(tensor.dims)
        for turned, array in ((False, floats), (True, floats.T)):
            if shape != array.shape or (turned and floats.ndim != 2):
                continue
            if np.array_equal(numpy_helper.to_array(tensor), array):
                yield name, turned
                break


def _bytes(name: str, weight: IntegerWeight) -> tuple[dict[str, Array], list[Any]]:
    """Return the constants and nodes that give a weight as signed bytes."""
    from onnx import helper

    if not plane_parts(weight):
        return {f"{name}/bytes": weight.values.numpy()}, []
    arrays: dict[str, Array] = {
        f"{name}/plane{number}": plane for number, plane in enumerate(planes(weight))
    }
    arrays[f"{name}/offset"] = weight.offset.numpy().astype(np.uint8)
    arrays[f"{name}/stretch"] = np.array(1, np.uint8)
    node = helper.make_node(
        f"Weight{weight.bits}",
        list(arrays),
        [f"{name}/bytes"],
        domain=DOMAIN,
        count=[weight.codes.numel()],
        shape=list(weight.codes.shape),
    )
    return arrays, [node]
