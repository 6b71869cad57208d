"""Published methods of rounding in training; each class modifies a network in place.

HAWQ-V3 follows the largest weights and running ranges of activations; DoReFa-Net and
PACT transform weights by tanh; FracBits learns widths; LQ-Nets learns levels; RVQuant
keeps the largest weights in 16 bits.

HAWQ-V3 also keeps batch norms and trains them with their layers. A layer computes with
the weight that will be deployed: folded with the running statistics and rounded. Until
the norm is frozen, the output is normalized by the statistics of the batch; afterwards
it equals that of the folded layer, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from ompq.bit_widths import LARGEST_BITS, LARGEST_HALF_BITS, SMALLEST_BITS
from ompq.errors import TrainingError
from ompq.grids import Grid, half_through, round_through, straight_through
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    StoredValues,
    activation_quantizers,
    quantized_layers,
)
from ompq.network.folding import channel_axis, scaled_channels
from ompq.quantization.record import quantization_of
from ompq.training.norms import norm_factor
from ompq.weight_ranges import subsample

_SMALLEST = 1e-8  # smallest range, as in HAWQ-V3's released code
# Margin of a grid in units of the last place: a quotient that was rounded up must not
# put the largest weight outside its grid, where it has no gradient.
_MARGIN = 4
_SUBSAMPLE = 1 << 16  # values of a tensor from which the threshold of outliers is found
_SMALLEST_SCALE = 1e-12  # keeps DoReFa's scales above zero; far below any that occurs
_BISECTIONS = 40  # of a shift between -8 and 8: beyond float32 precision
_MOMENTUM = 0.9  # momentum of LQ-Nets' basis, as published
_FIRST_FITS = 10  # fits before training; LQ-Nets does not publish their number
_RIDGE = 1e-4  # ridge towards the old basis, where the codes do not determine it
_OUTLIER_BYTES = 4  # 16 bits for the value, 16 for the distance to the previous outlier


class WeightRanges:
    """Symmetric grids that follow the largest weight of each channel (HAWQ-V3)."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        for layer in self.layers:
            layer.weight_zero_point.fill_(_middle(layer))
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Set the scales by the current weights, folded with their norms."""
        for layer in self.layers:
            weight = layer.folded_weight(norm_factor(layer))
            largest = _rows(layer, weight).abs().amax(1).clamp(min=_SMALLEST)
            levels = layer.grid_like_weight().qmax - _middle(layer)
            margin = 1 + _MARGIN * torch.finfo(weight.dtype).eps
            layer.weight_scale.copy_(largest / levels * margin)


def _middle(layer: QuantizedLayer) -> int:
    """Return the zero point of a symmetric grid."""
    return (layer.grid_like_weight().qmax + 1) // 2


class ActivationRanges:
    """Running ranges of activations (HAWQ-V3).

    Tensors that calibration never found negative have a zero point of 0; others get
    symmetric grids. With ``outliers`` (RVQuant) the ranges exclude that fraction of the
    values, the largest, which are then not clipped.
    """

    def __init__(
        self, model: nn.Module, momentum: float, outliers: float = 0.0
    ) -> None:
        self.momentum, self.outliers = momentum, outliers
        self.quantizers = list(activation_quantizers(model).values())
        self.hooks = []
        for quantizer in self.quantizers:
            _make_symmetric(quantizer)
            quantizer.outliers = outliers > 0
            # The negated minimum, and the maximum; zeros before the first pass.
            quantizer.register_buffer("ends", quantizer.scale.new_zeros(2))
            self.hooks.append(quantizer.register_forward_pre_hook(self._update))

    @torch.no_grad()
    def _update(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        if not quantizer.training:
            return
        assert isinstance(quantizer, ActivationQuantizer)
        new = self._ends(args[0]).to(quantizer.scale)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(new, distributed.ReduceOp.MAX)
        ends = quantizer.get_buffer("ends")
        average = self.momentum * ends + (1 - self.momentum) * new
        ends.copy_(torch.where(ends.any(), average, new))
        largest = torch.where(quantizer.zero_point != 0, ends.abs().amax(), ends[1])
        levels = (1 << quantizer.bits) - 1 - quantizer.zero_point
        quantizer.scale.copy_(largest.clamp(min=_SMALLEST) / levels)

    def _ends(self, x: Tensor) -> Tensor:
        """Return the negated minimum and the maximum, (2,), without outliers."""
        if not self.outliers:
            return torch.stack([-x.amin(), x.amax()])
        magnitudes = subsample(x.flatten()[None].abs(), _SUBSAMPLE)[0].sort().values
        return magnitudes[int((1 - self.outliers) * (len(magnitudes) - 1))].expand(2)

    def detach(self) -> None:
        """Remove hooks and buffers; the quantizers keep their ranges."""
        for hook in self.hooks:
            hook.remove()
        for quantizer in self.quantizers:
            del quantizer.ends


@torch.no_grad()
def _make_symmetric(quantizer: ActivationQuantizer) -> None:
    """Make a grid with negative values symmetric, so that it covers the old range."""
    if quantizer.zero_point == 0:
        return
    levels, middle = (1 << quantizer.bits) - 1, 1 << (quantizer.bits - 1)
    longer = torch.maximum(quantizer.zero_point, levels - quantizer.zero_point)
    quantizer.scale.mul_(longer / (levels - middle))
    quantizer.zero_point.fill_(middle)


def dorefa_levels(bits: Tensor) -> Tensor:
    """Return the number of steps from -1 to 1.

    From 7 bits on it is one less than published, so that 0 is a code: the half steps
    of other grids would not fit the signed bytes of integer arithmetic.
    """
    return 2.0**bits - 1 - (bits > LARGEST_HALF_BITS).to(bits)


def dorefa(weight: Tensor, levels: Tensor) -> Tensor:
    """Return 2 · round(n · (tanh w / (2 max |tanh w|) + 1/2)) / n - 1 for n levels.

    The maximum is taken over the whole layer. Gradients are straight-through.
    """
    squashed = torch.tanh(weight)
    unit = squashed / (2 * squashed.abs().max()) + 0.5
    return 2 * round_through(unit * levels) / levels - 1


class DoReFaWeights:
    """Rounds weights as DoReFa-Net does.

    The published values lie in [-1, 1], so that a batch norm must rescale the output.
    Here each layer's values are multiplied by a constant, fitted to its initial weights
    by least squares. So training starts near the given network, and layers without a
    norm work, too.

    PACT adds activations with a learned clipping value. Where it starts depends on the
    network; here it is the end of the calibrated range, and it does not decay.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        with torch.no_grad():
            for layer in self.layers:
                levels = layer_levels(layer)
                values = dorefa(layer.weight, levels)
                size = (values * layer.weight).sum() / values.square().sum()
                layer.weight_scale.copy_(2 * size / levels)
                layer.weight_zero_point.copy_(levels / 2)
        for layer in self.layers:
            layer.rounding = self.rounded

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, its channels times a factor (C,)."""
        values, size = dorefa(layer.weight, layer_levels(layer)), _size(layer)
        return scaled_channels(values, size if factor is None else size * factor, layer)

    def update(self) -> None:
        """Do nothing: the scales are constant."""

    @torch.no_grad()
    def finalize(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Go back to rounding to the layer's grid, which contains these values."""
        if factor is not None:
            layer.weight_scale.mul_(factor.abs()).clamp_(min=_SMALLEST_SCALE)
        layer.rounding = None


