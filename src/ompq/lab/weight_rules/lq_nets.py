"""Levels that are fitted to the weights of each channel (LQ-Nets)."""

import torch
from torch import Tensor, nn

from ompq.layers import QuantizedLayer, StoredValues, quantized_layers
from ompq.network.folding import channel_axis, scaled_channels
from ompq.training.rounding_rules import WeightRule, rows_by_channel

_MOMENTUM = 0.9  # momentum of LQ-Nets' basis, as published
_FIRST_FITS = 10  # fits before training; LQ-Nets does not publish their number
_RIDGE = 1e-4  # ridge towards the old basis, where the codes do not determine it


def signs_of(bits: int, like: Tensor) -> Tensor:
    """Return all codes as rows of -1 and 1, (2^bits, bits)."""
    numbers = torch.arange(1 << bits, device=like.device)[:, None]
    places = torch.arange(bits, device=like.device)
    return ((numbers >> places & 1) * 2 - 1).to(like.dtype)


def nearest_codes(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the codes of the levels nearest to weights (C, n), for bases (C, K).

    The levels of a channel are the sums of its basis with all combinations of signs.
    """
    levels, order = (basis @ signs_of(basis.shape[1], basis).T).sort(1)
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    places = torch.searchsorted(middles.contiguous(), rows.contiguous())
    return order.gather(1, places)


def level_values(codes: Tensor, basis: Tensor) -> Tensor:
    """Return the levels of codes (C, n)."""
    return (basis @ signs_of(basis.shape[1], basis).T).gather(1, codes)


def fitted_basis(rows: Tensor, codes: Tensor, basis: Tensor) -> Tensor:
    """Return the least-squares basis (C, K) for weights and their codes (C, n)."""
    signs = signs_of(basis.shape[1], basis)[codes]  # (C, n, K)
    ridge = _RIDGE * rows.shape[1]
    gram = signs.mT @ signs + ridge * torch.eye(basis.shape[1]).to(basis)
    products = signs.mT @ rows[..., None] + ridge * basis[..., None]
    # The matrix is positive definite; checking it would synchronize with the GPU.
    solution: Tensor = torch.linalg.solve_ex(gram, products).result
    return solution[..., 0]


class LearnedLevels(WeightRule):
    """Rounds weights as LQ-Nets does.

    The basis of an output channel has one number per bit. After every step a new basis
    is fitted to the current codes by least squares, and the basis moves a tenth of the
    way towards it. LQ-Nets also learns levels of activations; here activations keep
    uniform grids or are float, as in the OMPQ paper's tables.

    Its first bases are not published in full: here they give uniform levels up to the
    largest weight, improved by ten fits. Where the codes do not determine the basis, as
    with a code that no weight has, a small ridge keeps it near the old one.
    """

    keeps_plan = False

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        for layer in self.layers:
            rows = rows_by_channel(layer, layer.weight.detach())
            largest = rows.abs().amax(1, keepdim=True)
            powers = 2.0 ** torch.arange(layer.bits, device=rows.device)
            basis = largest * powers / powers.sum()  # uniform levels
            for _ in range(_FIRST_FITS):
                basis = fitted_basis(rows, nearest_codes(rows, basis), basis)
            layer.register_buffer("weight_basis", basis)
            layer.rounding = self.round

    def round(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, with straight-through gradients."""
        basis, axis = layer.get_buffer("weight_basis"), channel_axis(layer)
        rows = rows_by_channel(layer, layer.weight.detach())
        values = level_values(nearest_codes(rows, basis), basis)
        values = values.reshape(layer.weight.movedim(axis, 0).shape).movedim(0, axis)
        values = values + (layer.weight - layer.weight.detach())
        return values if factor is None else scaled_channels(values, factor, layer)

    @torch.no_grad()
    def update(self) -> None:
        """Move the bases towards those that fit the current weights."""
        for layer in self.layers:
            rows = rows_by_channel(layer, layer.weight.detach())
            basis = layer.get_buffer("weight_basis")
            fitted = fitted_basis(rows, nearest_codes(rows, basis), basis)
            basis.lerp_(fitted, 1 - _MOMENTUM)

    def finalize(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Mark the weight as rounded, with the size of codes, bases and bias."""
        del layer.weight_basis
        bits = layer.weight.numel() * layer.bits
        channels = len(layer.weight_scale)
        size = -(-bits // 8) + 4 * channels * (layer.bits + (layer.bias is not None))
        layer.rounding = StoredValues("LQ-Nets", size)
