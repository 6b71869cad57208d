"""Integer steps, or a weights-only network, as an ONNX graph."""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.errors import ExportError, QuantizationError
from ompq.graph import Unit
from ompq.integer.operators import (
    Average,
    Concatenate,
    Convolution,
    Flatten,
    IntegerWeight,
    MaxPool,
    Pad,
    Product,
    Quantize,
    Requantize,
    Slice,
    Step,
    Steps,
    Sum,
)
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.onnx.containers import (
    DOMAIN,
    Array,
    StoredWeight,
    plane_parts,
    planes,
    unpack_function,
)
from ompq.packing.format import broadcast_grid
from ompq.quantization import quantization_of
from ompq.quantizers import Grid, integer_weight
from ompq.recording import tensors_in
from ompq.samples import Samples, SamplesLike, evaluating, to_device

INPUT, OUTPUT = "input", "logits"
_LARGEST_CODE = 255


class OnnxGraph:
    """The graph of a network while it is written, node by node.

    Attributes:
        codes: Position of a step → name of the tensor of its codes.
        weights: How each weight is stored.
    """

    def __init__(self, steps: Steps, opset: int) -> None:
        self.steps = steps
        self.opset = opset
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.codes: dict[int, str] = {}
        self.floats: dict[int, str] = {}
        self.weights: list[StoredWeight] = []
        self.widths: set[int] = set()  # of weights in planes
        for position, step in enumerate(steps.steps):
            self._step(position, step)

    def model(self) -> Any:
        """Return the whole file's content."""
        from onnx import helper, numpy_helper

        last = self.steps.steps[-1]
        final = self._float(len(self.steps.steps) - 1)
        self.nodes.append(helper.make_node("Identity", [final], [OUTPUT]))
        graph = helper.make_graph(
            self.nodes,
            "network",
            [_described(INPUT, self.steps.input_shape)],
            [_described(OUTPUT, last.shape)],
            [numpy_helper.from_array(a, name) for name, a in self.constants.items()],
        )
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(
            graph,
            producer_name="ompq",
            ir_version=helper.find_min_ir_version_for([opset]),
            opset_imports=[opset, helper.make_opsetid(DOMAIN, 1)],
            functions=[unpack_function(w, self.opset) for w in sorted(self.widths)],
        )

    def _node(self, kind: str, inputs: Sequence[str], output: str, **given: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, list(inputs), [output], **given))
        return output

    def _constant(self, name: str, value: Any, kind: Any) -> str:
        self.constants[name] = np.array(value, dtype=kind)
        return name

    def _step(self, position: int, step: Step) -> None:
        operation = step.operation
        if isinstance(operation, Slice | Pad):
            self.codes[position] = self._moved(step)
            return
        if isinstance(operation, Requantize) and self._only_clips(step):
            self.codes[position] = self._clipped(step, self.codes[step.inputs[0]])
            return
        if isinstance(operation, Quantize):
            result = INPUT
        elif isinstance(operation, Requantize):
            result = self._float(step.inputs[0])
        else:
            result = self._computed(step)
        if step.grid is None:
            self.floats[position] = self._limited(step, result)
        else:
            self.codes[position] = self._quantized(step, result)

    def _only_clips(self, step: Step) -> bool:
        return self.steps.steps[step.inputs[0]].grid == step.grid

    def _float(self, position: int) -> str:
        """Return the tensor of a step's values; dequantizes its codes once."""
        if position not in self.floats:
            codes = self.codes[position]
            scale, zero_point = self._grid(self.steps.steps[position])
            name = f"{codes}/values"
            self._node("DequantizeLinear", [codes, scale, zero_point], name)
            self.floats[position] = name
        return self.floats[position]

    def _grid(self, step: Step) -> tuple[str, str]:
        grid = step.grid
        assert grid is not None  # asked for codes only
        scale = self._constant(f"scale/{grid.scale:.9g}", grid.scale, np.float32)
        return scale, self._constant(
            f"zero/{grid.zero_point}", grid.zero_point, np.uint8
        )

    def _quantized(self, step: Step, values: str) -> str:
        scale, zero_point = self._grid(step)
        codes = self._node(
            "QuantizeLinear", [values, scale, zero_point], f"{step.name}/codes"
        )
        return self._clipped(step, codes)

    def _clipped(self, step: Step, codes: str) -> str:
        assert step.grid is not None
        low, high = step.grid.limits(step.low, step.high)
        if (low, high) == (0, _LARGEST_CODE):
            return codes
        ends = [self._constant(f"code/{end}", end, np.uint8) for end in (low, high)]
        return self._node("Clip", [codes, *ends], f"{step.name}/clip")

    def _limited(self, step: Step, values: str) -> str:
        if (step.low, step.high) == (-inf, inf):
            return values
        ends = [
            self._constant(f"{step.name}/{name}", end, np.float32)
            if isfinite(end)
            else ""
            for name, end in (("low", step.low), ("high", step.high))
        ]
        return self._node("Clip", [values, *ends], f"{step.name}/clip")

    def _computed(self, step: Step) -> str:
        """Add the node of a step that reads values and gives values."""
        operation, name = step.operation, f"{step.name}/values"
        inputs = [self._float(source) for source in step.inputs]
        match operation:
            case Convolution():
                inputs += self._weight(step, operation.weight)
                return self._node("Conv", inputs, name, **_conv_attributes(operation))
            case Product():
                inputs += self._weight(step, operation.weight)
                return self._node("Gemm", inputs, name, transB=1)
            case Sum():
                return self._node("Add", inputs, name)
            case Average(whole=True):
                return self._node("GlobalAveragePool", inputs, name)
            case Average():
                given = _pool_attributes(operation)
                return self._node(
                    "AveragePool", inputs, name, count_include_pad=1, **given
                )
            case MaxPool():
                ceil = int(operation.ceil)
                given = {
                    **_pool_attributes(operation),
                    **_unusual(dilations=operation.dilation, ceil_mode=ceil),
                }
                return self._node("MaxPool", inputs, name, **given)
            case Flatten():
                return self._node("Flatten", inputs, name)
            case _:
                assert isinstance(operation, Concatenate)
                return self._node("Concat", inputs, name, axis=1)

    def _moved(self, step: Step) -> str:
        """Add a node that moves codes as they are, whatever a runtime's kernels."""
        codes, operation = self.codes[step.inputs[0]], step.operation
        if isinstance(operation, Slice):
            columns = list(zip(*operation.ranges, strict=True))
            columns.insert(2, tuple(range(1, 1 + len(operation.ranges))))
            given = [
                self._constant(f"{step.name}/{kind}", column, np.int64)
                for kind, column in zip(
                    ("starts", "ends", "axes", "steps"), columns, strict=True
                )
            ]
            return self._node("Slice", [codes, *given], f"{step.name}/codes")
        assert isinstance(operation, Pad)
        ends = [
            0,
            *(s[0] for s in operation.sides),
            0,
            *(s[1] for s in operation.sides),
        ]
        sides = self._constant(f"{step.name}/sides", ends, np.int64)
        zero_point = self._grid(step)[1]
        return self._node("Pad", [codes, sides, zero_point], f"{step.name}/codes")

    def _weight(self, step: Step, weight: IntegerWeight) -> list[str]:
        """Add the nodes of a weight and its bias; return both as values."""
        before = sum(array.nbytes for array in self.constants.values())
        name = step.name
        values = self._bytes(name, weight)
        scale = self._constant(f"{name}/scale", weight.scale.numpy(), np.float32)
        inputs = [values, scale]
        if isinstance(step.operation, Product):
            # ONNX Runtime fuses a Gemm only with the zeros written out.
            zeros = np.zeros(len(weight.scale))
            inputs.append(self._constant(f"{name}/zeros", zeros, np.int8))
        result = self._node("DequantizeLinear", inputs, f"{name}/weight", axis=0)
        bias = self._constant(f"{name}/bias", weight.bias.numpy(), np.int32)
        given = self._grid(self.steps.steps[step.inputs[0]])[0]
        unit = self._node("Mul", [scale, given], f"{name}/unit")
        added = self._node("DequantizeLinear", [bias, unit], f"{name}/shift", axis=0)
        parts = plane_parts(weight)
        container = f"planes {'+'.join(map(str, parts))}" if parts else "int8"
        size = sum(array.nbytes for array in self.constants.values()) - before
        self.weights.append(StoredWeight(name, weight.bits, container, size))
        return [result, added]

    def _bytes(self, name: str, weight: IntegerWeight) -> str:
        """Add a weight as signed bytes, unpacked from planes where it is narrower."""
        if not plane_parts(weight):
            return self._constant(f"{name}/bytes", weight.values.numpy(), np.int8)
        self.widths.add(weight.bits)
        like = (-1, *[1] * (weight.codes.dim() - 1))
        stretch = weight.stretch.numpy()
        inputs = [
            self._constant(f"{name}/plane{number}", plane, np.uint8)
            for number, plane in enumerate(planes(weight))
        ]
        offset = weight.offset.numpy().reshape(like)
        inputs.append(self._constant(f"{name}/offset", offset, np.uint8))
        same = (stretch == stretch[0]).all()
        value = stretch[0] if same else stretch.reshape(like)
        inputs.append(self._constant(f"{name}/stretch", value, np.uint8))
        return self._node(
            f"Weight{weight.bits}",
            inputs,
            f"{name}/bytes",
            domain=DOMAIN,
            count=[weight.codes.numel()],
            shape=list(weight.codes.shape),
        )