def layer_levels(layer: QuantizedLayer) -> Tensor:
    """Return the number of DoReFa steps at a layer's width."""
    # Filled on the device: a recorded CUDA graph cannot copy from the host.
    return dorefa_levels(layer.weight_scale.new_full((), layer.bits))


def mixed(weight: Tensor, width: Tensor) -> Tensor:
    """Return a weight at a fractional width, interpolated between whole widths.

    At 3.2 bits it is 0.8 times the 3-bit weight plus 0.2 times the 4-bit weight, each
    rounded by :func:`dorefa`. This gives the width a gradient.
    """
    low = width.detach().floor()
    share = width - low
    lower, upper = (dorefa(weight, dorefa_levels(bits)) for bits in (low, low + 1))
    return (1 - share) * lower + share * upper


def rounded_widths(widths: Tensor, counts: Tensor, most: float) -> Tensor:
    """Return whole widths (U,) at which all weights take at most ``most`` bits.

    The same shift is subtracted from all widths before rounding. It is the smallest one
    that fits, found by bisection.
    """

    def shifted(shift: float) -> Tensor:
        return (widths - shift).round().clamp(SMALLEST_BITS, LARGEST_BITS)

    low, high = -float(LARGEST_BITS), float(LARGEST_BITS)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        fits = float((shifted(middle) * counts).sum()) <= most
        low, high = (low, middle) if fits else (middle, high)
    return shifted(high)


