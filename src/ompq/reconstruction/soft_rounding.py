"""SoftRounding: a weight on its way to one of its two neighbours (AdaRound)."""

import torch
from torch import Tensor, nn

from ompq.quantization.layers import QuantizedLayer
from ompq.quantizers.grids import rectified_sigmoid, soft_start


class SoftRounding(nn.Module):
    """A weight between two neighbours on its grid, on the way to one of them.

    Attributes:
        base: The lower neighbour's code, shaped as the weight.
        up: How far up, before the rectified sigmoid; learned.
        stretch: Logarithm of what the scale is multiplied by, (C, 1, ...); learned if
            the configuration says so.
    """

    base: Tensor
    scale: Tensor
    zero: Tensor
    share: Tensor | None = None

    def __init__(self, layer: QuantizedLayer) -> None:
        super().__init__()
        grid = layer.grid_like_weight()
        weight = layer.weight.detach()
        self.top = grid.top
        self.register_buffer("base", (weight / grid.scale + grid.zero).detach().floor())
        self.register_buffer("scale", grid.scale.detach().clone())
        self.register_buffer("zero", grid.zero.clone())
        self.up = nn.Parameter(soft_start(weight, grid).detach())
        self.stretch = nn.Parameter(torch.zeros_like(self.scale), requires_grad=False)

    def forward(self) -> Tensor:
        """Return the soft weight, shaped as the layer's weight."""
        self.share = share = rectified_sigmoid(self.up)  # the penalty reads it too
        return self._value(share)

    def indecision(self, beta: Tensor) -> Tensor:
        """Return the sum of 1 − |2h − 1|^beta: 0 once every weight has decided."""
        assert self.share is not None  # the block has just been called
        return (1 - (2 * self.share - 1).abs().pow(beta)).sum()

    def hardened(self) -> Tensor:
        """Return the weight with each value at the nearer neighbour."""
        return self._value((rectified_sigmoid(self.up) >= 0.5).to(self.up.dtype))

    def learned_scale(self) -> Tensor:
        """Return the scale, stretched as learned."""
        return self.scale * self.stretch.exp()

    def _value(self, share: Tensor) -> Tensor:
        codes = (self.base + share).clamp(0, self.top)
        return self.learned_scale() * (codes - self.zero)
