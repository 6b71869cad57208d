"""Biases that make up for the mean error of rounding, unit by unit, in one pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Run = Callable[[], Any]


def output_means(modules: Mapping[str, nn.Module], run: Run) -> dict[str, Tensor]:
    """Return the mean output of each module's channels, (C,), in one pass.

    A module that runs more than once has several means, and is left out.

    Args:
        modules: Any name → a module whose output has its channels where convolutions
            or, for linear layers, linear layers have them.
        run: Runs them.
    """
    means: dict[str, list[Tensor]] = {name: [] for name in modules}

    def remember(name: str) -> Any:
        def hook(module: nn.Module, _args: Any, output: Tensor) -> None:
            means[name].append(channel_mean(module, output))

        return hook

    with _hooks(modules, remember):
        run()
    return {name: found[0] for name, found in means.items() if len(found) == 1}


def correct_biases(
    layers: Mapping[str, nn.Module], means: Mapping[str, Tensor], run: Run
) -> None:
    """Shift the bias of each layer so that its mean output is what it should be.

    One pass suffices: each layer is corrected while the pass goes through it, so that
    later ones see what the corrected ones before them give.

    Args:
        layers: Any name → a layer; its bias is changed, or made if it has none.
        means: Names → the mean output of each channel, (C,). Only these are changed.
        run: Runs them, once.
    """

    def correct(name: str) -> Any:
        def hook(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            shift = means[name] - channel_mean(module, output)
            old = getattr(module, "bias", None)
            new = shift if old is None else old + shift
            module.bias = nn.Parameter(new, requires_grad=False)
            shape = [1] * output.dim()
            shape[_channel_axis(module, output)] = -1
            return output + shift.reshape(shape)

        return hook

    with _hooks({name: layers[name] for name in means}, correct):
        run()


def _channel_axis(module: nn.Module, output: Tensor) -> int:
    return output.dim() - 1 if isinstance(module, nn.Linear) else 1


def channel_mean(module: nn.Module, output: Tensor) -> Tensor:
    """Return the mean of each channel of what a layer returned, (C,)."""
    axis = _channel_axis(module, output)
    return output.mean([d for d in range(output.dim()) if d != axis])


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