class FractionalWidths:
    """Learns the widths of weights as FracBits does, and rounds the weights.

    Widths start as planned. The loss grows by ``penalty`` for each bit per weight above
    or below the planned average; FracBits' own coefficient is for sizes in other units.
    8-bit layers, usually the first and the last, keep their width. So do activations,
    whose widths FracBits learns as well. Layers that share their bits share a width.
    The learning rate of widths is not published; here it is that of the weights times
    ``TrainConfig.step_rate``, 1 in the recipe.
    """

    def __init__(self, model: nn.Module, penalty: float) -> None:
        DoReFaWeights(model)  # fits the constant of each layer
        layers = quantized_layers(model)
        self.layers, self.kappa = list(layers.values()), penalty
        groups: dict[str, list[QuantizedLayer]] = {}
        for unit in quantization_of(model).graph.units:
            layer = layers.get(unit.name)
            if layer is not None and layer.bits < LARGEST_BITS:
                groups.setdefault(unit.group, []).append(layer)
        if not groups:
            raise TrainingError(
                "widths='learned' has nothing to learn: every layer has "
                f"{LARGEST_BITS} bits. Plan fewer bits or use widths='planned'"
            )
        self.widths: list[nn.Parameter] = []
        for members in groups.values():
            bits = max(layer.bits for layer in members)
            width = nn.Parameter(members[0].weight_scale.new_tensor(float(bits)))
            self.widths.append(width)
            for layer in members:
                layer.weight_width = width
                layer.rounding = self.rounded
        self.counts = torch.tensor(
            [sum(x.weight.numel() for x in each) for each in groups.values()]
        ).to(self.widths[0])
        self.most = float((torch.stack([*self.widths]).detach() * self.counts).sum())
        self.whole: Tensor | None = None

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, its channels times a factor (C,)."""
        size = _size(layer)
        values = mixed(layer.weight, layer.get_parameter("weight_width"))
        return scaled_channels(values, size if factor is None else size * factor, layer)

    def penalty(self) -> Tensor:
        """Return the penalty on the average width, a scalar."""
        bits = (torch.stack([*self.widths]) * self.counts).sum() - self.most
        return self.kappa * bits.abs() / self.counts.sum()

    @torch.no_grad()
    def update(self) -> None:
        """Clamp the widths to the supported range; once rounded, they stay whole."""
        for number, width in enumerate(self.widths):
            width.clamp_(SMALLEST_BITS, LARGEST_BITS)
            if self.whole is not None:
                width.copy_(self.whole[number])

    @torch.no_grad()
    def make_whole(self) -> None:
        """Round the widths within the planned bits, and keep them from now on."""
        widths = torch.stack([*self.widths])
        self.whole = rounded_widths(widths, self.counts, self.most)
        self.update()

    @torch.no_grad()
    def finalize(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Go back to rounding to the layer's grid, at its new width."""
        size = _size(layer)
        if "weight_width" in layer._parameters:
            layer.bits = int(layer.get_parameter("weight_width"))
            del layer.weight_width
        levels = layer_levels(layer)
        scale = 2 * size * (1 if factor is None else factor.abs()) / levels
        layer.weight_scale.copy_(scale.clamp(min=_SMALLEST_SCALE))
        layer.weight_zero_point.copy_(levels / 2)
        layer.rounding = None


def _size(layer: QuantizedLayer) -> Tensor:
    """Return the constants that multiply the values in [-1, 1], (C,)."""
    return layer.weight_scale.detach() * layer_levels(layer) / 2


def signs_of(bits: int, like: Tensor) -> Tensor:
    """Return all codes as rows of -1 and 1, (2^bits, bits)."""
    numbers = torch.arange(1 << bits, device=like.device)[:, None]
    places = torch.arange(bits, device=like.device)
    return ((numbers >> places & 1) * 2 - 1).to(like.dtype)


