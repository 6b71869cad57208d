"""Batch norm folded into the layer before it: the arithmetic."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

from ompq.graph.units import Unit


def normalised_by(model: nn.Module, unit: Unit) -> str:
    """Return the module that gives what a unit gives after its batch norm.

    Batch norms of timm hold the activation that follows; what comes first in them, a
    dropout that does nothing in eval mode, returns what was normalised.
    """
    if not unit.norm:
        return unit.name
    held = list(model.get_submodule(unit.norm).named_children())
    if held and isinstance(held[0][1], nn.Identity | _DropoutNd):
        return f"{unit.norm}.{held[0][0]}"
    return unit.norm


def norm_affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return the scale and shift that a batch norm applies in eval mode, (C,) each."""
    assert norm.running_mean is not None  # only norms with statistics are folded
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    if norm.affine:
        shift = shift + norm.bias
    return scale, shift


def channel_axis(module: nn.Module) -> int:
    """Return the weight's axis of output channels (within a group, if transposed)."""
    return 1 if isinstance(module, _ConvTransposeNd) else 0


def scaled_channels(weight: Tensor, scale: Tensor, module: nn.Module) -> Tensor:
    """Multiply each output channel of a layer's weight by its scale.

    Args:
        weight: The weight, (C, ...); transposed convolutions have (in, C/groups, ...).
        scale: One factor a channel, (C,).
        module: The layer, which says where its output channels are.
    """
    if not isinstance(module, _ConvTransposeNd):
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    groups = module.groups
    parts = weight.reshape(groups, -1, *weight.shape[1:])  # (g, in/g, C/g, ...)
    factor = scale.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))
    return (parts * factor).reshape(weight.shape)


def folded(module: nn.Module, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer with the batch norm folded into it."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    scale, shift = norm_affine(norm)
    if isinstance(bias, Tensor):
        shift = shift + bias * scale
    return scaled_channels(weight, scale, module), shift
