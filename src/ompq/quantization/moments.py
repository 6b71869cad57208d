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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ompq.graph import scaled_channels
from ompq.layers import QuantizedLayer
from ompq.samples import attached

Run = Callable[[], Any]

# Samples that moments are read from; the float and the quantized network see the same,
# so that what differs is what rounding did.
FOR_MOMENTS = 256

# Channels that rounding has all but emptied are not blown up to what they were.
_LARGEST_RATIO = 2.0
_LEAST_UNIT = 1e-3  # of a layer's mean spread


class Moments(NamedTuple):
    """Mean of each channel and mean distance from it, sample by sample, (N, C) each."""

    mean: Tensor
    spread: Tensor


def output_moments(modules: Mapping[str, nn.Module], run: Run) -> dict[str, Moments]:
    """Return the moments of what each module returns, in one pass.

    A module that runs more than once has several, and is left out.

    Args:
        modules: Any name → a convolution, linear layer or batch norm.
        run: Runs them.
    """
    moments: dict[str, list[Moments]] = {name: [] for name in modules}

    def remember(name: str) -> Any:
        def hook(module: nn.Module, _args: Any, output: Tensor) -> None:
            moments[name].append(channel_moments(module, output))

        return hook

    with _hooks(modules, remember):
        run()
    return {name: found[0] for name, found in moments.items() if len(found) == 1}


def restore_moments(
    layers: Mapping[str, QuantizedLayer], moments: Mapping[str, Moments], run: Run
) -> None:
    """Change scales and biases so that outputs have the moments they should have.

    The codes of the weights stay. One pass suffices: each layer is corrected while the
    pass goes through it, so that later ones see what the corrected ones before give.

    Args:
        layers: Any name → a layer; it gets a bias if it has none.
        moments: Names → what its outputs should have. Only these layers are changed.
        run: Runs them, once.
    """

    def restore(name: str) -> Any:
        def hook(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            assert isinstance(module, QuantizedLayer)
            found = channel_moments(module, output)
            had = found.mean.mean(0)
            mean, ratio = _corrections(module, found, moments[name])
            bias = torch.zeros_like(ratio) if module.bias is None else module.bias
            bias = (bias - had) * ratio + mean
            module.bias = nn.Parameter(bias, requires_grad=False)
            module.weight.copy_(scaled_channels(module.weight, ratio, module))
            module.weight_scale.mul_(ratio[: len(module.weight_scale)])
            had, ratio, mean = (
                _like_channels(each, module, output) for each in (had, ratio, mean)
            )
            return (output - had) * ratio + mean

        return hook

    with torch.no_grad(), _hooks({name: layers[name] for name in moments}, restore):
        run()


def _corrections(
    layer: QuantizedLayer, found: Moments, wanted: Moments
) -> tuple[Tensor, Tensor]:
    """Return each channel's mean to be, and what it is multiplied by, (C,) each."""
    spread = found.spread.mean(0)
    unit = torch.maximum(spread, wanted.spread.mean(0))
    tiny = torch.finfo(unit.dtype).tiny
    # In units of the channel's spread; one that hardly varies must not speak for all.
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
    """Return the mean of what samples say, shrunk by what may be chance, (C,).

    Where rounding does little, a few samples tell more of themselves than of rounding.
    One factor for all channels, as James and Stein have it, errs less than none does.

    Args:
        changes: What each sample says, (N, C).
    """
    mean, count = changes.mean(0), len(changes)
    chance = changes.var(0, correction=min(1, count - 1)).sum() / count
    total = mean.square().sum().clamp_min(torch.finfo(mean.dtype).tiny)
    return mean * (1 - chance / total).clamp_min(0)


def channel_mean(module: nn.Module, output: Tensor) -> Tensor:
    """Return the mean of each channel of what a layer returned, (C,)."""
    return output.mean(_other_axes(module, output))


def channel_moments(module: nn.Module, output: Tensor) -> Moments:
    """Return the moments of each channel of what a layer returned, by sample."""
    axes = [axis for axis in _other_axes(module, output) if axis != 0]
    mean = output.mean(axes) if axes else output
    distance = (output - _like_channels(mean.mean(0), module, output)).abs_()
    return Moments(mean, distance.mean(axes) if axes else distance)


def _like_channels(values: Tensor, module: nn.Module, output: Tensor) -> Tensor:
    """Return one value a channel, (C,), shaped to go with what a layer returned."""
    shape = [1] * output.dim()
    shape[_channel_axis(module, output)] = -1
    return values.reshape(shape)


def _channel_axis(module: nn.Module, output: Tensor) -> int:
    return output.dim() - 1 if isinstance(module, nn.Linear) else 1


def _other_axes(module: nn.Module, output: Tensor) -> list[int]:
    axis = _channel_axis(module, output)
    return [d for d in range(output.dim()) if d != axis]


@contextmanager
def _hooks(
    modules: Mapping[str, nn.Module], hook: Callable[[str], Any]
) -> Iterator[None]:
    # Before other hooks: those that round must see what has been corrected.
    handles = [
        module.register_forward_hook(hook(name), prepend=True)
        for name, module in modules.items()
    ]
    with attached(handles):
        yield
