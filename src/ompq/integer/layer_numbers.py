"""Quantized layers in whole numbers, and layers that compute with them in floats."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ompq.integer.steps import CodeGrid, IntegerWeight
from ompq.integer.weights import largest_sum, whole_numbers
from ompq.quantization.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.quantization.placement import Link

_WHOLE_FLOATS = 1 << 24  # up to here float32 holds every whole number


def code_grid(quantizer: ActivationQuantizer) -> CodeGrid:
    """Return the grid of a quantizer as plain numbers."""
    zero = round(float(quantizer.zero))
    return CodeGrid(float(quantizer.scale), zero, quantizer.bits)


def layer_weight(layer: QuantizedLayer, grid: CodeGrid) -> IntegerWeight:
    """Return a layer's weight and bias in whole numbers.

    Args:
        layer: A convolution or linear layer with weight (O, ...).
        grid: Grid of its input.

    Raises:
        QuantizationError: The sum of products may exceed 32 bits.
    """
    return whole_numbers(
        layer.codes(),
        layer.weight_zero,
        layer.weight_scale.detach(),
        layer.bits,
        None if layer.bias is None else layer.bias.detach(),
        grid,
    )


@dataclass(frozen=True, eq=False)
class IntegerMap:
    """Computes a layer as 8-bit kernels do, to the last bit, with whole floats.

    The sum of products is exact. Its scale is applied as ONNX Runtime does it: one
    product in float32, rounded to a step of the output's grid.

    Attributes:
        source: Quantizer of the layer's input.
        target: Quantizer of its output; None for logits.
    """

    source: ActivationQuantizer
    target: ActivationQuantizer | None

    def __call__(self, layer: QuantizedLayer, x: Tensor) -> Tensor:
        """Return the layer's output for x (N, C, ...), which lies on its grid."""
        grid = code_grid(self.source)
        weight = layer_weight(layer, grid)
        kind = torch.float32
        if int(largest_sum(weight, grid).max()) >= _WHOLE_FLOATS:
            kind = torch.float64
        # In place where it can be: these tensors are large, and no gradient is kept.
        levels = (x / self.source.scale).round_().to(kind)
        sums = linear_map(layer, levels, weight.values.to(kind), None)
        # A fast algorithm of convolution may leave a sum near its whole number.
        sums = sums.round_().add_(_like(layer, weight.bias.to(kind), sums)).float()
        ratio = self.source.scale.float() * weight.scale.float()
        if self.target is None:
            return sums.mul_(_like(layer, ratio, sums)).to(x.dtype)
        ratio = ratio / self.target.scale.float()
        steps = sums.mul_(_like(layer, ratio, sums)).round_()
        return steps.to(x.dtype).mul_(self.target.scale)


def link_layers(model: nn.Module, links: Iterable[Link]) -> None:
    """Let layers compute with whole numbers; the others compute with floats.

    Args:
        model: The quantized network; changed in place.
        links: Layers with the quantizers of their input and output.
    """
    layers, quantizers = quantized_layers(model), activation_quantizers(model)
    for layer in layers.values():
        layer.integers = None
    for link in links:
        layers[link.layer].integers = IntegerMap(
            quantizers[link.source], quantizers[link.target] if link.target else None
        )


def _like(layer: nn.Module, values: Tensor, output: Tensor) -> Tensor:
    """Return values (C,) in a shape that broadcasts with a layer's output."""
    shape = [1] * output.dim()
    shape[output.dim() - 1 if isinstance(layer, nn.Linear) else 1] = -1
    return values.reshape(shape)
