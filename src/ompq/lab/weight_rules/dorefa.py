"""Weights rounded by tanh (DoReFa-Net), as PACT rounds them in training."""

import torch
from torch import Tensor, nn

from ompq.bit_widths import LARGEST_HALF_BITS
from ompq.grids import round_through
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.network.folding import scaled_channels
from ompq.training.rounding_rules import WeightRule

SMALLEST_SCALE = 1e-12  # keeps scales above zero; far below any that occurs


def dorefa_levels(bits: Tensor) -> Tensor:
    """Return the number of steps from -1 to 1.

    From 7 bits on it is one less than published, so that 0 is a code: the half steps
    of other grids would not fit the signed bytes of integer arithmetic.
    """
    return 2.0**bits - 1 - (bits > LARGEST_HALF_BITS).to(bits)


def dorefa(weight: Tensor, levels: Tensor) -> Tensor:
    """Return 2 · round(n · (tanh w / (2 max |tanh w|) + 1/2)) / n - 1 for n levels.

    The maximum is taken over the whole layer. Gradients are straight-through.
    """
    squashed = torch.tanh(weight)
    unit = squashed / (2 * squashed.abs().max()) + 0.5
    return 2 * round_through(unit * levels) / levels - 1


class DoReFaWeights(WeightRule):
    """Rounds weights as DoReFa-Net does.

    The published values lie in [-1, 1], so that a batch norm must rescale the output.
    Here each layer's values are multiplied by a constant, fitted to its initial weights
    by least squares. So training starts near the given network, and layers without a
    norm work, too.

    PACT adds activations with a learned clipping value. Where it starts depends on the
    network; here it is the end of the calibrated range, and it does not decay.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        with torch.no_grad():
            for layer in self.layers:
                levels = layer_levels(layer)
                values = dorefa(layer.weight, levels)
                size = (values * layer.weight).sum() / values.square().sum()
                layer.weight_scale.copy_(2 * size / levels)
                layer.weight_zero_point.copy_(levels / 2)
        for layer in self.layers:
            layer.rounding = self.round

    def round(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, its channels times a factor (C,)."""
        values, size = dorefa(layer.weight, layer_levels(layer)), layer_size(layer)
        return scaled_channels(values, size if factor is None else size * factor, layer)

    @torch.no_grad()
    def finalize(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Go back to rounding to the layer's grid, which contains these values."""
        if factor is not None:
            layer.weight_scale.mul_(factor.abs()).clamp_(min=SMALLEST_SCALE)
        layer.rounding = None


def layer_levels(layer: QuantizedLayer) -> Tensor:
    """Return the number of DoReFa steps at a layer's width."""
    # Filled on the device: a recorded CUDA graph cannot copy from the host.
    return dorefa_levels(layer.weight_scale.new_full((), layer.bits))


def layer_size(layer: QuantizedLayer) -> Tensor:
    """Return the constants that multiply the values in [-1, 1], (C,)."""
    return layer.weight_scale.detach() * layer_levels(layer) / 2
