"""Blocks reconstructed as BRECQ does it: first the weights' rounding, then the steps.

Li et al., BRECQ, 2021, with the settings of its released code: rounding as a rectified
sigmoid (AdaRound) while activations are float; then activation steps, on inputs of the
float network. One thing differs: a block that learning makes worse keeps what it had.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ompq.errors import check_counts
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.ranges import shrunk_tensor
from ompq.reconstruction.blocks import BlockCache
from ompq.reconstruction.descent import Descent, Picked, kept_if_better, optimising
from ompq.samples import Samples, attached, evaluating, run_batch
from ompq.stages import Progress

ZETA, GAMMA = 1.1, -0.1  # ends of the stretched sigmoid
_FOR_RANGES = 64  # samples that ranges of activations are found with


@dataclass(frozen=True, kw_only=True)
class BrecqConfig:
    """How BRECQ reconstructs a block.

    Attributes:
        iterations: Steps of Adam for the rounding of weights.
        activation_iterations: Steps of Adam for the steps of activations.
        batch_size: Samples a step, out of 1,024.
        learning_rate: Of the rounding.
        activation_learning_rate: Of the steps at first; it falls as a cosine.
        round_weight: Weight of the loss that drives the rounding to a side; BRECQ has
            0.01, and 0.1 for MobileNetV2.
        warmup: Fraction of the iterations before that loss counts.
        exponent: Of that loss, at first and at the end.
        activation_power: Of the error while steps are learned.
    """

    iterations: int = 20_000
    activation_iterations: int = 5_000
    batch_size: int = 32
    learning_rate: float = 1e-3
    activation_learning_rate: float = 4e-4
    round_weight: float = 0.01
    warmup: float = 0.2
    exponent: tuple[float, float] = (20.0, 2.0)
    activation_power: float = 2.4

    def __post_init__(self) -> None:
        check_counts(
            iterations=self.iterations,
            activation_iterations=self.activation_iterations,
            batch_size=self.batch_size,
        )


class SigmoidRounding:
    """Weights between two neighbours of their grids, by AdaRound's rectified sigmoid.

    Attributes:
        alphas: What is learned, shaped as the weight of each layer.
    """

    def __init__(self, layers: Sequence[QuantizedLayer]) -> None:
        """Start at the layers' weights before rounding."""
        self._layers, self.alphas = layers, list[Tensor]()
        self._low: list[Tensor] = []
        for layer in layers:
            grid = layer.grid_like_weight()
            code = (layer.weight / grid.scale + grid.zero_point).detach()
            self._low.append(code.floor())
            rest = code - code.floor()
            self.alphas.append(-((ZETA - GAMMA) / (rest - GAMMA) - 1).log())

    def up(self) -> list[Tensor]:
        """Return how far above its lower neighbour each weight is, 0 to 1."""
        stretched = (a.sigmoid() * (ZETA - GAMMA) + GAMMA for a in self.alphas)
        return [s.clamp(0, 1) for s in stretched]

    @contextmanager
    def used(self, up: Sequence[Tensor]) -> Iterator[None]:
        """Let the layers compute with weights so far above their lower neighbours."""
        for layer, weight in zip(self._layers, self._weights(up), strict=True):
            layer.learning = (weight, layer.bias)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.learning = None

    def _weights(self, up: Sequence[Tensor]) -> Iterator[Tensor]:
        for layer, low, each in zip(self._layers, self._low, up, strict=True):
            grid = layer.grid_like_weight()
            codes = (low + each).clamp(0, grid.qmax)
            yield grid.scale * (codes - grid.zero_point)

    @torch.no_grad()
    def finish(self) -> None:
        """Put each weight at the neighbour that it is nearer to."""
        sides = [(alpha >= 0).to(alpha.dtype) for alpha in self.alphas]
        for layer, weight in zip(self._layers, self._weights(sides), strict=True):
            layer.weight.copy_(weight)


def summed_error(output: Tensor, target: Tensor, power: float) -> Tensor:
    """Return |error|^power summed over channels, averaged over all else."""
    error = (output - target).abs().pow(power)
    return error.sum(1).mean()


def side_loss(up: Sequence[Tensor], exponent: Tensor) -> Tensor:
    """Return AdaRound's regulariser, 0 where every weight is at a side."""
    parts = [(1 - (2 * each - 1).abs().pow(exponent)).sum() for each in up]
    return torch.stack(parts).sum()


