"""Blocks reconstructed as BRECQ does it: first the weights' rounding, then the steps.

Li et al., BRECQ, 2021, with the settings of its released code: rounding as a rectified
sigmoid (AdaRound) while activations are float; then activation steps, on inputs of the
float network. One thing differs: a block that learning makes worse keeps what it had.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    quantized_layers,
)
from ompq.processes import average
from ompq.ranges import shrunk_tensor
from ompq.reconstruction.blocks import BlockCache
from ompq.reconstruction.rounding import block_error, kernel_graph, optimising
from ompq.samples import (
    Progress,
    Samples,
    attached,
    call,
    evaluating,
    model_device,
    to_device,
)

# Called with a block's inputs, its target and the number of the step, (1,).
_Loss: TypeAlias = Callable[[list[Tensor], Tensor, Tensor], Tensor]
ZETA, GAMMA = 1.1, -0.1  # ends of the stretched sigmoid
_FOR_RANGES = 64  # samples that ranges of activations are found with
_REPORT_EVERY = 50  # iterations
_EAGER = 3  # steps that run before one is captured on CUDA


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
        seed: Seed of the order of samples.
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
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("iterations", "activation_iterations", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


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
    """Return weight and exponent of the regulariser, (iterations, 2)."""
    step = torch.arange(config.iterations, dtype=torch.float32)
    begin = config.warmup * config.iterations
    left = 1 - (step - begin).clamp(min=0) / max(config.iterations - begin, 1)
    start, end = config.exponent
    weight = config.round_weight * (step >= begin)
    return torch.stack([weight, end + (start - end) * left], 1)


def learn_weights(
    block: nn.Module, cache: BlockCache, config: BrecqConfig, progress: Progress | None
) -> tuple[float, float]:
    """Learn the rounding of a block's weights; return its error before and after."""
    soft = SigmoidRounding(list(quantized_layers(block).values()))
    sides = side_schedule(config).to(model_device(block))

    def loss(inputs: list[Tensor], target: Tensor, number: Tensor) -> Tensor:
        up, (weight, exponent) = soft.up(), sides.index_select(0, number)[0]
        with soft.used(up):
            output = cache.call(block, inputs)
        sides_cost: Tensor = weight * side_loss(up, exponent)
        return summed_error(output, target, 2.0) + sides_cost

    rates = torch.full((config.iterations,), config.learning_rate)
    with _kept_if_better(block, cache, config, 2.0) as errors:
        descent = _Descent(cache, soft.alphas, rates, loss)
        descent.run(config.batch_size, config.seed, progress)
        soft.finish()
    return errors[0], errors[1]


def learn_steps(
    block: nn.Module, cache: BlockCache, config: BrecqConfig, progress: Progress | None
) -> tuple[float, float]:
    """Learn the steps of a block's activations; return its error before and after."""
    scales: list[Tensor] = [q.scale for q in _quantizers(block)]
    power = config.activation_power

    def loss(inputs: list[Tensor], target: Tensor, _number: Tensor) -> Tensor:
        output = cache.call(block, inputs)
        return summed_error(output, target, power)

    share = torch.arange(config.activation_iterations) / config.activation_iterations
    rates = config.activation_learning_rate * (1 + (torch.pi * share).cos()) / 2
    with _kept_if_better(block, cache, config, power) as errors:
        if scales:
            descent = _Descent(cache, scales, rates, loss)
            descent.run(config.batch_size, config.seed, progress)
    return errors[0], errors[1]


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
    batch = to_device(samples.first_batch(_FOR_RANGES), model_device(model))
    with attached(hooks), evaluating(model):
        call(model, batch)


@contextmanager
def float_activations(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Let activations pass unrounded meanwhile, if that is wanted."""
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


@contextmanager
def _kept_if_better(
    block: nn.Module, cache: BlockCache, config: BrecqConfig, power: float
) -> Iterator[list[float]]:
    """Yield a list for the errors before and after; undo what did not help."""
    size = max(config.batch_size, cache.batch_size)
    errors = [block_error(block, cache, size, power)]
    state = copy.deepcopy(block.state_dict())
    with optimising(block, config.seed):
        yield errors
    errors.append(block_error(block, cache, size, power))
    if not errors[1] < errors[0]:  # NaN is no improvement either
        block.load_state_dict(state)


class _Descent:
    """Adam on a block; on CUDA a step is captured once and replayed.

    Processes, each with samples of its own, average their gradients.
    """

    def __init__(
        self, cache: BlockCache, learned: list[Tensor], rates: Tensor, loss: _Loss
    ) -> None:
        """Prepare to learn these tensors with a rate for each step, (iterations,)."""
        self.cache, self.learned, self.loss = cache, learned, loss
        self.device = learned[0].device
        self.rates = rates.to(self.device)
        self.rate = self.rates[:1].clone()
        self.number = torch.zeros(1, dtype=torch.long, device=self.device)
        self.optimizer = torch.optim.Adam(
            [{"params": [t.requires_grad_() for t in learned], "lr": self.rate[0]}],
            capturable=self.device.type == "cuda",
            fused=True,
        )

    def run(self, batch_size: int, seed: int, progress: Progress | None) -> None:
        """Do all steps."""
        count, total = len(self.cache.targets), len(self.rates)
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randperm(count, generator=generator) for _ in range(total)]
        self.order = torch.stack([each[:batch_size] for each in drawn])
        self.order = self.order.to(self.cache.targets.device)
        # A cache in host memory is picked from there and copied into fixed places.
        away = self.cache.targets.device != self.device
        first = self._pick(self.order[0]) if away else []
        self.places = [tensor.to(self.device) for tensor in first]
        compute, move = self._compute, self._move
        if self.device.type == "cuda":
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for done in range(min(_EAGER, total)):
                    self._step(done, compute, move)
            torch.cuda.current_stream().wait_stream(stream)
            self.optimizer.zero_grad(set_to_none=True)
            compute, move = kernel_graph(compute), kernel_graph(move)
        for done in range(int(self.number.item()), total):
            self._step(done, compute, move)
            if progress and (done + 1) % _REPORT_EVERY == 0:
                progress(done + 1, total, "")
        for tensor in self.learned:
            tensor.requires_grad, tensor.grad = False, None

    def _step(
        self, done: int, compute: Callable[[], None], move: Callable[[], None]
    ) -> None:
        if self.places:
            found = self._pick(self.order[done])
            for place, tensor in zip(self.places, found, strict=True):
                place.copy_(tensor)
        compute()
        average(tensor.grad for tensor in self.learned)
        move()

    def _pick(self, index: Tensor) -> list[Tensor]:
        inputs, target, _ = self.cache.pick(index)
        return [*inputs, target]

    def _compute(self) -> None:
        torch.index_select(self.rates, 0, self.number, out=self.rate)
        found = self.places
        if not found:
            found = self._pick(self.order.index_select(0, self.number)[0])
        *inputs, target = found
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(inputs, target, self.number).backward()  # type: ignore[no-untyped-call]

    def _move(self) -> None:
        self.optimizer.step()
        self.number.add_(1)
