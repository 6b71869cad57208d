"""Rounded layers whose outputs have the mean and the spread they should have.

Rounding shrinks weights a little, and with them the spread of what a layer returns. A
bias that restores the mean alone makes that worse: before a ReLU the mean is mostly
negative, the shrunken rest falls below zero, and the signal dies out with depth. So
both moments are restored, as a batch norm that is estimated anew would do.

The spread is the mean distance from the mean, not the standard deviation: a few large
values are most of that, and where a grid cuts them off, which it may do with good
reason, channels would be stretched to make up for them.

Both are read from a few samples, with and without rounding. What these differ by is
restored only as far as the samples agree on it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ompq.graph import normalised_by, scaled_channels
from ompq.layers import QuantizedLayer
from ompq.recording import visit_outputs
from ompq.samples import Samples, evaluating, run_batch
from ompq.units import Unit

# Each runs the layers on one batch.
Runs: TypeAlias = Sequence[Callable[[], Any]]

# Samples that moments are read from. The float and the quantized network see the same,
# so that only rounding makes them differ.
FOR_MOMENTS = 256

# Limits how much channels are scaled that rounding has left almost empty.
_LARGEST_RATIO = 2.0
_LEAST_UNIT = 1e-3  # of a layer's mean spread


class Moments(NamedTuple):
    """Mean of each channel and mean distance from it, sample by sample, (N, C) each."""

    mean: Tensor
    spread: Tensor


def batch_runs(model: nn.Module, samples: Samples, batch_size: int) -> Runs:
    """Return functions that run a network on the samples that moments come from."""
    first = Samples((samples.first_batch(FOR_MOMENTS),))
    return [partial(run_batch, model, batch) for batch in first.batches(batch_size)]


def float_moments(
    model: nn.Module, units: Sequence[Unit], samples: Samples, batch_size: int
) -> dict[str, Moments]:
    """Return the moments of what units give after their batch norms, by name."""
    modules = {u.name: model.get_submodule(normalised_by(model, u)) for u in units}
    with evaluating(model):
        return output_moments(modules, batch_runs(model, samples, batch_size))


def output_moments(modules: Mapping[str, nn.Module], runs: Runs) -> dict[str, Moments]:
    """Return the moments of what modules that run once return, in one pass."""
    found: dict[str, list[Moments]] = {name: [] for name in modules}

    def read(name: str, outputs: Sequence[Tensor]) -> None:
        found[name].append(channel_moments(modules[name], outputs))

    visit_outputs(runs, modules, read)
    return {name: each[0] for name, each in found.items() if len(each) == 1}


@torch.no_grad()
def restore_moments(
    layers: Mapping[str, QuantizedLayer], moments: Mapping[str, Moments], runs: Runs
) -> None:
    """Change scales and biases so that outputs have the moments they should have.

    The codes of the weights stay, and only layers with moments change. One pass over
    the samples that the moments come from suffices: each layer is corrected while the
    pass goes through it, so that later layers see the corrected ones before them.
    """

    def correct(name: str, outputs: Sequence[Tensor]) -> list[Tensor]:
        layer = layers[name]
        found = channel_moments(layer, outputs)
        had = found.mean.mean(0)
        mean, ratio = _corrections(layer, found, moments[name])
        bias = torch.zeros_like(ratio) if layer.bias is None else layer.bias
        bias = (bias - had) * ratio + mean
        layer.bias = nn.Parameter(bias, requires_grad=False)
        layer.weight.copy_(scaled_channels(layer.weight, ratio, layer))
        own = ratio[: len(layer.weight_scale)]
        layer.weight_scale.mul_(own if layer.group_size == 0 else own[:, None])
        had, ratio, mean = (
            like_channels(each, layer, outputs[0]) for each in (had, ratio, mean)
        )
        return [(output - had) * ratio + mean for output in outputs]

    visit_outputs(runs, {name: layers[name] for name in moments}, correct)


def _corrections(
    layer: QuantizedLayer, found: Moments, wanted: Moments
) -> tuple[Tensor, Tensor]:
    """Return each channel's mean to be, and what it is multiplied by, (C,) each."""
    spread = found.spread.mean(0)
    unit = torch.maximum(spread, wanted.spread.mean(0))
    tiny = torch.finfo(unit.dtype).tiny
    # In units of the channel's spread; one that hardly varies must not dominate.
    unit = unit.clamp_min(_LEAST_UNIT * unit.mean()).clamp_min(tiny)
    mean = found.mean.mean(0) + unit * _certain((wanted.mean - found.mean) / unit)
    change = unit * _certain((wanted.spread - found.spread) / unit)
    ratio = 1 + change / spread.clamp_min(tiny)
    ratio = ratio.clamp(1 / _LARGEST_RATIO, _LARGEST_RATIO)
    # A channel that is constant stays so; groups of a transposed convolution share
    # their scales.
    own = len(layer.weight_scale) == len(ratio)
    return mean, torch.where((spread > tiny) & own, ratio, 1.0)


def _certain(changes: Tensor) -> Tensor:
    """Return the mean of what samples (N, C) say, shrunk by what may be chance, (C,).

    Where rounding changes little, a few samples mostly show their own variation.
    One factor for all channels (James-Stein shrinkage) errs less than none.
    """
    mean, count = changes.mean(0), len(changes)
    chance = changes.var(0, correction=min(1, count - 1)).sum() / count
    total = mean.square().sum().clamp_min(torch.finfo(mean.dtype).tiny)
    return mean * (1 - chance / total).clamp_min(0)


def channel_mean(module: nn.Module, output: Tensor) -> Tensor:
    """Return the mean of each channel of what a layer returned, (C,)."""
    return output.mean(_other_axes(module, output))


def channel_moments(module: nn.Module, outputs: Sequence[Tensor]) -> Moments:
    """Return the moments of each channel of a layer's outputs, by sample."""
    axes = [axis for axis in _other_axes(module, outputs[0]) if axis != 0]
    mean = torch.cat([each.mean(axes) if axes else each for each in outputs])
    centre = like_channels(mean.mean(0), module, outputs[0])
    spreads = []
    for output in outputs:
        distance = (output - centre).abs_()
        spreads.append(distance.mean(axes) if axes else distance)
    return Moments(mean, torch.cat(spreads))


def like_channels(values: Tensor, module: nn.Module, output: Tensor) -> Tensor:
    """Return one value a channel, (C,), shaped to go with what a layer returned."""
    shape = [1] * output.dim()
    shape[_channel_axis(module, output)] = -1
    return values.reshape(shape)


def _channel_axis(module: nn.Module, output: Tensor) -> int:
    return output.dim() - 1 if isinstance(module, nn.Linear) else 1


def _other_axes(module: nn.Module, output: Tensor) -> list[int]:
    axis = _channel_axis(module, output)
    return [d for d in range(output.dim()) if d != axis]
