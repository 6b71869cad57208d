"""Inputs and outputs of one block, gathered batch by batch and kept where they fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ompq.graph.observation import tensors_in
from ompq.samples import (
    Batch,
    Samples,
    call,
    evaluating,
    model_device,
    sample_batches,
    to_device,
)


class _BlockReached(Exception):  # noqa: N818  (a signal, not an error)
    """Stops a forward pass once the block has what was wanted."""


@dataclass
class BlockCache:
    """What a block gets and what it should return, for all samples.

    Attributes:
        inputs: The block's tensor arguments, each (N, ...).
        targets: What the float block returns, (N, ...).
        arguments: The block's arguments as nested tuples, lists and dicts, with the
            positions of ``inputs`` in place of the tensors.
        float_inputs: What the float block gets in their place, or none.
        weights: Importance of each element of the targets, or None.
        clip: Range to which an activation after the block cuts its output, or None.
    """

    inputs: list[Tensor]
    targets: Tensor
    arguments: Any
    float_inputs: list[Tensor] = field(default_factory=list)
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


def gather(
    quantized: nn.Module,
    model: nn.Module,
    names: tuple[str, str],
    samples: Samples,
    *,
    batch_size: int,
    limit: int,
) -> BlockCache:
    """Run both networks up to a block and keep its inputs and targets.

    Args:
        quantized: Its blocks before this one are done; the inputs come from it.
        model: The float network; the targets come from it.
        names: The block, and the module of the float network that ends it.
        samples: Inputs of the networks.
        batch_size: How many samples run at a time.
        limit: Bytes up to which the cache stays on the network's device.
    """
    keep_on = model_device(model)
    # For each batch: inputs, float inputs, targets.
    rows: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []
    arguments: Any = None
    for batch in sample_batches(samples, batch_size=batch_size):
        given, _ = _run_to(quantized, names[0], None, batch)
        plain, output = _run_to(model, *names, batch)
        arguments = arguments or _emptied(given)
        target = next(tensors_in(output))
        row = (list(tensors_in(given)), list(tensors_in(plain)), [target])
        rows.append(_moved(row, keep_on))
        if sum(_bytes(t) for t in tensors_in(rows)) > limit:
            keep_on = torch.device("cpu")
            rows = [_moved(row, keep_on) for row in rows]
    inputs, others, (targets,) = (
        [torch.cat(parts) for parts in zip(*column, strict=True)]
        for column in zip(*rows, strict=True)
    )
    return BlockCache(inputs, targets, arguments, others)


def _moved(
    row: tuple[list[Tensor], list[Tensor], list[Tensor]], device: torch.device
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    inputs, others, targets = ([t.to(device) for t in part] for part in row)
    return inputs, others, targets


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _run_to(
    model: nn.Module, start: str, end: str | None, batch: Batch
) -> tuple[Any, Any]:
    """Run a network as far as needed.

    Returns:
        The arguments of module ``start``, and what ``end`` returns, unless it is None.
    """
    arguments: list[Any] = []
    outputs: list[Any] = []

    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments.append((args, kwargs))
        if end is None:
            raise _BlockReached

    def after(_module: nn.Module, _args: Any, result: Any) -> None:
        outputs.append(result)
        raise _BlockReached

    first = model.get_submodule(start)
    handles = [first.register_forward_pre_hook(before, with_kwargs=True)]
    if end is not None:
        last = model.get_submodule(end)
        handles.append(last.register_forward_hook(after, prepend=True))
    try:
        with evaluating(model):
            call(model, to_device(batch, model_device(model)))
    except _BlockReached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return arguments[0], outputs[0] if outputs else None


def _emptied(value: Any, count: list[int] | None = None) -> Any:
    """Replace each tensor by its number in the order of :func:`tensors_in`."""
    count = [0] if count is None else count
    if isinstance(value, Tensor):
        count[0] += 1
        return _Slot(count[0] - 1)
    if isinstance(value, tuple | list):
        return type(value)(_emptied(item, count) for item in value)
    if isinstance(value, dict):
        return {key: _emptied(item, count) for key, item in value.items()}
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
