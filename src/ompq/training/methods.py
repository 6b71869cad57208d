"""Published ways to round while training, each a class that changes a network.

HAWQ-V3 follows the largest weights and running ranges of activations; DoReFa-Net and
PACT bend weights by tanh; FracBits learns widths; LQ-Nets learns levels; RVQuant keeps
the largest weights in 16 bits.

HAWQ-V3 also keeps batch norms: they stand beside their layers while both are trained.
The layer computes with its weight folded with the running statistics and rounded, as it
will be deployed. Until the norm is frozen its output is normalised by the statistics of
the batch; afterwards what is computed is the folded layer, bit for bit.
"""

import copy
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.errors import TrainingError
from ompq.graph import channel_axis, folded, norm_affine, scaled_channels
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    Size,
    StoredValues,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.quantization import quantization_of
from ompq.quantization.equalization import enlarge, equalized
from ompq.quantizers import Grid, half_through, round_through, straight_through
from ompq.ranges import thinned
from ompq.streams import LARGEST_BITS, LARGEST_HALF_BITS, SMALLEST_BITS

_SMALLEST = 1e-8  # of a range, as in HAWQ-V3's released code
# In units of the last place: the largest weight should not fall off its grid, and lose
# its gradient, because a quotient was rounded up.
_MARGIN = 4
_COUNTED = 1 << 16  # values of a tensor that tell which of them are outliers
_SMALLEST_SCALE = 1e-12  # of DoReFa's weights: never zero, and below any that occurs
_BISECTIONS = 40  # of a shift between -8 and 8: to float32 precision and beyond
_MOMENTUM = 0.9  # of LQ-Nets' basis, as published
_FIRST_FITS = 10  # before training; how many LQ-Nets takes is not published
_RIDGE = 1e-4  # how strongly directions that the codes leave open keep their basis
_BYTES = 4  # of an outlier: 16 bits of value, 16 of its distance from the one before


class WeightRanges:
    """Symmetric grids for the weights of a network, which is changed."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(quantized_layers(model).values())
        for layer in self.layers:
            layer.weight_zero_point.fill_(_middle(layer))
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Set the scales by the weights, folded with their norms, as they are now."""
        for layer in self.layers:
            weight = layer.folded_weight(norm_factor(layer))
            largest = _rows(layer, weight).abs().amax(1).clamp(min=_SMALLEST)
            levels = layer.grid_like_weight().qmax - _middle(layer)
            margin = 1 + _MARGIN * torch.finfo(weight.dtype).eps
            layer.weight_scale.copy_(largest / levels * margin)


def _middle(layer: QuantizedLayer) -> int:
    """Return the code of 0 that leaves as many levels above it as can be below."""
    return (layer.grid_like_weight().qmax + 1) // 2


