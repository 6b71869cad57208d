"""What a block gets, what it should return, and which of it matters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ompq.graph.observation import tensors_in
from ompq.samples import (
    Samples,
    call,
    evaluating,
    model_device,
    sample_batches,
    to_device,
)


@dataclass
class BlockCache:
    """What a block gets and what it should return, for all samples.

    Attributes:
        inputs: The block's tensor arguments, each (N, ...).
        targets: What the float block returns, (N, ...).
        arguments: The block's arguments as nested tuples, lists and dicts, with the
            positions of ``inputs`` in place of the tensors.
        float_inputs: What the float block gets in their place, or none.
        sizes: How many samples the networks ran at a time.
        weights: Importance of each element of the targets, or None.
        clip: Range to which an activation after the block cuts its output, or None.
    """

    inputs: list[Tensor]
    targets: Tensor
    arguments: Any
    float_inputs: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    weights: Tensor | None = None
    clip: tuple[float, float | None] | None = None

    def call(self, block: nn.Module, tensors: list[Tensor]) -> Tensor:
        """Call the block with these tensors in the places of its inputs."""
        args, kwargs = _filled(self.arguments, tensors)
        return self.clipped(next(tensors_in(block(*args, **kwargs))))

    def clipped(self, output: Tensor) -> Tensor:
        """Return what the activation after the block leaves of its output."""
        return output if self.clip is None else output.clamp(*self.clip)

    def pick(self, index: Tensor) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Return inputs, targets and weights of some samples."""
        inputs = [t.index_select(0, index) for t in self.inputs]
        weights = None if self.weights is None else self.weights.index_select(0, index)
        return inputs, self.clipped(self.targets.index_select(0, index)), weights

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield the sample numbers in order, ``size`` at a time."""
        device = self.targets.device
        yield from torch.split(torch.arange(len(self.targets), device=device), size)


def emptied(value: Any, count: list[int] | None = None) -> Any:
    """Replace each tensor by its number in the order of :func:`tensors_in`."""
    count = [0] if count is None else count
    if isinstance(value, Tensor):
        count[0] += 1
        return _Slot(count[0] - 1)
    if isinstance(value, tuple | list):
        return type(value)(emptied(item, count) for item in value)
    if isinstance(value, dict):
        return {key: emptied(item, count) for key, item in value.items()}
    return value


def _filled(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.number]
    if isinstance(value, tuple | list):
        return type(value)(_filled(item, tensors) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    return value


@dataclass(frozen=True)
class _Slot:
    number: int


def fisher_weights(
    model: nn.Module,
    name: str,
    samples: Samples,
    loss: Callable[[Any], Tensor],
    *,
    batch_size: int,
) -> Tensor:
    """Return squared gradients of a loss at the block's output, mean 1, (N, ...).

    Args:
        model: The float network.
        name: The block.
        samples: Inputs.
        loss: From the network's output to the loss, summed over samples.
        batch_size: How many samples run at a time.
    """
    block = model.get_submodule(name)
    found: list[Tensor] = []
    for batch in sample_batches(samples, batch_size=batch_size):
        seen: list[Tensor] = []

        def leaf(_module: nn.Module, _args: Any, result: Any, seen: Any = seen) -> Any:
            # Cut here: what is before the block needs no gradient.
            tensor = next(tensors_in(result)).detach().requires_grad_()
            seen.append(tensor)
            return tensor if isinstance(result, Tensor) else (tensor, *result[1:])

        handle = block.register_forward_hook(leaf)
        try:
            with evaluating(model), torch.enable_grad():
                output = call(model, to_device(batch, model_device(model)))
                (gradient,) = torch.autograd.grad(loss(output), seen[0])
        finally:
            handle.remove()
        found.append(gradient.square())
    weights = torch.cat(found)
    return weights / weights.mean().clamp_min(torch.finfo(weights.dtype).tiny)
