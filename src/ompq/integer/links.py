"""Links: layers that compute with integers, from one quantizer's grid to another's."""

from collections import Counter
from collections.abc import Iterable, Sequence
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ompq.integer.lowering import code_grid
from ompq.integer.operators import layer_weight
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    Size,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.network.folding import channel_axis
from ompq.quantization.activation_sites import Link
from ompq.quantization.moments import like_channels

_WHOLE_FLOATS = 1 << 24  # float32 holds every integer up to this one


# The quantizers of a layer's input and output; None for logits.
Grids: TypeAlias = tuple[ActivationQuantizer, ActivationQuantizer | None]


class IntegerMap:
    """Computes a layer bit-exactly as 8-bit kernels do, with integers held in floats.

    The sum of products is exact. It is scaled as in ONNX Runtime: by one product in
    float32, rounded to a code of the output's grid (``target``; None for logits).

    The quantized weight is cached until a tensor it depends on changes. torch's version
    counters tell; they miss writes through ``.data``.
    """

    def __init__(self, grids: Sequence[Grids]) -> None:
        """Prepare a layer; if its calls differ in their grids, ``grids`` has each."""
        self.grids = grids
        self.calls: Counter[int] = Counter()  # by thread, in the current forward pass
        self._prepared: dict[Grids, tuple[Any, tuple[Tensor, Tensor, Tensor]]] = {}

    def __call__(
        self, layer: QuantizedLayer, x: Tensor, output_size: Size = None
    ) -> Tensor:
        """Return the layer's output for x (N, C, ...) on the input's grid."""
        source, target = self.grids[self.calls[get_ident()] % len(self.grids)]
        self.calls[get_ident()] += len(self.grids) > 1
        weight, bias, ratio = self._weight(layer, source, target)
        # In place where possible: these tensors are large, and there are no gradients.
        levels = (x / source.scale).round_().to(weight.dtype)
        sums = linear_map(layer, levels, weight, None, output_size)
        # Fast convolution algorithms may not give exact integers.
        sums = sums.round_().add_(like_channels(bias, layer, sums)).float()
        scaled = sums.mul_(like_channels(ratio, layer, sums))
        if target is None:
            return scaled.to(x.dtype)
        return scaled.round_().to(x.dtype).mul_(target.scale)

    def _weight(
        self,
        layer: QuantizedLayer,
        source: ActivationQuantizer,
        target: ActivationQuantizer | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the integral weight and bias (O,), and the float ratio (O,)."""
        read = [layer.weight, layer.weight_scale, layer.weight_zero_point, layer.bias]
        read += [source.scale, source.zero_point]
        read += [] if target is None else [target.scale]
        key = tuple(
            (t.data_ptr(), t._version, t.dtype, t.device) for t in read if t is not None
        )
        known, prepared = self._prepared.get((source, target), (None, None))
        if prepared is None or key != known:
            grid = code_grid(source)
            weight = layer_weight(layer, grid)
            exact = int(weight.largest_sum(grid).max()) < _WHOLE_FLOATS
            dtype = torch.float32 if exact else torch.float64
            ratio = source.scale.detach().float() * weight.scale.float()
            if target is not None:
                ratio = ratio / target.scale.detach().float()
            values = weight.values.transpose(0, channel_axis(layer)).to(dtype)
            prepared = values, weight.bias.to(dtype), ratio
            self._prepared[source, target] = key, prepared
        return prepared


class _PassStart:
    """Forward pre-hook of a network: calls of its layers are counted from 0 again."""

    def __init__(self, maps: Sequence[IntegerMap]) -> None:
        self.maps = maps

    def __call__(self, _network: nn.Module, _args: Any) -> None:
        """Forget the calls of the last forward pass, which may have failed."""
        for each in self.maps:
            each.calls.pop(get_ident(), None)


def link_layers(model: nn.Module, links: Iterable[Link]) -> None:
    """Make linked layers compute with integers, and all others with floats."""
    layers, quantizers = quantized_layers(model), activation_quantizers(model)
    for layer in layers.values():
        layer.integers = None
    grids: dict[str, list[Grids]] = {}
    for name, source, target in links:
        pair = quantizers[source], quantizers[target] if target else None
        grids.setdefault(name, []).append(pair)
    maps = {name: IntegerMap(pairs) for name, pairs in grids.items()}
    for name, each in maps.items():
        layers[name].integers = each
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _PassStart)]:
        del hooks[key]
    several = [each for each in maps.values() if len(each.grids) > 1]
    if several:
        model.register_forward_pre_hook(_PassStart(several))
