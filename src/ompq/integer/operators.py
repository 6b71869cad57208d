"""Operators on integer codes: one class each.

A class says how its operator is recognized from a call, what it computes with integers,
and which ONNX node does the same. To add an operator, write a class and enter its
functions in ``OPERATORS``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import (
    CodeGrid,
    Dyadic,
    IntegerWeight,
    Pair,
    dyadic,
    float_dyadic,
    float_rescaled,
    padded,
    rescaled,
    taps,
)
from ompq.layers import QuantizedConv2d, QuantizedLayer, QuantizedLinear

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """An ONNX node."""

    kind: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    # Further inputs by name, int64; None is the code of 0.
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Whether it reads and gives codes, and not the values they stand for.
    on_codes: bool = False


@dataclass(frozen=True, eq=False)
class Operator:
    """Computes codes on one grid from codes on others."""

    moves: ClassVar[bool] = False  # whether codes are only moved, and keep their grid

    @property
    def divisor(self) -> int:
        """What sums are divided by."""
        return 1

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return sums of codes less their zero points, int32; or move them."""
        return values[0]

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return by what sums are multiplied to become codes."""
        scales = torch.tensor([grid.scale for grid in sources], dtype=torch.float64)
        return dyadic(scales / target.scale / self.divisor, together=True)

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Return the codes of sums on the target, not clipped, int64."""
        product = sums.long() * ratio.multiplier
        return rescaled(product, ratio.shift, target.zero_point)

    def largest(self, sources: Sequence[CodeGrid]) -> float:
        """Return the largest magnitude that a result can have."""
        return sum(grid.scale * grid.reach for grid in sources)

    def possible_results(self, _sources: Sequence[CodeGrid]) -> Tensor | None:
        """Return every value before rounding, float64, if they are few; else None."""
        return None

    def node(self) -> Node | None:
        """Return the node that computes values; None where they are only rounded."""
        return None


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of a network."""

    name: str  # unique: the module where it happens, perhaps with a number
    operator: Operator
    inputs: tuple[int, ...]  # positions of the steps whose results it reads
    shape: Shape  # shape of its result for one input, without the batch dimension
    grid: CodeGrid  # grid of its codes
    low: float = -inf  # values below are clipped to it: 0 after a ReLU
    high: float = inf  # values above are clipped to it: 6 after a ReLU6
    quantizer: str = ""  # name of the activation quantizer whose grid it is, or ""
    module: str = ""  # name of the module where it happens


@dataclass(frozen=True, eq=False)
class Codes:
    """A tensor that is known as codes: the result of a step."""

    step: int
    grid: CodeGrid
    shape: Shape


@dataclass(frozen=True, eq=False)
class Pending:
    """A tensor that becomes a step once its grid is known."""

    operator: Operator
    inputs: tuple[int, ...]  # positions of the steps it reads
    module: str
    shape: Shape  # of the result, without the batch dimension
    low: float = -inf  # values below are clipped to it
    high: float = inf  # values above are clipped to it
    # What moves its codes once it has any, with the shape that this gives.
    moves: tuple[tuple[Operator, Shape], ...] = ()
    # Its grid where that is known at once: codes in other places, or clipped.
    grid: CodeGrid | None = None


Value: TypeAlias = Codes | Pending


def as_codes(value: Value | None) -> Codes:
    """Return a value if it is codes; else raise a QuantizationError."""
    if isinstance(value, Codes):
        return value
    where = value.module if isinstance(value, Pending) else "a constant"
    raise QuantizationError(f"reads a tensor without a grid, from {where}")


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a torch function."""

    module: str  # name of the module it happened in
    # Values of the tensors that it read, in order; None for others.
    values: tuple[Value | None, ...]
    arguments: Mapping[str, Any]  # its arguments by name
    shape: Shape  # shape of its output, without the batch dimension
    same_batch: bool  # whether the batch dimension came through as it was

    @property
    def value(self) -> Value:
        """The value of its first tensor."""
        value = self.values[0]
        if value is None:
            raise QuantizationError("reads a tensor that does not come from the input")
        return value

    @property
    def codes(self) -> list[Codes]:
        """The values of all its tensors, every one of which must be codes."""
        return [as_codes(value) for value in self.values]

    @property
    def source_shape(self) -> Shape:
        """Shape of its first tensor, without the batch dimension."""
        value = self.value
        moved = isinstance(value, Pending) and value.moves
        return moved[-1][1] if moved else value.shape

    def computed(self, operator: Operator, **given: Any) -> Pending:
        """Return the result of an operator on all its tensors, which are codes."""
        inputs = tuple(codes.step for codes in self.codes)
        return Pending(operator, inputs, self.module, self.shape, **given)

    def moved(self, operator: Operator) -> Value:
        """Move the codes of a value, or note to do so when it has some.

        Rounding or moving first is the same: 0 is a code, and rounding keeps order.
        """
        value = self.value
        if isinstance(value, Pending):
            return replace(value, moves=(*value.moves, (operator, self.shape)))
        return self.computed(operator, grid=value.grid)


