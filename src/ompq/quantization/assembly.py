"""A quantized network put together from its parts: fold, swap, attach.

Where the grids come from is the caller's business: :func:`ompq.quantize` searches for
them, :func:`ompq.load` reads them from a file. So both make the same network.
"""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.costs import FLOAT_BITS
from ompq.errors import QuantizationError
from ompq.graph.folding import channel_axis, folded
from ompq.graph.units import Choice, LayerGraph, Unit
from ompq.quantization.layers import (
    ActivationQuantizer,
    quantized_layer,
    replace_module,
)
from ompq.quantization.placement import Point
from ompq.quantizers.grids import Grid
from ompq.samples import model_device

# Called as weight_grid(unit, weight, axis of the output channels).
WeightGrid: TypeAlias = Callable[[Unit, Tensor, int], Grid]


def assemble(
    model: nn.Module,
    graph: LayerGraph,
    allocation: Mapping[str, Choice],
    points: Sequence[Point],
    *,
    weight_grid: WeightGrid,
    activation_grids: Sequence[Grid],
) -> nn.Module:
    """Return a quantized copy of a float network, in eval mode.

    Args:
        model: The float network; left as it is.
        graph: Its units.
        allocation: Unit name → bits.
        points: Where activations are quantized.
        weight_grid: Returns the grid of a unit's weight, which is folded already.
        activation_grids: The grid of each point.

    Raises:
        QuantizationError: A layer cannot be replaced.
    """
    quantized = copy.deepcopy(model).eval()
    tied = _shared(quantized)
    for unit in graph.units:
        _fold(quantized, unit)
        if allocation[unit.name].weight < FLOAT_BITS:
            shared = id(quantized.get_parameter(unit.parameter)) in tied
            _swap(quantized, unit, weight_grid, shared=shared)
    names = quantizer_names(quantized, points)
    device = model_device(model)
    for name, point, grid in zip(names, points, activation_grids, strict=True):
        _attach(quantized, name, point, ActivationQuantizer(grid).to(device))
    return quantized


def quantizer_names(model: nn.Module, points: Sequence[Point]) -> list[str]:
    """Return the name of each point's quantizer among the network's modules."""
    found: list[str] = []
    for point in points:
        kind, places = (
            ("output", point.after) if point.after else ("input", point.before)
        )
        owner = places[0]
        # What is added to a Sequential would run as its last module.
        while isinstance(inner := model.get_submodule(owner), nn.Sequential):
            owner = f"{owner}.{next(iter(inner._modules))}".removeprefix(".")
        base = f"{owner}.{kind}_quantizer".removeprefix(".")
        same = sum(name.startswith(base) for name in found)
        found.append(f"{base}_{same + 1}" if same else base)
    return found


def bias_key(unit: Unit) -> str:
    """Return what a unit's bias is called in the ``state_dict``, if it has one."""
    return f"{unit.parameter.removesuffix('weight')}bias"


def _fold(model: nn.Module, unit: Unit) -> None:
    if not unit.norm:
        return
    module, norm = model.get_submodule(unit.name), model.get_submodule(unit.norm)
    assert isinstance(norm, _BatchNorm)  # the trace found it to be one
    with torch.no_grad():
        weight, bias = folded(module, norm)
        module.weight = nn.Parameter(weight.detach())
        module.bias = nn.Parameter(bias.detach())
    replace_module(model, unit.norm, _without_norm(norm))


def _without_norm(norm: nn.Module) -> nn.Module:
    """Return what is left of a batch norm that was folded.

    Those of timm hold the activation that follows, and perhaps a dropout.
    """
    held = OrderedDict(norm.named_children())
    return nn.Sequential(held).train(norm.training) if held else nn.Identity()


def _swap(
    model: nn.Module, unit: Unit, weight_grid: WeightGrid, *, shared: bool
) -> None:
    weight = model.get_parameter(unit.parameter).detach()
    holder, _, leaf = unit.parameter.rpartition(".")
    owner = model.get_submodule(holder)
    grid = weight_grid(unit, weight, channel_axis(owner))
    if unit.kind == "attention" or unit.calls == 0 or shared:
        # Something else than the layer's own forward reads this weight, so it is
        # rounded where it is; the grid stays next to it, for files and runtimes.
        weight.copy_(grid.fake(weight))
        owner.register_buffer(f"{leaf}_scale", grid.scale.detach().clone().flatten())
        owner.register_buffer(f"{leaf}_zero", grid.zero.detach().clone().flatten())
        return
    try:
        replace_module(model, unit.name, quantized_layer(owner, grid))
    except QuantizationError as error:
        raise QuantizationError(f"{unit.name}: {error}") from error


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules hold."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {one for one, count in holders.items() if count > 1}


def _attach(
    model: nn.Module, name: str, point: Point, quantizer: ActivationQuantizer
) -> None:
    """Hang one quantizer on all its places; the first one owns it."""
    for place in point.after:
        model.get_submodule(place).register_forward_hook(quantizer.after)
    for place in point.before:
        model.get_submodule(place).register_forward_pre_hook(
            quantizer.before, with_kwargs=True
        )
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).add_module(leaf, quantizer)
