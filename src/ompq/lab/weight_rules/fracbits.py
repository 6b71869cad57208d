"""Bit widths that are learned with the weights (FracBits)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ompq.bit_widths import LARGEST_BITS, SMALLEST_BITS
from ompq.errors import TrainingError
from ompq.lab.weight_rules.dorefa import (
    SMALLEST_SCALE,
    DoReFaWeights,
    dorefa,
    dorefa_levels,
    layer_levels,
    layer_size,
)
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.network.folding import scaled_channels
from ompq.quantization.record import quantization_of
from ompq.training.rounding_rules import WeightRule

_BISECTIONS = 40  # of a shift between -8 and 8: beyond float32 precision
_WHOLE_AFTER = 0.8  # share of the epochs after which widths become whole


def mix_widths(weight: Tensor, width: Tensor) -> Tensor:
    """Return a weight at a fractional width, interpolated between whole widths.

    At 3.2 bits it is 0.8 times the 3-bit weight plus 0.2 times the 4-bit weight, each
    rounded by :func:`dorefa`. This gives the width a gradient.
    """
    low = width.detach().floor()
    share = width - low
    lower, upper = (dorefa(weight, dorefa_levels(bits)) for bits in (low, low + 1))
    return (1 - share) * lower + share * upper


def rounded_widths(widths: Tensor, counts: Tensor, most: float) -> Tensor:
    """Return whole widths (U,) at which all weights take at most ``most`` bits.

    The same shift is subtracted from all widths before rounding. It is the smallest one
    that fits, found by bisection.
    """

    def shifted(shift: float) -> Tensor:
        return (widths - shift).round().clamp(SMALLEST_BITS, LARGEST_BITS)

    low, high = -float(LARGEST_BITS), float(LARGEST_BITS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        fits = float((shifted(middle) * counts).sum()) <= most
        low, high = (low, middle) if fits else (middle, high)
    return shifted(high)


class FractionalWidths(WeightRule):
    """Learns the widths of weights as FracBits does, and rounds the weights.

    Widths start as planned. The loss grows by ``penalty`` for each bit per weight above
    or below the planned average; FracBits' own coefficient is for sizes in other units.
    After 80 % of the epochs they become whole. 8-bit layers, usually the first and the
    last, keep their width. So do activations, whose widths FracBits learns as well.
    Layers that share their bits share a width.
    The learning rate of widths is not published; here it is that of the weights times
    ``TrainConfig.step_rate``, 1 in the recipe.
    """

    keeps_plan = False

    def __init__(self, model: nn.Module, penalty: float) -> None:
        DoReFaWeights(model)  # fits the constant of each layer
        layers = quantized_layers(model)
        self.layers, self.kappa = list(layers.values()), penalty
        groups: dict[str, list[QuantizedLayer]] = {}
        for unit in quantization_of(model).graph.units:
            layer = layers.get(unit.name)
            if layer is not None and layer.bits < LARGEST_BITS:
                groups.setdefault(unit.group, []).append(layer)
        if not groups:
            raise TrainingError(
                f"FracBits has nothing to learn: every layer has {LARGEST_BITS} bits. "
                "Plan fewer bits, or use weights='dorefa'"
            )
        self.widths: list[nn.Parameter] = []
        for members in groups.values():
            bits = max(layer.bits for layer in members)
            width = nn.Parameter(members[0].weight_scale.new_tensor(float(bits)))
            self.widths.append(width)
            for layer in members:
                layer.weight_width = width
                layer.rounding = self.round
        self.counts = torch.tensor(
            [sum(x.weight.numel() for x in each) for each in groups.values()]
        ).to(self.widths[0])
        self.most = float((torch.stack([*self.widths]).detach() * self.counts).sum())
        self.whole: Tensor | None = None

    def round(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, its channels times a factor (C,)."""
        size = layer_size(layer)
        values = mix_widths(layer.weight, layer.get_parameter("weight_width"))
        return scaled_channels(values, size if factor is None else size * factor, layer)

    def learned(self) -> Sequence[tuple[nn.Parameter, float]]:
        """Return the widths; layers of one group share theirs."""
        return [(width, SMALLEST_BITS) for width in self.widths]

    def begin_epoch(self, number: int, epochs: int) -> None:
        """Make the widths whole when their time has come."""
        if number >= int(_WHOLE_AFTER * epochs):
            self.make_whole()

    def penalty(self) -> Tensor:
        """Return the penalty on the average width, a scalar."""
        bits = (torch.stack([*self.widths]) * self.counts).sum() - self.most
        return self.kappa * bits.abs() / self.counts.sum()

    @torch.no_grad()
    def update(self) -> None:
        """Clamp the widths to the supported range; once rounded, they stay whole."""
        for number, width in enumerate(self.widths):
            width.clamp_(SMALLEST_BITS, LARGEST_BITS)
            if self.whole is not None:
                width.copy_(self.whole[number])

    @torch.no_grad()
    def make_whole(self) -> None:
        """Round the widths within the planned bits, and keep them from now on."""
        widths = torch.stack([*self.widths])
        self.whole = rounded_widths(widths, self.counts, self.most)
        self.update()

    @torch.no_grad()
    def finalize(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Go back to rounding to the layer's grid, at its new width."""
        size = layer_size(layer)
        if "weight_width" in layer._parameters:
            layer.bits = int(layer.get_parameter("weight_width"))
            del layer.weight_width
        levels = layer_levels(layer)
        scale = 2 * size * (1 if factor is None else factor.abs()) / levels
        layer.weight_scale.copy_(scale.clamp(min=SMALLEST_SCALE))
        layer.weight_zero_point.copy_(levels / 2)
        layer.rounding = None


@dataclass(frozen=True)
class FracBits:
    """Makes the rule for a network: ``TrainConfig(weights=FracBits(penalty=0.1))``.

    Attributes:
        penalty: Loss for each bit per weight above or below the planned average.
    """

    penalty: float = 1.0

    keeps_plan: ClassVar[bool] = False

    def __call__(self, model: nn.Module) -> FractionalWidths:
        """Install the rule on a network."""
        return FractionalWidths(model, self.penalty)


FRACBITS = FracBits()  # as published
