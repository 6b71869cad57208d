"""Operators on integer codes: recognized from a call, and computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ompq.errors import QuantizationError

_LARGEST_PAIR = (1 << 15) - 1
Pair: TypeAlias = tuple[int, int]
Sides: TypeAlias = tuple[int, int, int, int]  # top, left, bottom, right


@dataclass(frozen=True)
class CodeGrid:
    """What the codes of an activation stand for: ``scale * (code - zero)``.

    Attributes:
        scale: The step.
        zero_point: The code of 0.
        bits: Width of a code, 2 to 8.
    """

    scale: float
    zero_point: int
    bits: int

    @property
    def qmax(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1

    @property
    def reach(self) -> int:
        """The largest magnitude of ``code - zero``."""
        return max(self.zero_point, self.qmax - self.zero_point)

    def limits(self, low: float, high: float) -> tuple[int, int]:
        """Return the codes between which values clipped to [low, high] lie."""
        ends = [
            min(max(round(end / self.scale + self.zero_point), 0), self.qmax)
            if isfinite(end)
            else default
            for end, default in ((low, 0), (high, self.qmax))
        ]
        return ends[0], ends[1]


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A weight as signed bytes, and its bias in steps of the accumulator.

    The value of a byte is ``scale * byte``, and the byte of a code is
    ``(code * unit - offset) * stretch``: the distance from the zero in halves of a
    step, times a whole number that makes the accumulator's step, and with it the
    bias, finer.

    Attributes:
        codes: uint8 of the weight's shape, 0 to 2^bits - 1.
        bits: Width of a code.
        unit: 2 where zeros may lie halfway between codes, else 1.
        offset: int32, (O,): the zero, times the unit.
        stretch: int32, (O,); 0 for a channel without weights.
        values: The bytes, int8 of the weight's shape.
        scale: float64, (O,).
        bias: int32, (O,), in steps of the input's scale times ``scale``.
    """

    codes: Tensor
    bits: int
    unit: int
    offset: Tensor
    stretch: Tensor
    values: Tensor
    scale: Tensor
    bias: Tensor

    @cached_property
    def affine(self) -> bool:
        """Whether the formula gives the bytes: not those of a coarsened channel."""
        shape = (-1, *[1] * (self.codes.dim() - 1))
        halves = self.codes.int() * self.unit - self.offset.view(shape)
        return torch.equal(halves * self.stretch.view(shape), self.values.int())

    def pair_excess(self, grid: CodeGrid) -> Tensor:
        """Return how far two products may exceed 16 bits, as a ratio; (O,), 1 is safe.

        Processors with AVX2 or AVX-512 but without VNNI add products of unsigned and
        signed bytes in pairs, in 16 bits, and saturate. Which weights meet in a pair is
        the runtime's choice, so the two largest of one sign count.
        """
        rows = self.values.flatten(1).int()
        both = torch.stack([rows, -rows]).clamp(min=0)
        pairs = both.topk(min(2, rows.shape[1]), dim=2).values.sum(2)  # (2, O)
        return pairs.amax(0).double() * grid.qmax / _LARGEST_PAIR

    def cpu(self) -> "IntegerWeight":
        """Return it in host memory."""
        return replace(
            self,
            codes=self.codes.cpu(),
            offset=self.offset.cpu(),
            stretch=self.stretch.cpu(),
            values=self.values.cpu(),
            scale=self.scale.cpu(),
            bias=self.bias.cpu(),
        )


@dataclass(frozen=True)
class Quantize:
    """The network's input becomes codes."""


@dataclass(frozen=True, eq=False)
class Convolution:
    """A 2-D convolution; zeros around the image are the code of 0."""

    weight: IntegerWeight
    stride: Pair
    padding: Sides
    dilation: Pair
    groups: int


@dataclass(frozen=True, eq=False)
class Product:
    """A linear layer."""

    weight: IntegerWeight


@dataclass(frozen=True)
class Sum:
    """A residual sum of two tensors on grids of their own."""


@dataclass(frozen=True)
class Average:
    """The mean of windows; zeros around the image count."""

    window: Pair
    stride: Pair
    padding: Pair
    whole: bool  # the window is the image, whatever its size


@dataclass(frozen=True)
class Requantize:
    """Codes go to another grid, or are clipped."""


