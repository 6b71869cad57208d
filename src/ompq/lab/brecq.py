"""BRECQ: learn each block's weight rounding first, then its activation steps.

Li et al., BRECQ, 2021, with the settings of the released code. Rounding is a rectified
sigmoid (AdaRound) and learned with float activations; activation steps are learned on
inputs from the float network. One thing differs: a block whose error does not fall is
left as it was. Samples are used as they are given; BRECQ's are random crops.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from ompq.configs import ReconstructConfig
from ompq.configuration_checks import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Config,
    setting,
)
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.progress import Progress
from ompq.reconstruction.block_data import BlockCache
from ompq.reconstruction.descent import Descent, Picked, kept_if_better, optimising
from ompq.reconstruction.phases import Phase
from ompq.samples import Samples, attached, evaluating, run_batch
from ompq.weight_ranges import shrunk_tensor

ZETA, GAMMA = 1.1, -0.1  # ends of the stretched sigmoid
_RANGE_SAMPLES = 64  # samples that activation ranges are calibrated on


@dataclass(frozen=True, kw_only=True)
class BrecqConfig(Config):
    """How BRECQ reconstructs a block."""

    iterations: int = setting(
        20_000, "Number of Adam steps for the weight rounding.", COUNT
    )
    activation_iterations: int = setting(
        5_000, "Number of Adam steps for the activation steps.", COUNT
    )
    batch_size: int = setting(
        32, "Samples per Adam step; BRECQ draws them from 1,024.", COUNT
    )
    learning_rate: float = setting(1e-3, "Learning rate of the rounding.", POSITIVE)
    activation_learning_rate: float = setting(
        4e-4,
        "Initial learning rate of the activation steps; it follows a cosine to 0.",
        NOT_NEGATIVE,
    )
    round_weight: float = setting(
        0.01,
        "Weight of the regulariser that drives weights to grid points. BRECQ uses "
        "0.01, and 0.1 for MobileNetV2.",
        NOT_NEGATIVE,
    )
    warmup: float = setting(
        0.2,
        "Fraction of the iterations before the regulariser is switched on.",
        FRACTION,
    )
    exponent: tuple[float, float] = setting(
        (20.0, 2.0), "Exponent of the regulariser at the start and at the end."
    )
    activation_power: float = setting(
        2.4, "Power of the error while activation steps are learned.", POSITIVE
    )

    skips_stem: ClassVar[bool] = True

    def phases(
        self, groups: Sequence[tuple[str, ...]], samples: Samples
    ) -> Sequence[Phase]:
        """Return two: rounding with float activations, then activation steps."""
        weights = Phase(
            groups,
            self.iterations,
            learn_weights,
            self,
            ", weights",
            float_activations=True,
        )
        activations = Phase(
            groups,
            self.activation_iterations,
            learn_steps,
            self,
            ", activations",
            begin=lambda network: calibrate_steps(network, samples),
        )
        return weights, activations

    def adapted(self, network: str, iterations: int | None) -> "BrecqConfig":
        """Return the settings for a network; MobileNetV2 has its own rounding loss.

        Activation steps are learned in a quarter as many iterations.
        """
        found = replace(self, round_weight=0.1) if "mobilenet" in network else self
        if iterations is None:
            return found
        steps = max(1, iterations // 4)
        return replace(found, iterations=iterations, activation_iterations=steps)


class SigmoidRounding:
    """Weights between two neighbouring grid points, by AdaRound's rectified sigmoid.

    Attributes:
        alphas: The learned tensors, each shaped as the weight of its layer.
    """

    def __init__(self, layers: Sequence[QuantizedLayer]) -> None:
        """Start from the layers' unrounded weights."""
        self._layers, self.alphas = layers, list[Tensor]()
        self._low: list[Tensor] = []
        for layer in layers:
            grid = layer.grid_like_weight()
            code = (layer.weight / grid.scale + grid.zero_point).detach()
            self._low.append(code.floor())
            rest = code - code.floor()
            self.alphas.append(-((ZETA - GAMMA) / (rest - GAMMA) - 1).log())

    def up(self) -> list[Tensor]:
        """Return the distance of each weight from its lower neighbour, 0 to 1."""
        stretched = (a.sigmoid() * (ZETA - GAMMA) + GAMMA for a in self.alphas)
        return [s.clamp(0, 1) for s in stretched]

    @contextmanager
    def used(self, up: Sequence[Tensor]) -> Iterator[None]:
        """Make the layers compute with weights at these distances."""
        for layer, weight in zip(self._layers, self._weights(up), strict=True):
            layer.learning = (weight, layer.bias)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.learning = None

    def _weights(self, up: Sequence[Tensor]) -> Iterator[Tensor]:
        for layer, low, distance in zip(self._layers, self._low, up, strict=True):
            grid = layer.grid_like_weight()
            codes = (low + distance).clamp(0, grid.qmax)
            yield grid.scale * (codes - grid.zero_point)

    @torch.no_grad()
    def finish(self) -> None:
        """Put each weight on the nearer grid point."""
        up = [(alpha >= 0).to(alpha.dtype) for alpha in self.alphas]
        for layer, weight in zip(self._layers, self._weights(up), strict=True):
            layer.weight.copy_(weight)


