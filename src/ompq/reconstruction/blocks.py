"""Inputs and targets of one block after another."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ompq.errors import QuantizationError, SampleError
from ompq.graph import normalised_by, observe
from ompq.quantization import quantization_of
from ompq.recording import ForwardPass, tensors_in, with_tensors
from ompq.samples import (
    Batch,
    Collector,
    Samples,
    attached,
    batch_length,
    collect,
    evaluating,
    first_tensor,
    model_device,
    run_batch,
)


@dataclass(frozen=True)
class Layout:
    """Where the samples of a tensor are."""

    # The dimension along which they lie; None for what all samples share.
    axis: int | None = 0
    rows: int = 1  # how many neighbours along it belong to one sample

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
    """Return the layout of a tensor from its shapes with one sample and with two."""
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
    """How a block is called."""

    example: Any  # its arguments and keyword arguments, nested, for any samples
    layouts: Sequence[Layout]  # the layout of each tensor in it, in order

    def own(self, given: Any) -> list[Tensor]:
        """Return the tensors of such arguments that samples do not share, (N, ...)."""
        pairs = zip(self.layouts, tensors_in(given), strict=True)
        return [layout.sorted(t) for layout, t in pairs if layout.axis is not None]

    def filled(self, own: Sequence[Tensor]) -> Any:
        """Return arguments with these tensors, and what is shared as it was."""
        rest = iter(own)
        pairs = zip(self.layouts, tensors_in(self.example), strict=True)
        tensors = [
            shared if layout.axis is None else layout.restored(next(rest))
            for layout, shared in pairs
        ]
        return with_tensors(self.example, tensors)


@dataclass
class BlockCache:
    """What a block gets and what it should return, for all samples."""

    # The block's tensor arguments that samples do not share, each (N, ...).
    inputs: list[Tensor]
    targets: Tensor  # what the float block returns, (N, ...)
    arguments: Arguments  # how the block is called with them
    # What the float block gets in their place, or none.
    float_inputs: list[Tensor] = field(default_factory=list)
    batch_size: int = 64  # how many samples the networks ran at a time
    weights: Tensor | None = None  # importance of each element of the targets, or None
    # Range to which an activation after the block cuts its output, or None.
    clip: tuple[float, float | None] | None = None
    layout: Layout = Layout()  # where the samples are in what the block returns

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
    model: nn.Module, end: str, batches: Iterable[Batch], *, layout: Layout = Layout()
) -> Iterator[Tensor]:
    """Yield squared gradients of the network's loss at a block's output, (N, ...).

    The loss is −log p of the network's own most likely class.
    """
    for batch in batches:
        seen: list[Tensor] = []

        def leaf(_module: nn.Module, _args: Any, result: Any, seen: Any = seen) -> Any:
            # Cut here: what is before the block needs no gradient.
            first, *others = tensors_in(result)
            seen.append(first.detach().requires_grad_())
            # What follows may work in place, which a leaf does not allow.
            return with_tensors(result, [seen[0].clone(), *others])

        block = model.get_submodule(end)
        with evaluating(model), block.register_forward_hook(leaf), torch.enable_grad():
            output = run_batch(model, batch)
            log_p = first_tensor(output).flatten(1).log_softmax(1)
            (gradient,) = torch.autograd.grad(-log_p.amax(1).sum(), seen[0])
        yield layout.sorted(gradient.square())


class _NetworkPass(ForwardPass):
    """One batch on its way through a network, from block to block."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__(lambda: run_batch(model, batch))
        self._model = model

    def run_to(self, start: str, end: str | None = None) -> tuple[Any, Any]:
        """Run until a block is reached, and through it if its end is given.

        Return the block's arguments and keyword arguments, and what ``end`` returns. A
        pass that has left the block behind starts again from the input.
        """
        again = self.paused
        found = self._advance(start, end)
        if found is None and again:
            found = self._advance(start, end)
        if found is None:
            raise QuantizationError(
                f"block {start} runs for some samples and not for others; "
                "reconstruction needs a network that runs every block each time"
            )
        return found  # type: ignore[no-any-return]

    def _advance(self, start: str, end: str | None) -> Any:
        arguments: list[Any] = []

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if end is None:
                self.pause(((args, kwargs), None))
            elif not arguments:  # copied: the block may change its input in place
                copies = [t.clone() for t in tensors_in((args, kwargs))]
                arguments.append(with_tensors((args, kwargs), copies))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if arguments:
                self.pause((arguments[0], output))

        first = self._model.get_submodule(start)
        # First among the hooks: quantizers round the input when the block runs.
        register = first.register_forward_pre_hook
        hooks = [register(before, prepend=True, with_kwargs=True)]
        if end is not None:
            last = self._model.get_submodule(end)
            hooks.append(last.register_forward_hook(after, prepend=True))
        with attached(hooks):
            return self.resume()


class _Row(NamedTuple):
    """What one batch gives: inputs of both blocks, and what the float one returns."""

    inputs: list[Tensor]
    float_inputs: list[Tensor]
    targets: list[Tensor]

    def to(self, device: torch.device) -> "_Row":
        return _Row(*([t.to(device) for t in part] for part in self))

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in tensors_in(self))


# Activations cut off parts of the output that then need not be reconstructed.
_CLIPS = {"relu": (0.0, None), "relu6": (0.0, 6.0)}