def side_schedule(config: BrecqConfig) -> Tensor:
    """Return rate, and weight and exponent of the regulariser, (iterations, 3)."""
    step = torch.arange(config.iterations, dtype=torch.float32)
    begin = config.warmup * config.iterations
    left = 1 - (step - begin).clamp(min=0) / max(config.iterations - begin, 1)
    start, end = config.exponent
    weight = config.round_weight * (step >= begin)
    rate = torch.full_like(step, config.learning_rate)
    return torch.stack([rate, weight, end + (start - end) * left], 1)


def learn_weights(
    block: nn.Module,
    cache: BlockCache,
    config: BrecqConfig,
    seed: int,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Learn the rounding of a block's weights; return its error before and after."""
    soft = SigmoidRounding(list(quantized_layers(block).values()))

    def loss(picked: Picked, row: Tensor) -> tuple[Tensor, Tensor]:
        up = soft.up()
        with soft.used(up):
            output = cache.call(block, picked.inputs)
        sides_cost: Tensor = row[1] * side_loss(up, row[2])
        error, share = _errors(output, picked.target, 2.0, errors[0])
        return error + sides_cost, share

    table, learned = side_schedule(config), [(soft.alphas, 0)]
    size = max(config.batch_size, cache.batch_size)
    with (
        kept_if_better(block, cache, size) as errors,
        optimising(block, seed),
    ):
        order = _sample_order(cache, len(table), config.batch_size, seed)
        Descent(block, cache, learned, table, order, loss).run(progress)
        soft.finish()
    return errors[0], errors[1]


def learn_steps(
    block: nn.Module,
    cache: BlockCache,
    config: BrecqConfig,
    seed: int,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Learn the steps of a block's activations; return its error before and after."""
    scales: list[Tensor] = [q.scale for q in _quantizers(block)]
    power = config.activation_power

    def loss(picked: Picked, _row: Tensor) -> tuple[Tensor, Tensor]:
        output = cache.call(block, picked.inputs)
        return _errors(output, picked.target, power, errors[0])

    share = torch.arange(config.activation_iterations) / config.activation_iterations
    rates = config.activation_learning_rate * (1 + (torch.pi * share).cos()) / 2
    size = max(config.batch_size, cache.batch_size)
    with (
        kept_if_better(block, cache, size, power) as errors,
        optimising(block, seed),
    ):
        if scales:
            order = _sample_order(cache, len(rates), config.batch_size, seed)
            Descent(block, cache, [(scales, 0)], rates[:, None], order, loss).run(
                progress
            )
    return errors[0], errors[1]


def _errors(
    output: Tensor, target: Tensor, power: float, before: float
) -> tuple[Tensor, Tensor]:
    """Return the summed error, and its share of what it was before learning."""
    error = summed_error(output, target, power)
    usual = before * summed_error(torch.zeros_like(target), target, power)
    return error, error / usual.clamp_min(torch.finfo(usual.dtype).tiny)


def _sample_order(
    cache: BlockCache, iterations: int, batch_size: int, seed: int
) -> Tensor:
    """Return which samples each step sees, none twice, (iterations, batch size)."""
    generator, count = torch.Generator().manual_seed(seed), len(cache.targets)
    drawn = (torch.randperm(count, generator=generator) for _ in range(iterations))
    return torch.stack([each[:batch_size] for each in drawn])


def calibrate_steps(model: nn.Module, samples: Samples) -> None:
    """Find the range of every activation anew, in one pass of 64 samples.

    Each is found from what its quantizer gets from the quantized layers before it.
    """
    seen: set[nn.Module] = set()

    def find(module: nn.Module, args: tuple[Tensor]) -> None:
        quantizer = cast(ActivationQuantizer, module)
        if quantizer not in seen:
            seen.add(quantizer)
            grid = shrunk_tensor(args[0], quantizer.bits)
            quantizer.scale.copy_(grid.scale)
            quantizer.zero_point.copy_(grid.zero_point)

    hooks = [q.register_forward_pre_hook(find) for q in _quantizers(model)]
    with attached(hooks), evaluating(model):
        run_batch(model, samples.first_batch(_FOR_RANGES))


@contextmanager
def float_activations(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Leave activations unrounded within the context, if ``wanted``."""
    quantizers = _quantizers(model)
    flags = [quantizer.enabled for quantizer in quantizers]
    try:
        for quantizer, flag in zip(quantizers, flags, strict=True):
            quantizer.enabled = flag and not wanted
        yield
    finally:
        for quantizer, flag in zip(quantizers, flags, strict=True):
            quantizer.enabled = flag


def _quantizers(model: nn.Module) -> list[ActivationQuantizer]:
    return list(activation_quantizers(model).values())