@dataclass(frozen=True)
class MaxPool:
    """The largest code of each window."""

    window: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil: bool


@dataclass(frozen=True)
class Flatten:
    """(N, C, H, W) to (N, C * H * W)."""


@dataclass(frozen=True)
class Concatenate:
    """Channels of several tensors, one after the other."""


@dataclass(frozen=True)
class Slice:
    """Every so-many-th element of a range in each dimension but the first."""

    ranges: tuple[tuple[int, int, int], ...]  # start, stop, step


@dataclass(frozen=True)
class Pad:
    """Zeros before and after in each dimension but the first."""

    sides: tuple[Pair, ...]


Operation: TypeAlias = (
    Quantize
    | Convolution
    | Product
    | Sum
    | Average
    | Requantize
    | MaxPool
    | Flatten
    | Concatenate
    | Slice
    | Pad
)


@dataclass(frozen=True, eq=False)
class Step:
    """One operation.

    Attributes:
        name: Unique: the module where it happens, perhaps with a number.
        operation: What is computed.
        inputs: Positions of the steps whose results it reads.
        shape: Shape of its result for one input, without the batch dimension.
        grid: Grid of its codes; None where the accumulator itself is the result.
        low: Values below are clipped to it: 0 after a ReLU.
        high: Values above are clipped to it: 6 after a ReLU6.
        quantizer: Name of the activation quantizer whose grid it is, or "".
        module: Name of the module where it happens.
    """

    name: str
    operation: Operation
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    grid: CodeGrid | None
    low: float = -inf
    high: float = inf
    quantizer: str = ""
    module: str = ""


@dataclass(frozen=True, eq=False)
class Steps:
    """All of a network; the last step gives the logits.

    Attributes:
        steps: In order of execution; the first is ``Quantize``.
        input_shape: Shape of one input, (C, H, W) or (I,).
        sites: For each call of an activation quantizer, the step that gives its codes;
            None where it does not depend on the input.
    """

    steps: tuple[Step, ...]
    input_shape: tuple[int, ...]
    sites: tuple[int | None, ...] = ()

    def grid(self, position: int) -> CodeGrid:
        """Return the grid of a step that another one reads."""
        grid = self.steps[position].grid
        assert grid is not None  # only the last step may lack one
        return grid

    def saturating(self) -> list[str]:
        """Return the layers in which two products may exceed 16 bits."""
        return [
            step.name
            for step in self.steps
            if isinstance(step.operation, Convolution | Product)
            and step.operation.weight.pair_excess(self.grid(step.inputs[0])).max() > 1
        ]

    def last_use(self) -> dict[int, int]:
        """Return, for each step, the position of the last step that reads it."""
        return {
            source: position
            for position, step in enumerate(self.steps)
            for source in step.inputs
        }


def padded(x: Tensor, sides: Sequence[Pair], value: int = 0) -> Tensor:
    """Return a tensor (N, ...) with a constant around it.

    Args:
        x: Integers of any shape.
        sides: How many before and after in each dimension but the first.
        value: What surrounds it.
    """
    if not any(before or after for before, after in sides):
        return x
    # torch's own padding turns the constant into a float.
    sizes = [
        size + before + after
        for size, (before, after) in zip(x.shape[1:], sides, strict=True)
    ]
    whole = x.new_full((x.shape[0], *sizes), value)
    inner = whole
    for axis, (before, _) in enumerate(sides, start=1):
        inner = inner.narrow(axis, before, x.shape[axis])
    inner.copy_(x)
    return whole


