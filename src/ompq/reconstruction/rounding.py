"""Learning the rounding of one block (AdaRound), steps of activations with it (LSQ)."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ompq.quantization.layers import (
    activation_quantizers,
    quantized_layers,
)
from ompq.quantizers.grids import LARGEST_BITS
from ompq.reconstruction.blocks import BlockCache
from ompq.reconstruction.soft_rounding import SoftRounding
from ompq.samples import Progress, evaluating, model_device

_REPORT_EVERY = 50  # on a CPU fifty steps can take seconds


@dataclass(frozen=True, kw_only=True)
class RoundingConfig:
    """How the rounding of one block is learned.

    Attributes:
        iterations: Steps of Adam.
        batch_size: Samples a step.
        travel: How far a logit of the rounding may move in all; the learning rate is
            this over the iterations, so that fewer iterations still decide.
        activation_learning_rate: Of the steps of activations below 8 bits; 0 keeps
            them.
        scale_learning_rate: Of the logarithm of the weights' scales; 0 keeps them.
        bias_learning_rate: Of the biases; 0 keeps them.
        penalty: Weight of the term that drives each weight to one side, against the
            error relative to that of rounding to nearest; both are near 1, whatever
            the network.
        warmup: Fraction of the iterations without that term.
        temperature: Exponent of the term at the end of the warm-up and at the end.
        drop: Probability with which an activation passes unrounded (QDrop); 0 is off.
        seed: Seed of the order of samples.
    """

    iterations: int = 2_000
    batch_size: int = 32
    travel: float = 20.0
    activation_learning_rate: float = 4e-5
    scale_learning_rate: float = 2e-4
    bias_learning_rate: float = 1e-3
    penalty: float = 100.0
    warmup: float = 0.2
    temperature: tuple[float, float] = (20.0, 2.0)
    drop: float = 0.0
    seed: int = 0


def learn_rounding(
    block: nn.Module,
    cache: BlockCache,
    config: RoundingConfig,
    *,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Learn the rounding of a block's weights; keep it only where it helps.

    Args:
        block: A block of a quantized network; its weights are changed.
        cache: What it gets and should return.
        config: Steps and rates.
        progress: Called now and then.

    Returns:
        The relative squared error of its output, before and after.
    """
    before = block_error(block, cache, config.batch_size)
    state = copy.deepcopy(block.state_dict())
    with _optimising(block, config.seed):
        step = _Step(block, cache, config, before)
        step.run(progress)
        step.finish()
    after = block_error(block, cache, config.batch_size)
    if after >= before:
        block.load_state_dict(state)
    return before, after


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
    cudnn = torch.backends.cudnn
    with (
        torch.random.fork_rng(devices=devices),
        cudnn.flags(
            enabled=cudnn.enabled,
            benchmark=False,
            deterministic=True,
            allow_tf32=cudnn.allow_tf32,
        ),
        evaluating(block),
        torch.enable_grad(),
    ):
        torch.manual_seed(seed)
        yield


class _Step:
    """One step of the optimisation; on CUDA it is captured once and replayed.

    Everything that changes from step to step (the step's number, and with it the
    samples and the temperature, and Adam's state) lives on the device, so that a
    replayed graph needs nothing from the host.
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
        self.layers = list(quantized_layers(block).values())
        self.quantizers = list(activation_quantizers(block).values())
        self.soft = [SoftRounding(layer) for layer in self.layers]
        for layer, soft in zip(self.layers, self.soft, strict=True):
            layer.soft = soft
        for quantizer in self.quantizers:
            quantizer.keep = 1.0 - config.drop
        self.groups = self._groups()
        self.optimizer = torch.optim.Adam(
            [{"params": tensors, "lr": rate} for tensors, rate in self.groups],
            capturable=self.device.type == "cuda",
            fused=self.device.type == "cuda",
        )
        self.number = torch.zeros(1, dtype=torch.long, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        # A cache in host memory is picked from there and copied into fixed places.
        self.on_device = cache.targets.device == self.device
        self.order = _sample_order(len(cache.targets), config).to(cache.targets.device)
        self.places = [] if self.on_device else self._to_device(self.order[0])

    def _groups(self) -> list[tuple[list[nn.Parameter], float]]:
        config = self.config
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        # A finer step gains nothing at 8 bits, and its gradient is costly.
        coarse = [q.scale for q in self.quantizers if q.bits < LARGEST_BITS]
        groups = [
            (
                [soft.up for soft in self.soft],
                min(config.travel / config.iterations, 0.02),
            ),
            (coarse, config.activation_learning_rate),
            ([soft.stretch for soft in self.soft], config.scale_learning_rate),
            (biases, config.bias_learning_rate),
        ]
        chosen = [(tensors, rate) for tensors, rate in groups if rate > 0 and tensors]
        for tensors, _ in chosen:
            for tensor in tensors:
                tensor.requires_grad_()
        return chosen

    def run(self, progress: Progress | None) -> None:
        """Run all iterations."""
        total = self.config.iterations
        replay = self._capture() if self.device.type == "cuda" else self._advance
        # The steps that warm the capture up are steps like any other.
        for done in range(int(self.number.item()), total):
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
        """Do one step: pick samples, compute the loss, move the parameters."""
        inputs, target, weights = self._batch()
        output = self.cache.call(self.block, inputs)
        error = (output - target).square()
        error = error if weights is None else error * weights
        loss = error.mean() / self.usual + self._penalty()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        for soft in self.soft:
            soft.share = None  # or the step's graph would live on into the next one
        self.loss.copy_(loss.detach())
        self.number += 1

    def _batch(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        if not self.on_device:
            *inputs, target = self.places[: len(self.cache.inputs) + 1]
            return inputs, target, next(iter(self.places[len(inputs) + 1 :]), None)
        return self.cache.pick(self.order.index_select(0, self.number).squeeze(0))

    def _penalty(self) -> Tensor:
        config = self.config
        start, end = config.temperature
        done = self.number / max(config.iterations, 1)
        left = ((1 - done) / (1 - config.warmup)).clamp(0, 1)
        temperature = end + (start - end) * left
        weight = config.penalty * (done >= config.warmup)
        total = sum(soft.indecision(temperature) for soft in self.soft)
        return (weight * total).squeeze() / sum(soft.up.numel() for soft in self.soft)

    def _to_device(self, index: Tensor) -> list[Tensor]:
        inputs, target, weights = self.cache.pick(index)
        extra = [] if weights is None else [weights]
        return [t.to(self.device) for t in (*inputs, target, *extra)]

    def _refill(self, index: Tensor) -> None:
        for place, tensor in zip(self.places, self._to_device(index), strict=True):
            place.copy_(tensor)

    def finish(self) -> None:
        """Put the learned rounding into the layers."""
        with torch.no_grad():
            for layer, soft in zip(self.layers, self.soft, strict=True):
                layer.weight.copy_(soft.hardened())
                layer.weight_scale.copy_(soft.learned_scale().flatten())
                layer.soft = None
        for tensors, _ in self.groups:
            for tensor in tensors:
                tensor.requires_grad = False
                tensor.grad = None
        for quantizer in self.quantizers:
            quantizer.keep = 1.0


def _sample_order(count: int, config: RoundingConfig) -> Tensor:
    """Return which samples each step sees, (iterations, batch size)."""
    generator = torch.Generator().manual_seed(config.seed)
    size = (config.iterations, min(config.batch_size, count))
    return torch.randint(count, size, generator=generator)
