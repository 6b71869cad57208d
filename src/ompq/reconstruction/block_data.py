"""Inputs and targets of each block, from the quantized and the float network."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ompq.configs import BlockLossKind
from ompq.errors import QuantizationError, SampleError
from ompq.network.dataflow import call_flow
from ompq.network.folding import normalised_by
from ompq.network.graph import observe
from ompq.network.observation import ForwardPass, tensors_in, with_tensors
from ompq.outputs import Outputs
from ompq.quantization.moments import Moments
from ompq.quantization.record import quantization_of
from ompq.reconstruction.block_fisher import (
    ChannelFisher,
    channel_fisher,
    clamp_positive,
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


@dataclass(frozen=True)
class Arguments:
    """The signature of a block's call: an example, and which tensors hold samples."""

    example: Any  # (args, kwargs) of one call, possibly nested
    layouts: Sequence[Layout]  # the layout of each tensor in the example, in order

    def own(self, given: Any) -> list[Tensor]:
        """Return those tensors of (args, kwargs) that differ by sample, (N, ...)."""
        pairs = zip(self.layouts, tensors_in(given), strict=True)
        return [one.samples_first(t) for one, t in pairs if one.axis is not None]

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

    inputs: list[Tensor]  # tensor arguments that differ by sample, each (N, ...)
    targets: Tensor  # outputs of the float block, (N, ...)
    arguments: Arguments  # how the block is called with the inputs
    # The float network's inputs of the block, as ``inputs``; empty if not needed.
    float_inputs: list[Tensor] = field(default_factory=list)
    batch_size: int = 64  # number of samples per forward pass of the networks
    weights: Tensor | None = None  # importance of each element of the targets
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

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield sample indices in order, ``size`` at a time."""
        device = self.targets.device
        yield from torch.split(torch.arange(len(self.targets), device=device), size)


class _NetworkPass(ForwardPass):
    """A forward pass of one batch that can be paused at blocks."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__(lambda: run_batch(model, batch))
        self._model = model

    def run_to(self, start: str, end: str | None = None) -> tuple[Any, Any]:
        """Run up to the block ``start``, and through ``end`` if it is given.

        Return (args, kwargs) of ``start``, and the output of ``end``. A pass that is
        already past the block starts again from the input.
        """
        was_paused = self.paused
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

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if end is None:
                self.pause(((args, kwargs), None))
            elif not arguments:  # cloned: the block may modify its input in place
                copies = [t.clone() for t in tensors_in((args, kwargs))]
                arguments.append(with_tensors((args, kwargs), copies))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if arguments:
                self.pause((arguments[0], output))

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

    def to(self, device: torch.device) -> "_GatheredBatch":
        return _GatheredBatch(*([t.to(device) for t in part] for part in self))

    def bytes(self) -> int:
        return sum(t.nbytes for t in tensors_in(self))


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
        the next block start from the network's input.
        """
        self._networks = quantized, model
        record = quantization_of(quantized)
        self._graph, self._output, self._samples = record.graph, record.output, samples
        self._batch_size, self._limit = batch_size, limit
        one, two = samples.first_batch(1), samples.first_batch(2)
        if batch_length(two) == 1:
            two = with_tensors(one, [torch.cat([t, t]) for t in tensors_in(one)])
        # Comparing these shows which dimension of a block's tensors is the samples'.
        self._probes = [_NetworkPass(model, batch) for batch in (one, two)]
        self._example = _NetworkPass(quantized, one)
        self._batches = list(samples.batches(batch_size))
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
        end = normalised_by(model, units[block]) if block in units else last or block
        with evaluating(quantized, model):
            arguments, layout = self._layouts(block, end)
            batches = self._gather_batches(block, end, arguments, layout)
        inputs, others, (targets,) = (
            [_concatenated(parts) for parts in zip(*column, strict=True)]
            for column in zip(*batches, strict=True)
        )
        size = self._batch_size
        cache = BlockCache(inputs, targets, arguments, others, size, layout=layout)
        cache.moments = moments
        if block in units:
            cache.clip = _CLIPS.get(units[block].activation)
        given, device = self._batches, targets.device
        if loss == "fisher":
            found = fisher_weights(
                model, end, given, outputs=self._outputs, layout=layout
            )
            weights = torch.cat([part.to(device) for part in found])
            cache.weights = weights / clamp_positive(weights.mean())
        elif loss == "low_rank_fisher":
            # The whole network is a block without a name.
            ends = self._graph.blocks.get(last or block, [-1])
            unit = self._graph.units[ends[-1]]
            axis = output_axis(unit, targets.shape)
            matrix = fisher_matrix(
                model, end, given, axis=axis, outputs=self._outputs, layout=layout
            )
            cache.channels = channel_fisher(matrix, axis, fisher_rank)
        return cache

    @cached_property
    def _outputs(self) -> Outputs:
        return Outputs.of(self._networks[1], self._samples, self._output)

    def _gather_batches(
        self, block: str, end: str, arguments: Arguments, layout: Layout
    ) -> list[_GatheredBatch]:
        device = model_device(self._networks[1])
        batches: list[_GatheredBatch] = []
        for quantized_pass, float_pass in self._passes:
            given, _ = quantized_pass.run_to(block)
            float_given, output = float_pass.run_to(block, end)
            target = layout.samples_first(next(tensors_in(output)))
            inputs, float_inputs = arguments.own(given), arguments.own(float_given)
            batches.append(_GatheredBatch(inputs, float_inputs, [target]).to(device))
            size = sum(batch.bytes() for batch in batches)
            if 2 * size > self._limit:
                self.close()
            if size > self._limit:
                device = torch.device("cpu")
                batches = [batch.to(device) for batch in batches]
        return batches

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


def merged(
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


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        found = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise SampleError(
            f"a block's tensors differ in shape between batches, {found}; "
            "give samples of one size"
        )
    return torch.cat(list(parts))