def summed_error(output: Tensor, target: Tensor, power: float) -> Tensor:
    """Return |output − target|^power, summed over dimension 1, averaged over others."""
    return (output - target).abs().pow(power).sum(1).mean()


def side_loss(up: Sequence[Tensor], exponent: Tensor) -> Tensor:
    """Return AdaRound's regulariser; it is 0 if every weight is on a grid point."""
    parts = [(1 - (2 * each - 1).abs().pow(exponent)).sum() for each in up]
    return torch.stack(parts).sum()


def side_schedule(config: BrecqConfig) -> Tensor:
    """Return learning rate, and weight and exponent of the regulariser, (steps, 3)."""
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
    cache.float_inputs = []
    soft = SigmoidRounding(list(quantized_layers(block).values()))

    def loss(picked: Picked, row: Tensor) -> tuple[Tensor, Tensor]:
        up = soft.up()
        with soft.used(up):
            output = cache.call(block, picked.inputs)
        regulariser: Tensor = row[1] * side_loss(up, row[2])
        error, relative = _errors(output, picked.target, 2.0, errors[0])
        return error + regulariser, relative

    schedule, learned = side_schedule(config), [(soft.alphas, 0)]
    with (
        kept_if_better(block, cache, cache.batch_size) as errors,
        optimising(block, seed),
    ):
        order = _sample_order(cache, len(schedule), config.batch_size, seed)
        Descent(block, cache, learned, schedule, order, loss).run(progress)
        soft.finish()
    return errors[0], errors[1]


def learn_steps(
    block: nn.Module,
    cache: BlockCache,
    config: BrecqConfig,
    seed: int,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Learn a block's activation steps; return its error before and after.

    The block reads the float network's inputs.
    """
    cache.inputs, cache.float_inputs = cache.float_inputs, []
    scales: list[Tensor] = [q.scale for q in _quantizers(block)]
    power = config.activation_power

    def loss(picked: Picked, _row: Tensor) -> tuple[Tensor, Tensor]:
        output = cache.call(block, picked.inputs)
        return _errors(output, picked.target, power, errors[0])

    time = torch.arange(config.activation_iterations) / config.activation_iterations
    rates = config.activation_learning_rate * (1 + (torch.pi * time).cos()) / 2
    learned, schedule = [(scales, 0)], rates[:, None]
    size = cache.batch_size
    with kept_if_better(block, cache, size, power) as errors, optimising(block, seed):
        if scales:
            order = _sample_order(cache, len(rates), config.batch_size, seed)
            Descent(block, cache, learned, schedule, order, loss).run(progress)
    return errors[0], errors[1]


def _errors(
    output: Tensor, target: Tensor, power: float, before: float
) -> tuple[Tensor, Tensor]:
    """Return the summed error, and its ratio to the error before learning."""
    error = summed_error(output, target, power)
    expected = before * summed_error(torch.zeros_like(target), target, power)
    return error, error / expected.clamp_min(torch.finfo(expected.dtype).tiny)


def _sample_order(
    cache: BlockCache, iterations: int, batch_size: int, seed: int
) -> Tensor:
    """Return the indices of each step's samples, all distinct, (steps, batch size)."""
    generator, count = torch.Generator().manual_seed(seed), len(cache.targets)
    drawn = (torch.randperm(count, generator=generator) for _ in range(iterations))
    return torch.stack([each[:batch_size] for each in drawn])


def calibrate_steps(model: nn.Module, samples: Samples) -> None:
    """Calibrate all activation ranges again, in one pass of 64 samples.

    Each quantizer's range comes from the values it reads in the quantized network.
    """
    calibrated: set[nn.Module] = set()

    def calibrate(module: nn.Module, args: tuple[Tensor]) -> None:
        quantizer = cast(ActivationQuantizer, module)
        if quantizer not in calibrated:
            calibrated.add(quantizer)
            grid = shrunk_tensor(args[0], quantizer.bits)
            quantizer.scale.copy_(grid.scale)
            quantizer.zero_point.copy_(grid.zero_point)

    hooks = [q.register_forward_pre_hook(calibrate) for q in _quantizers(model)]
    with attached(hooks), evaluating(model):
        run_batch(model, samples.first_batch(_RANGE_SAMPLES))


def _quantizers(model: nn.Module) -> list[ActivationQuantizer]:
    return list(activation_quantizers(model).values())


BRECQ = ReconstructConfig(rounding=BrecqConfig())  # as published