def _described(name: str, shape: tuple[int, ...]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])


def _conv_attributes(operation: Convolution) -> dict[str, Any]:
    return _unusual(
        strides=operation.stride,
        pads=operation.padding,
        dilations=operation.dilation,
        group=operation.groups,
    )


def _pool_attributes(operation: Average | MaxPool) -> dict[str, Any]:
    return {
        "kernel_shape": operation.window,
        **_unusual(strides=operation.stride, pads=operation.padding * 2),
    }


def _unusual(**given: Any) -> dict[str, Any]:
    """Return the attributes that are not what a node without them has."""
    usual = {"strides": {1}, "dilations": {1}, "pads": {0}, "group": {1}}
    usual["ceil_mode"] = {0}
    return {
        name: value
        for name, value in given.items()
        if {*np.atleast_1d(value).tolist()} != usual[name]
    }


_CPU = torch.device("cpu")


def weights_only_model(
    quantized: nn.Module, samples: SamplesLike, opset: int
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


def float_model(model: nn.Module, samples: SamplesLike, opset: int = 21) -> Any:
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


def _written(network: nn.Module, samples: SamplesLike, opset: int) -> Any:
    images, *more = tensors_in(to_device(Samples.of(samples).first_batch(2), _CPU))
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
    scale, zero_point = (
        state[f"{unit.parameter}_{name}"].detach().cpu()
        for name in ("scale", "zero_point")
    )
    grid = broadcast_grid(Grid(scale, zero_point, bits), unit, _CPU)
    codes = grid.quantize(state[unit.parameter].detach().cpu())
    values, factor = integer_weight(codes, grid.zero_point, bits)
    ones = torch.ones(len(zero_point), dtype=torch.int32)
    weight = IntegerWeight(
        codes=codes,
        bits=bits,
        unit=round(1 / factor),
        offset=(grid.zero_point / factor).int(),
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
