"""settle(): a simulated network that computes what integers compute, to the last bit.

Two forms of a network that differ in the seventh digit round one value in a million to
another code, and depth multiplies such differences: a deep network in float32 does not
even agree with itself at another batch size. A settled network has nothing left to
disagree about:

- its layers add up whole numbers, which floats do exactly, and apply the scale as
  8-bit kernels do: one product in float32, rounded once;
- its biases are whole steps of that sum;
- where values meet (sums, averages) scales are moved by less than one percent, so that
  no result lies so near the middle between two codes that the order of arithmetic
  would decide.
"""

import copy
from collections import Counter
from math import prod

import torch
from torch import Tensor, nn

from ompq.integer.layer_numbers import IntegerMap, code_grid
from ompq.integer.lowering import lower
from ompq.integer.steps import Average, CodeGrid, Requantize, Step, Steps, Sum
from ompq.quantization.layers import activation_quantizers, quantized_layers
from ompq.samples import Samples

# How far from the middle between two codes every result shall be, in steps: about what
# float32 arithmetic errs near code 255.
_MARGIN = 4e-5
_NUDGE = 2.0**-16
_NUDGES = 512
_AT_ONCE = 1 << 22
# Averages with more possible results than this cannot all be kept off the middle.
_MOST_RESULTS = 1 << 18


def settle(quantized: nn.Module, samples: Samples) -> nn.Module:
    """Return a copy that computes exactly what its integer and ONNX forms compute.

    It trains and reconstructs as before: only passes without gradients are exact. It
    stays settled when weights and scales change, but for the margins of sums.

    Args:
        quantized: From :func:`ompq.quantize`, perhaps reconstructed or trained.
        samples: Inputs; one or two are run.

    Raises:
        QuantizationError: An operation has no integer form; it is named.
    """
    result = copy.deepcopy(quantized)
    quantizers = activation_quantizers(result)
    steps = lower(result, samples)
    for step in steps.steps:
        if isinstance(step.operation, Sum | Average | Requantize) and step.grid:
            grids = [
                code_grid(quantizers[steps.steps[source].quantizer])
                for source in step.inputs
            ]
            target = quantizers[step.quantizer]
            scale = clear_scale(step, grids, code_grid(target))
            with torch.no_grad():
                target.scale.fill_(scale)
    _link(result, steps)
    return result


def _link(model: nn.Module, steps: Steps) -> None:
    """Tell each layer the quantizers of its input and output."""
    quantizers = activation_quantizers(model)
    layers = quantized_layers(model)
    found = [step for step in steps.steps if step.module in layers]
    times = Counter(step.module for step in found)
    for step in found:
        # A layer that serves two grids would have to round to both.
        if times[step.module] == 1:
            source = steps.steps[step.inputs[0]].quantizer
            layers[step.module].integers = IntegerMap(
                quantizers[source], quantizers.get(step.quantizer)
            )


def clear_scale(step: Step, grids: list[CodeGrid], target: CodeGrid) -> float:
    """Return a scale near the target's that keeps results off the middle of codes.

    Args:
        step: A sum, an average or a change of grid.
        grids: Grids of what it reads.
        target: Grid of what it gives.
    """
    values = _results(step, grids)
    if values.numel() > _MOST_RESULTS:
        return target.scale
    best, widest = target.scale, -1.0
    count = max(1, _AT_ONCE // values.numel())
    for start in range(0, _NUDGES, count):
        nudges = torch.arange(start, min(start + count, _NUDGES)) * _NUDGE
        # As float32, which is what the network will hold.
        scales = (target.scale * (1 + nudges.double())).float().double()
        margins = _margins(values, scales, target)
        clear = (margins >= _MARGIN).nonzero()
        at = int(clear[0]) if len(clear) else int(margins.argmax())
        if float(margins[at]) > widest:
            best, widest = float(scales[at]), float(margins[at])
        if widest >= _MARGIN:
            break
    return best


def _results(step: Step, grids: list[CodeGrid]) -> Tensor:
    """Return every value that a step can have before it is rounded, float64."""
    levels = [
        grid.scale * torch.arange(-grid.zero, grid.top + 1 - grid.zero).double()
        for grid in grids
    ]
    if isinstance(step.operation, Sum):
        return (levels[0][:, None] + levels[1]).flatten()
    (grid,) = grids
    if isinstance(step.operation, Average):
        size = prod(step.operation.window)
        sums = torch.arange(-grid.zero * size, (grid.top - grid.zero) * size + 1)
        return grid.scale * sums.double() / size
    return levels[0]


def _margins(values: Tensor, scales: Tensor, target: CodeGrid) -> Tensor:
    """Return the least distance of a result from the middle of two codes, (S,)."""
    codes = values / scales[:, None] + target.zero  # (S, results)
    inside = (codes > -1) & (codes < target.top + 1)
    distance = (codes - codes.floor() - 0.5).abs()
    return distance.masked_fill(~inside, 0.5).amin(1)