def pair(value: Any) -> Pair:
    """Return one number for height and width, or two, as two."""
    first, second = (value, value) if isinstance(value, int) else tuple(value)
    return int(first), int(second)


def _unusual(**given: Any) -> dict[str, Any]:
    """Return the attributes that differ from what a node without them has."""
    usual = {"strides": {1}, "dilations": {1}, "pads": {0}, "group": {1}}
    usual["ceil_mode"] = {0}
    return {
        name: value
        for name, value in given.items()
        if set(value if isinstance(value, tuple) else [value]) != usual[name]
    }


class Quantize(Operator):
    """The network's input becomes codes."""


@dataclass(frozen=True, eq=False)
class Layer(Operator):
    """What convolutions and linear layers share: a weight, and rounding by floats."""

    weight: IntegerWeight

    def ratio(self, sources: Sequence[CodeGrid], target: CodeGrid) -> Dyadic:
        """Return a ratio for each channel: as float32 computes it for 8-bit codes."""
        given, scales = sources[0].scale, self.weight.scale
        exact = torch.tensor([given, target.scale], dtype=torch.float32)
        ratio = (
            dyadic(given * scales / target.scale)
            if target.wide
            else float_dyadic(exact[0] * scales.float() / exact[1])
        )
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
    """A 2-D convolution; zeros around the image are the code of 0."""

    stride: Pair
    padding: tuple[int, int, int, int]  # top, left, bottom, right
    dilation: Pair
    groups: int

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.weight.values.shape[:2] == (self.groups, 1)

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the sums of products with the bias, (N, O, H', W')."""
        top, left, bottom, right = self.padding
        x = padded(values[0], ((0, 0), (top, bottom), (left, right)))
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
            # Images stand side by side, so that each group is one product of matrices.
            stacked = torch.stack(parts, 2).permute(1, 2, 0, 3, 4)  # (C, taps, N, H, W)
            rows = stacked.reshape(groups, channels // groups * count, -1)
            matrices = weight.reshape(groups, -1, rows.shape[1])  # (groups, O / groups)
            sums = torch.bmm(matrices, rows).reshape(-1, images, height, width)
            sums = sums.transpose(0, 1)
        return sums + self.weight.bias.view(-1, 1, 1)

    def node(self) -> Node:
        """Return a Conv."""
        given = _unusual(
            strides=self.stride,
            pads=self.padding,
            dilations=self.dilation,
            group=self.groups,
        )
        return Node("Conv", given)


@dataclass(frozen=True, eq=False)
class Product(Layer):
    """A linear layer."""

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the products of rows with the weight, and the bias, (N, O)."""
        return values[0] @ self.weight.values.int().T + self.weight.bias

    def node(self) -> Node:
        """Return a Gemm."""
        return Node("Gemm", {"transB": 1})


class Sum(Operator):
    """A residual sum of two tensors on grids of their own."""

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize the sum of two tensors of one shape."""
        if len(call.values) != 2 or call.arguments["alpha"] != 1:
            raise QuantizationError("adds something else than two tensors")
        first, second = call.codes
        if first.shape != second.shape:
            raise QuantizationError(f"adds shapes {first.shape} and {second.shape}")
        return call.computed(Sum())

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return both, side by side: each is multiplied before they are added."""
        return torch.stack(values, -1)

    def rescale(self, sums: Tensor, ratio: Dyadic, target: CodeGrid) -> Tensor:
        """Add both products and shift the sum."""
        product = (sums.long() * ratio.multiplier).sum(-1)
        return rescaled(product, ratio.shift, target.zero_point)

    def possible_results(self, sources: Sequence[CodeGrid]) -> Tensor:
        """Return the sum of every two values."""
        first, second = (grid.levels for grid in sources)
        return (first[:, None] + second).flatten()

    def node(self) -> Node:
        """Return an Add."""
        return Node("Add")


