"""Widths that are learned with the weights, as FracBits does."""

import torch
from torch import Tensor, nn

from ompq.graph import scaled_channels
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.quantization import quantization_of
from ompq.quantizers import LARGEST_BITS, SMALLEST_BITS
from ompq.training.dorefa import (
    SMALLEST_SCALE,
    DoReFaWeights,
    dorefa,
    dorefa_levels,
    layer_levels,
)

_BISECTIONS = 40


def mixed(weight: Tensor, width: Tensor) -> Tensor:
    """Return a weight at a real width: its two neighbouring widths, mixed.

    At 3.2 bits it is 0.8 times the weight of 3 bits and 0.2 times that of 4 bits, each
    as :func:`dorefa` rounds it. So the width has a gradient.
    """
    low = width.detach().floor()
    share = width - low
    few, more = (dorefa(weight, dorefa_levels(bits)) for bits in (low, low + 1))
    return (1 - share) * few + share * more


def rounded_widths(widths: Tensor, counts: Tensor, most: float) -> Tensor:
    """Return whole widths (U,) whose weights take at most so many bits.

    All widths less one number are rounded; the number is found by bisection.
    """

    def shifted(shift: float) -> Tensor:
        return (widths - shift).round().clamp(SMALLEST_BITS, LARGEST_BITS)

    low, high = -float(LARGEST_BITS), float(LARGEST_BITS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        fits = float((shifted(middle) * counts).sum()) <= most
        low, high = (low, middle) if fits else (middle, high)
    return shifted(high)


class FractionalWidths:
    """Learns the widths of a network, which is changed, and rounds its weights.

    The widths start as planned, and all weights together shall take what they took
    then: the loss grows by ``penalty`` times the bits a weight beyond or below that.
    Layers of 8 bits, the first and the last as a rule, keep them; so do activations,
    whose widths FracBits learns as well. Layers that share their bits share a width.
    FracBits' own weight of the penalty is for sizes in other units.
    """

    def __init__(self, model: nn.Module, penalty: float) -> None:
        DoReFaWeights(model)  # fits the size of each layer's values
        layers = quantized_layers(model)
        self.layers, self.kappa = list(layers.values()), penalty
        groups: dict[str, list[QuantizedLayer]] = {}
        for unit in quantization_of(model).graph.units:
            layer = layers.get(unit.name)
            if layer is not None and layer.bits < LARGEST_BITS:
                groups.setdefault(unit.group, []).append(layer)
        self.widths: list[nn.Parameter] = []
        for members in groups.values():
            bits = max(layer.bits for layer in members)
            width = nn.Parameter(members[0].weight_scale.new_tensor(float(bits)))
            self.widths.append(width)
            for layer in members:
                layer.weight_width = width
                layer.rounding = self.rounded
        self.counts = torch.tensor(
            [sum(x.weight.numel() for x in each) for each in groups.values()]
        ).to(self.widths[0] if self.widths else torch.zeros(()))
        self.most = float((torch.stack([*self.widths]).detach() * self.counts).sum())
        self.settled: Tensor | None = None

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, its channels times a factor (C,)."""
        size = _size(layer)
        values = mixed(layer.weight, layer.get_parameter("weight_width"))
        return scaled_channels(values, size if factor is None else size * factor, layer)

    def penalty(self) -> Tensor:
        """Return what is added to the loss."""
        bits = (torch.stack([*self.widths]) * self.counts).sum() - self.most
        return self.kappa * bits.abs() / self.counts.sum()

    @torch.no_grad()
    def follow(self) -> None:
        """Keep the widths within what there is, or whole once they are."""
        for at, width in enumerate(self.widths):
            width.clamp_(SMALLEST_BITS, LARGEST_BITS)
            if self.settled is not None:
                width.copy_(self.settled[at])

    @torch.no_grad()
    def make_whole(self) -> None:
        """Round the widths, within the bits there were; they stay so from now on."""
        widths = torch.stack([*self.widths])
        self.settled = rounded_widths(widths, self.counts, self.most)
        self.follow()

    @torch.no_grad()
    def settle(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Let the layer round to its grid again, at its new width."""
        size = _size(layer)
        if "weight_width" in layer._parameters:
            layer.bits = int(layer.get_parameter("weight_width"))
            del layer.weight_width
        levels = layer_levels(layer)
        scale = (
            2 * size / levels if factor is None else 2 * size * factor.abs() / levels
        )
        layer.weight_scale.copy_(scale.clamp(min=SMALLEST_SCALE))
        layer.weight_zero_point.copy_(levels / 2)
        layer.rounding = None


def _size(layer: QuantizedLayer) -> Tensor:
    """Return what the values of each channel, -1 to 1, are multiplied by, (C,)."""
    return layer.weight_scale.detach() * layer_levels(layer) / 2
