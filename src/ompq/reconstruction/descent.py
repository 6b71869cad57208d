"""Gradient descent on one block, shared by all ways of learning its rounding."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ompq.processes import add_up, average, process_count
from ompq.reconstruction.blocks import BlockCache
from ompq.recording import detach_state
from ompq.samples import cudnn_kernels, evaluating, model_device
from ompq.stages import Progress

_REPORT_EVERY = 50  # iterations; on a CPU these can take seconds
_EAGER = 3  # steps that run before one is captured on CUDA


class Picked(NamedTuple):
    """What a step sees, on the block's device; samples first."""

    inputs: list[Tensor]
    float_inputs: list[Tensor]  # what the float block gets in their place, or none
    target: Tensor
    weights: Tensor | None  # importance of each element of the target


@dataclass(eq=False)
class Descent:
    """Adam on a block; on CUDA a step is captured once and replayed.

    Everything that changes from step to step (the step's number, and with it the
    samples, the rates and Adam's state) lives on the device, so that a replayed graph
    needs nothing from the host. Processes, each with samples of its own, average their
    gradients.
    """

    block: nn.Module
    cache: BlockCache
    learned: list[tuple[list[Tensor], int]]  # tensors, and the column of their rate
    schedule: Tensor  # what each step reads, (iterations, columns)
    order: Tensor  # which samples each step sees, (iterations, batch size)
    # Called with what a step sees and its row of the schedule; returns the loss, and
    # the error of the output as a share of what rounding to nearest leaves.
    loss: Callable[[Picked, Tensor], tuple[Tensor, Tensor]]
    # Called before a step with its number and Adam, for what a replayed step cannot do.
    # It must not hold the descent: the two would keep each other, and their memory.
    before: Callable[[int, torch.optim.Adam], None] = lambda _step, _adam: None
    # Called with the row after Adam has moved what is learned; may be replayed.
    after: Callable[[Tensor], None] = lambda _row: None

    def __post_init__(self) -> None:
        self.device = model_device(self.block)
        self.schedule = self.schedule.to(self.device)
        self.now = self.schedule[:1].clone()  # the row of this step
        self.number = torch.zeros(1, dtype=torch.long, device=self.device)
        self.shares = torch.zeros((), device=self.device)  # since the last report
        self.tensors = [tensor for tensors, _ in self.learned for tensor in tensors]
        for tensor in self.tensors:
            tensor.requires_grad_()
        self.optimizer = torch.optim.Adam(
            [{"params": given, "lr": self.now[0, at]} for given, at in self.learned],
            capturable=self.device.type == "cuda",
            fused=True,
        )
        # A cache in host memory is picked from there and copied into fixed places.
        home = self.cache.targets.device
        self.order = self.order.to(home)
        first = [] if home == self.device else self._pick(self.order[0])
        self.places = [tensor.to(self.device) for tensor in first]
        self.keeps_state = True  # until a step has shown that no module keeps any

    def run(self, progress: Progress | None) -> None:
        """Do all steps."""
        total = len(self.schedule)
        every = min(_REPORT_EVERY, total)
        advance = self._captured() if self.device.type == "cuda" else self._advance
        # The steps that warm the capture up are steps like any other.
        for done in range(int(self.number.item()), total):
            self._prepare(done)
            advance()
            if progress and (done + 1) % every == 0:
                share = self.shares.item() / every
                progress(done + 1, total, f"error {share:.0%} of rounding to nearest")
                self.shares.zero_()
        for tensor in self.tensors:
            tensor.requires_grad, tensor.grad = False, None

    @torch.no_grad()
    def _prepare(self, step: int) -> None:
        self.before(step, self.optimizer)
        if self.places:
            found = self._pick(self.order[step])
            for place, tensor in zip(self.places, found, strict=True):
                place.copy_(tensor)

    def _captured(self) -> Callable[[], None]:
        """Return a step that replays its kernels; processes talk between two graphs."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done in range(min(_EAGER, len(self.schedule))):
                self._prepare(done)
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        if process_count() == 1:
            return _kernel_graph(self._advance)
        compute, move = _kernel_graph(self._compute), _kernel_graph(self._move)

        def advance() -> None:
            compute()
            self._average()
            move()

        return advance

    def _advance(self) -> None:
        self._compute()
        self._average()
        self._move()

    def _average(self) -> None:
        average(tensor.grad for tensor in self.tensors)

    def _compute(self) -> None:
        """Pick samples and compute the gradients of the loss."""
        torch.index_select(self.schedule, 0, self.number, out=self.now)
        found = self.places
        if not found:
            found = self._pick(self.order.index_select(0, self.number).squeeze(0))
        count, others = len(self.cache.inputs), len(self.cache.float_inputs)
        inputs, (target, *weights) = found[:count], found[count + others :]
        plain = found[count : count + others]
        picked = Picked(inputs, plain, target, next(iter(weights), None))
        loss, share = self.loss(picked, self.now[0])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.keeps_state = self.keeps_state and detach_state(self.block)
        self.shares += share.detach()

    def _move(self) -> None:
        """Move what is learned."""
        self.optimizer.step()
        with torch.no_grad():
            self.after(self.now[0])
        self.number += 1

    def _pick(self, index: Tensor) -> list[Tensor]:
        """Return inputs, those of the float network, targets and weights."""
        inputs, target, weights = self.cache.pick(index)
        others = [t.index_select(0, index) for t in self.cache.float_inputs]
        return [*inputs, *others, target, *([] if weights is None else [weights])]


def _kernel_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Capture the kernels of a step, and return what runs them again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def kept_if_better(
    block: nn.Module, cache: BlockCache, batch_size: int, power: float = 2.0
) -> Iterator[list[float]]:
    """Yield a list of a block's errors before and after; undo what did not help."""
    errors = [_block_error(block, cache, batch_size, power)]
    state = copy.deepcopy(block.state_dict())
    yield errors
    errors.append(_block_error(block, cache, batch_size, power))
    if not errors[1] < errors[0]:  # NaN is not an improvement
        block.load_state_dict(state)


def _block_error(
    block: nn.Module, cache: BlockCache, batch_size: int, power: float
) -> float:
    """Return ||output − target||² / ||target||² over all samples, or another power."""
    device = model_device(block)
    error = torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(block):
        for index in cache.batches(batch_size):
            inputs, target, _ = cache.pick(index)
            output = cache.call(block, [t.to(device) for t in inputs])
            target = target.to(device)
            error += (output - target).double().abs().pow(power).sum()
            norm += target.double().abs().pow(power).sum()
    tiny = torch.finfo(torch.float64).tiny
    return float(add_up(error) / add_up(norm).clamp_min(tiny))


@contextmanager
def optimising(block: nn.Module, seed: int) -> Iterator[None]:
    """Make the arithmetic repeatable, and leave the global generators as they were."""
    device = model_device(block)
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        cudnn_kernels(repeatable=True),
        evaluating(block),
        torch.enable_grad(),
    ):
        torch.manual_seed(seed)
        yield
