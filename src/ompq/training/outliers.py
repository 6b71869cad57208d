"""Weights as RVQuant rounds them: the largest few keep 16 bits.

Those of activations are found in ``minmax.py``, with the other running ranges.
"""

import torch
from torch import Tensor, nn

from ompq.graph import channel_axis, scaled_channels
from ompq.layers import QuantizedLayer, StoredValues, quantized_layers
from ompq.quantizers import Grid, half_through, straight_through

_SMALLEST = 1e-8  # of a range
_BYTES = 4  # of an outlier: 16 bits of value, 16 of its distance from the one before


def with_outliers(rows: Tensor, bits: int, fraction: float) -> Tensor:
    """Return weights (C, n), the largest fraction in 16 bits, the rest rounded.

    Outliers are the largest of the layer; the others of each channel are rounded to a
    symmetric grid that ends at their largest. Gradients pass straight through.
    """
    size = rows.detach().abs()
    count = _outliers(rows.numel(), fraction)
    threshold = size.flatten().sort().values[-count - 1]
    large = size > threshold
    levels = (1 << (bits - 1)) - 1
    # No weight of the rest lies beyond the grid, so no gradient is lost there.
    ends = size.masked_fill(large, 0.0).amax(1, keepdim=True).clamp(min=_SMALLEST)
    scale = ends / levels * (1 + 4 * torch.finfo(rows.dtype).eps)
    grid = Grid(scale, torch.full_like(scale, levels + 1.0), bits)
    return torch.where(large, half_through(rows), straight_through(rows, grid))


def _outliers(count: int, fraction: float) -> int:
    return min(round(count * fraction), count - 1)


class OutlierWeights:
    """Rounds the weights of a network, which is changed, as RVQuant does.

    How RVQuant fine-tunes is not published in full.
    """

    def __init__(self, model: nn.Module, fraction: float) -> None:
        self.layers = list(quantized_layers(model).values())
        self.fraction = fraction
        for layer in self.layers:
            layer.rounding = self.rounded

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, folded with its norm's factor (C,)."""
        weight: Tensor = layer.weight
        if factor is not None:
            weight = scaled_channels(weight, factor, layer)
        moved = weight.movedim(channel_axis(layer), 0)
        rounded = with_outliers(moved.flatten(1), layer.bits, self.fraction)
        return rounded.reshape(moved.shape).movedim(0, channel_axis(layer))

    def follow(self) -> None:
        """Nothing is kept from step to step."""

    def settle(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Leave the layer with its values; the outliers count in its size."""
        count = layer.weight.numel()
        few = _outliers(count, self.fraction)
        channels = 4 * len(layer.weight_scale) * (1 + (layer.bias is not None))
        size = -(-count * layer.bits // 8) + _BYTES * few + channels
        layer.rounding = StoredValues("RVQuant", size)
