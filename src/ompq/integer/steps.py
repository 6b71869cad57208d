"""Steps: a quantized network as a short list of operations on integer codes.

The integer engine executes steps and the ONNX exporter writes them down; both get them
from :mod:`ompq.integer.lowering`. A step reads the codes of earlier steps. What it
computes is an integer accumulator, and its grid says which codes that becomes::

    code = clamp(round(accumulator * step_of_accumulator / scale) + zero, low, high)

| operation               | reads, writes                   | accumulator          |
|-------------------------|---------------------------------|----------------------|
| Quantize                | (N, C, H, W) float              | none                 |
| Convolution             | (N, C, H, W) → (N, O, H', W')   | sum of products      |
| Product                 | (N, I) → (N, O)                 | sum of products      |
| Sum                     | two of one shape                | sum, scales aligned  |
| Average                 | (N, C, H, W) → (N, C, H', W')   | sum of the window    |
| Requantize              | any                             | the codes themselves |
| MaxPool, Flatten,       | codes to codes on the same grid | none                 |
| Concatenate, Slice, Pad |                                 |                      |
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import TypeAlias

import torch
from torch import Tensor

Pair: TypeAlias = tuple[int, int]
Sides: TypeAlias = tuple[int, int, int, int]  # top, left, bottom, right


@dataclass(frozen=True)
class CodeGrid:
    """What the codes of an activation stand for: ``scale * (code - zero)``.

    Attributes:
        scale: The step.
        zero: The code of 0.
        bits: Width of a code, 2 to 8.
    """

    scale: float
    zero: int
    bits: int

    @property
    def top(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1

    @property
    def reach(self) -> int:
        """The largest magnitude of ``code - zero``."""
        return max(self.zero, self.top - self.zero)

    def limits(self, low: float, high: float) -> tuple[int, int]:
        """Return the codes between which values clipped to [low, high] lie."""
        ends = [
            min(max(round(end / self.scale + self.zero), 0), self.top)
            if isfinite(end)
            else default
            for end, default in ((low, 0), (high, self.top))
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
    """

    steps: tuple[Step, ...]
    input_shape: tuple[int, ...]

    def grid(self, position: int) -> CodeGrid:
        """Return the grid of a step that another one reads."""
        grid = self.steps[position].grid
        assert grid is not None  # only the last step may lack one
        return grid

    def last_use(self) -> dict[int, int]:
        """Return, for each step, the position of the last step that reads it."""
        return {
            source: position
            for position, step in enumerate(self.steps)
            for source in step.inputs
        }
