"""Writes integer steps as an ExecuTorch file (.pte) for XNNPACK, by torch.export."""

import warnings
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.errors import ExportError, MissingExtraError
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.lowering import Steps
from ompq.integer.operators import (
    Average,
    Convolution,
    Layer,
    MaxPool,
    Operator,
    Requantize,
    Step,
    Sum,
)
from ompq.runtimes.integer_files import SIGN
from ompq.runtimes.onnx.weight_containers import StoredWeight
from ompq.runtimes.xnnpack_kernels import xnnpack_steps

_BYTES = (-SIGN, SIGN - 1)
_NIBBLES = (-8, 7)  # these limits tell XNNPACK to store 4 bits


def executorch_steps(steps: Steps) -> Steps:
    """Return the steps of a network with the arithmetic of XNNPACK."""
    return xnnpack_steps(steps, lambda layer: layer)


class ExecutorchGraph(nn.Module):
    """A network of floats between quantizers, which XNNPACK merges into integers.

    The batch is one sample: with any other, XNNPACK as of ExecuTorch 1.5 averages
    images wrongly once the batch grows.

    Args:
        steps: From :func:`executorch_steps`.
        float_ends: Whether inputs and outputs are float32 instead of signed bytes.
        watched: Positions of steps whose codes become outputs besides the network's.
    """

    def __init__(
        self, steps: Steps, *, float_ends: bool = True, watched: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.steps, self.float_ends, self.watched = steps, float_ends, watched
        self.weights: list[StoredWeight] = []
        self.limits: dict[int, tuple[int, int]] = {}  # of each layer's weight
        self.pointwise: set[int] = set()  # convolutions written as linear layers
        for position, step in enumerate(steps.steps):
            _require_operator(step)
            if isinstance(step.operator, Layer):
                self._add_layer(position, step, step.operator)

    def _add_layer(self, position: int, step: Step, layer: Layer) -> None:
        """Keep the constants of a layer: weight, scale, zero point and bias."""
        weight, values = layer.weight, layer.weight.values.contiguous()
        (source,) = self.steps.sources(step)
        scale = weight.scale.float()
        # XNNPACK divides by the same product in float32.
        bias = weight.bias.double() * (scale * source.scale).double()
        if _is_pointwise(layer):
            self.pointwise.add(position)
            values = values.flatten(1)
        constants = values, scale, torch.zeros_like(weight.bias).long(), bias.float()
        for number, constant in enumerate(constants):
            self.register_buffer(f"constant_{position}_{number}", constant)
        linear = values.dim() == 2
        narrow = linear and _is_nibbles(layer)
        self.limits[position] = _NIBBLES if narrow else _BYTES
        stored = -(-values.numel() // 2) if narrow else values.numel()
        # A channel has a scale and a bias, of 4 bytes each.
        size = stored + 8 * len(scale)
        container = "int4" if narrow else "int8"
        self.weights.append(StoredWeight(step.name, weight.bits, container, size))

    def content(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of the file; a text is a method without inputs."""
        sample = torch.zeros(1, *self.steps.input_shape)
        if not self.float_ends:
            sample = sample.to(torch.int8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own use of what Python deprecates
            lower, partitioner = _compiler()
            program = lower(
                torch.export.export(self.eval(), (sample,)),
                partitioner=[partitioner()],
                constant_methods={**(metadata or {}), **self._grids()},
            )
            return bytes(program.to_executorch().buffer)

    def _grids(self) -> dict[str, list[float]]:
        """Return scale and zero point of the inputs and outputs that are bytes."""
        ends = {"input_grid": [0], "output_grids": [*self.steps.outputs.values()]}
        if self.float_ends:
            return {}
        return {
            name: [
                one for at in places for one in _on_grid(self.steps.steps[at].grid)[:2]
            ]
            for name, places in ends.items()
        }

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for one sample, and the codes of watched steps."""
        steps = self.steps.steps
        codes = [_quantized(x, steps[0].grid) if self.float_ends else x]
        for position, step in enumerate(steps[1:], 1):
            values = [_values(codes[at], steps[at].grid) for at in step.inputs]
            if position in self.pointwise:
                codes.append(self._pointwise(position, step, values[0]))
            else:
                result = self._computed(position, step, values)
                codes.append(_quantized(_clipped(result, step), step.grid))
        outputs = [codes[at] for at in self.steps.outputs.values()]
        if self.float_ends:
            grids = [steps[at].grid for at in self.steps.outputs.values()]
            outputs = list(map(_values, outputs, grids))
        return *outputs, *(codes[at] for at in self.watched)

    def _computed(self, position: int, step: Step, values: list[Tensor]) -> Tensor:
        operator = step.operator
        if isinstance(operator, Layer):
            return self._layer(position, operator, values[0])
        if isinstance(operator, Sum):
            return values[0] + values[1]
        if isinstance(operator, Average):  # of the whole image
            return values[0].mean((2, 3), keepdim=True)
        if isinstance(operator, MaxPool):
            return F.max_pool2d(
                values[0],
                operator.window,
                operator.stride,
                operator.padding,
                operator.dilation,
                operator.ceil,
            )
        return operator.compute(values)  # only moves

    def _layer(self, position: int, layer: Layer, x: Tensor) -> Tensor:
        weight, bias = self._constants(position)
        if not isinstance(layer, Convolution):
            return F.linear(x, weight, bias)
        top, left, bottom, right = layer.padding
        padding = (top, left)
        if padding != (bottom, right):
            x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
        return F.conv2d(
            x, weight, bias, layer.stride, padding, layer.dilation, layer.groups
        )

    def _pointwise(self, position: int, step: Step, x: Tensor) -> Tensor:
        """Return the codes of a 1 x 1 convolution, computed by a linear layer.

        Only linear layers take weights of 4 bits. Layers are recognized by quantizers
        around them, so channels move to the end and back between quantizers.
        """
        (source,) = self.steps.sources(step)
        x = _values(_quantized(x.permute(0, 2, 3, 1), source), source)
        result = _clipped(F.linear(x, *self._constants(position)), step)
        values = _values(_quantized(result, step.grid), step.grid)
        return _quantized(values.permute(0, 3, 1, 2), step.grid)

    def _constants(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the weight and bias of a layer."""
        values, scale, zero, bias = (
            self.get_buffer(f"constant_{position}_{number}") for number in range(4)
        )
        weight: Tensor = _ops().dequantize_per_channel.default(
            values, scale, zero, 0, *self.limits[position], torch.int8
        )
        return weight, bias


def _compiler() -> tuple[Any, Any]:
    """Return what lowers exported programs, and what gives their parts to XNNPACK."""
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
            XnnpackPartitioner,
        )
        from executorch.exir import to_edge_transform_and_lower
    except ImportError as error:
        raise MissingExtraError("executorch", "executorch") from error
    return to_edge_transform_and_lower, XnnpackPartitioner


def _ops() -> Any:
    """Return the operators that stand for quantizers in exported programs."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers them)

    return torch.ops.quantized_decomposed


def _quantized(x: Tensor, grid: CodeGrid) -> Tensor:
    found: Tensor = _ops().quantize_per_tensor.default(x, *_on_grid(grid))
    return found


def _values(codes: Tensor, grid: CodeGrid) -> Tensor:
    found: Tensor = _ops().dequantize_per_tensor.default(codes, *_on_grid(grid))
    return found


def _on_grid(grid: CodeGrid) -> tuple[float, int, int, int, torch.dtype]:
    return grid.scale, grid.zero_point - SIGN, *_BYTES, torch.int8


def _clipped(x: Tensor, step: Step) -> Tensor:
    """Clip as a step does, unless its grid clips by itself."""
    if step.grid.limits(step.low, step.high) == (0, step.grid.qmax):
        return x
    if (step.low, step.high) == (0, inf):
        return F.relu(x)
    return F.hardtanh(x, step.low, step.high)


def _is_nibbles(layer: Layer) -> bool:
    """Whether XNNPACK can store a weight in 4 bits: in pairs, from -8 to 7."""
    values = layer.weight.values
    within = int(values.min()) >= _NIBBLES[0] and int(values.max()) <= _NIBBLES[1]
    return layer.weight.bits <= 4 and within and values.shape[1] % 2 == 0


def _is_pointwise(operator: Operator) -> bool:
    """Whether a convolution is written as a linear layer, to store it in 4 bits."""
    return (
        isinstance(operator, Convolution)
        and tuple(operator.weight.values.shape[2:]) == (1, 1)
        and operator.stride == (1, 1)
        and not any(operator.padding)
        and operator.groups == 1
        and _is_nibbles(operator)
    )


def _require_operator(step: Step) -> None:
    """Raise an ExportError if XNNPACK would round a step with floats."""
    if isinstance(step.operator, Requantize):
        raise ExportError(
            f"{step.name} is rounded to two grids, or clipped after it is rounded, "
            "which ExecuTorch does not compute exactly"
        )
