"""Moments: each channel's mean and variance, restored after rounding."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ompq.layers import QuantizedLayer
from ompq.network.folding import output_module, scaled_channels
from ompq.network.observation import visit_outputs
from ompq.network.units import Unit
from ompq.samples import Report, Samples, evaluating, model_device, run_batch
from ompq.working_memory import working_bytes

# Each function runs the layers on one batch.
Runs: TypeAlias = Sequence[Callable[[], Any]]

# Number of samples that moments are read from. The float and the quantized network see
# the same ones, so that only rounding makes their moments differ.
FOR_MOMENTS = 256

_LARGEST_RATIO = 2.0  # for channels that rounding has left with almost no spread
_LEAST_SPREAD = 1e-3  # of a channel, relative to its layer's mean


class Moments(NamedTuple):
    """Mean and mean absolute deviation of each channel, by sample, (N, C) each."""

    mean: Tensor
    spread: Tensor


def batch_runs(
    model: nn.Module, samples: Samples, batch_size: int, count: int = FOR_MOMENTS
) -> Runs:
    """Return functions that run a network on the samples that moments are read from."""
    first = Samples((samples.first_batch(count),))
    return [partial(run_batch, model, batch) for batch in first.batches(batch_size)]


def float_moments(
    model: nn.Module, units: Sequence[Unit], samples: Samples, batch_size: int
) -> dict[str, Moments]:
    """Return the moments of units' outputs, after their batch norms, by name."""
    modules = {u.name: model.get_submodule(output_module(model, u)) for u in units}
    with evaluating(model):
        return output_moments(modules, batch_runs(model, samples, batch_size))


def output_moments(modules: Mapping[str, nn.Module], runs: Runs) -> dict[str, Moments]:
    """Return the output moments, in one pass, of those modules that run once."""
    found: dict[str, list[Moments]] = {name: [] for name in modules}

    def read(name: str, outputs: Sequence[Tensor]) -> None:
        found[name].append(channel_moments(modules[name], outputs))

    visit_outputs(runs, modules, read, limit=most_paused(modules))
    return {name: each[0] for name, each in found.items() if len(each) == 1}


@torch.no_grad()
def restore_moments(
    layers: Mapping[str, QuantizedLayer],
    moments: Mapping[str, Moments],
    runs: Runs,
    report: Report = lambda _done, _total: None,
) -> None:
    """Change scales and biases so that outputs have the given moments.

    The codes of the weights do not change, and neither do layers without moments or
    with other numbers of rows, such as those of the regions that a detector finds. One
    pass over the samples that the moments were read from is enough: each layer is
    corrected as the pass reaches it, so that later layers read corrected inputs.
    """
    done = count(1)

    def correct(name: str, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        report(next(done), len(layers))
        return restored_outputs(layers[name], outputs, moments[name])

    wanted = {name: layers[name] for name in moments}
    visit_outputs(runs, wanted, correct, limit=most_paused(wanted))


def restored_outputs(
    layer: QuantizedLayer,
    outputs: Sequence[Tensor],
    wanted: Moments,
    *,
    spread: bool = True,
) -> Sequence[Tensor]:
    """Change a layer so that its outputs have these moments; return the new ones.

    Without ``spread`` only their means are restored.
    """
    found = channel_moments(layer, _first_rows(outputs, wanted))
    if found.mean.shape != wanted.mean.shape:
        return outputs
    old_mean = found.mean.mean(0)
    mean, ratio = _corrections(layer, found, wanted)
    ratio = ratio if spread else torch.ones_like(ratio)
    bias = torch.zeros_like(ratio) if layer.bias is None else layer.bias
    bias = (bias - old_mean) * ratio + mean
    layer.bias = nn.Parameter(bias, requires_grad=False)
    layer.weight.copy_(scaled_channels(layer.weight, ratio, layer))
    factor = ratio[: len(layer.weight_scale)]
    layer.weight_scale.mul_(factor[:, None] if layer.group_size else factor)
    old_mean, ratio, mean = (
        like_channels(each, layer, outputs[0]) for each in (old_mean, ratio, mean)
    )
    # In place: of all batches, outputs of a first layer are the largest there are.
    return [output.sub_(old_mean).mul_(ratio).add_(mean) for output in outputs]


def _corrections(
    layer: QuantizedLayer, found: Moments, wanted: Moments
) -> tuple[Tensor, Tensor]:
    """Return each channel's new mean and the factor on its spread, (C,) each."""
    spread = found.spread.mean(0)
    unit = torch.maximum(spread, wanted.spread.mean(0))
    tiny = torch.finfo(unit.dtype).tiny
    # Changes are measured in units of each channel's spread, which has a lower limit so
    # that channels that hardly vary do not dominate.
    unit = unit.clamp_min(_LEAST_SPREAD * unit.mean()).clamp_min(tiny)
    mean = found.mean.mean(0) + unit * _shrunk_mean((wanted.mean - found.mean) / unit)
    change = unit * _shrunk_mean((wanted.spread - found.spread) / unit)
    ratio = 1 + change / spread.clamp_min(tiny)
    ratio = ratio.clamp(1 / _LARGEST_RATIO, _LARGEST_RATIO)
    # Constant channels stay constant. Channels that share a scale, in the groups of a
    # transposed convolution, keep it.
    own = len(layer.weight_scale) == len(ratio)
    return mean, torch.where((spread > tiny) & own, ratio, 1.0)


def _shrunk_mean(changes: Tensor) -> Tensor:
    """Return the mean of (N, C) over samples, shrunk by its uncertainty, (C,).

    Where rounding changes little, the differences of a few samples are mostly noise.
    One factor for all channels (James-Stein shrinkage) has a smaller error than none.
    """
    mean, count = changes.mean(0), len(changes)
    noise = changes.var(0, correction=min(1, count - 1)).sum() / count
    total = mean.square().sum().clamp_min(torch.finfo(mean.dtype).tiny)
    return mean * (1 - noise / total).clamp_min(0)


def channel_mean(module: nn.Module, output: Tensor) -> Tensor:
    """Return the mean of each channel of a layer's output, (C,)."""
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
    """Return one value per channel, (C,), shaped to broadcast with a layer's output."""
    shape = [1] * output.dim()
    shape[_channel_axis(module, output)] = -1
    return values.reshape(shape)


def _channel_axis(module: nn.Module, output: Tensor) -> int:
    return output.dim() - 1 if isinstance(module, nn.Linear) else 1


def _other_axes(module: nn.Module, output: Tensor) -> list[int]:
    axis = _channel_axis(module, output)
    return [d for d in range(output.dim()) if d != axis]


def most_paused(modules: Mapping[str, nn.Module]) -> float:
    """Return how many bytes paused passes may hold: on a CPU, a part of the limit."""
    on_host = all(model_device(module).type == "cpu" for module in modules.values())
    return working_bytes() / 4 if on_host else math.inf


def _first_rows(outputs: Sequence[Tensor], wanted: Moments) -> Sequence[Tensor]:
    """Return the first outputs, as many as moments were read from before."""
    rows = list(accumulate(map(len, outputs)))
    count = len(wanted.mean)
    return outputs[: rows.index(count) + 1] if count in rows else outputs
