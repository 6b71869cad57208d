"""Batch norms during training: kept apart, folded when they settle."""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.errors import TrainingError
from ompq.layers import QuantizedLayer, Size, linear_map, quantized_layers
from ompq.network.folding import fold_norm, norm_affine, scaled_channels
from ompq.quantization.equalization import enlarge, equalize_channels
from ompq.quantization.record import quantization_of

# Running standard deviations may change by this factor, far more than training needs.
# Grids with few bits may have no code for 0. Weights that a small norm scales down are
# then rounded up, the measured variance grows, and that scales them down further.
_LARGEST_CHANGE = 16.0


class KeptNorm(nn.Module):
    """Computes a quantized layer together with its batch norm."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(
        self, layer: QuantizedLayer, x: Tensor, output_size: Size = None
    ) -> Tensor:
        """Return the output of the layer and its norm for x (N, C, ...)."""
        factor, shift = norm_affine(self.norm)
        weight = layer.rounded_weight(factor)
        if not self.norm.training:
            return linear_map(layer, x, weight, shift, output_size)
        y = linear_map(layer, x, weight, None, output_size)
        shape = [1] * y.dim()
        shape[1] = -1
        # The divisor needs no gradient: the norm undoes any scaling of a channel.
        divisor = _nonzero(factor.detach()).reshape(shape)
        return cast(Tensor, self.norm(y / divisor))


def norm_factor(layer: QuantizedLayer) -> Tensor | None:
    """Return the factors by which a layer's kept norm scales its channels, (C,)."""
    return norm_affine(layer.norm.norm)[0] if isinstance(layer.norm, KeptNorm) else None


class Variances:
    """Keeps running variances of kept norms in a range around their first values."""

    def __init__(self, quantized: nn.Module) -> None:
        norms = [m.norm for m in quantized.modules() if isinstance(m, KeptNorm)]
        self.values = [cast(Tensor, norm.running_var) for norm in norms]
        first = [cast(Tensor, norm.running_var) + norm.eps for norm in norms]
        self.lowest = [value / _LARGEST_CHANGE**2 for value in first]
        self.highest = [value * _LARGEST_CHANGE**2 for value in first]

    @torch.no_grad()
    def limit(self) -> None:
        """Clamp the variances to their limits."""
        if self.values:
            torch._foreach_maximum_(self.values, self.lowest)
            torch._foreach_minimum_(self.values, self.highest)


def keep_norms(quantized: nn.Module, model: nn.Module) -> None:
    """Restore the float network's norms in a quantized network, in place.

    Weights are divided by the factors of their norms, so that the network computes the
    same as before.
    """
    layers, record = quantized_layers(quantized), quantization_of(quantized)
    sizes = {one.producer: one.exponents for one in record.equalized}
    for unit in record.graph.units:
        if not unit.norm or unit.name not in layers:
            continue
        layer = layers[unit.name]
        norm = dict(model.named_modules()).get(unit.norm)
        count = len(layer.weight_scale)
        if not isinstance(norm, _BatchNorm) or norm.num_features != count:
            raise TrainingError(
                f"{unit.norm} is not a batch norm of {count} channels in the float "
                "network; give the network that was quantized"
            )
        norm = copy.deepcopy(norm).to(layer.weight)
        if unit.norm in sizes:
            enlarge(norm, sizes[unit.norm])
        layer.norm = _unfold(layer, norm)


@torch.no_grad()
def restore_float_weights(quantized: nn.Module, model: nn.Module) -> None:
    """Copy the folded weights and biases of the float network to quantized layers."""
    layers, record = quantized_layers(quantized), quantization_of(quantized)
    sources = dict(equalize_channels(model, record.equalized).named_modules())
    for unit in record.graph.units:
        if unit.name not in layers:
            continue
        layer, source = layers[unit.name], sources.get(unit.name)
        weight, bias = getattr(source, "weight", None), getattr(source, "bias", None)
        if weight is None or weight.shape != layer.weight.shape:
            raise TrainingError(
                f"{unit.name} has no weight of shape {tuple(layer.weight.shape)} in "
                "the float network; give the network that was quantized"
            )
        norm = sources.get(unit.norm) if unit.norm else None
        if source is not None and isinstance(norm, _BatchNorm):
            weight, bias = fold_norm(source, norm)
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(torch.zeros_like(layer.bias) if bias is None else bias)


@torch.no_grad()
def fold_norms(quantized: nn.Module) -> None:
    """Fold the norms that :func:`keep_norms` restored into their layers again."""
    for layer in quantized_layers(quantized).values():
        if layer.norm is None:
            continue
        assert isinstance(layer.norm, KeptNorm)  # nothing else is ever put there
        factor, shift = norm_affine(layer.norm.norm)
        layer.weight.copy_(scaled_channels(layer.weight, factor, layer))
        assert layer.bias is not None  # folding gave it one
        layer.bias.copy_(shift)
        layer.norm = None


@torch.no_grad()
def _unfold(layer: QuantizedLayer, kept: _BatchNorm) -> KeptNorm:
    if not kept.affine:
        kept.affine = True
        kept.weight = nn.Parameter(layer.weight.new_ones(kept.num_features))
        kept.bias = nn.Parameter(layer.weight.new_zeros(kept.num_features))
    factor, _ = norm_affine(kept)
    layer.weight.copy_(scaled_channels(layer.weight, 1 / _nonzero(factor), layer))
    assert layer.bias is not None and kept.running_mean is not None
    kept.bias.copy_(layer.bias + kept.running_mean * factor)
    return KeptNorm(kept)


def _nonzero(factor: Tensor) -> Tensor:
    """Replace factors (C,) by 1 if squares of quotients by them would overflow."""
    smallest = torch.finfo(factor.dtype).tiny ** 0.25
    return torch.where(factor.abs() < smallest, torch.ones_like(factor), factor)
