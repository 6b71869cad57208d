"""Learning the rounding of one block (AdaRound), steps of activations with it (LSQ)."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.quantization.layers import activation_quantizers, quantized_layers
from ompq.quantization.moments import FOR_MOMENTS, Moments, restore_moments
from ompq.quantizers.grids import LARGEST_BITS
from ompq.reconstruction.blocks import BlockCache
from ompq.reconstruction.settings import (
    RoundingConfig,
    first_decided,
    sample_order,
    schedule,
)
from ompq.reconstruction.soft_rounding import SoftRounding
from ompq.samples import Progress, cudnn_kernels, evaluating, model_device

_REPORT_EVERY = 50  # on a CPU fifty steps can take seconds


def learn_rounding(
    block: nn.Module,
    cache: BlockCache,
    config: RoundingConfig,
    *,
    moments: Mapping[str, Moments] | None = None,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Learn the rounding of a block's weights; keep it only where it helps.

    Args:
        block: A block of a quantized network; its weights are changed.
        cache: What it gets and should return.
        config: Steps and rates.
        moments: Names of layers in the block → what their outputs should have. They are
            restored first: the blocks before this one have changed since it got its
            biases.
        progress: Called now and then.

    Returns:
        The relative squared error of its output, before and after.
    """
    before = block_error(block, cache, config.batch_size)
    state = copy.deepcopy(block.state_dict())
    _restore(block, cache, moments or {})
    with _optimising(block, config.seed):
        step = _Step(block, cache, config, before)
        step.run(progress)
        step.finish()
    after = block_error(block, cache, config.batch_size)
    if not after < before:  # nor is what is no number an improvement
        block.load_state_dict(state)
    return before, after


def _restore(
    block: nn.Module, cache: BlockCache, moments: Mapping[str, Moments]
) -> None:
    layers = {n: m for n, m in quantized_layers(block).items() if m.bias is not None}
    known = {name: wanted for name, wanted in moments.items() if name in layers}
    with evaluating(block):
        restore_moments(layers, known, lambda: _run_some(block, cache))


def _run_some(block: nn.Module, cache: BlockCache) -> None:
    inputs, _, _ = cache.pick(next(cache.batches(FOR_MOMENTS)))
    cache.call(block, [t.to(model_device(block)) for t in inputs])


def block_error(block: nn.Module, cache: BlockCache, batch_size: int) -> float:
    """Return ||output − target||² / ||target||² over all samples."""
    device = model_device(block)
    error = torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(block):
        for index in cache.batches(batch_size):
            inputs, target, _ = cache.pick(index)
            output = cache.call(block, [t.to(device) for t in inputs])
            target = target.to(device)
            error += (output - target).double().square().sum()
            norm += target.double().square().sum()
    return float(error / norm.clamp_min(torch.finfo(torch.float64).tiny))


@contextmanager
def _optimising(block: nn.Module, seed: int) -> Iterator[None]:
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


