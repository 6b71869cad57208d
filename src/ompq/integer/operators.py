"""Operators on integer codes: one class each.

A class says how its operator is recognized in a call, what it computes with integers,
and which ONNX node does the same. To add an operator, write a class and add its torch
functions to ``OPERATORS``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle

from ompq.bit_widths import SUM_BITS
from ompq.errors import QuantizationError
from ompq.integer.arithmetic import (
    CodeGrid,
    Dyadic,
    IntegerWeight,
    Pair,
    dyadic,
    float_dyadic,
    float_rescaled,
    pad_integers,
    rescale,
    taps,
)
from ompq.layers import (
    QuantizedConv2d,
    QuantizedConvTranspose2d,
    QuantizedLayer,
    QuantizedLinear,
)
from ompq.network.folding import channel_axis
from ompq.network.passive import SAME, SHAPES

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """An ONNX node."""

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    # Further inputs by name, int64 or float; None stands for the zero point, "" for an
    # input that is left out.
    constants: Mapping[str, Any] = field(default_factory=dict)
    on_codes: bool = False  # whether it works on codes instead of dequantized values


@dataclass(frozen=True, eq=False)
class Operator:
    """Computes codes on one grid from codes on others."""

    moves: ClassVar[bool] = False  # whether it only moves codes, which keep their grid

    @property
    def divisor(self) -> int:
        """The number by which sums are divided."""
        return 1

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return int32 sums of codes minus their zero points, or the codes moved."""
        return values[0]

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return the ratio that converts sums to codes of the target."""
        scales = torch.tensor([grid.scale for grid in sources], dtype=torch.float64)
        return dyadic(scales / target.scale / self.divisor, together=True)

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Return the unclipped codes of sums on the target grid, int64."""
        product = sums.long() * ratio.multiplier
        return rescale(product, ratio.shift, target.zero_point)

    def largest(self, sources: Sequence[CodeGrid]) -> float:
        """Return the largest magnitude that a result can have."""
        return sum(grid.scale * grid.reach for grid in sources)

    def possible_results(self, _sources: Sequence[CodeGrid]) -> Tensor | None:
        """Return all possible results before rounding, float64; None if too many."""
        return None

    def node(self) -> Node | None:
        """Return the ONNX node of the operator; None if it only rounds or clips."""
        return None


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of a network."""

    name: str  # unique: the name of its module, with a number if needed
    operator: Operator
    inputs: tuple[int, ...]  # positions of the steps whose results it reads
    shape: Shape  # shape of its result, without the batch dimension
    grid: CodeGrid  # grid of its codes
    low: float = -inf  # smaller values are clipped to it: 0 after a ReLU
    high: float = inf  # larger values are clipped to it: 6 after a ReLU6
    quantizer: str = ""  # name of the activation quantizer that has this grid, or ""
    module: str = ""  # name of the module that called it


@dataclass(frozen=True, eq=False)
class Codes:
    """A tensor of codes: the result of a step."""

    step: int
    grid: CodeGrid
    shape: Shape


@dataclass(frozen=True, eq=False)
class Pending:
    """A tensor that becomes a step once its grid is known."""

    operator: Operator
    inputs: tuple[int, ...]  # positions of the steps it reads
    module: str
    shape: Shape  # shape of the result, without the batch dimension
    low: float = -inf
    high: float = inf
    # Operators that will move its codes, each with the shape of its result.
    moves: tuple[tuple[Operator, Shape], ...] = ()
    grid: CodeGrid | None = None  # known at once if codes are only moved or clipped


Value: TypeAlias = Codes | Pending


def as_codes(value: Value | None) -> Codes:
    """Return a value that has codes; for others raise a QuantizationError."""
    if isinstance(value, Codes):
        return value
    where = value.module if isinstance(value, Pending) else "a constant"
    raise QuantizationError(f"reads a tensor without a grid, from {where}")


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a torch function."""

    module: str  # name of the module that called it
    # For each tensor argument its value; None if it does not come from the input.
    values: tuple[Value | None, ...]
    arguments: Mapping[str, Any]  # by name
    shape: Shape  # shape of the output, without the batch dimension
    same_batch: bool  # whether the output has the same batch dimension

    @property
    def value(self) -> Value:
        """The value of the first tensor."""
        value = self.values[0]
        if value is None:
            raise QuantizationError("reads a tensor that does not come from the input")
        return value

    @property
    def codes(self) -> list[Codes]:
        """The values of all tensors, which must have codes."""
        return [as_codes(value) for value in self.values]

    @property
    def source_shape(self) -> Shape:
        """Shape of the first tensor, without the batch dimension."""
        value = self.value
        moves = isinstance(value, Pending) and value.moves
        return moves[-1][1] if moves else value.shape

    def computed(self, operator: Operator, **options: Any) -> Pending:
        """Return the result of an operator on all tensors, which must have codes."""
        inputs = tuple(codes.step for codes in self.codes)
        return Pending(operator, inputs, self.module, self.shape, **options)

    def moved(self, operator: Operator) -> Value:
        """Move the codes of a value, now or once it has codes.

        The order of rounding and moving does not matter: 0 has a code, and rounding is
        monotonic.
        """
        value = self.value
        if isinstance(value, Pending):
            return replace(value, moves=(*value.moves, (operator, self.shape)))
        return self.computed(operator, grid=value.grid)


