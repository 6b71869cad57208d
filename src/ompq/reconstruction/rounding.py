"""Learning the rounding of one block (AdaRound), and activation scales (LSQ)."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvTransposeNd

from ompq.costs import coded_bytes
from ompq.errors import check_counts
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    Size,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.processes import average, copy_main, process_count, rank
from ompq.quantization.moments import (
    FOR_MOMENTS,
    Moments,
    Runs,
    channel_mean,
    restore_moments,
)
from ompq.rates import ZERO, code_bits, code_bytes, entropy, lowered_codes
from ompq.reconstruction.blocks import BlockCache
from ompq.reconstruction.descent import Descent, Picked, kept_if_better, optimising
from ompq.samples import attached, evaluating, model_device
from ompq.stages import Progress
from ompq.streams import LARGEST_BITS, CodeModel

_FASTEST = 0.005  # steps of the grid per iteration; more overshoots in short runs
_FEWEST_SAMPLES = 8  # an iteration with fewer is too noisy
# How often in all the prices of codes are set; how much more a bit is worth if codes
# take more than they should, and its logarithm at most; what they should take of what
# they may: to lower codes in the end costs more than to leave some bytes.
_PRICINGS, _GAIN, _MOST, _FILLED = 20, 60.0, 3.0, 0.99


@dataclass(frozen=True, kw_only=True)
class RoundingConfig:
    """How the rounding of one block is learned.

    Attributes:
        iterations: Steps of Adam.
        batch_size: Samples a step, at most.
        step_elements: Elements of the block's output a step, about: where outputs are
            large, fewer samples will do, but never fewer than eight.
        travel: How far a weight may move in all, in steps of its grid; the learning
            rate is this over the iterations, so that fewer iterations still decide.
        activation_learning_rate: Of the steps of activations below 8 bits; 0 keeps
            them.
        scale_learning_rate: Of the logarithm of the weights' scales; 0 keeps them.
        bias_learning_rate: Of the biases; 0 keeps them.
        warmup: Fraction of the iterations before weights are driven to a side.
        tail: Fraction of the iterations, at the end, in which each weight is at its
            side and only scales, steps and biases still learn.
        drive: How much faster than by its learning rate a weight is driven to its side
            at the end. It grows from 0, apart from Adam, as weight decay does in AdamW:
            weights that matter much and little decide at the same pace.
        exponent: The middle is driven less the higher this is; after the warm-up, and
            at the end.
        price: What a bit is worth to weights of coded layers while they learn, against
            what it is worth before. The more codes take than they may, the more it is.
            0 leaves it to the end, when codes are lowered that take too much.
        drop: Probability with which an activation passes unrounded (QDrop); 0 is off.
        float_inputs: Probability with which an element of the block's input is the one
            that the float network has, while learning. The block then does not overfit
            to the errors that the blocks before it make on these few samples.
    """

    iterations: int = 1_000
    batch_size: int = 64
    step_elements: int = 1 << 19
    travel: float = 5.0
    activation_learning_rate: float = 4e-5
    scale_learning_rate: float = 2e-3
    bias_learning_rate: float = 3e-3
    warmup: float = 0.2
    tail: float = 0.1
    drive: float = 20.0
    exponent: tuple[float, float] = (8.0, 2.0)
    price: float = 0.1
    drop: float = 0.0
    float_inputs: float = 0.5

    def __post_init__(self) -> None:
        check_counts(iterations=self.iterations, batch_size=self.batch_size)
        for name in ("warmup", "tail", "drop", "float_inputs"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to 1")


def learn_rounding(
    block: nn.Module,
    cache: BlockCache,
    config: RoundingConfig,
    *,
    seed: int = 0,
    moments: Mapping[str, Moments] | None = None,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Learn the rounding of a block's weights; keep it only where it helps.

    Return the relative squared error of its output, before and after. Moments of
    outputs are restored first: the blocks before this one have changed since it got its
    biases.
    """
    layers = {n: m for n, m in quantized_layers(block).items() if m.bias is not None}
    wanted = {name: each for name, each in (moments or {}).items() if name in layers}
    with kept_if_better(block, cache, config.batch_size) as errors:
        with evaluating(block):
            restore_moments(layers, wanted, _runs(block, cache))
        copy_main(block.state_dict().values())  # others have seen other samples
        soft = SoftRounding(list(quantized_layers(block).values()), _runs(block, cache))
        quantizers = activation_quantizers(block).values()
        with optimising(block, seed):
            for quantizer in quantizers:
                quantizer.keep = 1.0 - config.drop
            order = sample_order(cache.targets, config, seed)
            descent = rounding_descent(block, cache, soft, config, order, errors[0])
            descent.run(progress)
            with torch.no_grad():
                soft.finish()
            for quantizer in quantizers:
                quantizer.keep = 1.0
    return errors[0], errors[1]