class BlockRunner:
    """Runs the quantized and the float network side by side, block by block."""

    def __init__(
        self,
        quantized: nn.Module,
        model: nn.Module,
        samples: Samples,
        *,
        batch_size: int,
        limit: int,
    ) -> None:
        """Prepare the passes; nothing runs yet.

        Inputs of blocks come from the quantized network, targets from the float one. Up
        to ``limit`` bytes of them stay on the network's device. Passes hold about as
        much again: they pause up to half of the limit, and start from the input for
        each block beyond it.
        """
        self._networks = quantized, model
        self._graph = quantization_of(quantized).graph
        self._batch_size, self._limit = batch_size, limit
        one, two = samples.first_batch(1), samples.first_batch(2)
        if batch_length(two) == 1:
            two = with_tensors(one, [torch.cat([t, t]) for t in tensors_in(one)])
        # These show which dimension of a block's tensors grows with the samples.
        self._probes = [_NetworkPass(model, batch) for batch in (one, two)]
        self._example = _NetworkPass(quantized, one)
        self._batches = list(samples.batches(batch_size))
        self._passes = [
            (_NetworkPass(quantized, batch), _NetworkPass(model, batch))
            for batch in self._batches
        ]

    def gather(self, block: str, last: str = "", *, fisher: bool = False) -> BlockCache:
        """Run both networks to a block and return its inputs and targets.

        The blocks before it are done. The target is the output of ``last``, if that is
        a later block; ``fisher`` weights its elements by their importance.
        """
        quantized, model = self._networks
        units = {unit.name: unit for unit in self._graph.units}
        if any(unit.calls != 1 for unit in units.values() if unit.block == block):
            self.close()  # a later call is not the first one
        # A unit that stands alone ends after its norm, which the quantized one folded.
        end = normalised_by(model, units[block]) if block in units else last or block
        with evaluating(quantized, model):
            arguments, layout = self._layouts(block, end)
            rows = self._rows(block, end, arguments, layout)
        inputs, others, (targets,) = (
            [_together(parts) for parts in zip(*column, strict=True)]
            for column in zip(*rows, strict=True)
        )
        size = self._batch_size
        cache = BlockCache(inputs, targets, arguments, others, size, layout=layout)
        if block in units:
            cache.clip = _CLIPS.get(units[block].activation)
        if fisher:
            found = fisher_weights(model, end, self._batches, layout=layout)
            weights = torch.cat([part.to(targets.device) for part in found])
            tiny = torch.finfo(weights.dtype).tiny
            cache.weights = weights / weights.mean().clamp_min(tiny)
        return cache

    def _rows(
        self, block: str, end: str, arguments: Arguments, layout: Layout
    ) -> list[_Row]:
        device = model_device(self._networks[1])
        rows: list[_Row] = []
        for rounded, plain in self._passes:
            given, _ = rounded.run_to(block)
            wanted, output = plain.run_to(block, end)
            target = layout.sorted(next(tensors_in(output)))
            row = _Row(arguments.own(given), arguments.own(wanted), [target])
            rows.append(row.to(device))
            size = sum(one.bytes() for one in rows)
            if 2 * size > self._limit:
                self.close()
            if size > self._limit:
                device = torch.device("cpu")
                rows = [one.to(device) for one in rows]
        return rows

    def close(self) -> None:
        """Give up all passes; those for the next block start from the input."""
        for each in (*self._probes, self._example, *sum(self._passes, ())):
            each.close()

    def _layouts(self, block: str, end: str) -> tuple[Arguments, Layout]:
        """Return how a block is called, and where the samples are in its output."""
        example, _ = self._example.run_to(block)
        probes = [probe.run_to(block, end) for probe in self._probes]
        (given, output), (given_two, output_two) = probes
        pairs = zip(tensors_in(given), tensors_in(given_two), strict=True)
        layouts = [layout_of(a.shape, b.shape) for a, b in pairs]
        returned = (next(tensors_in(each)).shape for each in (output, output_two))
        return Arguments(example, layouts), layout_of(*returned)


def merged(
    model: nn.Module, blocks: Sequence[str], samples: Samples, most: int
) -> list[tuple[str, ...]]:
    """Group neighbouring blocks that can be reconstructed jointly.

    Each block of a group gets one tensor and returns one, which the next block alone
    reads. A layer outside any block is never merged.
    """
    if most == 1:
        return [(name,) for name in blocks]
    recording = observe(model, samples)
    consumers = recording.consumers()
    made = {each.name: each.output for each in recording.module_calls}
    times = Counter(each.name for each in recording.module_calls)
    plain: set[str] = set()  # blocks that get one tensor and return one

    def collector(name: str) -> Collector:
        def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensors = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            if tensors and isinstance(output, Tensor) and any(module.children()):
                plain.add(name)

        return see

    modules = [(model.get_submodule(name), collector(name)) for name in blocks]
    collect(model, samples.first(1), modules)

    def joins(first: str, second: str) -> bool:
        own = [c for c in recording.calls if f"{c.module}.".startswith(f"{second}.")]
        inside = {call.position for call in own}
        read = {source for call in own for source in call.inputs} - inside
        output = made[first]
        alone = output not in recording.returned and read == {output}
        return alone and inside.issuperset(consumers[cast(int, output)])

    groups: list[tuple[str, ...]] = []
    for name in blocks:
        last = groups[-1] if groups else ()
        usable = 0 < len(last) < most and all(
            one in plain and times[one] == 1 for one in (*last, name)
        )
        if usable and joins(last[-1], name):
            groups[-1] = (*last, name)
        else:
            groups.append((name,))
    return groups


def _together(parts: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        found = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise SampleError(
            f"a block's tensors differ in shape from batch to batch, {found}; "
            "give samples of one size"
        )
    return torch.cat(list(parts))
