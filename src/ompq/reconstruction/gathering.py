"""Inputs and targets of one block after the other, kept where they fit."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ompq.graph.observation import tensors_in
from ompq.reconstruction.blocks import BlockCache, emptied
from ompq.samples import (
    Batch,
    Samples,
    call,
    evaluating,
    first_samples,
    model_device,
    sample_batches,
    to_device,
)


class _BlockReached(Exception):  # noqa: N818  (a signal, not an error)
    """Stops a forward pass once the block has what was wanted."""


class _Row(NamedTuple):
    """What one batch gives: inputs of both blocks, and what the float one returns."""

    arguments: Any
    inputs: list[Tensor]
    float_inputs: list[Tensor]
    targets: list[Tensor]

    def on(self, device: torch.device) -> "_Row":
        moved = ([t.to(device) for t in part] for part in self[1:])
        return _Row(self.arguments, *moved)


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

    def rows() -> Iterator[_Row]:
        for batch in sample_batches(samples, batch_size=batch_size):
            given, _ = _run_to(quantized, names[0], None, batch)
            plain, output = _run_to(model, *names, batch)
            tensors = list(tensors_in(given)), list(tensors_in(plain))
            yield _Row(emptied(given), *tensors, [next(tensors_in(output))])

    return _collected(rows(), model_device(model), limit)


def gather_next(
    last: BlockCache,
    names: tuple[str, str],
    quantized: nn.Module,
    model: nn.Module,
    samples: Samples,
    *,
    limit: int,
) -> BlockCache | None:
    """Return the cache of a block that gets what the block before it returns.

    Only these two blocks run, and not all that is before them. Whether the one gets
    just what the other returns is tried with the first samples.

    Args:
        last: The cache of the block before.
        names: The block before, and this one.
        quantized: The block before is done.
        model: The float network.
        samples: Inputs of the networks.
        limit: Bytes up to which the cache stays on the network's device.

    Returns:
        What :func:`gather` would return, or None where only that can tell.
    """
    device = model_device(model)
    before, block = quantized.get_submodule(names[0]), model.get_submodule(names[1])
    alone = emptied(((torch.empty(0),), {}))  # one tensor and nothing else
    if last.arguments != alone:
        return None
    first = first_samples(samples, last.sizes[0])
    given, _ = _run_to(quantized, names[1], None, first)
    plain, _ = _run_to(model, names[1], None, first)
    if emptied(given) != alone:
        return None
    pieces = zip(
        torch.split(last.inputs[0], last.sizes),
        torch.split(last.targets, last.sizes),
        strict=True,
    )

    def rows() -> Iterator[_Row]:
        with evaluating(before), evaluating(block):
            for inputs, outputs in pieces:
                made, plain = before(inputs.to(device)), outputs.to(device)
                target = next(tensors_in(block(plain)))
                yield _Row(alone, list(tensors_in(made)), [plain], [target])

    found = rows()
    row = next(found)
    same = zip((given, plain), (row.inputs, row.float_inputs), strict=True)
    if not all(_equal(list(tensors_in(one)), other) for one, other in same):
        return None
    return _collected(_chained(row, found), device, limit)


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _chained(first: _Row, rest: Iterable[_Row]) -> Iterator[_Row]:
    yield first
    yield from rest


def _collected(rows: Iterable[_Row], device: torch.device, limit: int) -> BlockCache:
    """Put the rows of all batches together, in host memory beyond the limit."""
    kept: list[_Row] = []
    for row in rows:
        kept.append(row.on(device))
        if sum(_bytes(t) for one in kept for t in tensors_in(one[1:])) > limit:
            device = torch.device("cpu")
            kept = [one.on(device) for one in kept]
    inputs, others, (targets,) = (
        [torch.cat(parts) for parts in zip(*column, strict=True)]
        for column in list(zip(*kept, strict=True))[1:]
    )
    sizes = [len(row.targets[0]) for row in kept]
    return BlockCache(inputs, targets, kept[0].arguments, others, sizes)


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
