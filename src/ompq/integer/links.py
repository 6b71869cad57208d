"""Links: quantizers that must share one grid, and integer maps between them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ompq.integer.lowering import code_grid
from ompq.integer.operators import layer_weight
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.quantization.activation_sites import Link
from ompq.quantization.moments import like_channels

_WHOLE_FLOATS = 1 << 24  # float32 holds every integer up to this one


class IntegerMap:
    """Computes a layer bit-exactly as 8-bit kernels do, with integers held in floats.

    The sum of products is exact. It is scaled as in ONNX Runtime: by one product in
    float32, rounded to a code of the output's grid (``target``; None for logits).

    The quantized weight is cached until a tensor it depends on changes. torch's version
    counters tell; they miss writes through ``.data``.
    """

    def __init__(
        self, source: ActivationQuantizer, target: ActivationQuantizer | None
    ) -> None:
        self.source, self.target = source, target
        self._key: tuple[Any, ...] = ()
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, layer: QuantizedLayer, x: Tensor) -> Tensor:
        """Return the layer's output for x (N, C, ...) on the input's grid."""
        weight, bias, ratio = self._weight(layer)
        # In place where possible: these tensors are large, and there are no gradients.
        levels = (x / self.source.scale).round_().to(weight.dtype)
        sums = linear_map(layer, levels, weight, None)
        # Fast convolution algorithms may not give exact integers.
        sums = sums.round_().add_(like_channels(bias, layer, sums)).float()
        scaled = sums.mul_(like_channels(ratio, layer, sums))
        if self.target is None:
            return scaled.to(x.dtype)
        return scaled.round_().to(x.dtype).mul_(self.target.scale)

    def _weight(self, layer: QuantizedLayer) -> tuple[Tensor, Tensor, Tensor]:
        """Return integral weight (O, ...) and bias (O,), and the float ratio (O,)."""
        target = self.target
        read = [layer.weight, layer.weight_scale, layer.weight_zero_point, layer.bias]
        read += [self.source.scale, self.source.zero_point]
        read += [] if target is None else [target.scale]
        key = tuple(
            (t.data_ptr(), t._version, t.dtype, t.device) for t in read if t is not None
        )
        if self._prepared is None or key != self._key:
            grid = code_grid(self.source)
            weight = layer_weight(layer, grid)
            exact = int(weight.largest_sum(grid).max()) < _WHOLE_FLOATS
            dtype = torch.float32 if exact else torch.float64
            ratio = self.source.scale.detach().float() * weight.scale.float()
            if target is not None:
                ratio = ratio / target.scale.detach().float()
            self._prepared = weight.values.to(dtype), weight.bias.to(dtype), ratio
            self._key = key
        return self._prepared


def link_layers(model: nn.Module, links: Iterable[Link]) -> None:
    """Make linked layers compute with integers, and all others with floats."""
    layers, quantizers = quantized_layers(model), activation_quantizers(model)
    for layer in layers.values():
        layer.integers = None
    for link in links:
        layers[link.layer].integers = IntegerMap(
            quantizers[link.source], quantizers[link.target] if link.target else None
        )
