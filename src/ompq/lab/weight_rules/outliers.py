"""The largest weights and activations keep 16 bits (RVQuant)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ompq.grids import Grid, half_through, straight_through
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    StoredValues,
    quantized_layers,
)
from ompq.network.folding import channel_axis
from ompq.training.rounding_rules import ActivationRanges, WeightRule
from ompq.weight_ranges import subsample

_SMALLEST = 1e-8  # smallest range of a channel
# Margin of a grid in units of the last place: a quotient that was rounded up must not
# put the largest weight outside its grid, where it has no gradient.
_MARGIN = 4
_SUBSAMPLE = 1 << 16  # values of a tensor from which the threshold of outliers is found
_OUTLIER_BYTES = 4  # 16 bits for the value, 16 for the distance to the previous outlier


def with_outliers(rows: Tensor, bits: int, fraction: float) -> Tensor:
    """Return rounded weights (C, n), with the largest fraction of the layer in 16 bits.

    The other weights of each channel are rounded to a symmetric grid that ends at the
    largest of them. Gradients are straight-through.
    """
    magnitude = rows.detach().abs()
    count = _outlier_count(rows.numel(), fraction)
    threshold = magnitude.flatten().sort().values[-count - 1]
    large = magnitude > threshold
    levels = (1 << (bits - 1)) - 1
    # The grid covers all other weights, so none of them loses its gradient.
    ends = magnitude.masked_fill(large, 0.0).amax(1, keepdim=True).clamp(min=_SMALLEST)
    scale = ends / levels * (1 + _MARGIN * torch.finfo(rows.dtype).eps)
    grid = Grid(scale, torch.full_like(scale, levels + 1.0), bits)
    return torch.where(large, half_through(rows), straight_through(rows, grid))


def _outlier_count(count: int, fraction: float) -> int:
    return min(round(count * fraction), count - 1)


class OutlierRule(WeightRule):
    """Rounds weights and activations as RVQuant does.

    It is published that the largest 1 to 3 % of values keep 16 bits. The rest is our
    choice: the threshold is that of the layer, the grid of a channel is symmetric and
    ends at its largest other weight, and an outlier takes another 16 bits for its
    position. So are the rate and the epochs of the recipe. The ranges of activations
    follow a running average without their largest values, which are not clipped.
    """

    keeps_plan = False

    def __init__(self, model: nn.Module, fraction: float, momentum: float) -> None:
        self.layers = list(quantized_layers(model).values())
        self.fraction = fraction
        for layer in self.layers:
            layer.rounding = self.round
        self.ranges = ActivationRanges(model, momentum, self.ends_of)
        for quantizer in self.ranges.quantizers:
            quantizer.rounding = WIDE_VALUES

    def round(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, folded with its norm's factor (C,)."""
        weight = layer.folded_weight(factor)
        moved = weight.movedim(channel_axis(layer), 0)
        rounded = with_outliers(moved.flatten(1), layer.bits, self.fraction)
        return rounded.reshape(moved.shape).movedim(0, channel_axis(layer))

    def ends_of(self, x: Tensor) -> Tensor:
        """Return the largest magnitude without outliers, for both ends, (2,)."""
        magnitudes = subsample(x.flatten()[None].abs(), _SUBSAMPLE)[0].sort().values
        return magnitudes[int((1 - self.fraction) * (len(magnitudes) - 1))].expand(2)

    def detach(self) -> None:
        """Stop following the activations; their ranges stay."""
        self.ranges.detach()

    def finalize(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Mark the weight as rounded, with its size, outliers included."""
        count = layer.weight.numel()
        outliers = _OUTLIER_BYTES * _outlier_count(count, self.fraction)
        channels = 4 * len(layer.weight_scale) * (1 + (layer.bias is not None))
        size = -(-count * layer.bits // 8) + outliers + channels
        layer.rounding = StoredValues("RVQuant", size)


@dataclass(frozen=True)
class WideValues:
    """Rounds activations to their grid, and those beyond it to 16-bit floats."""

    def __call__(self, quantizer: ActivationQuantizer, x: Tensor) -> Tensor:
        """Return the rounded values, shaped as ``x``."""
        zero_point, qmax = quantizer.zero_point, (1 << quantizer.bits) - 1
        low, high = -zero_point - 0.5, qmax - zero_point + 0.5
        beyond = (x < low * quantizer.scale) | (x > high * quantizer.scale)
        return torch.where(beyond, half_through(x), quantizer.on_grid(x))


WIDE_VALUES = WideValues()


@dataclass(frozen=True)
class Outliers:
    """Makes the rule for a network: ``TrainConfig(weights=Outliers(0.03))``.

    Attributes:
        fraction: Fraction of weights and activations that are outliers.
        momentum: Momentum of the running ranges of activations.
    """

    fraction: float = 0.01
    momentum: float = 0.99

    keeps_plan: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("fraction", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                value = getattr(self, name)
                raise ValueError(f"{name}={value!r} must be from 0 to below 1")

    def __call__(self, model: nn.Module) -> OutlierRule:
        """Install the rule on a network."""
        return OutlierRule(model, self.fraction, self.momentum)


OUTLIERS = Outliers()