class ActivationRanges:
    """Running ranges of the activations of a network, which is changed.

    Tensors that were never negative when the network was calibrated get codes from 0;
    others get as many levels below 0 as above. With ``outliers`` (RVQuant) the ranges
    leave out that fraction of the values, the largest, which are not clipped then.
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
            # The negative minimum, and the maximum; zeros before the first pass.
            quantizer.register_buffer("ends", quantizer.scale.new_zeros(2))
            self.hooks.append(quantizer.register_forward_pre_hook(self._follow))

    @torch.no_grad()
    def _follow(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        if not quantizer.training:
            return
        assert isinstance(quantizer, ActivationQuantizer)
        seen = self._ends(args[0]).to(quantizer.scale)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(seen, distributed.ReduceOp.MAX)
        ends = quantizer.get_buffer("ends")
        mixed = self.momentum * ends + (1 - self.momentum) * seen
        ends.copy_(torch.where(ends.any(), mixed, seen))
        largest = torch.where(quantizer.zero_point != 0, ends.abs().amax(), ends[1])
        levels = (1 << quantizer.bits) - 1 - quantizer.zero_point
        quantizer.scale.copy_(largest.clamp(min=_SMALLEST) / levels)

    def _ends(self, x: Tensor) -> Tensor:
        """Return the negative minimum and the maximum, outliers left out."""
        if not self.outliers:
            return torch.stack([-x.amin(), x.amax()])
        sizes = thinned(x.flatten()[None].abs(), _COUNTED)[0].sort().values
        return sizes[int((1 - self.outliers) * (len(sizes) - 1))].expand(2)

    def detach(self) -> None:
        """Leave the ranges as they are, and the network as it was otherwise."""
        for hook in self.hooks:
            hook.remove()
        for quantizer in self.quantizers:
            del quantizer.ends


@torch.no_grad()
def _make_symmetric(quantizer: ActivationQuantizer) -> None:
    """Give a grid with negative values as many levels below 0 as above, at its ends."""
    if quantizer.zero_point == 0:
        return
    levels, middle = (1 << quantizer.bits) - 1, 1 << (quantizer.bits - 1)
    farthest = torch.maximum(quantizer.zero_point, levels - quantizer.zero_point)
    quantizer.scale.mul_(farthest / (levels - middle))
    quantizer.zero_point.fill_(middle)


def dorefa_levels(bits: Tensor) -> Tensor:
    """Return how many steps there are from -1 to 1.

    From 7 bits on one less than published, so that 0 is a code: half a step would not
    fit the signed bytes of integer arithmetic.
    """
    return 2.0**bits - 1 - (bits > LARGEST_HALF_BITS).to(bits)


def dorefa(weight: Tensor, levels: Tensor) -> Tensor:
    """Return 2 · round(n · (tanh w / (2 max |tanh w|) + 1/2)) / n - 1 for n levels.

    The largest |tanh w| is that of the whole layer. Gradients pass straight through the
    rounding.
    """
    bent = torch.tanh(weight)
    unit = bent / (2 * bent.abs().max()) + 0.5
    return 2 * round_through(unit * levels) / levels - 1


class DoReFaWeights:
    """Rounds the weights of a network, which is changed, as DoReFa-Net does.

    The published values lie in [-1, 1], and a batch norm must undo that. Here each
    layer's values are multiplied by one number that never changes, the one that suits
    its initial weights best, so that the network starts near to what it was, and layers
    without a norm work too.
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
        levels = layer_levels(layer)
        size = layer.weight_scale * levels / 2
        values = dorefa(layer.weight, levels)
        return scaled_channels(values, size if factor is None else size * factor, layer)

    def follow(self) -> None:
        """Nothing changes with the weights."""

    @torch.no_grad()
    def finalize(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Let the layer round to its grid again, which holds these values."""
        if factor is not None:
            layer.weight_scale.mul_(factor.abs()).clamp_(min=_SMALLEST_SCALE)
        layer.rounding = None


def layer_levels(layer: QuantizedLayer) -> Tensor:
    """Return how many steps there are at a layer's width."""
    # Filled where it is: a recorded step may copy nothing from the host.
    return dorefa_levels(layer.weight_scale.new_full((), layer.bits))


def mixed(weight: Tensor, width: Tensor) -> Tensor:
    """Return a weight at a real width: its two neighbouring widths, mixed.

    At 3.2 bits it is 0.8 times the weight of 3 bits and 0.2 times that of 4 bits, each
    as :func:`dorefa` rounds it. So the width has a gradient.
    """
    low = width.detach().floor()
    share = width - low
    few, more = (dorefa(weight, dorefa_levels(bits)) for bits in (low, low + 1))
    return (1 - share) * few + share * more


def rounded_widths(widths: Tensor, counts: Tensor, most: float) -> Tensor:
    """Return whole widths (U,) whose weights take at most ``most`` bits.

    All widths less one number are rounded; the number is found by bisection.
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
    """Learns the widths of a network, which is changed, and rounds its weights.

    The widths start as planned, and all weights together should take what they took
    then: the loss grows by ``penalty`` times the bits a weight beyond or below that.
    Layers of 8 bits, the first and the last as a rule, keep them; so do activations,
    whose widths FracBits learns as well. Layers that share their bits share a width.
    FracBits' own weight of the penalty is for sizes in other units.
    """

    def __init__(self, model: nn.Module, penalty: float) -> None:
        DoReFaWeights(model)  # fits the size of each layer's values
        layers = quantized_layers(model)
        self.layers, self.kappa = list(layers.values()), penalty
        groups: dict[str, list[QuantizedLayer]] = {}
        for unit in quantization_of(model).graph.units:
            layer = layers.get(unit.name)
            if layer is not None and layer.bits < LARGEST_BITS:
                groups.setdefault(unit.group, []).append(layer)
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
        ).to(self.widths[0] if self.widths else torch.zeros(()))
        self.most = float((torch.stack([*self.widths]).detach() * self.counts).sum())
        self.whole: Tensor | None = None

    def rounded(self, layer: QuantizedLayer, factor: Tensor | None) -> Tensor:
        """Return the rounded weight, its channels times a factor (C,)."""
        size = _size(layer)
        values = mixed(layer.weight, layer.get_parameter("weight_width"))
        return scaled_channels(values, size if factor is None else size * factor, layer)

    def penalty(self) -> Tensor:
        """Return what is added to the loss."""
        bits = (torch.stack([*self.widths]) * self.counts).sum() - self.most
        return self.kappa * bits.abs() / self.counts.sum()

    @torch.no_grad()
    def follow(self) -> None:
        """Clamp the widths to the supported range; once rounded, they stay whole."""
        for at, width in enumerate(self.widths):
            width.clamp_(SMALLEST_BITS, LARGEST_BITS)
            if self.whole is not None:
                width.copy_(self.whole[at])

    @torch.no_grad()
    def make_whole(self) -> None:
        """Round the widths, within the bits there were; they stay so from now on."""
        widths = torch.stack([*self.widths])
        self.whole = rounded_widths(widths, self.counts, self.most)
        self.follow()

    @torch.no_grad()
    def finalize(self, layer: QuantizedLayer, factor: Tensor | None) -> None:
        """Let the layer round to its grid again, at its new width."""
        size = _size(layer)
        if "weight_width" in layer._parameters:
            layer.bits = int(layer.get_parameter("weight_width"))
            del layer.weight_width
        levels = layer_levels(layer)
        scale = (
            2 * size / levels if factor is None else 2 * size * factor.abs() / levels
        )
        layer.weight_scale.copy_(scale.clamp(min=_SMALLEST_SCALE))
        layer.weight_zero_point.copy_(levels / 2)
        layer.rounding = None


def _size(layer: QuantizedLayer) -> Tensor:
    """Return what the values of each channel, -1 to 1, are multiplied by, (C,)."""
    return layer.weight_scale.detach() * layer_levels(layer) / 2


def signs_of(bits: int, like: Tensor) -> Tensor:
    """Return all codes as rows of -1 and 1, (2^bits, bits)."""
    numbers = torch.arange(1 << bits, device=like.device)[:, None]
    places = torch.arange(bits, device=like.device)
    return ((numbers >> places & 1) * 2 - 1).to(like.dtype)


def nearest_codes(rows: Tensor, basis: Tensor) -> Tensor:
    """Return the code of the level nearest to each weight (C, n), for bases (C, K).

    The levels of a channel are the sums of its basis with all signs.
    """
    levels, order = (basis @ signs_of(basis.shape[1], basis).T).sort(1)
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    places = torch.searchsorted(middles.contiguous(), rows.contiguous())
    return order.gather(1, places)


def level_values(codes: Tensor, basis: Tensor) -> Tensor:
    """Return the levels of codes (C, n)."""
    return (basis @ signs_of(basis.shape[1], basis).T).gather(1, codes)


def fitted_basis(rows: Tensor, codes: Tensor, basis: Tensor) -> Tensor:
    """Return the basis (C, K) that suits weights and codes (C, n) best."""
    signs = signs_of(basis.shape[1], basis)[codes]  # (C, n, K)
    ridge = _RIDGE * rows.shape[1]
    gram = signs.mT @ signs + ridge * torch.eye(basis.shape[1]).to(basis)
    products = signs.mT @ rows[..., None] + ridge * basis[..., None]
    # Positive definite; without the check, which would wait for a GPU.
    found: Tensor = torch.linalg.solve_ex(gram, products).result
    return found[..., 0]


class LearnedLevels:
    """Rounds the weights of a network, which is changed, as LQ-Nets does.

    Each output channel has a basis of as many numbers as the weight has bits. Every
    step fits it by least squares to the codes of the moment, and moves a tenth of the
    way there. LQ-Nets learns levels of activations so too; here these keep uniform
    grids, or are float, as in the OMPQ paper's rows.
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
        """Return the rounded weight; gradients pass straight through."""
        basis, axis = layer.get_buffer("weight_basis"), channel_axis(layer)
        rows = _rows(layer, layer.weight.detach())
        values = level_values(nearest_codes(rows, basis), basis)
        values = values.reshape(layer.weight.movedim(axis, 0).shape).movedim(0, axis)
        values = values + (layer.weight - layer.weight.detach())
        return values if factor is None else scaled_channels(values, factor, layer)

    @torch.no_grad()
    def follow(self) -> None:
        """Move the bases to what suits the weights as they are now."""
        for layer in self.layers:
            rows, basis = (
                _rows(layer, layer.weight.detach()),
                layer.get_buffer("weight_basis"),
            )
            fitted = fitted_basis(rows, nearest_codes(rows, basis), basis)
            basis.lerp_(fitted, 1 - _MOMENTUM)

    def finalize(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Leave the layer with its values: codes, a basis of float32 and the bias."""
        del layer.weight_basis
        bits = layer.weight.numel() * layer.bits
        channels = len(layer.weight_scale)
        size = -(-bits // 8) + 4 * channels * (layer.bits + (layer.bias is not None))
        layer.rounding = StoredValues("LQ-Nets", size)


def _rows(layer: QuantizedLayer, weight: Tensor) -> Tensor:
    """Return a layer's weight as one row for each output channel, (C, n)."""
    return weight.movedim(channel_axis(layer), 0).flatten(1)


def with_outliers(rows: Tensor, bits: int, fraction: float) -> Tensor:
    """Return weights (C, n), the largest fraction in 16 bits, the rest rounded.

    Outliers are the largest of the layer; the others of each channel are rounded to a
    symmetric grid that ends at their largest. Gradients pass straight through.
    """
    size = rows.detach().abs()
    count = _outliers(rows.numel(), fraction)
    threshold = size.flatten().sort().values[-count - 1]
    large = size > threshold
    levels = (1 << (bits - 1)) - 1
    # No weight of the rest lies beyond the grid, so no gradient is lost there.
    ends = size.masked_fill(large, 0.0).amax(1, keepdim=True).clamp(min=_SMALLEST)
    scale = ends / levels * (1 + _MARGIN * torch.finfo(rows.dtype).eps)
    grid = Grid(scale, torch.full_like(scale, levels + 1.0), bits)
    return torch.where(large, half_through(rows), straight_through(rows, grid))


def _outliers(count: int, fraction: float) -> int:
    return min(round(count * fraction), count - 1)


class OutlierWeights:
    """Rounds the weights of a network, which is changed, as RVQuant does.

    How RVQuant fine-tunes is not published in full.
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

    def follow(self) -> None:
        """Nothing is kept from step to step."""

    def finalize(self, layer: QuantizedLayer, _factor: Tensor | None) -> None:
        """Leave the layer with its values; the outliers count in its size."""
        count = layer.weight.numel()
        few = _outliers(count, self.fraction)
        channels = 4 * len(layer.weight_scale) * (1 + (layer.bias is not None))
        size = -(-count * layer.bits // 8) + _BYTES * few + channels
        layer.rounding = StoredValues("RVQuant", size)


# Running deviations may grow, or shrink, by this factor, far more than training needs.
# Few bits may have no code for 0: weights that a small norm scales down are then
# rounded up, the measured variance grows, which scales them down further, without end.
_MOST = 16.0


class KeptNorm(nn.Module):
    """Computes a quantized layer whose weight is still to be folded with its norm."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(
        self, layer: QuantizedLayer, x: Tensor, output_size: Size = None
    ) -> Tensor:
        """Return what the layer and its norm give for x (N, C, ...)."""
        factor, shift = norm_affine(self.norm)
        weight = layer.rounded_weight(factor)
        if not self.norm.training:
            return linear_map(layer, x, weight, shift, output_size)
        y = linear_map(layer, x, weight, None, output_size)
        shape = [1] * y.dim()
        shape[1] = -1
        # Nothing is learned from the divisor: norms undo whatever scales a channel.
        divisor = _nonzero(factor.detach()).reshape(shape)
        return cast(Tensor, self.norm(y / divisor))


def norm_factor(layer: QuantizedLayer) -> Tensor | None:
    """Return what the norm beside a layer multiplies its channels by, (C,)."""
    return norm_affine(layer.norm.norm)[0] if isinstance(layer.norm, KeptNorm) else None


class Variances:
    """The running variances of kept norms, and limits around where they are now."""

    def __init__(self, quantized: nn.Module) -> None:
        norms = [m.norm for m in quantized.modules() if isinstance(m, KeptNorm)]
        self.values = [cast(Tensor, norm.running_var) for norm in norms]
        began = [cast(Tensor, norm.running_var) + norm.eps for norm in norms]
        self.lowest = [value / _MOST**2 for value in began]
        self.highest = [value * _MOST**2 for value in began]

    @torch.no_grad()
    def limit(self) -> None:
        """Bring back those that have left their limits."""
        if self.values:
            torch._foreach_maximum_(self.values, self.lowest)
            torch._foreach_minimum_(self.values, self.highest)


def keep_norms(quantized: nn.Module, model: nn.Module) -> None:
    """Give layers of a quantized network, in place, the float network's norms back.

    The weights are divided by what the norms will multiply them by, so that at first
    the network computes what it computed before.
    """
    layers, record = quantized_layers(quantized), quantization_of(quantized)
    sizes = {one.producer: one.exponents for one in record.equalized}
    for unit in record.graph.units:
        if not unit.norm or unit.name not in layers:
            continue
        layer = layers[unit.name]
        norm = dict(model.named_modules()).get(unit.norm)
        count = len(layer.weight_scale)
        if not isinstance(norm, _BatchNorm) or norm.num_features != count:
            raise TrainingError(
                f"{unit.norm} is not a batch norm of {count} channels in the float "
                "network; give the network that was quantized"
            )
        norm = copy.deepcopy(norm).to(layer.weight)
        if unit.norm in sizes:
            enlarge(norm, sizes[unit.norm])
        layer.norm = _unfolded(layer, norm)


@torch.no_grad()
def restore_float_weights(quantized: nn.Module, model: nn.Module) -> None:
    """Give quantized layers the folded weights and biases of the float network."""
    layers, record = quantized_layers(quantized), quantization_of(quantized)
    sources = dict(equalized(model, record.equalized).named_modules())
    for unit in record.graph.units:
        if unit.name not in layers:
            continue
        layer, source = layers[unit.name], sources.get(unit.name)
        weight, bias = getattr(source, "weight", None), getattr(source, "bias", None)
        if weight is None or weight.shape != layer.weight.shape:
            raise TrainingError(
                f"{unit.name} has no weight of shape {tuple(layer.weight.shape)} in "
                "the float network; give the network that was quantized"
            )
        norm = sources.get(unit.norm) if unit.norm else None
        if source is not None and isinstance(norm, _BatchNorm):
            weight, bias = folded(source, norm)
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(torch.zeros_like(layer.bias) if bias is None else bias)


@torch.no_grad()
def fold_norms(quantized: nn.Module) -> None:
    """Fold the norms that :func:`keep_norms` gave, so that layers stand alone again."""
    for layer in quantized_layers(quantized).values():
        if layer.norm is None:
            continue
        assert isinstance(layer.norm, KeptNorm)  # nothing else is ever put there
        factor, shift = norm_affine(layer.norm.norm)
        layer.weight.copy_(scaled_channels(layer.weight, factor, layer))
        assert layer.bias is not None  # folding gave it one
        layer.bias.copy_(shift)
        layer.norm = None


@torch.no_grad()
def _unfolded(layer: QuantizedLayer, kept: _BatchNorm) -> KeptNorm:
    if not kept.affine:
        kept.affine = True
        kept.weight = nn.Parameter(layer.weight.new_ones(kept.num_features))
        kept.bias = nn.Parameter(layer.weight.new_zeros(kept.num_features))
    factor, _ = norm_affine(kept)
    layer.weight.copy_(scaled_channels(layer.weight, 1 / _nonzero(factor), layer))
    assert layer.bias is not None and kept.running_mean is not None
    kept.bias.copy_(layer.bias + kept.running_mean * factor)
    return KeptNorm(kept)


def _nonzero(factor: Tensor) -> Tensor:
    """Replace factors (C,) so small that what is divided by them has no square."""
    smallest = torch.finfo(factor.dtype).tiny ** 0.25
    return torch.where(factor.abs() < smallest, torch.ones_like(factor), factor)
