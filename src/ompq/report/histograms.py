"""Histograms of the worst layers: where their weights and inputs lie on the grid."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.graph.folding import folded
from ompq.graph.observation import tensors_in
from ompq.graph.units import Unit
from ompq.plans import Plan
from ompq.quantization.layers import QuantizedLayer, quantized_layers
from ompq.report.sections import Histogram
from ompq.samples import Samples, attached, run_first

_BINS = 64
_SAMPLES = 32


def worst_histograms(
    quantized: nn.Module,
    model: nn.Module,
    plan: Plan,
    samples: Samples,
    *,
    count: int = 3,
) -> list[Histogram]:
    """Return how the weights and inputs of the worst layers are spread.

    The worst are those with most expected damage at the bits they got. Weights are the
    float network's, with the batch norm folded in, as codes of their channel's grid:
    what is rounded to 0, 1, 2 and so on lies around these numbers. Inputs are the float
    network's too; the lines tell the least and the greatest that the quantized layer
    reads, and so where values are clipped.

    Args:
        quantized: The quantized network.
        model: The float network.
        plan: The plan, made for ``model``.
        samples: Inputs; the first 32 are used.
        count: How many layers.
    """
    layers = quantized_layers(quantized)
    damage = plan.scores.damage[range(len(plan.columns)), plan.columns]
    ranked = sorted(zip(damage, plan.graph.units, strict=True), key=lambda one: -one[0])
    worst = [unit for _, unit in ranked if unit.name in layers][:count]
    names = [unit.name for unit in worst]
    given, read = (_inputs(network, names, samples) for network in (model, quantized))
    found = []
    for unit in worst:
        layer = layers[unit.name]
        found.append(_of_weight(model, unit, layer))
        if unit.name in given:
            found.append(_of_input(unit, given[unit.name], read[unit.name]))
    return found


def _of_weight(model: nn.Module, unit: Unit, layer: QuantizedLayer) -> Histogram:
    grid = layer.grid_like_weight()
    with torch.no_grad():
        weight = _float_weight(model, unit).to(grid.scale.device)
        codes = weight / grid.scale + grid.zero
    ends = [("lowest code", 0.0), ("highest code", float(grid.top))]
    name = f"{unit.name}, weights as codes of {layer.bits} bits"
    return _histogram(name, codes, ends)


def _float_weight(model: nn.Module, unit: Unit) -> Tensor:
    if not unit.norm:
        return model.get_parameter(unit.parameter)
    norm = model.get_submodule(unit.norm)
    assert isinstance(norm, _BatchNorm)  # the trace found it to be one
    return folded(model.get_submodule(unit.name), norm)[0]


def _of_input(unit: Unit, values: Tensor, read: Tensor) -> Histogram:
    # Plus zero, since rounding leaves a zero its sign.
    ends = [
        ("least read", float(read.min()) + 0.0),
        ("greatest read", float(read.max()) + 0.0),
    ]
    return _histogram(f"{unit.name}, inputs", values, ends)


def _inputs(
    network: nn.Module, names: Sequence[str], samples: Samples
) -> dict[str, Tensor]:
    """Return the first tensor that each module gets, for a few samples."""
    found: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                found.setdefault(name, tensor.detach())

        return hook

    handles = [
        network.get_submodule(name).register_forward_pre_hook(
            remember(name), with_kwargs=True
        )
        for name in names
    ]
    with attached(handles):
        run_first(network, samples, _SAMPLES)
    return found


def _histogram(
    name: str, values: Tensor, lines: Sequence[tuple[str, float]]
) -> Histogram:
    flat = values.detach().float().flatten().cpu()
    low = min(float(flat.min()), *(at for _, at in lines))
    high = max(float(flat.max()), *(at for _, at in lines))
    if high <= low:  # a constant still has a bar
        low, high = low - 0.5, high + 0.5
    counts, edges = torch.histogram(flat, _BINS, range=(low, high))
    return Histogram(name, tuple(edges.tolist()), tuple(counts.tolist()), tuple(lines))
