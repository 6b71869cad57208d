"""Inputs and targets of one block after another."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ompq.errors import QuantizationError, SampleError
from ompq.recording import tensors_in, with_tensors
from ompq.samples import (
    Batch,
    Samples,
    attached,
    batch_length,
    call,
    evaluating,
    model_device,
    to_device,
)


@dataclass(frozen=True)
class Layout:
    """Where the samples of a tensor are.

    Attributes:
        axis: The dimension along which they lie; None for what all samples share.
        rows: How many neighbours along it belong to one sample.
    """

    axis: int | None = 0
    rows: int = 1

    def sorted(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its samples first, (N, ...); N is 1 if shared."""
        if self.axis is None:
            return tensor[None]
        tensor = tensor.movedim(self.axis, 0)
        shape = (-1, self.rows, *tensor.shape[1:])
        return tensor if self.rows == 1 else tensor.reshape(shape)

    def restored(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`sorted`."""
        if self.axis is None:
            return tensor[0]
        tensor = tensor if self.rows == 1 else tensor.flatten(0, 1)
        return tensor.movedim(0, self.axis)


def layout_of(one: Sequence[int], two: Sequence[int]) -> Layout:
    """Return the layout of a tensor from its shapes with one sample and with two.

    Raises:
        QuantizationError: Something other than one dimension doubled.
    """
    if tuple(one) == tuple(two):
        return Layout(None)
    pairs = zip(one, two, strict=False)
    changed = [axis for axis, sizes in enumerate(pairs) if sizes[0] != sizes[1]]
    if len(one) == len(two) and len(changed) == 1:
        (axis,) = changed
        if two[axis] == 2 * one[axis]:
            return Layout(axis, one[axis])
    raise QuantizationError(
        f"a tensor of shape {tuple(one)} with one sample has {tuple(two)} with two; "
        "reconstruction needs one dimension that grows with the samples"
    )


@dataclass(frozen=True)
class Arguments:
    """How a block is called.

    Attributes:
        example: Its arguments and keyword arguments, nested, for any samples.
        layouts: The layout of each tensor in it, in order.
    """

    example: Any
    layouts: Sequence[Layout]

    @property
    def single(self) -> bool:
        """Whether it gets one tensor, its samples first, and nothing else."""
        args, kwargs = self.example
        alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        return alone and self.layouts[0] == Layout()

    def own(self, given: Any) -> list[Tensor]:
        """Return the tensors of such arguments that samples do not share, (N, ...)."""
        pairs = zip(self.layouts, tensors_in(given), strict=True)
        return [layout.sorted(t) for layout, t in pairs if layout.axis is not None]

    def filled(self, own: Sequence[Tensor]) -> Any:
        """Return arguments with these tensors, and what is shared as it was."""
        rest = iter(own)
        tensors = [
            shared if layout.axis is None else layout.restored(next(rest))
            for layout, shared in zip(
                self.layouts, tensors_in(self.example), strict=True
            )
        ]
        return with_tensors(self.example, tensors)


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
    for batch in samples.batches(batch_size):
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
        for batch in samples.batches(batch_size):
            given, _ = _run_to(quantized, names[0], None, batch)
            plain, output = _run_to(model, *names, batch)
            target = layout.sorted(next(tensors_in(output)))
            yield _Row(arguments.own(given), arguments.own(plain), [target])

    return _collected(rows(), arguments, layout, model_device(model), limit)


def _layouts(
    quantized: nn.Module, model: nn.Module, names: tuple[str, str], samples: Samples
) -> tuple[Arguments, Layout]:
    """Return how a block is called, and where the samples are in what it returns."""
    one, two = samples.first_batch(1), samples.first_batch(2)
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
    first = samples.first_batch(last.sizes[0])
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
