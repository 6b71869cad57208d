"""What integers do in the place of a torch function.

A form is a function of one observed call: it gets the values that the call read and its
arguments, and returns the value of its output. It refuses what integers cannot do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeAlias

from ompq.errors import QuantizationError
from ompq.integer.steps import (
    Average,
    Concatenate,
    Flatten,
    MaxPool,
    Operation,
    Pad,
    Pair,
    Requantize,
    Slice,
    Sum,
)
from ompq.integer.values import Codes, Moved, Pending, Value, as_codes, shape_of


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
    if value.grid.limits(low, high) == (0, value.grid.top):
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
