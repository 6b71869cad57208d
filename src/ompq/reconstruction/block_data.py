"""Inputs and targets of each block, from the quantized and the float network."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ompq.configs import BlockLossKind
from ompq.errors import QuantizationError, SampleError
from ompq.network.dataflow import call_flow
from ompq.network.folding import output_module
from ompq.network.graph import observe
from ompq.network.observation import ForwardPass, tensors_in, with_tensors
from ompq.outputs import Outputs
from ompq.quantization.moments import Moments
from ompq.quantization.record import quantization_of
from ompq.reconstruction.block_fisher import (
    ChannelFisher,
    channel_fisher,
    fisher_matrix,
    fisher_weights,
)
from ompq.reconstruction.block_layout import PART, Layout, layout_of, output_axis
from ompq.samples import (
    Batch,
    Collector,
    Samples,
    attached,
    batch_length,
    collect,
    evaluating,
    model_device,
    run_batch,
)
from ompq.scratch_file import Parked, Rows, ScratchFile, StoredRows, owns_memory
from ompq.working_memory import release, working_bytes


@dataclass(frozen=True)
class Arguments:
    """The signature of a block's call: an example, and which tensors hold samples."""

    example: Any  # (args, kwargs) of one call, possibly nested
    layouts: Sequence[Layout]  # the layout of each tensor in the example, in order

    def own(self, given: Any) -> list[Tensor]:
        """Return those tensors of (args, kwargs) that differ by sample, (N, ...)."""
        pairs = zip(self.layouts, tensors_in(given), strict=True)
        return [one.samples_first(t) for one, t in pairs if one.axis is not None]

    def sampled(self, given: Any) -> list[Tensor]:
        """Return the same tensors as they are."""
        pairs = zip(self.layouts, tensors_in(given), strict=True)
        return [tensor for layout, tensor in pairs if layout.axis is not None]

    def filled(self, own: Sequence[Tensor]) -> Any:
        """Return (args, kwargs) with these tensors; shared ones are the example's."""
        rest = iter(own)
        pairs = zip(self.layouts, tensors_in(self.example), strict=True)
        tensors = [
            shared if layout.axis is None else layout.restored(next(rest))
            for layout, shared in pairs
        ]
        return with_tensors(self.example, tensors)


