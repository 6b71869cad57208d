"""Rounded layers whose outputs have the mean and the spread they should have.

Rounding shrinks weights a little, and with them the spread of what a layer returns. A
bias that restores the mean alone makes that worse: before a ReLU the mean is mostly
negative, the shrunken rest falls below zero, and the signal dies out with depth. So
both moments are restored, as a batch norm that is estimated anew would do.

The spread is the mean distance from the mean, not the standard deviation: a few large
values are most of that, and where a grid cuts them off, which it may do with good
reason, channels would be stretched to make up for them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ompq.graph.folding import scaled_channels
from ompq.quantization.layers import QuantizedLayer

Run = Callable[[], Any]

# Samples that moments are read from; the float and the quantized network see the same,
# so that what differs is what rounding did.
FOR_MOMENTS = 256

# Channels that rounding has all but emptied are not blown up to what they were.
_LARGEST_RATIO = 2.0


class Moments(NamedTuple):
    """Mean of each channel and mean distance from it, (C,) each."""

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
            found, wanted = channel_moments(module, output), moments[name]
            ratio = _ratio(module, found, wanted)
            bias = torch.zeros_like(ratio) if module.bias is None else module.bias
            bias = (bias - found.mean) * ratio + wanted.mean
            module.bias = nn.Parameter(bias, requires_grad=False)
            module.weight.copy_(scaled_channels(module.weight, ratio, module))
            module.weight_scale.mul_(ratio[: len(module.weight_scale)])
            shape = [1] * output.dim()
            shape[_channel_axis(module, output)] = -1
            centred = output - found.mean.reshape(shape)
            return centred * ratio.reshape(shape) + wanted.mean.reshape(shape)

        return hook

    with torch.no_grad(), _hooks({name: layers[name] for name in moments}, restore):
        run()


def _ratio(layer: QuantizedLayer, found: Moments, wanted: Moments) -> Tensor:
    """Return what each channel is multiplied by, (C,)."""
    tiny = torch.finfo(found.spread.dtype).tiny
    ratio = wanted.spread / found.spread.clamp_min(tiny)
    ratio = ratio.clamp(1 / _LARGEST_RATIO, _LARGEST_RATIO)
    # A channel that is constant stays so; groups of a transposed convolution share
    # their scales.
    own = len(layer.weight_scale) == len(ratio)
    return torch.where((found.spread > tiny) & own, ratio, 1.0)


def channel_mean(module: nn.Module, output: Tensor) -> Tensor:
    """Return the mean of each channel of what a layer returned, (C,)."""
    return output.mean(_other_axes(module, output))


def channel_moments(module: nn.Module, output: Tensor) -> Moments:
    """Return the moments of each channel of what a layer returned."""
    axes = _other_axes(module, output)
    mean = output.mean(axes, keepdim=True)
    return Moments(mean.flatten(), (output - mean).abs().mean(axes))


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
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
