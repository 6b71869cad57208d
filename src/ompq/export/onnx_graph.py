"""Steps as an ONNX graph with QuantizeLinear and DequantizeLinear.

Every tensor that is quantized becomes uint8 codes once; who reads it dequantizes them.
A runtime with 8-bit kernels fuses ``DequantizeLinear, Conv, QuantizeLinear`` and its
like; one without computes the same in float. There is no node for a ReLU: codes end at
0, and where clipping must happen elsewhere a Clip of the codes does it.
"""

from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

import numpy as np

from ompq.export.containers import (
    DOMAIN,
    Array,
    StoredWeight,
    plane_parts,
    planes,
    unpack_function,
)
from ompq.integer.steps import (
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
            scale, zero = self._grid(self.steps.steps[position])
            name = f"{codes}/values"
            self._node("DequantizeLinear", [codes, scale, zero], name)
            self.floats[position] = name
        return self.floats[position]

    def _grid(self, step: Step) -> tuple[str, str]:
        grid = step.grid
        assert grid is not None  # asked for codes only
        scale = self._constant(f"scale/{grid.scale:.9g}", grid.scale, np.float32)
        return scale, self._constant(f"zero/{grid.zero}", grid.zero, np.uint8)

    def _quantized(self, step: Step, values: str) -> str:
        scale, zero = self._grid(step)
        codes = self._node(
            "QuantizeLinear", [values, scale, zero], f"{step.name}/codes"
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
        zero = self._grid(step)[1]
        return self._node("Pad", [codes, sides, zero], f"{step.name}/codes")

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
