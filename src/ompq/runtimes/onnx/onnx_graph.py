"""The ONNX graph of an integer network."""

from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from torch import nn

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.finalization import finalize
from ompq.integer.lowering import INPUT, Steps
from ompq.integer.operators import Convolution, Layer, Node, Product, Step
from ompq.optional_libraries import optional_library
from ompq.quantization.record import quantization_of
from ompq.runtimes.onnx.weight_containers import (
    ZERO_OF_UNSIGNED,
    Array,
    StoredWeight,
    Unpacking,
    as_tensor,
    grid_names,
)
from ompq.samples import Samples

SMALLEST_OPSET = 18  # the first with a mask of bits

_LARGEST_CODE = 255  # of a byte


def libraries() -> tuple[Any, Any]:
    """Return onnx and onnxruntime."""
    return optional_library("onnx", "onnx"), optional_library("onnxruntime", "onnx")


def as_integers(
    quantized: nn.Module, samples: Samples, *, saturation_safe: bool
) -> tuple[nn.Module | None, str]:
    """Return a finalized network, or None and why integers cannot compute it."""
    if not quantization_of(quantized).sites:
        return None, "activations are float"
    try:
        return finalize(quantized, samples, saturation_safe=saturation_safe), ""
    except QuantizationError as error:
        return None, str(error)


class OnnxGraph:
    """The ONNX graph of integer steps, built node by node."""

    def __init__(
        self, steps: Steps, opset: int, *, saturation_safe: bool = True
    ) -> None:
        self.steps = steps
        self.opset = opset
        self.unsigned = set(steps.saturating() if saturation_safe else ())
        layers = (each.operator for each in steps.steps)
        sizes = [one.weight.codes.numel() for one in layers if isinstance(one, Layer)]
        self.unpacking = Unpacking(opset, sizes)
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
            outputs.append(_describe(name, self.steps.steps[position].shape))
        graph = helper.make_graph(
            self.nodes,
            "network",
            [_describe(INPUT, self.steps.input_shape)],
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
        in_bytes = step.grid.dtype == torch.uint8
        # Runtimes fuse only convolutions to bytes; others would add up floats.
        if isinstance(operator, Convolution) and not in_bytes:
            values = self._integer_convolution(step, operator)
        else:
            inputs = [self._values(source) for source in step.inputs] or [INPUT]
            values = inputs[0] if node is None else self._computed(step, node, inputs)
        if not in_bytes:  # there is no Clip of 16 bits
            values = self._limited(step, values)
        if step.grid.wide:
            return values
        inputs = [values, *self._grid(step.grid)]
        codes = self._node("QuantizeLinear", inputs, f"{step.name}/codes")
        return self._clipped(step, codes) if in_bytes else codes

    def _moved(self, step: Step, node: Node) -> str:
        (source,) = step.inputs
        in_bytes = step.grid.dtype == torch.uint8  # ONNX Runtime pads no 16-bit codes
        inputs = [self.codes[source] if in_bytes else self._values(source)]
        for name, value in node.constants.items():
            if value == "":
                inputs.append("")
            elif value is not None:
                kind = np.float32 if isinstance(value[0], float) else np.int64
                inputs.append(self._constant(f"{step.name}/{name}", value, kind))
            elif in_bytes:
                inputs.append(self._grid(step.grid)[1])
        name = f"{step.name}/codes"
        if in_bytes or step.grid.wide:
            return self._node(node.kind, inputs, name, **node.attributes)
        moved = self._node(node.kind, inputs, f"{step.name}/values", **node.attributes)
        return self._node("QuantizeLinear", [moved, *self._grid(step.grid)], name)

    def _values(self, position: int) -> str:
        """Return the tensor of a step's values; dequantizes its codes once."""
        if position not in self.values:
            grid = self._grid(self.steps.steps[position].grid)
            inputs, name = [self.codes[position], *grid], f"/v{position}"
            self.values[position] = self._node("DequantizeLinear", inputs, name)
        return self.values[position]

    def _grid(self, grid: CodeGrid) -> tuple[str, str]:
        kind: Any = np.uint8 if grid.dtype == torch.uint8 else np.uint16
        scale, zero = grid_names(grid.scale, grid.zero_point, kind)
        self._constant(scale, grid.scale, np.float32)
        self._constant(zero, grid.zero_point, kind)
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
        ends = [self._constant(f"code/{end:03d}", end, np.uint8) for end in (low, high)]
        return self._node("Clip", [codes, *ends], f"{step.name}/clip")

    def _weight(self, step: Step, layer: Layer) -> None:
        """Add a layer's weight as bytes, its bias, and the accumulator's step."""
        name, weight = step.name, layer.weight
        unsigned = name in self.unsigned
        arrays, nodes = self.unpacking.store(name, weight, unsigned=unsigned)
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
        self.nodes += nodes
        (source,) = self.steps.sources(step)
        given = [self._grid(source)[0], f"{name}/scale"]
        self._node("Mul", given, f"{self.unpacking.short}/unit")

    def _computed(self, step: Step, node: Node, inputs: list[str]) -> str:
        """Add the node that computes values from values."""
        name, short = step.name, self.unpacking.short
        if isinstance(step.operator, Layer):
            given = [f"{name}/bytes", f"{name}/scale"]
            given += [f"{name}/zeros"] * (f"{name}/zeros" in self.constants)
            shift = [f"{name}/bias", f"{short}/unit"]
            inputs += [
                self._node("DequantizeLinear", given, f"{short}/weight", axis=0),
                self._node("DequantizeLinear", shift, f"{short}/shift", axis=0),
            ]
        return self._node(node.kind, inputs, f"{name}/values", **node.attributes)

    def _integer_convolution(self, step: Step, operator: Convolution) -> str:
        """Add a convolution whose sums are not rounded, which runtimes do not fuse."""
        from onnx import TensorProto

        name, (source,) = step.name, step.inputs
        zero = self._grid(self.steps.steps[source].grid)[1]
        inputs, given = [self.codes[source], f"{name}/bytes", zero], operator.node()
        if name in self.unsigned:  # here ONNX Runtime takes one zero point for all
            inputs.append(self._constant("middle", ZERO_OF_UNSIGNED, np.uint8))
        self._node("ConvInteger", inputs, f"{name}/products", **given.attributes)
        shape = self._constant("channels", (1, -1, 1, 1), np.int64)
        short = self.unpacking.short
        bias = self._node("Reshape", [f"{name}/bias", shape], f"{short}/bias")
        unit = self._node("Reshape", [f"{short}/unit", shape], f"{short}/units")
        self._node("Add", [f"{name}/products", bias], f"{short}/sums")
        self._node("Cast", [f"{short}/sums"], f"{short}/floats", to=TensorProto.FLOAT)
        inputs = [f"{short}/floats", unit]
        return self._node("Mul", inputs, f"{name}/values")


def _describe(name: str, shape: tuple[int, ...]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
