"""Folding: a batch norm becomes part of the layer before it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

from ompq.network.units import Unit


def output_module(model: nn.Module, unit: Unit) -> str:
    """Return the module whose output is the unit's after its batch norm.

    Batch norms of timm contain the activation that follows; the first module in them,
    a dropout that does nothing in eval mode, returns the normalised values.
    """
    if not unit.norm:
        return unit.name
    held = list(model.get_submodule(unit.norm).named_children())
    if held and isinstance(held[0][1], nn.Identity | _DropoutNd):
        return f"{unit.norm}.{held[0][0]}"
    return unit.norm


def norm_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the scale and shift that a batch norm applies in eval mode, (C,) each."""
    given: Any = norm  # only norms with statistics are folded
    scale = torch.rsqrt(given.running_var + given.eps)
    scale = scale if given.weight is None else scale * given.weight
    shift = -given.running_mean * scale
    return scale, shift if given.weight is None else shift + given.bias


@torch.no_grad()
def norm_scales(norms: Sequence[nn.Module]) -> list[Tensor]:
    """Return the scales that batch norms apply in eval mode, (C,) each.

    All are computed in a few calls: on a GPU, it is their number that takes time.
    """
    given: list[Any] = [*norms]
    if not given:
        return []
    variances = [norm.running_var for norm in given]
    scales = torch._foreach_add(variances, [norm.eps for norm in given])
    ones = torch.ones_like
    weights = [ones(n.running_var) if n.weight is None else n.weight for n in given]
    return [*torch._foreach_mul(torch._foreach_rsqrt(scales), weights)]


def channel_axis(module: nn.Module) -> int:
    """Return the weight's axis of output channels (within a group, if transposed)."""
    return 1 if isinstance(module, _ConvTransposeNd) else 0


def scaled_channels(weight: Tensor, scale: Tensor, module: nn.Module) -> Tensor:
    """Multiply the output channels, (C, ...) or (in, C/groups, ...), by scales (C,)."""
    return weight * channel_factors(scale, weight.shape, module)


def channel_factors(scale: Tensor, shape: Sequence[int], module: nn.Module) -> Tensor:
    """Return scales of output channels, (C,), shaped to multiply a weight."""
    if not isinstance(module, _ConvTransposeNd):
        return scale.reshape(-1, *[1] * (len(shape) - 1))
    groups = module.groups
    of_inputs = scale.reshape(groups, 1, -1).expand(-1, shape[0] // groups, -1)
    return of_inputs.reshape(*shape[:2], *[1] * (len(shape) - 2))  # (in, C/g, ...)


def fold_norm(module: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer with the batch norm folded into it."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    scale, shift = norm_affine(norm)
    if isinstance(bias, Tensor):
        shift = shift + bias * scale
    return scaled_channels(weight, scale, module), shift