def pair(value: Any) -> Pair:
    """Return a pair of integers for one number, or for two."""
    first, second = (value, value) if isinstance(value, int) else tuple(value)
    return int(first), int(second)


_ATTRIBUTE_DEFAULTS = {
    "strides": {1}, "dilations": {1}, "pads": {0}, "group": {1}, "ceil_mode": {0},
}  # fmt: skip


def _without_defaults(**attributes: Any) -> dict[str, Any]:
    """Return the attributes of an ONNX node that differ from their defaults."""
    return {
        name: value
        for name, value in attributes.items()
        if {*(value if isinstance(value, tuple) else [value])}
        != _ATTRIBUTE_DEFAULTS[name]
    }


class Quantize(Operator):
    """Quantizes the network's input."""


@dataclass(frozen=True, eq=False)
class Layer(Operator):
    """Base of convolutions and linear layers, which have a weight."""

    weight: IntegerWeight

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return a ratio per channel; for 8-bit codes, as float32 computes it."""
        source, scales = sources[0].scale, self.weight.scale
        if target.wide:
            ratio = dyadic(source * scales / target.scale)
        else:
            single = torch.tensor([source, target.scale], dtype=torch.float32)
            ratio = float_dyadic(single[0] * scales.float() / single[1])
        return ratio.view(-1, *[1] * (self.weight.values.dim() - 2))

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Return codes as float32 arithmetic rounds them."""
        if target.wide:
            return super().rescale(sums, ratio, target)
        return float_rescaled(sums, ratio, target.zero_point)

    def largest(self, sources: Sequence[CodeGrid]) -> float:
        """Return the largest magnitude that any channel's result can have."""
        sums = self.weight.largest_sum(sources[0]) * self.weight.scale
        return sources[0].scale * float(sums.max())


