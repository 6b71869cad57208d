"""Learn the rounding of one block's weights (AdaRound) and activation scales (LSQ)."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvTransposeNd

from ompq.bit_widths import LARGEST_BITS
from ompq.configs import RoundingConfig
from ompq.costs import coded_bytes
from ompq.entropy_coding.codec import CodeModel
from ompq.entropy_coding.rates import (
    ZERO,
    code_bits,
    code_bytes,
    entropy,
    lowered_codes,
)
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    Size,
    activation_quantizers,
    linear_map,
    quantized_layers,
    random_like,
)
from ompq.parallel import average, copy_main, process_count, rank
from ompq.progress import Progress
from ompq.quantization.moments import FOR_MOMENTS, Runs, channel_mean, restore_moments
from ompq.quantization.record import are_halves
from ompq.reconstruction.block_data import BlockCache
from ompq.reconstruction.block_fisher import ChannelFisher
from ompq.reconstruction.descent import Descent, Picked, kept_if_better, optimising
from ompq.samples import attached, evaluating, model_device
from ompq.scratch_file import Rows

_LARGEST_RATE = 0.005  # grid steps per iteration; more overshoots in short runs
# Longer runs lower the learning rates of scales and biases, so that these end no
# farther from where they began. Without this, merged blocks of DeiT-tiny failed in
# 3,000 steps (divergence 3.9 instead of 0.67).
_RATED_ITERATIONS = 1_000
_FEWEST_SAMPLES = 8  # an iteration with fewer is too noisy
# The price of a bit in entropy-coded layers: the number of its updates, how fast its
# logarithm grows with the relative excess of bits, and the limit of that logarithm.
_PRICE_UPDATES, _PRICE_GAIN, _LARGEST_LOG_PRICE = 20, 60.0, 3.0
_TARGET_FILL = 0.995  # of the bytes allowed; lowering codes at the end costs more


def learn_rounding(
    block: nn.Module,
    cache: BlockCache,
    config: RoundingConfig,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Learn the rounding of a block's weights; keep it only if the error falls.

    Return the relative squared error of the block's output before and after. Output
    moments are restored first, because earlier blocks have changed since this block's
    biases were set.
    """
    layers = {n: m for n, m in quantized_layers(block).items() if m.bias is not None}
    moments = {name: each for name, each in cache.moments.items() if name in layers}
    if not config.float_inputs:
        cache.float_inputs = []
    with kept_if_better(block, cache, cache.batch_size) as errors:
        with evaluating(block):
            restore_moments(layers, moments, cache_runs(block, cache))
        copy_main(block.state_dict().values())  # each process has its own samples
        soft = SoftRounding(
            list(quantized_layers(block).values()), cache_runs(block, cache)
        )
        quantizers = activation_quantizers(block).values()
        with optimising(block, seed) as cache.generator:
            for quantizer in quantizers:
                quantizer.keep = 1.0 - config.drop
                quantizer.generator = cache.generator
            order = sample_order(cache.targets, config, seed, count=cache.learned_from)
            descent = rounding_descent(block, cache, soft, config, order, errors[0])
            descent.run(progress)
            with torch.no_grad():
                soft.finish()
            for quantizer in quantizers:
                quantizer.keep, quantizer.generator = 1.0, None
    return errors[0], errors[1]


def cache_runs(block: nn.Module, cache: BlockCache) -> Runs:
    """Return functions that run a block on the samples that moments are read from."""

    def run(index: Tensor) -> None:
        inputs, _ = cache.pick(index)
        cache.call(block, [t.to(model_device(block)) for t in inputs])

    first = next(cache.batches(FOR_MOMENTS))
    return [partial(run, index) for index in torch.split(first, cache.batch_size)]


