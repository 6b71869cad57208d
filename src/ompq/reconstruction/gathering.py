"""Inputs and targets of one block after the other, kept where they fit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ompq.errors import SampleError
from ompq.graph.observation import tensors_in, with_tensors
from ompq.reconstruction.blocks import BlockCache
from ompq.reconstruction.layouts import Arguments, Layout, layout_of
from ompq.samples import (
    Batch,
    Samples,
    attached,
    batch_length,
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

    inputs: list[Tensor]
    float_inputs: list[Tensor]
    targets: list[Tensor]

    def on(self, device: torch.device) -> "_Row":
        return _Row(*([t.to(device) for t in part] for part in self))


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
    arguments, layout = _layouts(quantized, model, names, samples)

    def rows() -> Iterator[_Row]:
        for batch in sample_batches(samples, batch_size=batch_size):
            given, _ = _run_to(quantized, names[0], None, batch)
            plain, output = _run_to(model, *names, batch)
            target = layout.sorted(next(tensors_in(output)))
            yield _Row(arguments.own(given), arguments.own(plain), [target])

    return _collected(rows(), arguments, layout, model_device(model), limit)


def _layouts(
    quantized: nn.Module, model: nn.Module, names: tuple[str, str], samples: Samples
) -> tuple[Arguments, Layout]:
    """Return how a block is called, and where the samples are in what it returns."""
    one, two = first_samples(samples, 1), first_samples(samples, 2)
    if batch_length(two) == 1:
        two = with_tensors(one, [torch.cat([t, t]) for t in tensors_in(one)])
    example, _ = _run_to(quantized, names[0], None, one)
    runs = [_run_to(model, *names, batch) for batch in (one, two)]
    (given, output), (given_two, output_two) = runs
    pairs = zip(tensors_in(given), tensors_in(given_two), strict=True)
    layouts = [layout_of(a.shape, b.shape) for a, b in pairs]
    returned = (next(tensors_in(each)).shape for each in (output, output_two))
    return Arguments(example, layouts), layout_of(*returned)


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
    if not last.arguments.single or last.layout != Layout():
        return None
    device = model_device(model)
    before, block = quantized.get_submodule(names[0]), model.get_submodule(names[1])
    arguments, layout = _layouts(quantized, model, (names[1],) * 2, samples)
    if not arguments.single:
        return None
    pieces = list(
        zip(
            torch.split(last.inputs[0], last.sizes),
            torch.split(last.targets, last.sizes),
            strict=True,
        )
    )

    def handed_on(piece: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor]:
        with evaluating(before):
            return list(tensors_in(before(piece[0].to(device)))), piece[1].to(device)

    # Before the block runs: what it does not get may not fit it at all.
    first = first_samples(samples, last.sizes[0])
    given, _ = _run_to(quantized, names[1], None, first)
    wanted, _ = _run_to(model, names[1], None, first)
    made, plain = handed_on(pieces[0])
    if not (_equal(given, made) and _equal(wanted, [plain])):
        return None

    def rows() -> Iterator[_Row]:
        with evaluating(block):
            for piece in pieces:
                made, plain = handed_on(piece)
                target = layout.sorted(next(tensors_in(block(plain))))
                yield _Row(made, [plain], [target])

    return _collected(rows(), arguments, layout, device, limit)


def _equal(given: Any, made: list[Tensor]) -> bool:
    tensors = list(tensors_in(given))
    return len(tensors) == len(made) and all(map(torch.equal, tensors, made))


def _collected(
    rows: Iterable[_Row],
    arguments: Arguments,
    layout: Layout,
    device: torch.device,
    limit: int,
) -> BlockCache:
    """Put the rows of all batches together, in host memory beyond the limit."""
    kept: list[_Row] = []
    for row in rows:
        kept.append(row.on(device))
        if sum(_bytes(t) for one in kept for t in tensors_in(one)) > limit:
            device = torch.device("cpu")
            kept = [one.on(device) for one in kept]
    inputs, others, (targets,) = (
        [_together(parts) for parts in zip(*column, strict=True)]
        for column in zip(*kept, strict=True)
    )
    sizes = [len(row.targets[0]) for row in kept]
    return BlockCache(inputs, targets, arguments, others, sizes, layout=layout)


def _together(parts: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        found = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise SampleError(
            f"a block's tensors differ in shape from batch to batch, {found}; "
            "give samples of one size"
        )
    return torch.cat(list(parts))


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
    with suppress(_BlockReached), attached(handles), evaluating(model):
        call(model, to_device(batch, model_device(model)))
    return arguments[0], outputs[0] if outputs else None
