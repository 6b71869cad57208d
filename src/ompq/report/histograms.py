"""Histograms of the layers that quantization hurts most."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ompq.entropy_coding.rates import ZERO
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.network.attention import with_layers
from ompq.network.folding import fold_norm
from ompq.network.observation import tensors_in
from ompq.network.units import Unit
from ompq.plans import Plan, check_plan
from ompq.report_sections import Histogram
from ompq.samples import Samples, SamplesLike, collect

_CODED_SHOWN = 12  # coded layers whose codes are drawn

_BINS, _SAMPLES = 64, 32


def layer_histograms(
    quantized: nn.Module,
    model: nn.Module,
    plan: Plan,
    samples: SamplesLike,
    *,
    count: int = 3,
) -> list[Histogram]:
    """Return histograms of the layers with the largest expected damage.

    Weights are the float network's, with the batch norm folded in, in units of codes:
    values around 1 are rounded to 1. Inputs are the float network's for 32 samples; the
    lines show the range that the quantized layer reads, and so where values are
    clipped. For the largest coded layers, the counts of their codes follow.
    """
    check_plan(plan)
    layers, samples = quantized_layers(quantized), Samples.of(samples)
    model = with_layers(model, samples)
    damage = plan.scores.damage[range(len(plan.columns)), plan.columns]
    ranked = sorted(zip(damage, plan.graph.units, strict=True), key=lambda one: -one[0])
    worst = [unit for _, unit in ranked if unit.name in layers][:count]
    names = [unit.name for unit in worst]
    given, read = (_inputs(network, names, samples) for network in (model, quantized))
    histograms = []
    for unit in worst:
        if not layers[unit.name].rate:  # coded layers are shown by their codes
            histograms.append(_weight_histogram(model, unit, layers[unit.name]))
        if unit.name in given:
            # Adding zero turns -0.0 into 0.0.
            low, high = (float(end) + 0.0 for end in read[unit.name].aminmax())
            ends = [("lowest value", low), ("highest value", high)]
            histograms.append(
                _histogram(f"{unit.name}, inputs", given[unit.name], ends)
            )
    coded = [u for u in plan.graph.units if u.name in layers and layers[u.name].rate]
    coded.sort(key=lambda unit: -unit.weights)
    largest = coded[:_CODED_SHOWN]
    return histograms + [_code_histogram(unit, layers[unit.name]) for unit in largest]


def _weight_histogram(model: nn.Module, unit: Unit, layer: QuantizedLayer) -> Histogram:
    grid = layer.grid_like_weight()
    weight: Tensor = model.get_parameter(unit.parameter)
    if unit.norm:
        norm = model.get_submodule(unit.norm)
        weight = fold_norm(model.get_submodule(unit.name), norm)[0]
    with torch.no_grad():
        codes = weight.to(grid.scale.device) / grid.scale + grid.zero_point
    ends = [("lowest code", 0.0), ("highest code", float(grid.qmax))]
    name = f"{unit.name}, weights as codes of {layer.bits} bits"
    return _histogram(name, codes, ends)


def _code_histogram(unit: Unit, layer: QuantizedLayer) -> Histogram:
    """Return the counts of a coded layer's codes, as signed levels."""
    levels = layer.codes().long().flatten().cpu() - ZERO
    low, high = int(levels.min()), int(levels.max())
    counts = torch.bincount(levels - low, minlength=high - low + 1)
    edges = tuple(level - 0.5 for level in range(low, high + 2))
    name = f"{unit.name}, codes: {layer.rate:g} bits coded"
    return Histogram(name, edges, tuple(map(float, counts.tolist())))


def _inputs(
    network: nn.Module, names: Sequence[str], samples: Samples
) -> dict[str, Tensor]:
    """Return the first input tensor of each module, for a few samples."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                inputs.setdefault(name, tensor.detach())

        return hook

    hooks = [(network.get_submodule(name), keep(name)) for name in names]
    collect(network, samples.first(_SAMPLES), hooks, batch_size=_SAMPLES)
    return inputs


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