class Requantize(Operator):
    """Codes go to another grid, or are clipped."""

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize clipping to an interval that holds 0."""
        given = call.arguments
        limits = [given.get(end, given.get(f"{end}_val")) for end in ("min", "max")]
        if any(isinstance(limit, Tensor) for limit in limits):
            raise QuantizationError("clips to a tensor")
        low, high = (
            default if limit is None else float(limit)
            for limit, default in zip(limits, (-inf, inf), strict=True)
        )
        if not low <= 0 <= high:
            raise QuantizationError(f"clips to [{low}, {high}], which does not hold 0")
        value = call.value
        if isinstance(value, Pending):
            return replace(value, low=max(value.low, low), high=min(value.high, high))
        # The quantizer came first; a grid that ends at the limits has clipped already.
        if value.grid.limits(low, high) == (0, value.grid.qmax):
            return value
        return call.computed(Requantize(), low=low, high=high, grid=value.grid)

    def possible_results(self, sources: Sequence[CodeGrid]) -> Tensor:
        """Return the values of all codes."""
        return sources[0].levels


@dataclass(frozen=True, eq=False)
class Average(Operator):
    """The mean of windows; zeros around the image count."""

    window: Pair
    stride: Pair
    padding: Pair = (0, 0)
    whole: bool = False  # the window is the image, whatever its size

    @staticmethod
    def adaptive(call: FunctionCall) -> Value:
        """Recognize averages to a size that divides the image's."""
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
        """Recognize average pooling with windows of one size."""
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
        found = call.computed(Average(window, window, whole=True))
        if call.arguments["keepdim"]:
            return found
        shape = (source.shape[0], 1, 1)
        return replace(found, shape=shape, moves=((Flatten(), call.shape),))

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
        x = padded(x, ((0, 0), (rows, rows), (columns, columns)))
        return torch.stack(list(taps(x, self.window, self.stride, (1, 1)))).sum(0)

    def possible_results(self, sources: Sequence[CodeGrid]) -> Tensor:
        """Return every sum of a window, over its size."""
        (grid,), size = sources, self.divisor
        low, high = -grid.zero_point * size, (grid.qmax - grid.zero_point) * size
        return grid.scale * torch.arange(low, high + 1).double() / size

    def node(self) -> Node:
        """Return a GlobalAveragePool or an AveragePool."""
        if self.whole:
            return Node("GlobalAveragePool")
        given = _unusual(strides=self.stride, pads=self.padding * 2)
        given |= {"kernel_shape": self.window, "count_include_pad": 1}
        return Node("AveragePool", given)


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
        ends = [self._end(size, axis) for axis, size in enumerate(x.shape[2:])]
        rows, columns = self.padding
        sides = ((0, 0), (rows, ends[0]), (columns, ends[1]))
        # The lowest number never wins against one of the image.
        x = padded(x, sides, torch.iinfo(x.dtype).min)
        first, *others = taps(x, self.window, self.stride, self.dilation)
        for other in others:
            first = torch.maximum(first, other)
        return first

    def _end(self, size: int, axis: int) -> int:
        """Return the padding after an axis, which ceiling may make longer."""
        before, stride = self.padding[axis], self.stride[axis]
        reach = self.dilation[axis] * (self.window[axis] - 1) + 1
        after = before
        if self.ceil:
            rest = (size + 2 * before - reach) % stride
            count = (size + 2 * before - reach) // stride + 1
            # A further window must begin inside the image or the padding before it.
            if rest and count * stride < size + before:
                after += stride - rest
        return after

    def node(self) -> Node:
        """Return a MaxPool."""
        given = _unusual(
            strides=self.stride,
            pads=self.padding * 2,
            dilations=self.dilation,
            ceil_mode=int(self.ceil),
        )
        return Node("MaxPool", {"kernel_shape": self.window, **given})


class Flatten(Operator):
    """(N, C, H, W) to (N, C * H * W)."""

    moves: ClassVar[bool] = True

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize a reshape to a row for each image, or to the shape it has."""
        if not call.same_batch:
            raise QuantizationError("moves values between the images of a batch")
        before = call.source_shape
        if call.shape == before:
            return call.value
        if len(call.shape) != 1:
            raise QuantizationError(f"reshapes {before} to {call.shape}, not to a row")
        return call.moved(Flatten())

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return a row for each image."""
        return values[0].flatten(1)

    def node(self) -> Node:
        """Return a Flatten."""
        return Node("Flatten")


class Concatenate(Operator):
    """Channels of several tensors on one grid, one after the other."""

    moves: ClassVar[bool] = True

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize tensors joined along their channels."""
        sources = call.codes
        if call.arguments["dim"] % (len(call.shape) + 1) != 1:
            raise QuantizationError(f"joins dimension {call.arguments['dim']}, not 1")
        if len({source.grid for source in sources}) > 1:
            raise QuantizationError("joins tensors on different grids")
        return call.computed(Concatenate(), grid=sources[0].grid)

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return all channels."""
        return torch.cat(values, 1)

    def node(self) -> Node:
        """Return a Concat."""
        return Node("Concat", {"axis": 1})


