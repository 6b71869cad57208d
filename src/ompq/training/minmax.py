"""Ranges that follow the smallest and largest value while a network is trained.

HAWQ-V3 has them: symmetric grids for weights, whose ends are the largest weight of each
channel at every step; and for activations a running minimum and maximum.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from ompq.graph import channel_axis, scaled_channels
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.ranges import thinned
from ompq.training.norms import norm_factor

_SMALLEST = 1e-8  # of a range, as in HAWQ-V3's released code
# In units of the last place: the largest weight should not fall off its grid, and lose
# its gradient, because a quotient was rounded up.
_MARGIN = 4
_COUNTED = 1 << 16  # values of a tensor that tell which of them are outliers


class WeightRanges:
    """Symmetric grids for the weights of a network, which is changed."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        for layer in self.layers:
            layer.weight_zero_point.fill_(_middle(layer))
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Set the scales by the weights, folded with their norms, as they are now."""
        for layer in self.layers:
            weight: Tensor = layer.weight
            factor = norm_factor(layer)
            if factor is not None:
                weight = scaled_channels(weight, factor, layer)
            rows = weight.movedim(channel_axis(layer), 0).flatten(1)
            largest = rows.abs().amax(1).clamp(min=_SMALLEST)
            levels = layer.grid_like_weight().qmax - _middle(layer)
            margin = 1 + _MARGIN * torch.finfo(weight.dtype).eps
            layer.weight_scale.copy_(largest / levels * margin)


def _middle(layer: QuantizedLayer) -> int:
    """Return the code of 0 that leaves as many levels above it as can be below."""
    return (layer.grid_like_weight().qmax + 1) // 2


class ActivationRanges:
    """Running ranges of the activations of a network, which is changed.

    Tensors that were never negative when the network was calibrated get codes from 0;
    others get as many levels below 0 as above. With ``outliers`` (RVQuant) the ranges
    leave out that fraction of the values, the largest, which are not clipped then.
    """

    def __init__(
        self, model: nn.Module, momentum: float, outliers: float = 0.0
    ) -> None:
        self.momentum, self.outliers = momentum, outliers
        self.quantizers = list(activation_quantizers(model).values())
        self.hooks = []
        for quantizer in self.quantizers:
            _make_symmetric(quantizer)
            quantizer.outliers = outliers > 0
            # The negative minimum, and the maximum; zeros before the first pass.
            quantizer.register_buffer("ends", quantizer.scale.new_zeros(2))
            self.hooks.append(quantizer.register_forward_pre_hook(self._follow))

    @torch.no_grad()
    def _follow(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        if not quantizer.training:
            return
        assert isinstance(quantizer, ActivationQuantizer)
        seen = self._ends(args[0]).to(quantizer.scale)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(seen, distributed.ReduceOp.MAX)
        ends = quantizer.get_buffer("ends")
        mixed = self.momentum * ends + (1 - self.momentum) * seen
        ends.copy_(torch.where(ends.any(), mixed, seen))
        largest = torch.where(quantizer.zero_point != 0, ends.abs().amax(), ends[1])
        levels = (1 << quantizer.bits) - 1 - quantizer.zero_point
        quantizer.scale.copy_(largest.clamp(min=_SMALLEST) / levels)

    def _ends(self, x: Tensor) -> Tensor:
        """Return the negative minimum and the maximum, outliers left out."""
        if not self.outliers:
            return torch.stack([-x.amin(), x.amax()])
        sizes = thinned(x.flatten()[None].abs(), _COUNTED)[0].sort().values
        return sizes[int((1 - self.outliers) * (len(sizes) - 1))].expand(2)

    def detach(self) -> None:
        """Leave the ranges as they are, and the network as it was otherwise."""
        for hook in self.hooks:
            hook.remove()
        for quantizer in self.quantizers:
            del quantizer.ends


@torch.no_grad()
def _make_symmetric(quantizer: ActivationQuantizer) -> None:
    """Give a grid with negative values as many levels below 0 as above, at its ends."""
    if quantizer.zero_point == 0:
        return
    levels, middle = (1 << quantizer.bits) - 1, 1 << (quantizer.bits - 1)
    farthest = torch.maximum(quantizer.zero_point, levels - quantizer.zero_point)
    quantizer.scale.mul_(farthest / (levels - middle))
    quantizer.zero_point.fill_(middle)
