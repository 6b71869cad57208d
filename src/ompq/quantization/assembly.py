"""Assembly: quantized layers and quantizers take their places in a copy."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ompq.bit_widths import FLOAT_BITS
from ompq.errors import QuantizationError
from ompq.grids import Grid, of_groups
from ompq.layers import (
    ActivationQuantizer,
    LogQuantizer,
    quantized_layer,
    replace_module,
)
from ompq.network.folding import channel_axis, fold_norm
from ompq.network.observation import copy_network
from ompq.network.units import IN_PLACE, Choice, LayerGraph, Unit
from ompq.quantization.activation_sites import ActivationSite
from ompq.quantization.error_feedback import parameter_uses
from ompq.quantization.products import ProductQuantizers
from ompq.quantization.weight_grids import WeightGrid
from ompq.samples import model_device

_CHILD = "products"  # name of the submodule with the quantizers of a module's products


def attach_to_operand(
    model: nn.Module, site: ActivationSite, quantizer: ActivationQuantizer
) -> None:
    """Quantize an operand of a product that a module of the network computes."""
    owner = model.get_submodule(site.before[0])
    quantizers = owner._modules.get(_CHILD)
    if not isinstance(quantizers, ProductQuantizers):
        quantizers = ProductQuantizers()
        owner.add_module(_CHILD, quantizers)
        owner.register_forward_pre_hook(quantizers.enter)
        owner.register_forward_hook(quantizers.leave, always_call=True)
    quantizers.add_module(f"{site.product}_{site.operand}", quantizer)


def quantizer_name(site: ActivationSite) -> str:
    """Return the name of an operand's quantizer among the network's modules."""
    name = f"{site.before[0]}.{_CHILD}.{site.product}_{site.operand}"
    return name.removeprefix(".")


def assemble(
    model: nn.Module,
    graph: LayerGraph,
    allocation: Mapping[str, Choice],
    sites: Sequence[ActivationSite],
    *,
    weight_grid: WeightGrid,
    activation_grids: Sequence[Grid],
) -> nn.Module:
    """Return a quantized copy of a float network, in eval mode.

    ``weight_grid`` is called with a unit's weight after folding its batch norm.
    """
    quantized = copy_network(model).eval()
    aliases = _aliases(quantized)
    uses = parameter_uses(quantized)
    for module in quantized.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # Its fused kernel would read the stored weights, which are not rounded.
            module.activation_relu_or_gelu = 0
    counts = [uses[id(quantized.get_parameter(unit.parameter))] for unit in graph.units]
    for unit, users in zip(graph.units, counts, strict=True):
        if unit.norm:
            _fold_norm(quantized, unit)
        if (choice := allocation[unit.name]).weight < FLOAT_BITS:
            tied = users > 1 and not unit.norm
            _quantize_unit(quantized, unit, choice, weight_grid, tied=tied)
    for alias, name in aliases.items():
        replace_module(quantized, alias, quantized.get_submodule(name))
    names = quantizer_names(quantized, sites)
    device = model_device(model)
    for name, site, grid in zip(names, sites, activation_grids, strict=True):
        quantizer = (
            LogQuantizer(grid, site.shift) if site.powers else ActivationQuantizer(grid)
        )
        _attach(quantized, name, site, quantizer.to(device))
    return quantized


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return further names of modules that have several, with the first of each."""
    first: dict[nn.Module, str] = {}
    named = model.named_modules(remove_duplicate=False)
    pairs = [(name, first.setdefault(module, name)) for name, module in named]
    return {name: other for name, other in pairs if name != other}


def _fold_norm(model: nn.Module, unit: Unit) -> None:
    module, norm = model.get_submodule(unit.name), model.get_submodule(unit.norm)
    with torch.no_grad():
        weight, bias = fold_norm(module, norm)
        module.weight = nn.Parameter(weight.detach())
        module.bias = nn.Parameter(bias.detach())
    # A batch norm of timm contains the activation after it, and sometimes a dropout.
    children = OrderedDict(norm.named_children())
    rest = nn.Sequential(children).train(norm.training) if children else nn.Identity()
    replace_module(model, unit.norm, rest)


def _quantize_unit(
    model: nn.Module, unit: Unit, choice: Choice, weight_grid: WeightGrid, *, tied: bool
) -> None:
    """Replace a unit by a quantized layer, or else round its weight in place."""
    weight = model.get_parameter(unit.parameter).detach()
    if weight.element_size() < 4:
        raise QuantizationError(
            f"{unit.name}: its weight is {weight.dtype}, which is too coarse for a "
            "grid; quantize the network in float32: model.float()"
        )
    holder, _, leaf = unit.parameter.rpartition(".")
    owner, group_size = model.get_submodule(holder), unit.shared_by(choice)
    on_device = weight.to(model_device(model))
    grid, stored = weight_grid(unit, on_device, channel_axis(owner))
    weight.copy_(stored)
    scale, zero_point = grid.scale.to(weight.device), grid.zero_point.to(weight.device)
    grid = replace(grid, scale=scale, zero_point=zero_point)
    if unit.kind in IN_PLACE or unit.calls == 0 or tied:
        # Other code than the layer's own forward reads this weight, so it is rounded in
        # place; its grid is kept in buffers beside it, for files and runtimes.
        weight.copy_(grid.fake(weight))
        for name in ("scale", "zero_point"):
            values = of_groups(getattr(grid, name).detach(), group_size)
            owner.register_buffer(f"{leaf}_{name}", values.clone())
        return
    layer = quantized_layer(owner, grid, group_size)
    layer.rate = choice.rate
    replace_module(model, unit.name, layer)


def quantizer_names(model: nn.Module, sites: Sequence[ActivationSite]) -> list[str]:
    """Return the name of each site's quantizer among the network's modules."""
    found: list[str] = []
    for site in sites:
        if site.operand:
            found.append(quantizer_name(site))
            continue
        kind, places = ("output", site.after) if site.after else ("input", site.before)
        owner = places[0]
        # A module added to a Sequential would become its last layer.
        while isinstance(inner := model.get_submodule(owner), nn.Sequential):
            owner = f"{owner}.{next(iter(inner._modules))}".removeprefix(".")
        base = f"{owner}.{kind}_quantizer".removeprefix(".")
        same = sum(name.startswith(base) for name in found)
        found.append(f"{base}_{same + 1}" if same else base)
    return found


def _attach(
    model: nn.Module, name: str, site: ActivationSite, quantizer: ActivationQuantizer
) -> None:
    """Hook a quantizer to all modules of its site; the first becomes its parent."""
    if site.operand:
        attach_to_operand(model, site, quantizer)
        return
    for place in site.after:
        model.get_submodule(place).register_forward_hook(quantizer.after)
    for place in site.before:
        module = model.get_submodule(place)
        module.register_forward_pre_hook(quantizer.before, with_kwargs=True)
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).add_module(leaf, quantizer)
