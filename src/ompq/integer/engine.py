"""The engine: an integer network computed step by step."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ompq.errors import QuantizationError, check_type
from ompq.integer.lowering import Steps, lower
from ompq.integer.operators import Convolution, Step
from ompq.network.observation import tensors_in
from ompq.samples import SamplesLike

_ELEMENTS = 1 << 24  # values a layer may hold at once; larger batches are split


class IntegerNetwork(nn.Module):
    """A network that computes with integers, on the CPU; call it like any module."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        check_type("steps", steps, Steps)
        self.steps = steps
        self._ratios = [
            step.operator.ratio(steps.sources(step) or [step.grid], step.grid)
            for step in steps.steps
        ]

    @classmethod
    def from_quantized(
        cls, quantized: nn.Module, samples: SamplesLike
    ) -> "IntegerNetwork":
        """Convert a quantized network, running two samples.

        Raises:
            QuantizationError: The named operation has no integer kernel.
        """
        return cls(lower(quantized, samples))

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the float output for images (N, C, H, W), or a dict of several."""
        outputs = self.run(images)
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))

    def run(self, images: Tensor) -> dict[str, Tensor]:
        """Return the float outputs for images (N, C, H, W), by name."""
        codes = self.input_codes(images)
        per_image = max(self._elements(step) for step in self.steps.steps)
        parts = torch.split(codes, max(1, _ELEMENTS // per_image))
        results = zip(*(self.integer_outputs(part) for part in parts), strict=True)
        outputs = {}
        names = self.steps.outputs.items()
        for (name, position), result in zip(names, results, strict=True):
            grid = self.steps.steps[position].grid
            values = (torch.cat(result).double() - grid.zero_point) * grid.scale
            outputs[name] = values.float().to(images.device)
        return outputs

    def input_codes(self, images: Tensor) -> Tensor:
        """Quantize images to uint8 codes, with float arithmetic."""
        if tuple(images.shape[1:]) != self.steps.input_shape:
            raise ValueError(
                f"images of shape {tuple(images.shape[1:])} do not fit: the integer "
                f"network was made for {self.steps.input_shape}"
            )
        grid = self.steps.steps[0].grid
        levels = (images.cpu().float() / torch.tensor(grid.scale)).round()
        return (levels + grid.zero_point).clamp(0, grid.qmax).to(torch.uint8)

    def integer_outputs(self, codes: Tensor) -> list[Tensor]:
        """Return the codes of every output, uint8 if they have 8 bits, else int32."""
        outputs = self.steps.outputs.values()
        last_use = {
            source: position
            for position, step in enumerate(self.steps.steps)
            for source in step.inputs
        }
        results = {0: codes}
        for position, step in enumerate(self.steps.steps[1:], 1):
            results[position] = self._execute(position, results)
            for source in {*step.inputs} - {*outputs}:
                if last_use[source] == position:
                    del results[source]
        return [results[position] for position in outputs]

    def codes(self, images: Tensor) -> list[Tensor]:
        """Return the result of every step for images (N, C, H, W)."""
        return self.all_codes(self.input_codes(images))

    def all_codes(self, codes: Tensor) -> list[Tensor]:
        """Return the result of every step for codes of the input."""
        results = {0: codes}
        for position in range(1, len(self.steps.steps)):
            results[position] = self._execute(position, results)
        return list(results.values())

    def assert_integer_only(self, images: Tensor) -> None:
        """Raise a QuantizationError if running images involves any float operation."""
        codes = self.input_codes(images)
        with _NoFloats():  # type: ignore[no-untyped-call]
            self.integer_outputs(codes)

    def _execute(self, position: int, results: dict[int, Tensor]) -> Tensor:
        step = self.steps.steps[position]
        values = [
            results[source].int() - self.steps.steps[source].grid.zero_point
            for source in step.inputs
        ]
        codes = step.operator.compute(values)
        if step.operator.moves:
            codes = codes + step.grid.zero_point
        else:
            codes = step.operator.rescale(codes, self._ratios[position], step.grid)
            codes = codes.clamp(*step.grid.limits(step.low, step.high))
        return codes.to(step.grid.dtype)

    def _elements(self, step: Step) -> int:
        """Return how many values a step holds at once per image."""
        window = 1
        if isinstance(step.operator, Convolution):
            channels = self.steps.steps[step.inputs[0]].shape[0]
            window = prod(step.operator.weight.values.shape[2:]) * channels
        return max(prod(step.shape), window * prod(step.shape[1:]))


class _NoFloats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation with a float among its arguments or results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs, output))
        inexact = any(t.is_floating_point() or t.is_complex() for t in tensors)
        if inexact or any(isinstance(value, float) for value in args):
            raise QuantizationError(
                f"{func} computes with floats, so the network is not integer-only"
            )
        return output