@dataclass(frozen=True, eq=False)
class Convolution(Layer):
    """A 2-D convolution with zero padding."""

    stride: Pair
    padding: tuple[int, int, int, int]  # top, left, bottom, right
    dilation: Pair
    groups: int

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved separately."""
        return self.weight.values.shape[:2] == (self.groups, 1)

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the sums of products with the bias, (N, O, H', W')."""
        top, left, bottom, right = self.padding
        x = pad_integers(values[0], ((0, 0), (top, bottom), (left, right)))
        weight = self.weight.values.int()
        window = (weight.shape[2], weight.shape[3])
        parts = list(taps(x, window, self.stride, self.dilation))
        groups, count = self.groups, len(parts)
        if self.depthwise:
            columns = weight.reshape(-1, count, 1, 1).unbind(1)  # each (C, 1, 1)
            sums = parts[0] * columns[0]
            for part, column in zip(parts[1:], columns[1:], strict=True):
                sums += part * column
        else:
            images, channels, height, width = parts[0].shape
            # Put all images side by side, so that each group takes one matrix product.
            stacked = torch.stack(parts, 2).permute(1, 2, 0, 3, 4)  # (C, taps, N, H, W)
            rows = stacked.reshape(groups, channels // groups * count, -1)
            matrices = weight.reshape(groups, -1, rows.shape[1])  # (groups, O / groups)
            sums = torch.bmm(matrices, rows).reshape(-1, images, height, width)
            sums = sums.transpose(0, 1)
        return sums + self.weight.bias.view(-1, 1, 1)

    def node(self) -> Node:
        """Return a Conv."""
        attributes = _without_defaults(
            strides=self.stride,
            pads=self.padding,
            dilations=self.dilation,
            group=self.groups,
        )
        return Node("Conv", attributes)


@dataclass(frozen=True, eq=False)
class Product(Layer):
    """A linear layer."""

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the products with the weight plus the bias, (N, O)."""
        return values[0] @ self.weight.values.int().T + self.weight.bias

    def node(self) -> Node:
        """Return a Gemm."""
        return Node("Gemm", {"transB": 1})


class Sum(Operator):
    """A residual sum of two tensors, each on its own grid."""

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize the sum of two tensors of the same shape."""
        if len(call.values) != 2 or call.arguments["alpha"] != 1:
            raise QuantizationError("adds something other than two tensors")
        first, second = call.codes
        if first.shape != second.shape:
            raise QuantizationError(f"adds shapes {first.shape} and {second.shape}")
        return call.computed(Sum())

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return both tensors stacked: each is multiplied before they are added."""
        return torch.stack(values, -1)

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Add both products and shift the sum."""
        product = (sums.long() * ratio.multiplier).sum(-1)
        if target.bits > SUM_BITS:  # exact as floats, too, so halves are as frequent
            return rescale(product, ratio.shift) + target.zero_point
        return rescale(product, ratio.shift, target.zero_point)

    def possible_results(self, sources: Sequence[CodeGrid]) -> Tensor | None:
        """Return the sums of all pairs of values, unless there are too many."""
        if any(grid.bits > SUM_BITS for grid in sources):
            return None
        first, second = (grid.levels for grid in sources)
        return (first[:, None] + second).flatten()

    def node(self) -> Node:
        """Return an Add."""
        return Node("Add")


class Requantize(Operator):
    """Converts codes to another grid, or clips them."""

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize clipping to an interval that contains 0."""
        given = call.arguments
        limits = [given.get(end, given.get(f"{end}_val")) for end in ("min", "max")]
        if any(isinstance(limit, Tensor) for limit in limits):
            raise QuantizationError("clips to a tensor")
        low, high = (
            default if limit is None else float(limit)
            for limit, default in zip(limits, (-inf, inf), strict=True)
        )
        if not low <= 0 <= high:
            raise QuantizationError(
                f"clips to [{low}, {high}], which does not contain 0"
            )
        value = call.value
        if isinstance(value, Pending):
            return replace(value, low=max(value.low, low), high=min(value.high, high))
        # Already quantized; a grid that ends at the limits has clipped the values, too.
        if value.grid.limits(low, high) == (0, value.grid.qmax):
            return value
        return call.computed(Requantize(), low=low, high=high, grid=value.grid)

    def possible_results(self, sources: Sequence[CodeGrid]) -> Tensor:
        """Return the values of all codes."""
        return sources[0].levels


@dataclass(frozen=True, eq=False)
class Average(Operator):
    """The mean of each window, padding included."""

    window: Pair
    stride: Pair
    padding: Pair = (0, 0)
    whole: bool = False  # whether the window is the whole image

    @staticmethod
    def adaptive(call: FunctionCall) -> Value:
        """Recognize adaptive pooling to a size that divides the image's."""
        (source,) = call.codes
        (height, width), (rows, columns) = source.shape[1:], call.shape[1:]
        if height % rows or width % columns:
            raise QuantizationError(
                f"averages {height} × {width} to {rows} × {columns}, "
                "which does not divide it"
            )
        window = (height // rows, width // columns)
        if window == (1, 1):
            return source
        return call.computed(Average(window, window, whole=(rows, columns) == (1, 1)))

    @staticmethod
    def pooled(call: FunctionCall) -> Value:
        """Recognize average pooling with windows of equal size."""
        given = call.arguments
        window, padding = pair(given["kernel_size"]), pair(given["padding"])
        uneven = any(padding) and not given["count_include_pad"]
        if given["ceil_mode"] or given["divisor_override"] or uneven:
            raise QuantizationError("averages windows of unequal size")
        return call.computed(Average(window, pair(given["stride"] or window), padding))

    @staticmethod
    def mean(call: FunctionCall) -> Value:
        """Recognize the mean over height and width."""
        (source,) = call.codes
        dim = call.arguments["dim"]
        dims = {d % 4 for d in ((dim,) if isinstance(dim, int) else dim or ())}
        if len(source.shape) != 3 or dims != {2, 3}:
            raise QuantizationError(f"averages over dimensions {dim}, not (2, 3)")
        window = pair(source.shape[1:])
        average = call.computed(Average(window, window, whole=True))
        if call.arguments["keepdim"]:
            return average
        shape = (source.shape[0], 1, 1)
        return replace(average, shape=shape, moves=((Flatten(), call.shape),))

    @property
    def divisor(self) -> int:
        """The size of a window."""
        return prod(self.window)

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the sum of each window, (N, C, H', W')."""
        (x,) = values
        if self.whole:
            return x.sum((2, 3), keepdim=True)
        rows, columns = self.padding
        x = pad_integers(x, ((0, 0), (rows, rows), (columns, columns)))
        return torch.stack(list(taps(x, self.window, self.stride, (1, 1)))).sum(0)

    def possible_results(self, sources: Sequence[CodeGrid]) -> Tensor | None:
        """Return the means for all possible sums of a window, unless too many."""
        (grid,), size = sources, self.divisor
        if grid.bits > SUM_BITS:
            return None
        low, high = -grid.zero_point * size, (grid.qmax - grid.zero_point) * size
        return grid.scale * torch.arange(low, high + 1).double() / size

    def node(self) -> Node:
        """Return a GlobalAveragePool or an AveragePool."""
        if self.whole:
            return Node("GlobalAveragePool")
        attributes = _without_defaults(strides=self.stride, pads=self.padding * 2)
        attributes |= {"kernel_shape": self.window, "count_include_pad": 1}
        return Node("AveragePool", attributes)


@dataclass(frozen=True, eq=False)
class MaxPool(Operator):
    """The largest code of each window."""

    moves: ClassVar[bool] = True
    window: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil: bool

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize max pooling."""
        given = call.arguments
        window, padding = pair(given["kernel_size"]), pair(given["padding"])
        stride, dilation = pair(given["stride"] or window), pair(given["dilation"])
        ceil = bool(given["ceil_mode"])
        return call.moved(MaxPool(window, stride, padding, dilation, ceil))

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the largest value of each window, (N, C, H', W')."""
        (x,) = values
        ends = [self._end_padding(size, axis) for axis, size in enumerate(x.shape[2:])]
        rows, columns = self.padding
        sides = ((0, 0), (rows, ends[0]), (columns, ends[1]))
        # Padding with the lowest integer never wins over a value of the image.
        x = pad_integers(x, sides, torch.iinfo(x.dtype).min)
        largest, *others = taps(x, self.window, self.stride, self.dilation)
        for other in others:
            largest = torch.maximum(largest, other)
        return largest

    def _end_padding(self, size: int, axis: int) -> int:
        """Return the padding at the end of an axis, which ``ceil`` may increase."""
        before, stride = self.padding[axis], self.stride[axis]
        reach = self.dilation[axis] * (self.window[axis] - 1) + 1
        after = before
        if self.ceil:
            rest = (size + 2 * before - reach) % stride
            count = (size + 2 * before - reach) // stride + 1
            # Another window must begin inside the image or the padding before it.
            if rest and count * stride < size + before:
                after += stride - rest
        return after

    def node(self) -> Node:
        """Return a MaxPool."""
        attributes = _without_defaults(
            strides=self.stride,
            pads=self.padding * 2,
            dilations=self.dilation,
            ceil_mode=int(self.ceil),
        )
        return Node("MaxPool", {"kernel_shape": self.window, **attributes})


class Flatten(Operator):
    """(N, C, H, W) to (N, C * H * W)."""

    moves: ClassVar[bool] = True

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize a reshape to one row per image, or to the same shape."""
        if not call.same_batch:
            raise QuantizationError("moves values between the images of a batch")
        before = call.source_shape
        if call.shape == before:
            return call.value
        if len(call.shape) != 1:
            raise QuantizationError(f"reshapes {before} to {call.shape}, not to a row")
        return call.moved(Flatten())

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return one row per image."""
        return values[0].flatten(1)

    def node(self) -> Node:
        """Return a Flatten."""
        return Node("Flatten")


class Concatenate(Operator):
    """Concatenates the channels of several tensors on the same grid."""

    moves: ClassVar[bool] = True

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize concatenation along the channels."""
        sources = call.codes
        if call.arguments["dim"] % (len(call.shape) + 1) != 1:
            dim = call.arguments["dim"]
            raise QuantizationError(f"concatenates along dimension {dim}, not 1")
        if len({source.grid for source in sources}) > 1:
            raise QuantizationError("concatenates tensors on different grids")
        return call.computed(Concatenate(), grid=sources[0].grid)

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return all channels."""
        return torch.cat(values, 1)

    def node(self) -> Node:
        """Return a Concat."""
        return Node("Concat", {"axis": 1})


@dataclass(frozen=True, eq=False)
class Slice(Operator):
    """A slice in each dimension but the first."""

    moves: ClassVar[bool] = True
    ranges: tuple[tuple[int, int, int], ...]  # start, stop, step

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize slices that keep all images."""
        shape = call.source_shape
        index = call.arguments["index"]
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(p, slice) for p in parts) or parts[0] != slice(None):
            raise QuantizationError("selects single elements or images of the batch")
        parts = (*parts[1:], *[slice(None)] * (len(shape) - len(parts) + 1))
        ranges = [part.indices(size) for part, size in zip(parts, shape, strict=True)]
        return call.moved(Slice(tuple(ranges)))

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the sliced tensor."""
        return values[0][(slice(None), *(slice(*part) for part in self.ranges))]

    def node(self) -> Node:
        """Return a Slice of codes, which needs no quantized kernel."""
        starts, ends, steps = zip(*self.ranges, strict=True)
        axes = tuple(range(1, 1 + len(self.ranges)))
        constants = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
        return Node("Slice", constants=constants, on_codes=True)


@dataclass(frozen=True, eq=False)
class Upsample(Operator):
    """Repeats each value in height and width: resizing to the nearest value."""

    moves: ClassVar[bool] = True
    factors: Pair

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize resizing of images by whole factors."""
        before, after = call.source_shape, call.shape
        mode = call.arguments["mode"]
        if "nearest" not in mode or len(before) != 3:
            raise QuantizationError(
                f"resizes {len(before) - 1} dimensions in mode {mode}; integers can "
                "resize images, 2 dimensions, to the nearest value"
            )
        if any(new % old for old, new in zip(before[1:], after[1:], strict=True)):
            raise QuantizationError(
                f"resizes {before[1]} × {before[2]} to {after[1]} × {after[2]}, which "
                "is not a multiple of it"
            )
        rows, columns = after[1] // before[1], after[2] // before[2]
        return call.moved(Upsample((rows, columns)))

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the larger images, (N, C, H', W')."""
        rows, columns = self.factors
        return values[0].repeat_interleave(rows, 2).repeat_interleave(columns, 3)

    def node(self) -> Node:
        """Return a Resize of codes."""
        attributes = {
            "mode": "nearest",
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "floor",
        }
        scales = (1.0, 1.0, *map(float, self.factors))
        constants = {"region": "", "scales": scales}
        return Node("Resize", attributes, constants, on_codes=True)


@dataclass(frozen=True, eq=False)
class PixelShuffle(Operator):
    """(N, C * factor², H, W) to (N, C, H * factor, W * factor)."""

    moves: ClassVar[bool] = True
    factor: int

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize a pixel shuffle of images."""
        return call.moved(PixelShuffle(int(call.arguments["upscale_factor"])))

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the larger images."""
        return pixel_shuffle(values[0], self.factor)

    def node(self) -> Node:
        """Return a DepthToSpace of codes."""
        attributes = {"blocksize": self.factor, "mode": "CRD"}
        return Node("DepthToSpace", attributes, on_codes=True)


@dataclass(frozen=True, eq=False)
class Pad(Operator):
    """Zero padding in each dimension but the first."""

    moves: ClassVar[bool] = True
    sides: tuple[Pair, ...]

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize zero padding of each image."""
        shape, given = call.source_shape, call.arguments
        if given["mode"] != "constant" or given["value"]:
            raise QuantizationError("pads with something other than zeros")
        pad = list(given["pad"])  # two numbers per dimension, the last dimension first
        sides = [pair(pad[at : at + 2]) for at in range(0, len(pad), 2)]
        sides += [(0, 0)] * (len(shape) - len(sides))
        if len(sides) > len(shape) or any(min(side) < 0 for side in sides):
            raise QuantizationError("pads the batch or by a negative number")
        return call.moved(Pad(tuple(reversed(sides))))

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the padded tensor."""
        return pad_integers(values[0], self.sides)

    def node(self) -> Node:
        """Return a Pad of codes."""
        before, after = zip(*self.sides, strict=True)
        constants = {"sides": (0, *before, 0, *after), "zero": None}
        return Node("Pad", constants=constants, on_codes=True)


def layer_operator(
    layer: QuantizedLayer, module: str, source: Codes, shape: Shape
) -> Pending:
    """Return the result, of this shape, of a layer that reads codes."""
    inputs, grid = (source.step,), source.grid
    if isinstance(layer, QuantizedLinear) and len(source.shape) == 1:
        product = Product(layer_weight(layer, grid).cpu())
        return Pending(product, inputs, module, shape)
    if isinstance(layer, QuantizedConvTranspose2d):
        return _transposed(layer, module, source, shape)
    if isinstance(layer, QuantizedConv2d) and layer.padding_mode == "zeros":
        # torch resolves every form of padding, also "same", to these numbers.
        left, right, top, bottom = layer._reversed_padding_repeated_twice
        convolution = Convolution(
            layer_weight(layer, grid).cpu(),
            pair(layer.stride),
            (top, left, bottom, right),
            pair(layer.dilation),
            layer.groups,
        )
        return Pending(convolution, inputs, module, shape)
    mode = getattr(layer, "padding_mode", "zeros")
    raise QuantizationError(
        f"({type(layer).__name__}, {len(source.shape) + 1} dimensions, padding {mode}) "
        "has no integer kernel; there are kernels for Conv2d with zero padding, for "
        "ConvTranspose2d and for Linear on 2-D inputs"
    )


def _transposed(
    layer: QuantizedConvTranspose2d, module: str, source: Codes, shape: Shape
) -> Pending:
    """Return the result of a transposed convolution, computed by a plain one.

    Every input meets all positions of the kernel, so values that are ``stride`` apart
    read the same inputs, with other weights. A convolution computes those in channels
    of their own, which are then moved to their places.
    """
    stride, other = pair(layer.stride)
    size = pair(layer.kernel_size)
    divides = stride == other and not any(side % stride for side in size)
    if not divides or pair(layer.dilation) != (1, 1) or layer.groups != 1:
        raise QuantizationError(
            f"(ConvTranspose2d, kernel {size}, stride {pair(layer.stride)}, dilation "
            f"{pair(layer.dilation)}, {layer.groups} groups) has no integer kernel; "
            "the stride must divide the kernel's size, with one group and no dilation"
        )
    weight = layer_weight(layer, source.grid).cpu().by_phase(stride)
    (rows, columns), padding = (
        (side // stride - 1 for side in size),
        pair(layer.padding),
    )
    sides = (rows, columns, rows, columns)
    convolution = Convolution(weight, (1, 1), sides, (1, 1), 1)
    _, height, width = source.shape
    inner = (len(weight.scale), height + rows, width + columns)
    whole = (shape[0], inner[1] * stride, inner[2] * stride)
    ends = [before + kept for before, kept in zip(padding, shape[1:], strict=True)]
    if ends[0] > whole[1] or ends[1] > whole[2]:
        raise QuantizationError(
            f"(ConvTranspose2d, output padding {pair(layer.output_padding)}) has no "
            "integer kernel; it must not exceed the padding"
        )
    moves: list[tuple[Operator, Shape]] = []
    if stride > 1:
        moves.append((PixelShuffle(stride), whole))
    if whole != shape:
        kept = zip(padding, ends, strict=True)
        ranges = ((0, shape[0], 1), *((start, end, 1) for start, end in kept))
        moves.append((Slice(ranges), shape))
    inputs = (source.step,)
    return Pending(convolution, inputs, module, inner, moves=tuple(moves))


def layer_weight(layer: QuantizedLayer, grid: CodeGrid) -> IntegerWeight:
    """Return the weight (O, I, ...) and bias of a layer whose input has a grid."""
    if layer.group_size:
        raise QuantizationError(
            f"({type(layer).__name__}) has a scale for each group of "
            f"{layer.group_size} weights and so no integer kernel, which needs one "
            "scale per channel. Save or export it as it is, or plan without group_size"
        )
    codes = layer.codes().transpose(0, channel_axis(layer))
    own, stretched = layer.grid_like_weight(), layer.stretched
    return IntegerWeight.of(codes, own, layer.bias, grid, stretched=stretched)


# torch's names and defaults of the arguments after the first.
_CLAMP = {"min": None, "max": None}
_POOL = {"kernel_size": None, "stride": None, "padding": 0}
_SIZE = {"size": None, "scale_factor": None}
_COUNTED = {"count_include_pad": True, "divisor_override": None}
OPERATORS: dict[str, tuple[Callable[[FunctionCall], Value], dict[str, Any]]] = {
    "relu": (Requantize.called, {"inplace": False, "min": 0}),
    "relu6": (Requantize.called, {"inplace": False, "min": 0, "max": 6}),
    "hardtanh": (Requantize.called, {"min_val": -1, "max_val": 1}),
    **dict.fromkeys(("clamp", "clip", "clamp_min"), (Requantize.called, _CLAMP)),
    "add": (Sum.called, {"other": None, "alpha": 1}),
    "adaptive_avg_pool2d": (Average.adaptive, {"output_size": None}),
    "avg_pool2d": (Average.pooled, {**_POOL, "ceil_mode": False, **_COUNTED}),
    "mean": (Average.mean, {"dim": None, "keepdim": False}),
    "max_pool2d": (MaxPool.called, {**_POOL, "dilation": 1, "ceil_mode": False}),
    "cat": (Concatenate.called, {"dim": 0}),
    "getitem": (Slice.called, {"index": None}),
    "interpolate": (Upsample.called, {**_SIZE, "mode": "nearest"}),
    "pixel_shuffle": (PixelShuffle.called, {"upscale_factor": 1}),
    "pad": (Pad.called, {"pad": None, "mode": "constant", "value": None}),
    **{name: (Flatten.called, {}) for name in SHAPES},
    **{name: (lambda call: call.value, {}) for name in SAME},
}
