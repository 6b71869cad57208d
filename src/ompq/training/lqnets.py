"""Weights as LQ-Nets round them: to levels that are learned by least squares."""

import torch
from torch import Tensor, nn

from ompq.graph import channel_axis, scaled_channels
from ompq.layers import QuantizedLayer, StoredValues, quantized_layers

_MOMENTUM = 0.9  # of the basis, as published
_FIRST_FITS = 10  # before training; how many LQ-Nets takes is not published
# How strongly directions that the codes leave open keep their basis.
_RIDGE = 1e-4


def signs_of(bits: int, like: Tensor) -> Tensor:
    """Return all codes as rows of -1 and 1, (2^bits, bits)."""
    numbers = torch.arange(1 << bits, device=like.device)[:, None]
    places = torch.arange(bits, device=like.device)
    return ((numbers >> places & 1) * 2 - 1).to(like.dtype)


def nearest_codes(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the code of the level nearest to each weight (C, n), for bases (C, K).

    The levels of a channel are the sums of its basis with all signs.
    """
    levels, order = (basis @ signs_of(basis.shape[1], basis).T).sort(1)
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    places = torch.searchsorted(middles.contiguous(), rows.contiguous())
    return order.gather(1, places)


def level_values(codes: Tensor, basis: Tensor) -> Tensor:
    """Return the levels of codes (C, n)."""
    return (basis @ signs_of(basis.shape[1], basis).T).gather(1, codes)


def fitted_basis(rows: Tensor, codes: Tensor, basis: Tensor) -> Tensor:
    """Return the basis (C, K) that suits weights and codes (C, n) best."""
    signs = signs_of(basis.shape[1], basis)[codes]  # (C, n, K)
    ridge = _RIDGE * rows.shape[1]
    gram = signs.mT @ signs + ridge * torch.eye(basis.shape[1]).to(basis)
    products = signs.mT @ rows[..., None] + ridge * basis[..., None]
    # Positive definite; without the check, which would wait for a GPU.
    found: Tensor = torch.linalg.solve_ex(gram, products).result
    return found[..., 0]


class LearnedLevels:
    """Rounds the weights of a network, which is changed, as LQ-Nets does.

    Each output channel has a basis of as many numbers as the weight has bits. Every
    step fits it by least squares to the codes of the moment, and moves a tenth of the
    way there. LQ-Nets learns levels of activations so too; here these keep uniform
    grids, or are float, as in the OMPQ paper's rows.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        for layer in self.layers:
            rows = _rows(layer)
            largest = rows.abs().amax(1, keepdim=True)
            powers = 2.0 ** torch.arange(layer.bits, device=rows.device)
            basis = largest * powers / powers.sum()  # uniform levels
            for _ in range(_FIRST_FITS):
                basis = fitted_basis(rows, nearest_codes(rows, basis), basis)
            layer.register_buffer("weight_basis", basis)
            layer.rounding = self.rounded

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight; gradients pass straight through."""
        basis, axis = layer.get_buffer("weight_basis"), channel_axis(layer)
        rows = _rows(layer)
        values = level_values(nearest_codes(rows, basis), basis)
        values = values.reshape(layer.weight.movedim(axis, 0).shape).movedim(0, axis)
        values = values + (layer.weight - layer.weight.detach())
        return values if factor is None else scaled_channels(values, factor, layer)

    @torch.no_grad()
    def follow(self) -> None:
        """Move the bases to what suits the weights as they are now."""
        for layer in self.layers:
            rows, basis = _rows(layer), layer.get_buffer("weight_basis")
            fitted = fitted_basis(rows, nearest_codes(rows, basis), basis)
            basis.lerp_(fitted, 1 - _MOMENTUM)

    def settle(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Leave the layer with its values: codes, a basis of float32 and the bias."""
        del layer.weight_basis
        bits = layer.weight.numel() * layer.bits
        channels = len(layer.weight_scale)
        size = -(-bits // 8) + 4 * channels * (layer.bits + (layer.bias is not None))
        layer.rounding = StoredValues("LQ-Nets", size)


def _rows(layer: QuantizedLayer) -> Tensor:
    return layer.weight.detach().movedim(channel_axis(layer), 0).flatten(1)
