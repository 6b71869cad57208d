"""Integer steps, or a weights-only network, as an ONNX graph."""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.costs import FLOAT_BITS
from ompq.errors import ExportError, QuantizationError
from ompq.graph import Unit
from ompq.integer.arithmetic import CodeGrid, IntegerWeight
from ompq.integer.lowering import INPUT, Steps, output_names
from ompq.integer.operators import Convolution, Layer, Node, Product, Step
from ompq.layers import quantized_layers
from ompq.onnx.containers import (
    ZERO_OF_UNSIGNED,
    Array,
    StoredWeight,
    as_tensor,
    stored_bytes,
)
from ompq.packing.format import broadcast_grid
from ompq.quantization import quantization_of
from ompq.quantizers import Grid, integer_weight
from ompq.recording import tensors_in
from ompq.samples import Samples, SamplesLike, call, evaluating

_LARGEST_CODE = 255


class OnnxGraph:
    """The graph of a network while it is written, node by node."""

    def __init__(
        self, steps: Steps, opset: int, *, saturation_safe: bool = True
    ) -> None:
        self.steps = steps
        self.opset = opset
        self.unsigned = set(steps.saturating() if saturation_safe else ())
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.weights: list[StoredWeight] = []
        self.codes: dict[int, str] = {}  # step → name of the tensor of its codes
        self.values: dict[int, str] = {}
        for position, step in enumerate(steps.steps):
            found = self.values if step.grid.wide else self.codes
            found[position] = self._step(step)

    def model(self) -> Any:
        """Return the whole file's content."""
        from onnx import helper

        outputs = []
        for name, position in self.steps.outputs.items():
            self._node("Identity", [self._values(position)], name)
            outputs.append(_described(name, self.steps.steps[position].shape))
        graph = helper.make_graph(
            self.nodes,
            "network",
            [_described(INPUT, self.steps.input_shape)],
            outputs,
            [as_tensor(name, one) for name, one in self.constants.items()],
        )
        opset = helper.make_opsetid("", self.opset)
        return helper.make_model(
            graph,
            producer_name="ompq",
            ir_version=helper.find_min_ir_version_for([opset]),
            opset_imports=[opset],
        )

    def _node(self, kind: str, inputs: list[str], output: str, **given: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], **given))
        return output

    def _constant(self, name: str, value: Any, kind: Any) -> str:
        self.constants[name] = np.array(value, dtype=kind)
        return name

    def _step(self, step: Step) -> str:
        """Add a step; return the tensor of its codes, or of wide values."""
        node, operator = step.operator.node(), step.operator
        if node is not None and node.on_codes:
            return self._moved(step, node)
        same_grid = step.grid in self.steps.sources(step)
        if node is None and same_grid:
            return self._clipped(step, self.codes[step.inputs[0]])
        if isinstance(operator, Layer):
            self._weight(step, operator)
        if isinstance(operator, Convolution) and step.grid.wide:
            values = self._integer_convolution(step, operator)
        else:
            inputs = [self._values(source) for source in step.inputs] or [INPUT]
            values = inputs[0] if node is None else self._computed(step, node, inputs)
        if step.grid.wide:
            return self._limited(step, values)
        inputs = [values, *self._grid(step.grid)]
        codes = self._node("QuantizeLinear", inputs, f"{step.name}/codes")
        return self._clipped(step, codes)

    def _moved(self, step: Step, node: Node) -> str:
        (source,) = step.inputs
        inputs = [self.values[source] if step.grid.wide else self.codes[source]]
        for name, value in node.constants.items():
            if value is not None:
                inputs.append(self._constant(f"{step.name}/{name}", value, np.int64))
            elif not step.grid.wide:
                inputs.append(self._grid(step.grid)[1])
        return self._node(node.kind, inputs, f"{step.name}/codes", **node.attributes)

    def _values(self, position: int) -> str:
        """Return the tensor of a step's values; dequantizes its codes once."""
        if position not in self.values:
            codes = self.codes[position]
            inputs = [codes, *self._grid(self.steps.steps[position].grid)]
            name = f"{codes}/values"
            self.values[position] = self._node("DequantizeLinear", inputs, name)
        return self.values[position]

    def _grid(self, grid: CodeGrid) -> tuple[str, str]:
        scale = self._constant(f"scale/{grid.scale:.9g}", grid.scale, np.float32)
        zero = self._constant(f"zero/{grid.zero_point}", grid.zero_point, np.uint8)
        return scale, zero

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

    def _clipped(self, step: Step, codes: str) -> str:
        low, high = step.grid.limits(step.low, step.high)
        if (low, high) == (0, _LARGEST_CODE):
            return codes
        ends = [self._constant(f"code/{end}", end, np.uint8) for end in (low, high)]
        return self._node("Clip", [codes, *ends], f"{step.name}/clip")

    def _weight(self, step: Step, layer: Layer) -> None:
        """Add a layer's weight as bytes, its bias, and the accumulator's step."""
        name, weight = step.name, layer.weight
        unsigned, short = name in self.unsigned, f"w{len(self.weights)}"
        arrays, nodes = stored_bytes(name, weight, self.opset, short, unsigned=unsigned)
        arrays[f"{name}/scale"] = weight.scale.numpy().astype(np.float32)
        arrays[f"{name}/bias"] = weight.bias.numpy()
        if unsigned:
            zeros = np.full(len(weight.scale), ZERO_OF_UNSIGNED, np.uint8)
            arrays[f"{name}/zeros"] = zeros
        elif isinstance(layer, Product):
            # ONNX Runtime fuses a Gemm only with the zeros written out.
            arrays[f"{name}/zeros"] = np.zeros(len(weight.scale), np.int8)
        self.weights.append(StoredWeight.of(name, weight, arrays))
        self.constants |= arrays
        for kind, inputs, output, attributes in nodes:
            self._node(kind, inputs, output, **attributes)
        (source,) = self.steps.sources(step)
        given = [self._grid(source)[0], f"{name}/scale"]
        self._node("Mul", given, f"{name}/unit")

    def _computed(self, step: Step, node: Node, inputs: list[str]) -> str:
        """Add the node that computes values from values."""
        name = step.name
        if isinstance(step.operator, Layer):
            given = [f"{name}/bytes", f"{name}/scale"]
            given += [f"{name}/zeros"] * (f"{name}/zeros" in self.constants)
            shift = [f"{name}/bias", f"{name}/unit"]
            inputs += [
                self._node("DequantizeLinear", given, f"{name}/weight", axis=0),
                self._node("DequantizeLinear", shift, f"{name}/shift", axis=0),
            ]
        return self._node(node.kind, inputs, f"{name}/values", **node.attributes)

    def _integer_convolution(self, step: Step, operator: Convolution) -> str:
        """Add a convolution whose sums are not rounded: runtimes fuse no such Conv."""
        from onnx import TensorProto

        name, (source,) = step.name, step.inputs
        zero = self._grid(self.steps.steps[source].grid)[1]
        inputs, given = [self.codes[source], f"{name}/bytes", zero], operator.node()
        if name in self.unsigned:  # here ONNX Runtime takes one zero point for all
            inputs.append(self._constant("middle", ZERO_OF_UNSIGNED, np.uint8))
        self._node("ConvInteger", inputs, f"{name}/products", **given.attributes)
        shape = self._constant("channels", (1, -1, 1, 1), np.int64)
        for part in ("bias", "unit"):
            self._node("Reshape", [f"{name}/{part}", shape], f"{name}/{part}/shaped")
        self._node("Add", [f"{name}/products", f"{name}/bias/shaped"], f"{name}/sums")
        self._node("Cast", [f"{name}/sums"], f"{name}/floats", to=TensorProto.FLOAT)
        inputs = [f"{name}/floats", f"{name}/unit/shaped"]
        return self._node("Mul", inputs, f"{name}/values")