def _runs(block: nn.Module, cache: BlockCache) -> Runs:
    """Return what runs a block on the samples that moments come from."""

    def run(index: Tensor) -> None:
        inputs, _, _ = cache.pick(index)
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
    """Return the descent that learns a block's rounding; its error was ``before``."""
    energy = cache.targets.double().square().mean()
    average([energy])
    usual = max(before * energy.item(), torch.finfo(torch.float32).tiny)
    decided = first_decided(config)
    every = max(1, config.iterations // _PRICINGS)

    def loss(picked: Picked, _row: Tensor) -> tuple[Tensor, Tensor]:
        with soft.used():
            output = cache.call(block, _mixed(picked, config.float_inputs))
        share = _squared_error(output, picked) / usual
        return share, share

    def prepare(step: int, adam: torch.optim.Adam) -> None:
        if step == decided:
            soft.harden()
            # Where a weight's error matters much, gradients vary much.
            state = adam.state[soft.up]
            equal = torch.ones_like(soft.up)
            soft.keep_rates(state["exp_avg_sq"].sqrt() if state else equal)
        elif config.price and step < decided and step % every == 0:
            for each in soft.coded:
                each.set_price(config.price)

    return Descent(
        block=block,
        cache=cache,
        learned=_learned(soft, activation_quantizers(block).values(), config),
        schedule=schedule(config),
        order=order,
        loss=loss,
        before=prepare,
        after=lambda row: soft.decide(row[4], row[5]),
    )


def _squared_error(output: Tensor, picked: Picked) -> Tensor:
    if picked.weights is None:
        return F.mse_loss(output, picked.target)
    return ((output - picked.target).square() * picked.weights).mean()


def _learned(
    soft: "SoftRounding",
    quantizers: Iterable[ActivationQuantizer],
    config: RoundingConfig,
) -> list[tuple[list[Tensor], int]]:
    """Return what is learned, with the columns of the schedule that are its rates."""
    # A finer step gains nothing at 8 bits, and its gradient is costly.
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


def _mixed(picked: Picked, share: float) -> list[Tensor]:
    """Return inputs of which a share of the elements is the float network's."""
    if not picked.float_inputs:
        return picked.inputs
    return [
        torch.where(torch.rand_like(rounded) < share, plain, rounded)
        if rounded.is_floating_point()
        else rounded
        for rounded, plain in zip(picked.inputs, picked.float_inputs, strict=True)
    ]


def first_decided(config: RoundingConfig) -> int:
    """Return the step from which on each weight is at its side."""
    return int(config.iterations * (1 - config.tail))


def schedule(config: RoundingConfig) -> Tensor:
    """Return what each step reads, (iterations, 6).

    The columns are the rates of weights, steps of activations, scales and biases, and
    exponent and size of what drives weights to their sides.
    """
    count = config.iterations
    step = torch.arange(count, dtype=torch.float32)
    left = 1 - step / count
    soft = (step < first_decided(config)).float()
    learning = max(1 - config.warmup - config.tail, 1 / count)
    phase = ((1 - left - config.warmup) / learning).clamp(0, 1)
    rate = min(config.travel / count, _FASTEST) * soft
    start, end = config.exponent
    columns = (
        rate,
        config.activation_learning_rate * left,
        config.scale_learning_rate * left,
        config.bias_learning_rate * left,
        start + (end - start) * phase,
        config.drive * phase * rate,
    )
    return torch.stack(columns, dim=1)


def sample_order(targets: Tensor, config: RoundingConfig, seed: int) -> Tensor:
    """Return which samples each step sees, (iterations, batch size).

    Of several processes, each sees its share of the batch, from its own samples.
    """
    count = len(targets)
    fitting = config.step_elements // targets[0].numel()
    size = min(max(fitting, _FEWEST_SAMPLES), config.batch_size, count)
    size = max(size // process_count(), 1)
    generator = torch.Generator().manual_seed(seed + rank())
    return torch.randint(count, (config.iterations, size), generator=generator)


class SoftRounding:
    """The weights of a block, each between two neighbours on its grid.

    All weights lie in one tensor, (W,), all channels in another, (C,), and all scales,
    of channels or groups, in a third, (S,): a step of learning is bound by the number
    of its kernels, not by their work.

    Biases follow the weights: whatever side a weight takes, the mean output of its
    channel stays what it was, and only the rest has to be learned.

    Attributes:
        up: How far above its lower neighbour each weight is, 0 to 1, (W,); learned.
        stretch: Logarithm of what each scale is multiplied by, (S,); learned.
        bias: Bias of each channel, (C,); learned.
    """

    def __init__(self, layers: Sequence[QuantizedLayer], runs: Runs) -> None:
        """Start from the layers' weights before rounding."""
        self._layers = layers
        parts = [_rows(layer) for layer in layers]
        self._shapes = [part.up.shape for part in parts]
        self._sizes = [rows * width for rows, width in self._shapes]
        self._low = _flat([part.low for part in parts])
        self._free = _flat([part.free for part in parts])
        self._scale = _flat([part.scale for part in parts])
        self._scales = [part.scale.numel() for part in parts]
        self._own = _flat([part.own for part in parts])
        self._groups = [layer.group_size for layer in layers]
        self._whole = [0] * len(layers)
        self._row = self._numbers(self._whole)
        self._place = self._numbers(self._groups) if any(self._groups) else self._row
        self.up = _flat([part.up for part in parts])
        self.stretch = torch.zeros_like(self._scale)
        self.bias = _flat([part.bias for part in parts])
        pairs = zip(layers, mean_inputs(layers, runs), strict=True)
        self._inputs = _flat([rows_of(layer, mean) for layer, mean in pairs])
        self._slope = torch.zeros_like(self.up)  # of the loss, by the price of codes
        flat = (self._low, self._free, self.up, self._slope)
        views = [torch.split(tensor, self._sizes) for tensor in flat]
        found = zip(layers, *views, strict=True)
        self.coded = [CodedWeights(*each) for each in found if each[0].rate]
        with torch.no_grad():
            rounded = [rows_of(layer, layer.rounded_weight()) for layer in layers]
            average([self._inputs])
            self._means = self._sums(_flat(rounded) * self._inputs, self._whole)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers compute with their soft weights, and biases to match."""
        weight, bias = _SoftWeights.apply(self.up, self.stretch, self.bias, self)
        for layer, own, own_bias in self._by_layer(weight, bias):
            layer.learning = (own, None if layer.bias is None else own_bias)
        try:
            yield
        finally:
            # What is kept from one step to the next keeps that step's graph alive.
            for layer in self._layers:
                layer.learning = None

    def decide(self, exponent: Tensor, step: Tensor) -> None:
        """Move each weight to its nearer side; a large exponent spares the middle."""
        side = (2 * self.up).sub_(1)  # -1 to 1
        self.up.addcmul_(side.abs().pow_(exponent - 1).copysign_(side), step)
        self.up.clamp_(0, 1)

    def harden(self) -> None:
        """Put each weight at its nearer neighbour."""
        self.up.round_()

    def keep_rates(self, importance: Tensor) -> None:
        """Lower codes of coded layers that take more than they may."""
        parts = torch.split(importance, self._sizes)
        of = dict(zip(self._layers, parts, strict=True))
        for each in self.coded:
            each.keep_rate(of[each.layer])

    def finish(self) -> None:
        """Write the final weights, scales and biases into the layers."""
        self.harden()
        weight, bias = _SoftWeights.apply(self.up, self.stretch, self.bias, self)
        scale = self._scale * self.stretch.exp()
        scales = torch.split(scale, self._scales)
        found = zip(self._by_layer(weight, bias), scales, strict=True)
        for (layer, own, own_bias), own_scale in found:
            layer.weight.copy_(own)
            kept = own_scale[: layer.weight_scale.numel()]
            layer.weight_scale.copy_(kept.view_as(layer.weight_scale))
            if layer.bias is not None:
                layer.bias.copy_(own_bias)

    def _by_layer(
        self, weight: Tensor, bias: Tensor
    ) -> list[tuple[QuantizedLayer, Tensor, Tensor]]:
        weights = torch.split(weight, self._sizes)
        biases = torch.split(bias, [rows for rows, _ in self._shapes])
        found = zip(self._layers, weights, biases, strict=True)
        return [(layer, weight_of(layer, w), b) for layer, w, b in found]

    def _numbers(self, sizes: Sequence[int]) -> Tensor:
        """Return the number of the group that each weight is in, (W,).

        Size 0 makes a whole channel a group.
        """
        widths: list[int] = []
        for (rows, width), size in zip(self._shapes, sizes, strict=True):
            starts = range(0, width, size or width)
            widths += [min(size or width, width - start) for start in starts] * rows
        device = self._low.device
        numbers = torch.arange(len(widths), dtype=torch.int32, device=device)
        return numbers.repeat_interleave(torch.tensor(widths, device=device))

    def _sums(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return sums over groups of ``size`` weights; 0 sums whole channels."""
        sums = []
        parts = torch.split(flat, self._sizes)
        for part, shape, size in zip(parts, self._shapes, sizes, strict=True):
            rows = part.view(shape)
            if size:
                rows = F.pad(rows, (0, -shape[1] % size)).view(-1, size)
            sums.append(rows.sum(1))
        return torch.cat(sums)


class CodedWeights:
    """The weights of a coded layer while their rounding is learned, (W,) each.

    Besides its part of the error, each weight feels the price of bits: what the codes
    of its two neighbours differ by. The price follows what all codes take, so that in
    the end they take what the layer's rate allows.
    """

    def __init__(
        self,
        layer: QuantizedLayer,
        low: Tensor,
        free: Tensor,
        up: Tensor,
        slope: Tensor,
    ) -> None:
        """Take views of what is learned, and of the slope of the loss to be set."""
        self.layer, self._low, self._free, self._up = layer, low, free, up
        self._slope = slope
        self._limit = coded_bytes(len(low), layer.rate)
        codes = layer.codes().cpu().numpy()
        model = CodeModel.fit(codes)
        # Which weights are small changes little, and with it what the coder expects.
        classes = torch.from_numpy(model.classes(codes)).to(low.device)
        self._classes = rows_of(layer, classes).flatten().long()
        spent = entropy(self._codes(), self._classes) / (8 * model.size(codes))
        self._goal = max(_FILLED * spent * 8 * self._limit, 1.0)  # bits

    def _codes(self) -> Tensor:
        return (self._low + self._free * self._up.round() + ZERO).to(torch.uint8)

    def _bytes(self, codes: Tensor) -> int:
        return code_bytes(weight_of(self.layer, codes))

    def set_price(self, price: float) -> None:
        """Set the slope of the loss by what codes cost now; ``price`` is relative.

        The block's error was 1 before learning. A bit more for each weight divides it
        by four: at its price, 1, the first part of a bit lowers it by 2 ln 2 as much.
        """
        codes = self._codes()
        excess = entropy(codes, self._classes) / self._goal - 1
        price *= 2 * math.log(2) / len(codes)
        price *= math.exp(min(max(_GAIN * excess, -_MOST), _MOST))
        bits = code_bits(codes, self._classes)
        dearer = (bits[:, 1:] - bits[:, :-1]).flatten()
        # A weight beyond the last code has no neighbour above it.
        low = (self._low + ZERO).clamp(max=bits.shape[1] - 2).long()
        place = self._classes * (bits.shape[1] - 1) + low
        torch.mul(dearer[place] * self._free, price, out=self._slope)

    def keep_rate(self, importance: Tensor) -> None:
        """Lower codes that take more than they may."""
        codes = self._codes()
        found = lowered_codes(
            codes, codes, importance, size=self._bytes, limit=self._limit
        )
        self._low += found.float() - codes.float()


class _SoftWeights(torch.autograd.Function):
    """Weights and biases from what is learned, in few kernels both ways."""

    @staticmethod
    def forward(
        ctx: Any, up: Tensor, stretch: Tensor, bias: Tensor, soft: SoftRounding
    ) -> tuple[Tensor, Tensor]:
        levels = torch.addcmul(soft._low, up, soft._free)
        scale = soft._scale * stretch.exp()
        spread = scale.index_select(0, soft._place)
        weight = levels * spread
        moved = soft._sums(weight * soft._inputs, soft._whole)
        ctx.save_for_backward(levels, scale, spread)
        ctx.soft = soft
        return weight, bias + (soft._means - moved)

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor, of_bias: Tensor) -> Any:
        levels, scale, spread = ctx.saved_tensors
        soft = ctx.soft
        through_bias = of_bias.index_select(0, soft._row)
        total = torch.addcmul(of_weight, through_bias, soft._inputs, value=-1)
        of_stretch = soft._sums(total * levels, soft._groups).mul_(scale * soft._own)
        of_up = torch.addcmul(soft._slope, total * spread, soft._free)
        return of_up, of_stretch, of_bias, None


class _Rows(NamedTuple):
    """A layer's weight as one row for each output channel."""

    low: Tensor  # code of the lower neighbour, less the zero, (C, K)
    free: Tensor  # 0 beyond the ends of the grid, with one neighbour only, (C, K)
    up: Tensor  # how far above it the weight is, (C, K)
    scale: Tensor  # (C,), or (C, G) with groups
    own: Tensor  # 0 where groups of a transposed convolution share scales; like scale
    bias: Tensor  # (C,)


def _rows(layer: QuantizedLayer) -> _Rows:
    grid = layer.grid_like_weight()
    weight = layer.weight.detach()
    code = rows_of(layer, (weight / grid.scale + grid.zero_point).detach())
    zero_point = rows_of(layer, grid.zero_point.expand_as(weight))
    scale = rows_of(layer, grid.scale.detach().expand_as(weight))
    scale = scale[:, :: layer.group_size or scale.shape[1]]
    floor = code.floor()
    own = float(len(layer.weight_scale) == len(scale))
    return _Rows(
        low=floor.clamp(0, grid.qmax) - zero_point,
        free=((floor >= 0) & (floor < grid.qmax)).to(weight.dtype),
        up=code - floor,
        scale=scale,
        own=torch.full_like(scale, own),
        bias=scale.new_zeros(len(scale)) if layer.bias is None else layer.bias.detach(),
    )


def rows_of(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a layer's weight as one row for each output channel, (C, K)."""
    if not isinstance(layer, _ConvTransposeNd):
        return weight.flatten(1)
    groups, shape = layer.groups, weight.shape
    parts = weight.reshape(groups, -1, *shape[1:])  # (groups, in/groups, C/groups, ...)
    return parts.movedim(2, 1).reshape(groups * shape[1], -1)


def weight_of(layer: nn.Module, rows: Tensor) -> Tensor:
    """Return the weight, in the layer's shape, whose rows these are, flat or not."""
    shape = cast(Tensor, layer.weight).shape
    if not isinstance(layer, _ConvTransposeNd):
        return rows.reshape(shape)
    inner = (layer.groups, shape[1], shape[0] // layer.groups, *shape[2:])
    return rows.reshape(inner).movedim(1, 2).reshape(shape)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _mapped(
    layer: QuantizedLayer, weight: Tensor, input: Tensor, output_size: Size = None
) -> Tensor:
    """Return what a layer gives for its arguments with this weight and no bias."""
    return linear_map(layer, input.detach(), weight, None, output_size)


def mean_inputs(layers: Sequence[QuantizedLayer], runs: Runs) -> list[Tensor]:
    """Return what each weight is multiplied by on average, shaped as the weights.

    The mean output of a channel, less its bias, is the sum of its weights times these.
    Each layer runs once.
    """
    sums: dict[nn.Module, Tensor] = {}
    counts: Counter[nn.Module] = Counter()

    def hook(module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        layer = cast(QuantizedLayer, module)
        # Each weight belongs to one channel and enters linearly: a gradient will do.
        weight = layer.weight.detach().requires_grad_()
        with torch.enable_grad():
            output = _mapped(layer, weight, *args, **kwargs)
            total = channel_mean(layer, output).sum() * len(output)
        (found,) = torch.autograd.grad(total, weight)
        sums[layer] = sums[layer] + found if layer in sums else found
        counts[layer] += len(output)

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    with attached(handles), torch.no_grad():
        for run in runs:
            run()
    return [sums[layer] / counts[layer] for layer in layers]