@dataclass
class BlockCache:
    """A block's inputs and targets for all samples."""

    inputs: list[Rows]  # tensor arguments that differ by sample, each (N, ...)
    targets: Rows  # outputs of the float block, (N, ...)
    arguments: Arguments  # how the block is called with the inputs
    # The float network's inputs of the block, as ``inputs``; empty if not needed.
    float_inputs: list[Rows] = field(default_factory=list)
    batch_size: int = 64  # number of samples per forward pass of the networks
    # How many samples, the last ones, judge what is learned from the others; with 0,
    # all samples do both.
    held_out: int = 0
    # Of what is random while the block learns; None is the device's own.
    generator: torch.Generator | None = None
    weights: Rows | None = None  # importance of each element of the targets
    channels: "ChannelFisher | None" = None  # in which directions errors count more
    # Range to which the activation that follows clips the block's output, if any.
    clip: tuple[float, float | None] | None = None
    layout: Layout = Layout()  # of the block's output
    # Of the float outputs of the block's units, by name, where they are restored.
    moments: Mapping[str, Moments] = field(default_factory=dict)

    def call(self, block: nn.Module, tensors: list[Tensor]) -> Tensor:
        """Call the block with these inputs; return its first output, (N, ...)."""
        args, kwargs = self.arguments.filled(tensors)
        output = next(tensors_in(block(*args, **kwargs)))
        output = self.layout.samples_first(output)
        wanted = self.targets.shape[1:]
        if output.shape[1:] != wanted:
            raise QuantizationError(
                f"a {type(block).__name__} returns {tuple(output.shape[1:])} for a "
                f"sample, but {tuple(wanted)} in the float network; reconstruction "
                f"needs the same shapes. {PART}"
            )
        return self.clipped(output)

    def clipped(self, output: Tensor) -> Tensor:
        """Clip an output as the activation after the block does."""
        return output if self.clip is None else output.clamp(*self.clip)

    def pick(self, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return inputs and targets of the samples with these indices."""
        inputs = [t.index_select(0, index) for t in self.inputs]
        return inputs, self.clipped(self.targets.index_select(0, index))

    def energy(self) -> Tensor:
        """Return the mean square of the targets, ()."""
        total = torch.zeros((), dtype=torch.float64, device=self.targets.device)
        for index in self.batches(self.batch_size):
            total += (
                self.targets.index_select(0, index).square().sum(dtype=torch.float64)
            )
        return total / math.prod(self.targets.shape)

    @property
    def learned_from(self) -> int:
        """How many samples, the first ones, are learned from."""
        return len(self.targets) - self.held_out

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield sample indices in order, ``size`` at a time."""
        device = self.targets.device
        yield from torch.split(torch.arange(len(self.targets), device=device), size)

    def judging(self, size: int) -> Iterator[Tensor]:
        """Yield the indices of the samples that judge, ``size`` at a time."""
        first = self.learned_from if self.held_out else 0
        index = torch.arange(first, len(self.targets), device=self.targets.device)
        yield from torch.split(index, size)


class _NetworkPass(ForwardPass):
    """A forward pass of one batch that can be paused at blocks."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__(lambda: run_batch(model, batch))
        self._model, self._batch = model, batch
        self._parked: list[Parked] = []
        # What the two modules read between which the pass ran.
        self.holds: list[Any] = []

    def park(self, file: ScratchFile, tensors: Iterable[Tensor]) -> None:
        """Move tensors that a paused pass holds to a file until it goes on."""
        self.holds = []
        kept = tensors_in((self._batch, [*self._model.parameters()]))
        kept_storages = {t.untyped_storage().data_ptr() for t in kept}
        for parked in self._parked:
            parked.park()
        self._parked = [parked for parked in self._parked if parked.alive]
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if address and address not in kept_storages and owns_memory(tensor):
                self._parked.append(Parked(file, tensor))

    def close(self) -> None:
        """Give up the pass and free what it holds; it may start again."""
        super().close()
        self._parked = []

    def run_to(self, start: str, end: str | None = None) -> tuple[Any, Any]:
        """Run up to the block ``start``, and through ``end`` if it is given.

        Return (args, kwargs) of ``start``, and the output of ``end``. A pass that is
        already past the block starts again from the input.
        """
        was_paused = self.paused
        for parked in self._parked:
            parked.restore()
        found = self._advance(start, end)
        if found is None and was_paused:
            found = self._advance(start, end)
        if found is None:
            raise QuantizationError(
                f"block {start} runs for some samples and not for others; "
                "reconstruction needs a network that runs every block each time"
            )
        return found  # type: ignore[no-any-return]

    def _advance(self, start: str, end: str | None) -> Any:
        arguments: list[Any] = []
        self.holds = []

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if end is None:
                self.pause(((args, kwargs), None))
            elif not arguments:  # cloned: the block may modify its input in place
                copies = [t.clone() for t in tensors_in((args, kwargs))]
                arguments.append(with_tensors((args, kwargs), copies))
                self.holds.append((args, kwargs))

        def after(_module: nn.Module, args: Any, output: Any) -> None:
            if arguments:
                self.holds.append(args)
                self.pause((arguments.pop(), output))

        first = self._model.get_submodule(start)
        # Before other hooks, so that the input is not rounded yet: the quantizers among
        # them round it again whenever the block runs.
        register = first.register_forward_pre_hook
        hooks = [register(before, prepend=True, with_kwargs=True)]
        if end is not None:
            last = self._model.get_submodule(end)
            hooks.append(last.register_forward_hook(after, prepend=True))
        with attached(hooks):
            return self.resume()


class _GatheredBatch(NamedTuple):
    """The fields of a :class:`BlockCache` for one batch."""

    inputs: list[Tensor]
    float_inputs: list[Tensor]
    targets: list[Tensor]

    def bytes_of(self, samples: int) -> float:
        """Return the bytes that this many samples like these take."""
        count = len(self.targets[0])
        return sum(t.nbytes for t in tensors_in(self)) / count * samples


class _Column:
    """One of the tensors of a :class:`BlockCache`, filled batch by batch."""

    def __init__(self, first: Tensor, count: int, home: torch.device | ScratchFile):
        """Make room for ``count`` samples like those in ``first``."""
        self._filled, self._shape = 0, first.shape[1:]
        self.rows: Rows = (
            StoredRows(home, first[:0])
            if isinstance(home, ScratchFile)
            else torch.empty((count, *self._shape), dtype=first.dtype, device=home)
        )

    def append(self, batch: Tensor) -> None:
        """Add the samples of a batch."""
        if batch.shape[1:] != self._shape:
            shapes = sorted({tuple(batch.shape[1:]), tuple(self._shape)})
            raise SampleError(
                f"a block's tensors differ in shape between batches, {shapes[0]} and "
                f"{shapes[1]}; give samples of one size"
            )
        if isinstance(self.rows, StoredRows):
            self.rows.append(batch)
            return
        end = self._filled + len(batch)
        self.rows[self._filled : end] = batch
        self._filled = end


# The part of an output that the next activation clips need not be reconstructed.
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

        Inputs of blocks come from the quantized network, targets from the float one.
        They stay on the network's device up to ``limit`` bytes. Paused passes hold
        about as much again, so above half the limit they are closed, and the passes for
        the next block start from the network's input. In host memory they take a
        quarter of what may be worked in; what exceeds it goes to a temporary file, as
        does what paused passes on a CPU hold.
        """
        release()
        self._networks = quantized, model
        record = quantization_of(quantized)
        self._graph, self._output, self._samples = record.graph, record.output, samples
        self._limit, self._host_limit = limit, working_bytes() // 4
        self._file, self._parking, self._closing = ScratchFile(), False, False
        self._batch_size = batch_size
        one, two = samples.first_batch(1), samples.first_batch(2)
        if batch_length(two) == 1:
            two = with_tensors(one, [torch.cat([t, t]) for t in tensors_in(one)])
        # Comparing these shows which dimension of a block's tensors is the samples'.
        self._probes = [_NetworkPass(model, batch) for batch in (one, two)]
        self._example = _NetworkPass(quantized, one)
        self._batches = list(samples.batches(self._batch_size))
        self._passes = [
            (_NetworkPass(quantized, batch), _NetworkPass(model, batch))
            for batch in self._batches
        ]

    def gather(
        self,
        block: str,
        last: str = "",
        *,
        loss: BlockLossKind = "squared",
        fisher_rank: int = 16,
        moments: Mapping[str, Moments] = MappingProxyType({}),
    ) -> BlockCache:
        """Run both networks up to a block and return its inputs and targets.

        All earlier blocks must be reconstructed already. The targets are the outputs of
        ``last``, which may be a later block. A ``loss`` other than ``squared`` also
        needs gradients of the float network.
        """
        quantized, model = self._networks
        units = {unit.name: unit for unit in self._graph.units}
        if any(unit.calls != 1 for unit in units.values() if unit.block == block):
            self.close()  # a paused pass may already be past the first call
        # A lone unit ends after its norm, which is folded in the quantized network.
        end = output_module(model, units[block]) if block in units else last or block
        with evaluating(quantized, model):
            arguments, layout = self._layouts(block, end)
            inputs, others, (targets,) = self._columns(block, end, arguments, layout)
        size = self._batch_size
        cache = BlockCache(inputs, targets, arguments, others, size, layout=layout)
        cache.moments = moments
        if block in units:
            cache.clip = _CLIPS.get(units[block].activation)
        if loss == "fisher":
            found = fisher_weights(
                model, end, self._batches, outputs=self._outputs, layout=layout
            )
            cache.weights = self._weights(found, targets)
        elif loss == "low_rank_fisher":
            # The whole network is a block without a name.
            ends = self._graph.blocks.get(last or block, [-1])
            unit = self._graph.units[ends[-1]]
            axis = output_axis(unit, targets.shape)
            matrix = fisher_matrix(
                model,
                end,
                self._batches,
                axis=axis,
                outputs=self._outputs,
                layout=layout,
            )
            cache.channels = channel_fisher(matrix, axis, fisher_rank)
        return cache

    @cached_property
    def _outputs(self) -> Outputs:
        return Outputs.of(self._networks[1], self._samples, self._output)

    def _weights(self, parts: Iterable[Tensor], targets: Rows) -> Rows:
        """Return weights whose mean is 1, where the targets are."""
        home = self._file if isinstance(targets, StoredRows) else targets.device
        column, total = None, 0.0
        for part in parts:
            column = column or _Column(part, len(targets), home)
            column.append(part)
            total += float(part.sum(dtype=torch.float64))
        assert column is not None
        factor = math.prod(targets.shape) / max(total, torch.finfo(torch.float32).tiny)
        column.rows.mul_(factor)
        return column.rows

    def _columns(
        self, block: str, end: str, arguments: Arguments, layout: Layout
    ) -> list[list[Rows]]:
        """Return the inputs, float inputs and targets of all samples."""
        columns: list[list[_Column]] = []
        for quantized_pass, float_pass in self._passes:
            given, _ = quantized_pass.run_to(block)
            float_given, output = float_pass.run_to(block, end)
            first = next(tensors_in(output))
            batch = _GatheredBatch(
                arguments.own(given),
                arguments.own(float_given),
                [layout.samples_first(first)],
            )
            if not columns:
                columns = self._empty_columns(batch, layout)
            for parts, tensors in zip(columns, batch, strict=True):
                for column, tensor in zip(parts, tensors, strict=True):
                    column.append(tensor)
            if self._closing:
                quantized_pass.close()
                float_pass.close()
            elif self._parking:
                read = arguments.sampled(float_pass.holds[0])
                if end != block:  # the last module of several has read something else
                    read += tensors_in(float_pass.holds[1])
                read = [t for t in read if len(t) == len(batch.targets[0])]
                quantized_pass.park(self._file, arguments.sampled(given))
                float_pass.park(self._file, [*read, first])
                del given, float_given, output, first, batch, read
                release()
        return [[column.rows for column in parts] for parts in columns]

    def _empty_columns(
        self, batch: _GatheredBatch, layout: Layout
    ) -> list[list[_Column]]:
        """Allocate room for all samples, in memory or in a file."""
        size = batch.bytes_of(len(self._samples))
        device = model_device(self._networks[1])
        home: torch.device | ScratchFile = device
        self._closing = 2 * size > self._limit
        if device.type == "cpu":
            self._parking |= 2 * size > self._host_limit
            home = self._file if size > self._host_limit else device
        elif size > self._limit:
            home = torch.device("cpu")
        # Of a target that all samples share, there is one for each pass.
        targets = len(self._passes) if layout.axis is None else len(self._samples)
        counts = len(self._samples), len(self._samples), targets
        return [
            [_Column(tensor, count, home) for tensor in part]
            for part, count in zip(batch, counts, strict=True)
        ]

    def close(self) -> None:
        """Close all passes; the next block is reached from the network's input."""
        for each in (*self._probes, self._example, *sum(self._passes, ())):
            each.close()

    def _layouts(self, block: str, end: str) -> tuple[Arguments, Layout]:
        """Return how a block is called, and the layout of its output."""
        example, _ = self._example.run_to(block)
        probes = [probe.run_to(block, end) for probe in self._probes]
        (given, output), (given_two, output_two) = probes
        pairs = zip(tensors_in(given), tensors_in(given_two), strict=True)
        layouts = [layout_of(a.shape, b.shape) for a, b in pairs]
        shapes = (next(tensors_in(each)).shape for each in (output, output_two))
        return Arguments(example, layouts), layout_of(*shapes)


def merge_blocks(
    model: nn.Module, blocks: Sequence[str], samples: Samples, most: int
) -> list[tuple[str, ...]]:
    """Group up to ``most`` consecutive blocks that can be reconstructed jointly.

    Each block of a group takes one tensor and returns one, which only the next block
    reads. A layer outside any block is never merged.
    """
    if most == 1:
        return [(name,) for name in blocks]
    recording = observe(model, samples)
    outputs = {each.name: each.output for each in recording.module_calls}
    call_counts = Counter(each.name for each in recording.module_calls)
    plain: set[str] = set()  # blocks that take one tensor and return one

    def collector(name: str) -> Collector:
        def check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            one_tensor = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            if one_tensor and isinstance(output, Tensor) and any(module.children()):
                plain.add(name)

        return check

    modules = [(model.get_submodule(name), collector(name)) for name in blocks]
    collect(model, samples.first(1), modules)

    def joins(first: str, second: str) -> bool:
        calls = [c for c in recording.calls if f"{c.module}.".startswith(f"{second}.")]
        inside = {call.position for call in calls}
        read = {source for call in calls for source in call.inputs} - inside
        output = cast(int, outputs[first])
        only_input = output not in recording.returned and read == {output}
        return only_input and inside.issuperset(call_flow(recording).readers(output))

    groups: list[tuple[str, ...]] = []
    for name in blocks:
        last = groups[-1] if groups else ()
        mergeable = 0 < len(last) < most and all(
            one in plain and call_counts[one] == 1 for one in (*last, name)
        )
        if mergeable and joins(last[-1], name):
            groups[-1] = (*last, name)
        else:
            groups.append((name,))
    return groups