def rounding_descent(
    block: nn.Module,
    cache: BlockCache,
    soft: "SoftRounding",
    config: RoundingConfig,
    order: Tensor,
    before: float,
) -> Descent:
    """Return the descent that learns the rounding of a block with error ``before``."""
    energy = cache.energy()
    average([energy])
    error_before = max(before * energy.item(), torch.finfo(torch.float32).tiny)
    decided = first_decided(config)
    every = max(1, config.iterations // _PRICE_UPDATES)

    def loss(picked: Picked, _row: Tensor) -> tuple[Tensor, Tensor]:
        with soft.used(*SoftWeights.apply(*soft.learned)):
            inputs = _mix_inputs(picked, config.float_inputs, cache.generator)
            output = cache.call(block, inputs)
        relative = block_output_error(output, picked, cache.channels) / error_before
        return relative, relative

    def prepare(step: int, adam: torch.optim.Adam) -> None:
        if step == decided:
            soft.harden()
            # The size of its gradients shows how much a weight matters.
            state = adam.state[soft.up]
            equal = torch.ones_like(soft.up)
            soft.keep_rates(state["exp_avg_sq"].sqrt() if state else equal)
        elif config.price and step < decided and step % every == 0:
            for each in soft.coded:
                each.set_price(config.price)

    return Descent(
        block=block,
        cache=cache,
        learned=_learned_tensors(soft, activation_quantizers(block).values(), config),
        schedule=schedule(config),
        order=order,
        loss=loss,
        before=prepare,
        after=lambda row: soft.decide(row[4], row[5]),
    )


def block_output_error(
    output: Tensor, picked: Picked, channels: ChannelFisher | None
) -> Tensor:
    """Return the mean squared error of a block's output, weighed as the loss asks.

    A low-rank Fisher matrix is blind to most directions, so the plain error stands
    beside it. At full rank both are alike for independent errors of equal size.
    """
    if picked.weights is not None:
        return ((output - picked.target).square() * picked.weights).mean()
    error = F.mse_loss(output, picked.target)
    if channels is None:
        return error
    return (error + channels.error(output - picked.target)) / 2


def _learned_tensors(
    soft: "SoftRounding",
    quantizers: Iterable[ActivationQuantizer],
    config: RoundingConfig,
) -> list[tuple[list[Tensor], int]]:
    """Return the learned tensors, with the schedule columns of their learning rates."""
    # At 8 bits a better step gains nothing, and its gradient is costly.
    narrow = [q for q in quantizers if q.bits < LARGEST_BITS and q.learnable]
    rates: tuple[tuple[list[Tensor], float], ...] = (
        ([q.scale for q in narrow], config.activation_learning_rate),
        ([soft.stretch], config.scale_learning_rate),
        ([soft.bias], config.bias_learning_rate),
    )
    others = [
        (tensors, column)
        for column, (tensors, rate) in enumerate(rates, start=1)
        if tensors and rate > 0
    ]
    return [([soft.up], 0), *others]


def _mix_inputs(
    picked: Picked, probability: float, generator: torch.Generator | None
) -> list[Tensor]:
    """Return the inputs with random elements replaced by the float network's."""
    if not picked.float_inputs:
        return picked.inputs
    return [
        torch.where(random_like(own, generator) < probability, plain, own)
        if own.is_floating_point()
        else own
        for own, plain in zip(picked.inputs, picked.float_inputs, strict=True)
    ]


def first_decided(config: RoundingConfig) -> int:
    """Return the first step at which the rounding of all weights is fixed."""
    return int(config.iterations * (1 - config.tail))


def schedule(config: RoundingConfig) -> Tensor:
    """Return the values that each step reads, (iterations, 6).

    The columns are the learning rates of the rounding, activation steps, scales and
    biases, then the exponent and the strength of the drive to grid points.
    """
    count = config.iterations
    step = torch.arange(count, dtype=torch.float32)
    left = 1 - step / count
    undecided = (step < first_decided(config)).float()
    driven = max(1 - config.warmup - config.tail, 1 / count)
    phase = ((1 - left - config.warmup) / driven).clamp(0, 1)
    rate = min(config.travel / count, _LARGEST_RATE) * undecided
    slowed = left * min(_RATED_ITERATIONS / count, 1)
    start, end = config.exponent
    columns = (
        rate,
        config.activation_learning_rate * slowed,
        config.scale_learning_rate * slowed,
        config.bias_learning_rate * slowed,
        start + (end - start) * phase,
        config.drive * phase * rate,
    )
    return torch.stack(columns, dim=1)


def sample_order(
    targets: Rows, config: RoundingConfig, seed: int, count: int | None = None
) -> Tensor:
    """Return the indices of each step's samples, (iterations, batch size).

    They are among the first ``count``, by default all. With several processes, each
    draws its share of the batch from its own samples.
    """
    count = len(targets) if count is None else count
    fitting = config.step_elements // math.prod(targets.shape[1:])
    size = min(max(fitting, _FEWEST_SAMPLES), config.batch_size, count)
    size = max(size // process_count(), 1)
    generator = torch.Generator().manual_seed(seed + rank())
    return torch.randint(count, (config.iterations, size), generator=generator)


class SoftRounding:
    """The weights of a block, each between two neighbouring grid points.

    All weights are one tensor, (W,), all channels another, (C,), and all scales, of
    channels or groups, a third, (S,): the time of a step depends on the number of its
    kernels, not on their work.

    Biases follow the weights. However a weight is rounded, the mean output of its
    channel stays the same, and only the remaining error has to be learned.

    Attributes:
        up: Distance of each weight from its lower neighbour, 0 to 1, (W,); learned.
        stretch: Logarithm of a factor on each scale, (S,); learned.
        bias: Bias of each channel, (C,); learned.
    """

    def __init__(self, layers: Sequence[QuantizedLayer], runs: Runs) -> None:
        """Start from the layers' unrounded weights."""
        self._layers = layers
        parts = [_rows(layer) for layer in layers]
        self._shapes = [part.up.shape for part in parts]
        self._sizes = [rows * width for rows, width in self._shapes]
        self._low = _flat([part.low for part in parts])
        self._free = _flat([part.free for part in parts])
        self._scale = _flat([part.scale for part in parts])
        self._scale_counts = [part.scale.numel() for part in parts]
        self._learnable = _flat([part.learnable for part in parts])
        self._group_sizes = [layer.group_size for layer in layers]
        self._whole = [0] * len(layers)  # group sizes that make each channel a group
        self._channel_of = self._indices(self._whole)
        self._scale_of = self._channel_of
        if any(self._group_sizes):
            self._scale_of = self._indices(self._group_sizes)
        self.up = _flat([part.up for part in parts])
        self.stretch = torch.zeros_like(self._scale)
        self.bias = _flat([part.bias for part in parts])
        pairs = zip(layers, mean_inputs(layers, runs), strict=True)
        self._inputs = _flat([rows_of(layer, mean) for layer, mean in pairs])
        self._slope = torch.zeros_like(self.up)  # gradient of the price of codes
        flat = (self._low, self._free, self.up, self._slope)
        views = [torch.split(tensor, self._sizes) for tensor in flat]
        found = zip(layers, *views, strict=True)
        self.coded = [CodedWeights(*each) for each in found if each[0].rate]
        with torch.no_grad():
            rounded = [rows_of(layer, layer.rounded_weight()) for layer in layers]
            average([self._inputs])
            self._means = self._sums(_flat(rounded) * self._inputs, self._whole)

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor, "SoftRounding"]:
        """The arguments of :class:`SoftWeights`."""
        return self.up, self.stretch, self.bias, self

    @contextmanager
    def used(self, weight: Tensor, bias: Tensor) -> Iterator[None]:
        """Make the layers compute with these soft weights, (W,), and biases, (C,)."""
        for layer, own, own_bias in self._by_layer(weight, bias):
            layer.learning = (own, None if layer.bias is None else own_bias)
        try:
            yield
        finally:
            # These tensors would keep this step's graph alive during the next one.
            for layer in self._layers:
                layer.learning = None

    def decide(self, exponent: Tensor, step: Tensor) -> None:
        """Move weights to the nearer grid point; a high exponent spares the middle."""
        side = (2 * self.up).sub_(1)  # -1 to 1
        self.up.addcmul_(side.abs().pow_(exponent - 1).copysign_(side), step)
        self.up.clamp_(0, 1)

    def harden(self) -> None:
        """Put each weight on the nearer grid point."""
        self.up.round_()

    def keep_rates(self, importance: Tensor) -> None:
        """Lower codes of coded layers that exceed their limit."""
        parts = torch.split(importance, self._sizes)
        by_layer = dict(zip(self._layers, parts, strict=True))
        for each in self.coded:
            each.keep_rate(by_layer[each.layer])

    def finish(self) -> None:
        """Write the final weights, scales and biases into the layers."""
        self.harden()
        weight, bias = SoftWeights.apply(*self.learned)
        scale = self._scale * self.stretch.exp()
        scales = torch.split(scale, self._scale_counts)
        found = zip(self._by_layer(weight, bias), scales, strict=True)
        for (layer, own, own_bias), own_scale in found:
            layer.weight.copy_(own)
            kept = own_scale[: layer.weight_scale.numel()]
            scale = layer.weight_scale
            scale.copy_(kept.view_as(scale))
            if layer.bias is not None:
                layer.bias.copy_(own_bias)

    def _by_layer(
        self, weight: Tensor, bias: Tensor
    ) -> list[tuple[QuantizedLayer, Tensor, Tensor]]:
        weights = torch.split(weight, self._sizes)
        biases = torch.split(bias, [rows for rows, _ in self._shapes])
        found = zip(self._layers, weights, biases, strict=True)
        return [(layer, weight_of(layer, w), b) for layer, w, b in found]

    def _indices(self, sizes: Sequence[int]) -> Tensor:
        """Return the index of each weight's group, (W,).

        ``sizes`` holds each layer's group size; 0 makes each channel a group.
        """
        widths: list[int] = []
        for (rows, width), size in zip(self._shapes, sizes, strict=True):
            starts = range(0, width, size or width)
            widths += [min(size or width, width - start) for start in starts] * rows
        device = self._low.device
        indices = torch.arange(len(widths), dtype=torch.int32, device=device)
        return indices.repeat_interleave(torch.tensor(widths, device=device))

    def _sums(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the sum of each group's values; ``sizes`` as for ``_indices``."""
        sums = []
        parts = torch.split(flat, self._sizes)
        for part, shape, size in zip(parts, self._shapes, sizes, strict=True):
            rows = part.view(shape)
            if size:
                rows = F.pad(rows, (0, -shape[1] % size)).view(-1, size)
            sums.append(rows.sum(1))
        return torch.cat(sums)


class CodedWeights:
    """The weights of an entropy-coded layer while their rounding is learned.

    Besides the gradient of the error, each weight gets that of the code length: the
    bits by which the codes of its two neighbours differ, times a price. The price
    follows the total size of the codes, so that they end near the layer's limit.
    """

    def __init__(
        self,
        layer: QuantizedLayer,
        low: Tensor,
        free: Tensor,
        up: Tensor,
        slope: Tensor,
    ) -> None:
        """Take this layer's parts of the tensors of :class:`SoftRounding`, (W,)."""
        self.layer, self._low, self._free, self._up = layer, low, free, up
        self._slope = slope
        self._limit = coded_bytes(len(low), layer.rate)
        codes = layer.codes().cpu().numpy()
        model = CodeModel.fit(codes)
        # Computed once: rounding hardly changes which weights are small.
        classes = torch.from_numpy(model.classes(codes)).to(low.device)
        self._classes = rows_of(layer, classes).flatten().long()
        ratio = entropy(self._codes(), self._classes) / (8 * model.size(codes))
        self._target_bits = max(_TARGET_FILL * ratio * 8 * self._limit, 1.0)

    def _codes(self) -> Tensor:
        return (self._low + self._free * self._up.round() + ZERO).to(torch.uint8)

    def _bytes(self, codes: Tensor) -> int:
        return code_bytes(weight_of(self.layer, codes))

    def set_price(self, price: float) -> None:
        """Set the gradient of the price from the present lengths of the codes.

        The error is 1 before learning, and b more bits a weight would make it 4^-b: at
        a ``price`` of 1, a bit a weight is worth the slope of that at 0, 2 ln 2.
        """
        codes = self._codes()
        excess = entropy(codes, self._classes) / self._target_bits - 1
        price *= 2 * math.log(2) / len(codes)
        log_factor = min(_PRICE_GAIN * excess, _LARGEST_LOG_PRICE)
        price *= math.exp(max(log_factor, -_LARGEST_LOG_PRICE))
        bits = code_bits(codes, self._classes)
        increase = (bits[:, 1:] - bits[:, :-1]).flatten()
        # A weight beyond the last code has no neighbour above it.
        low = (self._low + ZERO).clamp(max=bits.shape[1] - 2).long()
        index = self._classes * (bits.shape[1] - 1) + low
        torch.mul(increase[index] * self._free, price, out=self._slope)

    def keep_rate(self, importance: Tensor) -> None:
        """Lower codes until they fit the limit."""
        codes, limit = self._codes(), self._limit
        lowered = lowered_codes(codes, codes, importance, size=self._bytes, limit=limit)
        self._low += lowered.float() - codes.float()


class SoftWeights(torch.autograd.Function):
    """Weights and biases from the learned tensors, in few kernels both ways."""

    @staticmethod
    def forward(
        ctx: Any, up: Tensor, stretch: Tensor, bias: Tensor, soft: SoftRounding
    ) -> tuple[Tensor, Tensor]:
        """Return weights, (W,), and biases, (C,)."""
        levels = torch.addcmul(soft._low, up, soft._free)
        scale = soft._scale * stretch.exp()
        steps = scale.index_select(0, soft._scale_of)  # (W,)
        weight = levels * steps
        means = soft._sums(weight * soft._inputs, soft._whole)
        ctx.save_for_backward(levels, scale, steps)
        ctx.soft = soft
        return weight, bias + (soft._means - means)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor) -> Any:
        """Return the gradients of what is learned."""
        levels, scale, steps = ctx.saved_tensors
        soft = ctx.soft
        through_bias = grad_bias.index_select(0, soft._channel_of)
        total = torch.addcmul(grad_weight, through_bias, soft._inputs, value=-1)
        grad_stretch = soft._sums(total * levels, soft._group_sizes)
        grad_stretch.mul_(scale * soft._learnable)
        grad_up = torch.addcmul(soft._slope, total * steps, soft._free)
        return grad_up, grad_stretch, grad_bias, None


class _Rows(NamedTuple):
    """A layer's weight with one row per output channel."""

    low: Tensor  # code of the lower neighbour minus the zero point, (C, K)
    free: Tensor  # 0 beyond the ends of the grid, where there is one neighbour, (C, K)
    up: Tensor  # distance from the lower neighbour, (C, K)
    scale: Tensor  # (C,), or (C, G) with groups
    # 0 if channels share scales, as in grouped transposed convolutions; like ``scale``.
    learnable: Tensor
    bias: Tensor  # (C,)


def _rows(layer: QuantizedLayer) -> _Rows:
    grid = layer.grid_like_weight()
    weight = layer.weight.detach()
    code = rows_of(layer, (weight / grid.scale + grid.zero_point).detach())
    zero_point = rows_of(layer, grid.zero_point.expand_as(weight))
    scale = rows_of(layer, grid.scale.detach().expand_as(weight))
    scale = scale[:, :: layer.group_size or scale.shape[1]]
    floor = code.floor()
    # Nor are scales that a file holds in 16 bits.
    halves = layer.group_size > 0 and are_halves(layer.weight_scale)
    learnable = float(len(layer.weight_scale) == len(scale) and not halves)
    return _Rows(
        low=floor.clamp(0, grid.qmax) - zero_point,
        free=((floor >= 0) & (floor < grid.qmax)).to(weight.dtype),
        up=code - floor,
        scale=scale,
        learnable=torch.full_like(scale, learnable),
        bias=scale.new_zeros(len(scale)) if layer.bias is None else layer.bias.detach(),
    )


def rows_of(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a layer's weight with one row per output channel, (C, K)."""
    if not isinstance(layer, _ConvTransposeNd):
        return weight.flatten(1)
    groups, shape = layer.groups, weight.shape
    parts = weight.reshape(groups, -1, *shape[1:])  # (groups, in/groups, C/groups, ...)
    return parts.movedim(2, 1).reshape(groups * shape[1], -1)


def weight_of(layer: nn.Module, rows: Tensor) -> Tensor:
    """Undo :func:`rows_of`; the rows may be flattened."""
    shape = cast(Tensor, layer.weight).shape
    if not isinstance(layer, _ConvTransposeNd):
        return rows.reshape(shape)
    inner = (layer.groups, shape[1], shape[0] // layer.groups, *shape[2:])
    return rows.reshape(inner).movedim(1, 2).reshape(shape)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _without_bias(
    layer: QuantizedLayer, weight: Tensor, input: Tensor, output_size: Size = None
) -> Tensor:
    """Return the output of a layer with this weight and no bias."""
    return linear_map(layer, input.detach(), weight, None, output_size)


def mean_inputs(layers: Sequence[QuantizedLayer], runs: Runs) -> list[Tensor]:
    """Return the mean of what each weight is multiplied by, shaped as the weights.

    A channel's mean output without its bias is the sum of its weights times these. Each
    layer must run once per pass.
    """
    sums: dict[nn.Module, Tensor] = {}
    counts: Counter[nn.Module] = Counter()

    def hook(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        layer = cast(QuantizedLayer, module)
        # Outputs are linear in the weights, so a gradient is the mean we look for.
        weight = layer.weight.detach().requires_grad_()
        with torch.enable_grad():
            output = _without_bias(layer, weight, *args, **kwargs)
            total = channel_mean(layer, output).sum() * len(output)
        (found,) = torch.autograd.grad(total, weight)
        sums[layer] = sums[layer] + found if layer in sums else found
        counts[layer] += len(output)

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    with attached(handles), torch.no_grad():
        for run in runs:
            run()
    return [sums[layer] / counts[layer] for layer in layers]