@dataclass(frozen=True, eq=False)
class Slice(Operator):
    """A range with a step in each dimension but the first."""

    moves: ClassVar[bool] = True
    ranges: tuple[tuple[int, int, int], ...]  # start, stop, step

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize slices that keep all images."""
        shape = call.source_shape
        index = call.arguments["index"]
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(p, slice) for p in parts) or parts[0] != slice(None):
            raise QuantizationError("picks single elements, or images of the batch")
        parts = (*parts[1:], *[slice(None)] * (len(shape) - len(parts) + 1))
        ranges = [part.indices(size) for part, size in zip(parts, shape, strict=True)]
        return call.moved(Slice(tuple(ranges)))

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return the chosen elements."""
        return values[0][(slice(None), *(slice(*part) for part in self.ranges))]

    def node(self) -> Node:
        """Return a Slice of codes as they are, whatever a runtime's kernels."""
        starts, ends, steps = zip(*self.ranges, strict=True)
        axes = tuple(range(1, 1 + len(self.ranges)))
        given = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
        return Node("Slice", constants=given, on_codes=True)


@dataclass(frozen=True, eq=False)
class Pad(Operator):
    """Zeros before and after in each dimension but the first."""

    moves: ClassVar[bool] = True
    sides: tuple[Pair, ...]

    @staticmethod
    def called(call: FunctionCall) -> Value:
        """Recognize zeros around each image."""
        shape, given = call.source_shape, call.arguments
        if given["mode"] != "constant" or given["value"]:
            raise QuantizationError("pads with something else than zeros")
        sides = list(given["pad"])
        ends = [pair(sides[at : at + 2]) for at in range(0, len(sides), 2)]
        ends += [(0, 0)] * (len(shape) - len(ends))
        if len(ends) > len(shape) or any(side < 0 for end in ends for side in end):
            raise QuantizationError("pads the batch, or by a negative number")
        return call.moved(Pad(tuple(reversed(ends))))

    def compute(self, values: list[Tensor]) -> Tensor:
        """Return values with zeros around them."""
        return padded(values[0], self.sides)

    def node(self) -> Node:
        """Return a Pad of codes as they are."""
        before, after = zip(*self.sides, strict=True)
        given = {"sides": (0, *before, 0, *after), "zero": None}
        return Node("Pad", constants=given, on_codes=True)


def layer_operator(layer: QuantizedLayer, dims: int, grid: CodeGrid) -> Operator:
    """Return the operator of a layer."""
    if isinstance(layer, QuantizedLinear) and dims == 2:
        return Product(layer_weight(layer, grid).cpu())
    if isinstance(layer, QuantizedConv2d) and layer.padding_mode == "zeros":
        # torch keeps the numbers of any spelling of the padding, last dimension first.
        left, right, top, bottom = layer._reversed_padding_repeated_twice
        return Convolution(
            layer_weight(layer, grid).cpu(),
            pair(layer.stride),
            (top, left, bottom, right),
            pair(layer.dilation),
            layer.groups,
        )
    mode = getattr(layer, "padding_mode", "zeros")
    raise QuantizationError(
        f"({type(layer).__name__}, {dims} dimensions, padding {mode}) has no "
        "integer kernel; there is one for Conv2d with zeros and Linear on rows"
    )


def layer_weight(layer: QuantizedLayer, grid: CodeGrid) -> IntegerWeight:
    """Return the weight (O, ...) and bias of a layer whose input has a grid."""
    if layer.group_size:
        raise QuantizationError(
            f"({type(layer).__name__}) has groups of {layer.group_size} weights with "
            "scales of their own, and no integer kernel: an accumulator has one scale. "
            "Save or export it as it is, or plan without group_size"
        )
    return IntegerWeight.of(layer.codes(), layer.grid_like_weight(), layer.bias, grid)


# Names of the arguments after the first, as torch spells them, and their defaults.
_CLAMP = {"min": None, "max": None}
_POOL = {"kernel_size": None, "stride": None, "padding": 0}
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
    "pad": (Pad.called, {"pad": None, "mode": "constant", "value": None}),
    **{n: (Flatten.called, {}) for n in ("flatten", "view", "reshape", "squeeze")},
    **{
        name: (lambda call: call.value, {})
        for name in ("dropout", "dropout2d", "contiguous", "clone", "detach", "to")
    },
}
