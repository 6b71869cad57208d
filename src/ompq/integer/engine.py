"""The integer engine: a quantized network executed with integers alone."""

from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import (
    Dyadic,
    dyadic,
    float_dyadic,
    float_rescaled,
    largest_sum,
    rescaled,
)
from ompq.integer.lowering import lower
from ompq.integer.operators import (
    Average,
    Concatenate,
    Convolution,
    Flatten,
    MaxPool,
    Pad,
    Product,
    Slice,
    Step,
    Steps,
    Sum,
    convolve,
    largest,
    padded,
    window_sums,
)
from ompq.recording import tensors_in
from ompq.samples import SamplesLike

# Logits use 30 bits: finer than any difference that could decide between two classes.
_LOGIT_BITS = 30
# Values that the largest layer may hold at once; more images are run in parts.
_ELEMENTS = 1 << 24


class IntegerNetwork(nn.Module):
    """A network that computes with integers.

    It can be evaluated like any network; it runs on the CPU.

    Attributes:
        steps: What it executes.
        logit_scale: What one step of the integer logits is worth.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        last = steps.steps[-1]
        self.logit_scale = last.grid.scale if last.grid else _logit_scale(steps)
        self._ratios = [self._ratio(step) for step in steps.steps]

    @classmethod
    def from_quantized(
        cls, quantized: nn.Module, samples: SamplesLike
    ) -> "IntegerNetwork":
        """Return the integer form of a quantized network.

        Args:
            quantized: From :func:`ompq.quantize`, perhaps reconstructed or trained.
            samples: Inputs, of which two are run to see what the network does.

        Raises:
            QuantizationError: An operation has no integer form; it is named.
        """
        return cls(lower(quantized, samples))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images (N, C, H, W) as floats, (N, classes)."""
        return self.run(images)

    def run(self, images: Tensor) -> Tensor:
        """Return the logits of images (N, C, H, W) as floats, (N, classes)."""
        codes = self.input_codes(images)
        per_image = max(_elements(self.steps, step) for step in self.steps.steps)
        parts = torch.split(codes, max(1, _ELEMENTS // per_image))
        logits = torch.cat([self.integer_logits(part) for part in parts])
        return (logits.double() * self.logit_scale).float().to(images.device)

    def input_codes(self, images: Tensor) -> Tensor:
        """Return the codes of images, uint8: the only arithmetic with floats.

        Raises:
            ValueError: The images are not of the size that the steps were made for.
        """
        if tuple(images.shape[1:]) != self.steps.input_shape:
            raise ValueError(
                f"images of shape {tuple(images.shape[1:])} do not fit: the integer "
                f"network was made for {self.steps.input_shape}"
            )
        grid = self.steps.grid(0)
        levels = (images.cpu().float() / torch.tensor(grid.scale)).round()
        return (levels + grid.zero_point).clamp(0, grid.qmax).to(torch.uint8)

    def integer_logits(self, codes: Tensor) -> Tensor:
        """Return integer logits from the input's codes.

        Args:
            codes: uint8, (N, C, H, W).

        Returns:
            int32, (N, classes), in steps of ``logit_scale``.
        """
        results: dict[int, Tensor] = {0: codes}
        last_use = self.steps.last_use()
        for position in range(1, len(self.steps.steps)):
            results[position] = self._execute(position, results)
            for source in self.steps.steps[position].inputs:
                if last_use[source] == position:
                    results.pop(source, None)
        result = results[len(self.steps.steps) - 1]
        grid = self.steps.steps[-1].grid
        return result if grid is None else result.int() - grid.zero_point

    def codes(self, images: Tensor) -> list[Tensor]:
        """Return the result of every step for images (N, C, H, W)."""
        results = {0: self.input_codes(images)}
        for position in range(1, len(self.steps.steps)):
            results[position] = self._execute(position, results)
        return list(results.values())

    def assert_integer_only(self, images: Tensor) -> None:
        """Run images and make sure that no float appears before the logits.

        Raises:
            QuantizationError: One does; the operation is named.
        """
        codes = self.input_codes(images)
        with _NoFloats():  # type: ignore[no-untyped-call]
            self.integer_logits(codes)

    def _execute(self, position: int, results: dict[int, Tensor]) -> Tensor:
        step = self.steps.steps[position]
        inputs = [results[source] for source in step.inputs]
        moved = _moved(step, inputs)
        if moved is not None:
            return moved
        grids = [self.steps.grid(source) for source in step.inputs]
        values = [
            codes.int() - grid.zero_point
            for codes, grid in zip(inputs, grids, strict=True)
        ]
        ratio = self._ratios[position]
        sums = _sums(step, values, ratio)
        if _is_layer(step) and step.grid:
            result = float_rescaled(sums, ratio, step.grid.zero_point)
        else:
            zero_point = step.grid.zero_point if step.grid else 0
            result = rescaled(sums, ratio.shift, zero_point)
        low, high = self._limits(step)
        result = result.clamp(low, high)
        return result.to(torch.uint8 if step.grid else torch.int32)

    def _limits(self, step: Step) -> tuple[int, int]:
        if step.grid:
            return step.grid.limits(step.low, step.high)
        bound = 1 << (_LOGIT_BITS + 1)
        low, high = (
            round(end / self.logit_scale) if isfinite(end) else default
            for end, default in ((step.low, -bound), (step.high, bound - 1))
        )
        return low, high

    def _ratio(self, step: Step) -> Dyadic:
        scale = step.grid.scale if step.grid else self.logit_scale
        sources = [self.steps.steps[source].grid for source in step.inputs]
        given = [grid.scale for grid in sources if grid] or [scale]
        operation = step.operation
        if isinstance(operation, Convolution | Product):
            return _layer_ratio(step, given[0], scale)
        ratio = torch.tensor(given, dtype=torch.float64) / scale
        if isinstance(operation, Average):
            ratio = ratio / prod(operation.window)
        return dyadic(ratio, together=isinstance(operation, Sum))


def _is_layer(step: Step) -> bool:
    return isinstance(step.operation, Convolution | Product)


def _layer_ratio(step: Step, given: float, scale: float) -> Dyadic:
    operation = step.operation
    assert isinstance(operation, Convolution | Product)
    steps = operation.weight.scale
    if step.grid is None:
        ratio = dyadic(given * steps / scale)
    else:
        exact = torch.tensor([given, scale], dtype=torch.float32)
        ratio = float_dyadic(exact[0] * steps.float() / exact[1])
    if isinstance(operation, Product):
        return ratio
    return Dyadic(ratio.multiplier.view(-1, 1, 1), ratio.shift.view(-1, 1, 1))


def _sums(step: Step, values: list[Tensor], ratio: Dyadic) -> Tensor:
    """Return the accumulators; those that are shifted as they are, multiplied."""
    operation = step.operation
    if isinstance(operation, Sum):
        first, second = ratio.multiplier.unbind()
        return values[0].long() * first + values[1].long() * second
    (x,) = values
    if isinstance(operation, Convolution):
        x = convolve(x, operation)
    elif isinstance(operation, Product):
        weight = operation.weight
        x = x @ weight.values.int().T + weight.bias
    elif isinstance(operation, Average):
        x = window_sums(x, operation)
    if _is_layer(step) and step.grid:
        return x
    return x.long() * ratio.multiplier


def _moved(step: Step, inputs: list[Tensor]) -> Tensor | None:
    """Return the result of an operation that only moves codes; None of another."""
    operation, codes = step.operation, inputs[0]
    match operation:
        case MaxPool():
            return largest(codes, operation)
        case Flatten():
            return codes.flatten(1)
        case Concatenate():
            return torch.cat(inputs, 1)
        case Slice(ranges):
            return codes[(slice(None), *(slice(*part) for part in ranges))]
        case Pad(sides):
            assert step.grid is not None  # padding is refused without one
            return padded(codes, sides, step.grid.zero_point)
        case _:
            return None


def _logit_scale(steps: Steps) -> float:
    """Return a step for the logits with which the largest possible one fits."""
    step = next(s for s in steps.steps if s.grid is None)
    grids = [steps.grid(source) for source in step.inputs]
    bound = sum(grid.scale * grid.reach for grid in grids)
    operation = step.operation
    if isinstance(operation, Convolution | Product):
        reach = largest_sum(operation.weight, grids[0]) * operation.weight.scale
        bound = grids[0].scale * float(reach.max())
    return bound / (1 << _LOGIT_BITS)


def _elements(steps: Steps, step: Step) -> int:
    """Return how many values the engine holds at once for one image in a step."""
    window = 1
    if isinstance(step.operation, Convolution):
        source = steps.steps[step.inputs[0]]
        window = prod(step.operation.weight.values.shape[2:]) * source.shape[0]
    return max(prod(step.shape), window * prod(step.shape[1:]))


class _NoFloats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that reads, makes or is given a float."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        floats = [t for t in tensors_in((args, kwargs, output)) if _inexact(t)]
        if floats or any(isinstance(value, float) for value in args):
            raise QuantizationError(
                f"{func} computes with floats: the network is not integer only"
            )
        return output


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