def convolve(x: Tensor, operation: Convolution) -> Tensor:
    """Return the sums of products of a convolution, with its bias.

    Args:
        x: Codes less their zero, int32, (N, C, H, W).
        operation: The convolution, its weight (O, C / groups, h, w).

    Returns:
        int32, (N, O, H', W').
    """
    qmax, left, bottom, right = operation.padding
    x = padded(x, ((0, 0), (qmax, bottom), (left, right)))
    weight = operation.weight.values.int()
    window = (weight.shape[2], weight.shape[3])
    taps = list(_taps(x, window, operation.stride, operation.dilation))
    groups, count = operation.groups, len(taps)
    if groups == x.shape[1] == weight.shape[0]:
        columns = weight.reshape(-1, count, 1, 1).unbind(1)  # each (C, 1, 1)
        sums = taps[0] * columns[0]
        for tap, column in zip(taps[1:], columns[1:], strict=True):
            sums += tap * column
    else:
        images, channels, height, width = taps[0].shape
        # Images stand side by side, so that each group is one product of matrices.
        stacked = torch.stack(taps, 2).permute(1, 2, 0, 3, 4)  # (C, taps, N, H', W')
        rows = stacked.reshape(groups, channels // groups * count, -1)
        parts = weight.reshape(groups, -1, rows.shape[1])  # (groups, O / groups, ...)
        sums = torch.bmm(parts, rows).reshape(-1, images, height, width)
        sums = sums.transpose(0, 1)
    return sums + operation.weight.bias.view(-1, 1, 1)


def window_sums(x: Tensor, operation: Average) -> Tensor:
    """Return the sum of each window, (N, C, H', W'), of codes less their zero."""
    if operation.whole:
        return x.sum((2, 3), keepdim=True)
    rows, columns = operation.padding
    x = padded(x, ((0, 0), (rows, rows), (columns, columns)))
    taps = _taps(x, operation.window, operation.stride, (1, 1))
    return torch.stack(list(taps)).sum(0)


def largest(codes: Tensor, operation: MaxPool) -> Tensor:
    """Return the largest code of each window, uint8, (N, C, H', W')."""
    ends = [
        _overhang(size, operation, axis) for axis, size in enumerate(codes.shape[2:])
    ]
    rows, columns = operation.padding
    # The lowest code never wins against one of the image.
    codes = padded(codes, ((0, 0), (rows, ends[0]), (columns, ends[1])))
    taps = list(_taps(codes, operation.window, operation.stride, operation.dilation))
    result = taps[0]
    for tap in taps[1:]:
        result = torch.maximum(result, tap)
    return result


def _overhang(size: int, operation: MaxPool, axis: int) -> int:
    """Return the padding after an axis, which ceiling may make longer."""
    before, stride = operation.padding[axis], operation.stride[axis]
    reach = operation.dilation[axis] * (operation.window[axis] - 1) + 1
    after = before
    if operation.ceil:
        rest = (size + 2 * before - reach) % stride
        count = (size + 2 * before - reach) // stride + 1
        # A further window must begin inside the image or the padding before it.
        if rest and count * stride < size + before:
            after += stride - rest
    return after


def _taps(x: Tensor, window: Pair, stride: Pair, dilation: Pair) -> Iterator[Tensor]:
    """Yield what all windows have at each of their places, (N, C, H', W')."""
    counts = [
        (x.shape[axis + 2] - dilation[axis] * (window[axis] - 1) - 1) // stride[axis]
        + 1
        for axis in (0, 1)
    ]
    for place in range(prod(window)):
        starts = (place // window[1] * dilation[0], place % window[1] * dilation[1])
        spans = [
            slice(start, start + stride[axis] * (counts[axis] - 1) + 1, stride[axis])
            for axis, start in enumerate(starts)
        ]
        yield x[:, :, spans[0], spans[1]]


@dataclass(frozen=True, eq=False)
class Codes:
    """A tensor that is known as codes: the result of a step."""

    step: int
    grid: CodeGrid
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Pending:
    """A tensor whose accumulator is known and whose grid is not: no step yet.

    Attributes:
        operation: What is accumulated.
        inputs: Positions of the steps it reads.
        module: Where.
        shape: Of the accumulator, without the batch dimension.
        low: Values below are clipped to it.
        high: Values above are clipped to it.
        moves: What moves its codes once it has any, with the shape that this gives.
    """

    operation: Operation
    inputs: tuple[int, ...]
    module: str
    shape: tuple[int, ...]
    low: float = -inf
    high: float = inf
    moves: tuple[tuple[Operation, tuple[int, ...]], ...] = ()

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """Shape after the moves, without the batch dimension."""
        return self.moves[-1][1] if self.moves else self.shape


@dataclass(frozen=True, eq=False)
class Moved:
    """Codes in other places, or clipped, on the grid that they had."""

    operation: Operation
    inputs: tuple[int, ...]
    grid: CodeGrid
    low: float = -inf
    high: float = inf


Value: TypeAlias = Codes | Pending


def as_codes(value: Value | None) -> Codes:
    """Return a value that is codes.

    Raises:
        QuantizationError: It is not.
    """
    if isinstance(value, Codes):
        return value
    where = value.module if isinstance(value, Pending) else "a constant"
    raise QuantizationError(f"reads a tensor without a grid, from {where}")


def shape_of(value: Value) -> tuple[int, ...]:
    """Return the shape of a value, without the batch dimension."""
    return value.moved_shape if isinstance(value, Pending) else value.shape


@dataclass(frozen=True, eq=False)
class Observed:
    """One call of a torch function.

    Attributes:
        module: Name of the module it happened in.
        values: Values of the tensors that it read, in order; None for others.
        arguments: Its arguments by name.
        shape: Shape of its output, without the batch dimension.
        whole: Whether the batch dimension came through as it was.
    """

    module: str
    values: tuple[Value | None, ...]
    arguments: Mapping[str, Any]
    shape: tuple[int, ...]
    whole: bool

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


def pair(value: Any) -> Pair:
    """Return one number for height and width, or two, as two."""
    first, second = (value, value) if isinstance(value, int) else tuple(value)
    return int(first), int(second)


def _clipped(value: Value, low: float, high: float) -> Value | Moved:
    if not low <= 0 <= high:
        raise QuantizationError(f"clips to {low} and {high}, between which 0 is not")
    if isinstance(value, Pending):
        return replace(value, low=max(value.low, low), high=min(value.high, high))
    # The quantizer came first; a grid that ends at the limits has clipped already.
    if value.grid.limits(low, high) == (0, value.grid.qmax):
        return value
    return Moved(Requantize(), (value.step,), value.grid, low, high)


def _relu(call: Observed) -> Value | Moved:
    return _clipped(call.value, 0.0, inf)


def _relu6(call: Observed) -> Value | Moved:
    return _clipped(call.value, 0.0, 6.0)


def _clamp(call: Observed) -> Value | Moved:
    low, high = call.arguments["min"], call.arguments["max"]
    low, high = -inf if low is None else low, inf if high is None else high
    if not all(isinstance(limit, int | float) for limit in (low, high)):
        raise QuantizationError("clips to a tensor")
    return _clipped(call.value, float(low), float(high))


def _hardtanh(call: Observed) -> Value | Moved:
    low, high = call.arguments["min_val"], call.arguments["max_val"]
    return _clipped(call.value, float(low), float(high))


def _same(call: Observed) -> Value:
    return call.value


def _add(call: Observed) -> Value:
    if len(call.values) != 2 or call.arguments["alpha"] != 1:
        raise QuantizationError("adds something else than two tensors")
    first, second = call.codes
    if first.shape != second.shape:
        raise QuantizationError(f"adds shapes {first.shape} and {second.shape}")
    return Pending(Sum(), (first.step, second.step), call.module, call.shape)


def _moved(call: Observed, operation: Operation) -> Value | Moved:
    """Move the codes of a value, or note to do so when it has some.

    Rounding first or moving first is the same: 0 is a code, and rounding keeps order.
    """
    value = call.value
    if isinstance(value, Pending):
        return replace(value, moves=(*value.moves, (operation, call.shape)))
    return Moved(operation, (value.step,), value.grid)


def _adaptive_average(call: Observed) -> Value:
    (source,) = call.codes
    height, width = source.shape[1:]
    rows, columns = call.shape[1:]
    if height % rows or width % columns:
        raise QuantizationError(
            f"averages {height} × {width} to {rows} × {columns}, which is no divisor"
        )
    window = (height // rows, width // columns)
    if window == (1, 1):
        return source
    operation = Average(window, window, (0, 0), whole=(rows, columns) == (1, 1))
    return Pending(operation, (source.step,), call.module, call.shape)


def _average(call: Observed) -> Value:
    (source,) = call.codes
    given = call.arguments
    window, padding = pair(given["kernel_size"]), pair(given["padding"])
    uneven = any(padding) and not given["count_include_pad"]
    if given["ceil_mode"] or given["divisor_override"] or uneven:
        raise QuantizationError("averages windows of unequal size")
    stride = pair(given["stride"] or window)
    operation = Average(window, stride, padding, whole=False)
    return Pending(operation, (source.step,), call.module, call.shape)


def _mean(call: Observed) -> Value:
    (source,) = call.codes
    dim = call.arguments["dim"]
    dims = {d % 4 for d in ((dim,) if isinstance(dim, int) else dim or ())}
    if len(source.shape) != 3 or dims != {2, 3}:
        raise QuantizationError(f"averages over dimensions {dim}, not (2, 3)")
    window = pair(source.shape[1:])
    operation = Average(window, window, (0, 0), whole=True)
    shape = (source.shape[0], 1, 1)
    moves = () if call.arguments["keepdim"] else ((Flatten(), call.shape),)
    return Pending(operation, (source.step,), call.module, shape, moves=moves)


def _max_pool(call: Observed) -> Value | Moved:
    given = call.arguments
    window = pair(given["kernel_size"])
    operation = MaxPool(
        window,
        pair(given["stride"] or window),
        pair(given["padding"]),
        pair(given["dilation"]),
        bool(given["ceil_mode"]),
    )
    return _moved(call, operation)


def _reshape(call: Observed) -> Value | Moved:
    if not call.whole:
        raise QuantizationError("moves values between the images of a batch")
    before = shape_of(call.value)
    if call.shape == before:
        return call.value
    if len(call.shape) != 1:
        raise QuantizationError(f"reshapes {before} to {call.shape}, not to a row")
    return _moved(call, Flatten())


def _concatenate(call: Observed) -> Moved:
    sources = call.codes
    if call.arguments["dim"] % (len(call.shape) + 1) != 1:
        raise QuantizationError(f"joins dimension {call.arguments['dim']}, not 1")
    if len({source.grid for source in sources}) > 1:
        raise QuantizationError("joins tensors on different grids")
    inputs = tuple(source.step for source in sources)
    return Moved(Concatenate(), inputs, sources[0].grid)


def _slice(call: Observed) -> Value | Moved:
    shape = shape_of(call.value)
    index = call.arguments["index"]
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) for part in parts) or parts[0] != slice(None):
        raise QuantizationError("picks single elements, or images of the batch")
    parts = (*parts[1:], *[slice(None)] * (len(shape) - len(parts) + 1))
    ranges = [part.indices(size) for part, size in zip(parts, shape, strict=True)]
    return _moved(call, Slice(tuple(ranges)))


def _pad(call: Observed) -> Value | Moved:
    shape = shape_of(call.value)
    given = call.arguments
    if given["mode"] != "constant" or given["value"]:
        raise QuantizationError("pads with something else than zeros")
    sides = list(given["pad"])
    ends = [pair(sides[at : at + 2]) for at in range(0, len(sides), 2)]
    ends += [(0, 0)] * (len(shape) - len(ends))
    if len(ends) > len(shape) or any(side < 0 for end in ends for side in end):
        raise QuantizationError("pads the batch, or by a negative number")
    return _moved(call, Pad(tuple(reversed(ends))))


Form: TypeAlias = Callable[[Observed], Value | Moved]

# The names of the arguments after the first, as torch spells them, and their defaults.
_CLAMP = {"min": None, "max": None}
_MEAN = {"dim": None, "keepdim": False}
_POOL = {"kernel_size": None, "stride": None, "padding": 0}
_COUNTED = {"count_include_pad": True, "divisor_override": None}
FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "relu": (_relu, {}),
    "relu6": (_relu6, {}),
    "hardtanh": (_hardtanh, {"min_val": -1.0, "max_val": 1.0}),
    "clamp": (_clamp, _CLAMP),
    "clip": (_clamp, _CLAMP),
    "clamp_min": (_clamp, _CLAMP),
    "add": (_add, {"other": None, "alpha": 1}),
    "adaptive_avg_pool2d": (_adaptive_average, {"output_size": None}),
    "avg_pool2d": (_average, {**_POOL, "ceil_mode": False, **_COUNTED}),
    "mean": (_mean, _MEAN),
    "max_pool2d": (_max_pool, {**_POOL, "dilation": 1, "ceil_mode": False}),
    "cat": (_concatenate, {"dim": 0}),
    "getitem": (_slice, {"index": None}),
    "pad": (_pad, {"pad": None, "mode": "constant", "value": None}),
    **{name: (_reshape, {}) for name in ("flatten", "view", "reshape", "squeeze")},
    **{
        name: (_same, {})
        for name in ("dropout", "dropout2d", "contiguous", "clone", "detach", "to")
    },
}