class _Step:
    """One step of the optimisation; on CUDA it is captured once and replayed.

    Everything that changes from step to step (the step's number, and with it the
    samples, the rates and Adam's state) lives on the device, so that a replayed graph
    needs nothing from the host.
    """

    def __init__(
        self,
        block: nn.Module,
        cache: BlockCache,
        config: RoundingConfig,
        before: float,
    ) -> None:
        self.block, self.cache, self.config = block, cache, config
        energy = cache.targets.double().square().mean().item()
        self.usual = max(before * energy, torch.finfo(torch.float32).tiny)
        self.device = model_device(block)
        self.quantizers = list(activation_quantizers(block).values())
        self.soft = SoftRounding(
            list(quantized_layers(block).values()), lambda: _run_some(block, cache)
        )
        for quantizer in self.quantizers:
            quantizer.keep = 1.0 - config.drop
        self.schedule = schedule(config).to(self.device)  # (iterations, 6)
        self.now = self.schedule[:1].clone()  # the row of this step
        self.learned = self._learned()
        self.optimizer = torch.optim.Adam(
            [{"params": tensors, "lr": rate} for tensors, rate in self.learned],
            capturable=self.device.type == "cuda",
            fused=True,
        )
        self.number = torch.zeros(1, dtype=torch.long, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        # A cache in host memory is picked from there and copied into fixed places.
        self.on_device = cache.targets.device == self.device
        self.order = sample_order(cache.targets, config).to(cache.targets.device)
        self.places = [] if self.on_device else self._to_device(self.order[0])

    def _learned(self) -> list[tuple[list[Tensor], Tensor]]:
        """Return what is learned, with the places from which its rates are read."""
        config = self.config
        # A finer step gains nothing at 8 bits, and its gradient is costly.
        coarse: list[Tensor] = [
            q.scale for q in self.quantizers if q.bits < LARGEST_BITS
        ]
        rates = (
            (coarse, config.activation_learning_rate),
            ([self.soft.stretch], config.scale_learning_rate),
            ([self.soft.bias], config.bias_learning_rate),
        )
        learned = [([self.soft.up], self.now[0, 0])]
        for column, (tensors, rate) in enumerate(rates, start=1):
            if tensors and rate > 0:
                learned.append((tensors, self.now[0, column]))
        for tensors, _ in learned:
            for tensor in tensors:
                tensor.requires_grad_()
        return learned

    def run(self, progress: Progress | None) -> None:
        """Run all iterations."""
        total = self.config.iterations
        replay = self._capture() if self.device.type == "cuda" else self._advance
        # The steps that warm the capture up are steps like any other.
        for done in range(int(self.number.item()), total):
            if done == first_decided(self.config):
                with torch.no_grad():
                    self.soft.harden()
            if not self.on_device:
                self._refill(self.order[done])
            replay()
            if progress and (done + 1) % _REPORT_EVERY == 0:
                progress(done + 1, total, f"loss {self.loss.item():.4g}")

    def _capture(self) -> Callable[[], None]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done in range(min(3, self.config.iterations)):
                if not self.on_device:
                    self._refill(self.order[done])
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        return graph.replay

    def _advance(self) -> None:
        """Do one step: pick samples, compute the loss, move what is learned."""
        torch.index_select(self.schedule, 0, self.number, out=self.now)
        inputs, target, weights = self._batch()
        with self.soft.used():
            output = self.cache.call(self.block, inputs)
        loss = _squared_error(output, target, weights) / self.usual
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with torch.no_grad():
            self.soft.decide(self.now[0, 4], self.now[0, 5])
        self.loss.copy_(loss.detach())
        self.number += 1

    def _batch(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Return inputs, targets and weights of this step's samples."""
        found = self.places
        if self.on_device:
            found = self._pick(self.order.index_select(0, self.number).squeeze(0))
        count, others = len(self.cache.inputs), len(self.cache.float_inputs)
        inputs, target, *weights = found[:count], *found[count + others :]
        pairs = zip(inputs, found[count : count + others], strict=False)
        mixed = [self._mixed(*pair) for pair in pairs]
        return mixed or inputs, target, next(iter(weights), None)

    def _mixed(self, rounded: Tensor, plain: Tensor) -> Tensor:
        if not rounded.is_floating_point():
            return rounded
        taken = torch.rand_like(rounded) < self.config.float_inputs
        return torch.where(taken, plain, rounded)

    def _pick(self, index: Tensor) -> list[Tensor]:
        """Return inputs, those of the float network, targets and weights."""
        inputs, target, weights = self.cache.pick(index)
        others = [t.index_select(0, index) for t in self.cache.float_inputs]
        return [*inputs, *others, target, *([] if weights is None else [weights])]

    def _to_device(self, index: Tensor) -> list[Tensor]:
        return [t.to(self.device) for t in self._pick(index)]

    def _refill(self, index: Tensor) -> None:
        for place, tensor in zip(self.places, self._to_device(index), strict=True):
            place.copy_(tensor)

    def finish(self) -> None:
        """Put the learned rounding into the layers."""
        with torch.no_grad():
            self.soft.finish()
        for tensors, _ in self.learned:
            for tensor in tensors:
                tensor.requires_grad = False
                tensor.grad = None
        for quantizer in self.quantizers:
            quantizer.keep = 1.0


def _squared_error(output: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return F.mse_loss(output, target)
    return ((output - target).square() * weights).mean()