def nearest_codes(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the codes of the levels nearest to weights (C, n), for bases (C, K).

    The levels of a channel are the sums of its basis with all combinations of signs.
    """
    levels, order = (basis @ signs_of(basis.shape[1], basis).T).sort(1)
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    places = torch.searchsorted(middles.contiguous(), rows.contiguous())
    return order.gather(1, places)


def level_values(codes: Tensor, basis: Tensor) -> Tensor:
    """Return the levels of codes (C, n)."""
    return (basis @ signs_of(basis.shape[1], basis).T).gather(1, codes)


def fitted_basis(rows: Tensor, codes: Tensor, basis: Tensor) -> Tensor:
    """Return the least-squares basis (C, K) for weights and their codes (C, n)."""
    signs = signs_of(basis.shape[1], basis)[codes]  # (C, n, K)
    ridge = _RIDGE * rows.shape[1]
    gram = signs.mT @ signs + ridge * torch.eye(basis.shape[1]).to(basis)
    products = signs.mT @ rows[..., None] + ridge * basis[..., None]
    # The matrix is positive definite; checking it would synchronize with the GPU.
    solution: Tensor = torch.linalg.solve_ex(gram, products).result
    return solution[..., 0]


class LearnedLevels:
    """Rounds weights as LQ-Nets does.

    The basis of an output channel has one number per bit. After every step a new basis
    is fitted to the current codes by least squares, and the basis moves a tenth of the
    way towards it. LQ-Nets also learns levels of activations; here activations keep
    uniform grids or are float, as in the OMPQ paper's tables.

    Its first bases are not published in full: here they give uniform levels up to the
    largest weight, improved by ten fits. Where the codes do not determine the basis, as
    with a code that no weight has, a small ridge keeps it near the old one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        for layer in self.layers:
            rows = _rows(layer, layer.weight.detach())
            largest = rows.abs().amax(1, keepdim=True)
            powers = 2.0 ** torch.arange(layer.bits, device=rows.device)
            basis = largest * powers / powers.sum()  # uniform levels
            for _ in range(_FIRST_FITS):
                basis = fitted_basis(rows, nearest_codes(rows, basis), basis)
            layer.register_buffer("weight_basis", basis)
            layer.rounding = self.rounded

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, with straight-through gradients."""
        basis, axis = layer.get_buffer("weight_basis"), channel_axis(layer)
        rows = _rows(layer, layer.weight.detach())
        values = level_values(nearest_codes(rows, basis), basis)
        values = values.reshape(layer.weight.movedim(axis, 0).shape).movedim(0, axis)
        values = values + (layer.weight - layer.weight.detach())
        return values if factor is None else scaled_channels(values, factor, layer)

    @torch.no_grad()
    def update(self) -> None:
        """Move the bases towards those that fit the current weights."""
        for layer in self.layers:
            rows = _rows(layer, layer.weight.detach())
            basis = layer.get_buffer("weight_basis")
            fitted = fitted_basis(rows, nearest_codes(rows, basis), basis)
            basis.lerp_(fitted, 1 - _MOMENTUM)

    def finalize(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Mark the weight as rounded, with the size of codes, bases and bias."""
        del layer.weight_basis
        bits = layer.weight.numel() * layer.bits
        channels = len(layer.weight_scale)
        size = -(-bits // 8) + 4 * channels * (layer.bits + (layer.bias is not None))
        layer.rounding = StoredValues("LQ-Nets", size)


def _rows(layer: QuantizedLayer, weight: Tensor) -> Tensor:
    """Return a layer's weight with one row per output channel, (C, n)."""
    return weight.movedim(channel_axis(layer), 0).flatten(1)


def with_outliers(rows: Tensor, bits: int, fraction: float) -> Tensor:
    """Return rounded weights (C, n), with the largest fraction of the layer in 16 bits.

    The other weights of each channel are rounded to a symmetric grid that ends at the
    largest of them. Gradients are straight-through.
    """
    magnitude = rows.detach().abs()
    count = _outlier_count(rows.numel(), fraction)
    threshold = magnitude.flatten().sort().values[-count - 1]
    large = magnitude > threshold
    levels = (1 << (bits - 1)) - 1
    # The grid covers all other weights, so none of them loses its gradient.
    ends = magnitude.masked_fill(large, 0.0).amax(1, keepdim=True).clamp(min=_SMALLEST)
    scale = ends / levels * (1 + _MARGIN * torch.finfo(rows.dtype).eps)
    grid = Grid(scale, torch.full_like(scale, levels + 1.0), bits)
    return torch.where(large, half_through(rows), straight_through(rows, grid))


def _outlier_count(count: int, fraction: float) -> int:
    return min(round(count * fraction), count - 1)


class OutlierWeights:
    """Rounds weights as RVQuant does.

    It is published that the largest 1 to 3 % of values keep 16 bits. The rest is our
    choice: the threshold is that of the layer, the grid of a channel is symmetric and
    ends at its largest other weight, and an outlier takes another 16 bits for its
    position. So are the rate and the epochs of the recipe.
    """

    def __init__(self, model: nn.Module, fraction: float) -> None:
        self.layers = list(quantized_layers(model).values())
        self.fraction = fraction
        for layer in self.layers:
            layer.rounding = self.rounded

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, folded with its norm's factor (C,)."""
        weight = layer.folded_weight(factor)
        moved = weight.movedim(channel_axis(layer), 0)
        rounded = with_outliers(moved.flatten(1), layer.bits, self.fraction)
        return rounded.reshape(moved.shape).movedim(0, channel_axis(layer))

    def update(self) -> None:
        """Do nothing: there is no state between steps."""

    def finalize(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Mark the weight as rounded, with its size, outliers included."""
        count = layer.weight.numel()
        outliers = _OUTLIER_BYTES * _outlier_count(count, self.fraction)
        channels = 4 * len(layer.weight_scale) * (1 + (layer.bias is not None))
        size = -(-count * layer.bits // 8) + outliers + channels
        layer.rounding = StoredValues("RVQuant", size)