def _described(name: str, shape: tuple[int, ...]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])


def weights_only_model(
    quantized: nn.Module, samples: SamplesLike, opset: int
) -> tuple[Any, list[StoredWeight]]:
    """Return a file for a network with float activations, and how it stores weights."""
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
    return model, stored


def float_model(model: nn.Module, samples: SamplesLike, opset: int = 21) -> Any:
    """Return the ONNX file of a float network of one input, as PyTorch writes it."""
    written = _written(copy.deepcopy(model).cpu(), samples, opset)
    _strip(written)
    return written


def _plain(quantized: nn.Module) -> nn.Module:
    """Return a copy whose layers are PyTorch's own, with rounded weights."""
    result = copy.deepcopy(quantized).cpu()
    with torch.no_grad():
        for layer in quantized_layers(result).values():
            layer.weight.copy_(layer.rounded_weight())
            replaced: Any = type(layer).__mro__[2]
            layer.__class__ = replaced
    return result


def _written(network: nn.Module, samples: SamplesLike, opset: int) -> Any:
    images, *more = tensors_in(Samples.of(samples).first_batch(2))
    if more:
        raise QuantizationError(
            f"the network takes {1 + len(more)} inputs: export covers one"
        )
    try:
        with evaluating(network), _quiet():
            names = output_names(call(network, images))
            program: Any = torch.onnx.export(
                network,
                (images,),
                None,
                dynamo=True,
                input_names=[INPUT],
                output_names=names,
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
    scale, zero_point, weight = (
        state[f"{unit.parameter}{name}"].detach().cpu()
        for name in ("_scale", "_zero_point", "")
    )
    grid = broadcast_grid(Grid(scale, zero_point, bits), unit, weight.device)
    codes = grid.quantize(weight)
    values, factor = integer_weight(codes, grid.zero_point, bits)
    found = IntegerWeight(
        codes=codes,
        bits=bits,
        unit=round(1 / factor),
        offset=(grid.zero_point / factor).int(),
        stretch=torch.ones((), dtype=torch.int32),
        values=values,
        scale=grid.scale * factor,
        bias=torch.zeros((), dtype=torch.int32),
    )
    return found, grid


def _replace(
    model: Any,
    constants: Mapping[str, Any],
    unit: Unit,
    weight: IntegerWeight,
    grid: Grid,
) -> StoredWeight:
    """Put nodes in the place of the constants that hold a unit's weight."""
    from onnx import TensorProto, helper

    floats = grid.dequantize(weight.codes).numpy()
    places = list(_places(constants, floats))
    if not places:
        raise ExportError(
            f"{unit.name}: its weight {tuple(floats.shape)} is not among the constants "
            "that PyTorch wrote; pin it to 32 bits to keep it float"
        )
    name = unit.name
    opset = model.opset_import[0].version
    short = f"w{len(model.graph.node)}"
    arrays, unpacking = stored_bytes(name, weight, opset, short)
    arrays[f"{name}/scale"] = weight.scale.numpy()
    made = helper.make_node
    nodes = [made(kind, given, [out], **more) for kind, given, out, more in unpacking]
    nodes += [
        made("Cast", [f"{name}/bytes"], [f"{name}/levels"], to=TensorProto.FLOAT),
        made("Mul", [f"{name}/levels", f"{name}/scale"], [f"{name}/weight"]),
    ]
    for place, turned in places:
        kind = "Transpose" if turned else "Identity"
        nodes.append(made(kind, [f"{name}/weight"], [place]))
        model.graph.initializer.remove(constants[place])
    known = {one.name for one in model.graph.initializer}
    for key, array in arrays.items():
        if key not in known:  # layers share tables
            model.graph.initializer.append(as_tensor(key, array))
    everything = [*nodes, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(everything)
    return StoredWeight.of(name, weight, arrays)


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
