"""The integer engine: a quantized network executed with integers alone."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ompq.errors import QuantizationError
from ompq.integer.lowering import Steps, lower
from ompq.integer.operators import Convolution, Step
from ompq.recording import tensors_in
from ompq.samples import SamplesLike

# Values that the largest layer may hold at once; more images are run in parts.
_ELEMENTS = 1 << 24


class IntegerNetwork(nn.Module):
    """A network that computes with integers, on the CPU; call it like any other."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self._ratios = [
            step.operator.ratio(steps.sources(step) or [step.grid], step.grid)
            for step in steps.steps
        ]

    @classmethod
    def from_quantized(
        cls, quantized: nn.Module, samples: SamplesLike
    ) -> "IntegerNetwork":
        """Return the integer network of a quantized one; two samples are run.

        Raises:
            QuantizationError: An operation has no integer kernel; it is named.
        """
        return cls(lower(quantized, samples))

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the output for images (N, C, H, W) as floats; several by name."""
        outputs = self.run(images)
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))

    def run(self, images: Tensor) -> dict[str, Tensor]:
        """Return every output for images (N, C, H, W) as floats, by name."""
        codes = self.input_codes(images)
        per_image = max(self._elements(step) for step in self.steps.steps)
        parts = torch.split(codes, max(1, _ELEMENTS // per_image))
        found = zip(*(self.integer_outputs(part) for part in parts), strict=True)
        outputs = {}
        for (name, at), held in zip(self.steps.outputs.items(), found, strict=True):
            grid = self.steps.steps[at].grid
            values = (torch.cat(held).double() - grid.zero_point) * grid.scale
            outputs[name] = values.float().to(images.device)
        return outputs

    def input_codes(self, images: Tensor) -> Tensor:
        """Return the codes of images, uint8: the only arithmetic with floats."""
        if tuple(images.shape[1:]) != self.steps.input_shape:
            raise ValueError(
                f"images of shape {tuple(images.shape[1:])} do not fit: the integer "
                f"network was made for {self.steps.input_shape}"
            )
        grid = self.steps.steps[0].grid
        levels = (images.cpu().float() / torch.tensor(grid.scale)).round()
        return (levels + grid.zero_point).clamp(0, grid.qmax).to(torch.uint8)

    def integer_outputs(self, codes: Tensor) -> list[Tensor]:
        """Return the codes of every output: int32, or uint8 where a grid is narrow."""
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
        results = {0: self.input_codes(images)}
        for position in range(1, len(self.steps.steps)):
            results[position] = self._execute(position, results)
        return list(results.values())

    def assert_integer_only(self, images: Tensor) -> None:
        """Run images; a QuantizationError names any float before the outputs."""
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
        return codes.to(torch.int32 if step.grid.wide else torch.uint8)

    def _elements(self, step: Step) -> int:
        """Return how many values a step holds at once for one image."""
        window = 1
        if isinstance(step.operator, Convolution):
            channels = self.steps.steps[step.inputs[0]].shape[0]
            window = prod(step.operator.weight.values.shape[2:]) * channels
        return max(prod(step.shape), window * prod(step.shape[1:]))


class _NoFloats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation that reads, makes or is given a float."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs, output))
        inexact = any(t.is_floating_point() or t.is_complex() for t in tensors)
        if inexact or any(isinstance(value, float) for value in args):
            raise QuantizationError(
                f"{func} computes with floats: the network is not integer only"
            )
        return output
