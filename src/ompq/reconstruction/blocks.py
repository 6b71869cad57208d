"""What a block gets, what it should return, and which of it matters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ompq.graph.observation import tensors_in, with_tensors
from ompq.reconstruction.layouts import Arguments, Layout
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
        inputs: The block's tensor arguments that samples do not share, each (N, ...).
        targets: What the float block returns, (N, ...).
        arguments: How the block is called with them.
        float_inputs: What the float block gets in their place, or none.
        sizes: How many samples the networks ran at a time.
        weights: Importance of each element of the targets, or None.
        clip: Range to which an activation after the block cuts its output, or None.
        layout: Where the samples are in what the block returns.
    """

    inputs: list[Tensor]
    targets: Tensor
    arguments: Arguments
    float_inputs: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    weights: Tensor | None = None
    clip: tuple[float, float | None] | None = None
    layout: Layout = Layout()

    def call(self, block: nn.Module, tensors: list[Tensor]) -> Tensor:
        """Call the block with these tensors in the places of its inputs."""
        args, kwargs = self.arguments.filled(tensors)
        output = next(tensors_in(block(*args, **kwargs)))
        return self.clipped(self.layout.sorted(output))

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


def fisher_weights(
    model: nn.Module,
    name: str,
    samples: Samples,
    loss: Callable[[Any], Tensor],
    *,
    batch_size: int,
    layout: Layout = Layout(),
) -> Iterator[Tensor]:
    """Yield squared gradients of a loss at the block's output, (N, ...) a batch.

    Args:
        model: The float network.
        name: The module that ends the block.
        samples: Inputs.
        loss: From the network's output to the loss, summed over samples.
        batch_size: How many samples run at a time.
        layout: Where the samples are in the block's output.
    """
    block = model.get_submodule(name)
    for batch in sample_batches(samples, batch_size=batch_size):
        seen: list[Tensor] = []

        def leaf(_module: nn.Module, _args: Any, result: Any, seen: Any = seen) -> Any:
            # Cut here: what is before the block needs no gradient.
            first, *others = tensors_in(result)
            seen.append(first.detach().requires_grad_())
            # What follows may work in place, which a leaf does not allow.
            return with_tensors(result, [seen[0].clone(), *others])

        hook = block.register_forward_hook(leaf)
        with hook, evaluating(model), torch.enable_grad():
            output = call(model, to_device(batch, model_device(model)))
            (gradient,) = torch.autograd.grad(loss(output), seen[0])
        yield layout.sorted(gradient.square())
