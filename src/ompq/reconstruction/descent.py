"""Gradient descent on one block, shared by all methods that learn its rounding."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ompq.network.observation import detach_state, tensors_in, with_tensors
from ompq.parallel import add_up, average
from ompq.progress import Progress
from ompq.reconstruction.block_data import BlockCache
from ompq.samples import cudnn_kernels, evaluating, model_device
from ompq.working_memory import release

_WARMUP_STEPS = 3  # eager steps before one is captured as a CUDA graph


class Picked(NamedTuple):
    """The samples of one step, on the block's device; each tensor is (N, ...)."""

    inputs: list[Tensor]
    float_inputs: list[Tensor]  # the float network's inputs of the block, or empty
    target: Tensor
    weights: Tensor | None  # importance of each element of the target


@dataclass(eq=False)
class Descent:
    """Adam on a block; on CUDA, one step is captured as a graph and replayed.

    Everything that changes between steps (the step number, which selects the samples
    and the learning rates, and Adam's state) lives on the device, so that a replayed
    graph needs nothing from the host. Several processes, each with its own samples,
    average their gradients.
    """

    block: nn.Module
    cache: BlockCache
    learned: list[tuple[list[Tensor], int]]  # tensors, and the column of their rate
    schedule: Tensor  # learning rates and other values of each step, (steps, columns)
    order: Tensor  # indices of the samples of each step, (steps, batch size)
    # Called with the samples and the schedule row of a step. Returns the loss, and the
    # output error relative to that before learning.
    loss: Callable[[Picked, Tensor], tuple[Tensor, Tensor]]
    # Called with the step number and Adam before each step, for work that cannot be
    # captured. It must not refer to the Descent: a reference cycle would keep both
    # alive, with their memory.
    before: Callable[[int, torch.optim.Adam], None] = lambda _step, _adam: None
    # Called with the schedule row after each Adam update; may be captured.
    after: Callable[[Tensor], None] = lambda _row: None
    capture: bool = True  # whether to capture a step on CUDA
    report_every: int = 50  # steps; on a CPU these can take seconds
    start: str = "rounding alone"  # what progress compares the error with

    def __post_init__(self) -> None:
        self.device = model_device(self.block)
        self.schedule = self.schedule.to(self.device)
        self.row = self.schedule[:1].clone()  # the schedule row of this step
        self.step = torch.zeros(1, dtype=torch.long, device=self.device)
        self.error_sum = torch.zeros((), device=self.device)  # since the last report
        self.tensors = [tensor for tensors, _ in self.learned for tensor in tensors]
        for tensor in self.tensors:
            tensor.requires_grad_()
        self.optimizer = torch.optim.Adam(
            [{"params": given, "lr": self.row[0, at]} for given, at in self.learned],
            capturable=self.device.type == "cuda",
            fused=True,
        )
        home = self.cache.targets.device
        self.order = self.order.to(home)
        # Samples of a cache in host memory are copied into fixed buffers on the device.
        self.buffers: Picked | None = None
        if home != self.device:
            first = self._pick(self.order[0])
            moved = [tensor.to(self.device) for tensor in tensors_in(first)]
            self.buffers = with_tensors(first, moved)
        self.keeps_state = True  # until a step shows that no module keeps any

    def run(self, progress: Progress | None) -> None:
        """Run all steps."""
        total = len(self.schedule)
        every = min(self.report_every, total)
        compute, update = self._compute, self._update
        if self.capture and self.device.type == "cuda":
            compute, update = self._captured()
        # The warm-up before the capture has already done the first steps.
        for step in range(int(self.step.item()), total):
            self._prepare(step)
            compute()
            average(tensor.grad for tensor in self.tensors)
            update()
            if progress and (step + 1) % every == 0:
                error = self.error_sum.item() / every
                progress(step + 1, total, f"error {error:.0%} of {self.start}")
                self.error_sum.zero_()
        for tensor in self.tensors:
            tensor.requires_grad, tensor.grad = False, None

    @torch.no_grad()
    def _prepare(self, step: int) -> None:
        self.before(step, self.optimizer)
        if self.buffers is not None:
            picked = tensors_in(self._pick(self.order[step]))
            for buffer, tensor in zip(tensors_in(self.buffers), picked, strict=True):
                buffer.copy_(tensor)

    def _captured(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Run the first steps, capture both parts of one; return what replays them."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(min(_WARMUP_STEPS, len(self.schedule))):
                self._prepare(step)
                self._compute()
                average(tensor.grad for tensor in self.tensors)
                self._update()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        return _kernel_graph(self._compute), _kernel_graph(self._update)

    def _compute(self) -> None:
        """Pick samples and compute the gradients of the loss."""
        torch.index_select(self.schedule, 0, self.step, out=self.row)
        picked = self.buffers
        if picked is None:
            picked = self._pick(self.order.index_select(0, self.step).squeeze(0))
        loss, error = self.loss(picked, self.row[0])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.keeps_state = self.keeps_state and detach_state(self.block)
        self.error_sum += error.detach()

    def _update(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            self.after(self.row[0])
        self.step += 1

    def _pick(self, index: Tensor) -> Picked:
        cache = self.cache
        inputs, target = cache.pick(index)
        float_inputs = [t.index_select(0, index) for t in cache.float_inputs]
        weights = cache.weights
        if weights is not None:
            weights = weights.index_select(0, index)
        return Picked(inputs, float_inputs, target, weights)


def _kernel_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as a CUDA graph and return the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def kept_if_better(
    block: nn.Module, cache: BlockCache, batch_size: int, power: float = 2.0
) -> Iterator[list[float]]:
    """Undo changes to a block that do not lower its error; yield [before, after].

    The samples that are held out decide, if there are any. The second error is
    appended to the list when the context ends.
    """
    errors = [_block_error(block, cache, batch_size, power)]
    state = copy.deepcopy(block.state_dict())
    yield errors
    errors.append(_block_error(block, cache, batch_size, power))
    if not errors[1] < errors[0]:  # also if it is NaN
        block.load_state_dict(state)


def _block_error(
    block: nn.Module, cache: BlockCache, batch_size: int, power: float
) -> float:
    """Return sum |output − target|^power / sum |target|^power, as held out."""
    device = model_device(block)
    error = torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(block):
        for index in cache.judging(batch_size):
            inputs, target = cache.pick(index)
            output = cache.call(block, [t.to(device) for t in inputs])
            target = target.to(device)
            error += (output - target).abs().pow(power).sum(dtype=torch.float64)
            norm += target.abs().pow(power).sum(dtype=torch.float64)
    release()
    tiny = torch.finfo(torch.float64).tiny
    return float(add_up(error) / add_up(norm).clamp_min(tiny))


@contextmanager
def optimising(block: nn.Module, seed: int) -> Iterator[torch.Generator | None]:
    """Use deterministic kernels; yield a generator of random numbers with the seed.

    On CUDA it is None, and the device's own generator has the seed meanwhile: a
    captured graph uses that. On a CPU threads would disturb each other's.
    """
    device = model_device(block)
    with ExitStack() as stack:
        generator = None
        if device.type == "cuda":
            stack.enter_context(torch.random.fork_rng(devices=[device]))
            torch.manual_seed(seed)
        else:
            generator = torch.Generator(device).manual_seed(seed)
        stack.enter_context(cudnn_kernels(repeatable=True))
        stack.enter_context(evaluating(block))
        stack.enter_context(torch.enable_grad())
        yield generator
    release()
