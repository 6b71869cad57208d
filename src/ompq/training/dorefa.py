"""Weights as DoReFa-Net and PACT round them: tanh, normalised, rounded in [0, 1]."""

import torch
from torch import Tensor, nn

from ompq.graph import scaled_channels
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.quantizers import LARGEST_HALF_BITS, round_through

SMALLEST_SCALE = 1e-12


def dorefa_levels(bits: Tensor) -> Tensor:
    """Return how many steps there are from -1 to 1.

    From 7 bits on one less than published, so that 0 is a code: half a step would not
    fit the signed bytes of integer arithmetic.
    """
    return 2.0**bits - 1 - (bits > LARGEST_HALF_BITS).to(bits)


def dorefa(weight: Tensor, levels: Tensor) -> Tensor:
    """Return 2 · round(n · (tanh w / (2 max |tanh w|) + 1/2)) / n - 1 for n levels.

    The largest |tanh w| is that of the whole layer. Gradients pass straight through the
    rounding.
    """
    bent = torch.tanh(weight)
    unit = bent / (2 * bent.abs().max()) + 0.5
    return 2 * round_through(unit * levels) / levels - 1


class DoReFaWeights:
    """Rounds the weights of a network, which is changed, as DoReFa-Net does.

    The published values lie in [-1, 1], and a batch norm must undo that. Here each
    layer's values are multiplied by one number that never changes, the one that suits
    its initial weights best, so that the network starts near to what it was, and layers
    without a norm work too.
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
            layer.rounding = self.rounded

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, its channels times a factor (C,)."""
        levels = layer_levels(layer)
        size = layer.weight_scale * levels / 2
        values = dorefa(layer.weight, levels)
        return scaled_channels(values, size if factor is None else size * factor, layer)

    def follow(self) -> None:
        """Nothing changes with the weights."""

    @torch.no_grad()
    def settle(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Let the layer round to its grid again, which holds these values."""
        if factor is not None:
            layer.weight_scale.mul_(factor.abs()).clamp_(min=SMALLEST_SCALE)
        layer.rounding = None


def layer_levels(layer: QuantizedLayer) -> Tensor:
    """Return how many steps there are at a layer's width."""
    # Filled where it is: a recorded step may copy nothing from the host.
    return dorefa_levels(layer.weight_scale.new_full((), layer.bits))
