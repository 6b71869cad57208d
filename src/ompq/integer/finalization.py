"""finalize(): a simulated network that computes what integers compute, to the bit."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import frexp
from typing import Any

import torch
from torch import Tensor, nn

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.lowering import Steps, code_grid, lower
from ompq.integer.operators import Step, layer_weight
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.quantization import keep_rates, quantization_of, with_quantization
from ompq.quantization.moments import like_channels
from ompq.quantization.sites import Link
from ompq.recording import copied
from ompq.samples import Samples, SamplesLike

_BYTE = 8  # bits of a weight that ONNX stores without unpacking
# From this many channels on, ONNX Runtime's fast convolutions need signed weights.
_IMAGE = 4
_WHOLE_FLOATS = 1 << 24  # up to here float32 holds every whole number
# The least distance of any result from the midpoint of two codes, in steps: about the
# error of float32 arithmetic near code 255.
_MARGIN = 4e-5
# Scales are moved within intervals, this many in each factor of two ...
_INTERVALS = 128
# ... among this many scales in each interval.
_CANDIDATES = 512
# Results times scales that are tried at once: 2 MiB each pass, which stay in the cache.
_AT_ONCE = 1 << 18
# Averages with more possible results than this cannot all be kept off the middle.
_MOST_RESULTS = 1 << 18
# Moving one scale may make it necessary to move another; two rounds usually suffice.
_ROUNDS = 8


def finalize(
    quantized: nn.Module, samples: SamplesLike, *, saturation_safe: bool = True
) -> nn.Module:
    """Return a copy that computes exactly what its integer engine and ONNX file do.

    It trains and reconstructs as before: only passes without gradients are exact.
    Finalize it again after that; a finalized network stays as it is.

    Args:
        quantized: From :func:`ompq.quantize`, perhaps reconstructed or trained.
        saturation_safe: Whether 8-bit weights of convolutions are rounded on a coarser
            grid where the kernels of processors without VNNI would saturate: up to one
            bit of a channel's eight. Without it the ONNX file is right only on other
            processors. Depthwise convolutions, those of an image and linear layers keep
            their grids: their kernels do not saturate, or not with unsigned weights.

    Raises:
        QuantizationError: An operation has no integer kernel; it is named.
    """
    record, samples = quantization_of(quantized), Samples.of(samples)
    result = copied(quantized)
    steps = lower(result, samples)
    if saturation_safe:
        _avoid_saturation(result, steps)
        keep_rates(result)
    for _ in range(_ROUNDS):
        if not _clear_scales(result, steps):
            break
        # Tensors that shared a grid by chance may do so no longer.
        steps = lower(result, samples)
    links = _links(result, steps)
    link_layers(result, links)
    return with_quantization(result, replace(record, links=links))


INTEGERS = "integers; the integer engine and ONNX compute the same"


def finalized(quantized: nn.Module, samples: SamplesLike) -> tuple[nn.Module, str]:
    """Return the network as its files compute it, and what it computes with.

    A network in which something has no integer kernel is returned as it is, with a text
    such as ``float: hardswish in features.0.2 has no integer kernel``.
    """
    try:
        return finalize(quantized, samples), INTEGERS
    except QuantizationError as error:
        return quantized, f"float: {error}"


def _avoid_saturation(model: nn.Module, steps: Steps) -> None:
    """Make channels coarser until no two of their products can exceed 16 bits."""
    layers = quantized_layers(model)
    for step in steps.steps:
        if not steps.pairs(step):
            continue
        layer, (grid,) = layers[step.module], steps.sources(step)
        few = layer.weight.dim() == 2 or layer.weight.shape[1] < _IMAGE
        if few and layer.bits == _BYTE:
            continue  # as fast with unsigned bytes, which do not saturate
        own, before = layer.grid_like_weight(), layer.weight_scale.detach().clone()
        low, high = -own.zero_point * own.scale, (own.qmax - own.zero_point) * own.scale
        with torch.no_grad():
            # Rounding may raise a weight by half a step, so one pass may not suffice.
            while (excess := layer_weight(layer, grid).pair_excess(grid)).max() > 1:
                # What the grid clips must stay clipped on a wider one.
                layer.weight.clamp_(low, high)
                layer.weight_scale.mul_(excess.clamp(min=1).to(layer.weight_scale))
            _keep_sums(layer, layer.weight_scale != before)


def _keep_sums(layer: QuantizedLayer, channels: Tensor) -> None:
    """Round the weights of channels (O,) so that each channel's sum stays.

    Inputs are mostly positive after a ReLU, so that an error of the sum would shift the
    whole output. Weights nearest to the middle of two codes go the other way, except
    the largest, which would saturate.
    """
    grid = layer.grid_like_weight()
    scale, zero_point = (t.flatten()[:, None] for t in (grid.scale, grid.zero_point))
    exact = layer.weight.flatten(1) / scale  # (O, K)
    levels = (exact + zero_point).round() - zero_point
    missing = (exact - levels).sum(1, keepdim=True).round()
    way = missing.sign()
    limit = (levels * way).topk(min(2, levels.shape[1]), dim=1).values[:, -1:]
    gain = ((exact - levels) * way).masked_fill(levels * way >= limit, 0)
    order = gain.argsort(1, descending=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    moved = (rank < missing.abs()) & (gain > 0)
    rounded = ((levels + moved * way) * scale).view_as(layer.weight)
    like = (-1, *[1] * (layer.weight.dim() - 1))
    layer.weight.copy_(torch.where(channels.view(like), rounded, layer.weight))


def _clear_scales(model: nn.Module, steps: Steps) -> bool:
    """Move scales of sums, averages and changes of grid; return whether any did."""
    quantizers = activation_quantizers(model)
    meeting: dict[str, list[Step]] = {}
    for step in steps.steps:
        if step.quantizer and not step.operator.moves:
            meeting.setdefault(step.quantizer, []).append(step)
    moved = False
    for name, several in meeting.items():
        results = []
        for step in several:
            sources = [steps.steps[i].quantizer for i in step.inputs]
            grids = [code_grid(quantizers[source]) for source in sources]
            found = step.operator.possible_results(grids)
            results += [] if found is None else [found]
        if not results:
            continue
        before = code_grid(quantizers[name])
        scale = clear_scale(torch.cat(results), before)
        with torch.no_grad():
            quantizers[name].scale.fill_(scale)
        moved |= scale != before.scale
    return moved


def _links(model: nn.Module, steps: Steps) -> tuple[Link, ...]:
    """Return each layer with the quantizers of its input and output."""
    layers = quantized_layers(model)
    found = dict.fromkeys(
        Link(step.module, steps.steps[step.inputs[0]].quantizer, step.quantizer)
        for step in steps.steps
        if step.module in layers
    )
    times = Counter(link.layer for link in found)
    # A layer that serves two grids would have to round to both.
    return tuple(link for link in found if times[link.layer] == 1)


def clear_scale(results: Tensor, target: CodeGrid) -> float:
    """Return a scale near the target's that keeps results (R,) off the middle of codes.

    A scale that does so already is returned as it is. Otherwise the nearest one that
    does in an interval less than 0.8 % wide, or the best one there: so that what is
    returned for it is the same again.
    """
    if results.numel() > _MOST_RESULTS:
        return target.scale
    own = torch.tensor([target.scale], dtype=torch.float64)
    if float(_margins(results, own, target)) >= _MARGIN:
        return target.scale
    best, widest = target.scale, -1.0
    count = max(1, _AT_ONCE // results.numel())
    for scales in torch.split(_candidates(target.scale), count):
        margins = _margins(results, scales, target)
        clear = (margins >= _MARGIN).nonzero()
        if len(clear):
            return float(scales[clear[0]])
        at = int(margins.argmax())
        if float(margins[at]) > widest:
            best, widest = float(scales[at]), float(margins[at])
    return best


def _candidates(scale: float) -> Tensor:
    """Return the scales of an interval, which float32 holds exactly, nearest first."""
    mantissa, exponent = frexp(scale)  # 0.5 to 1
    interval = int(mantissa * 2 * _INTERVALS)
    places = interval + torch.arange(_CANDIDATES).double() / _CANDIDATES
    scales = places / (2 * _INTERVALS) * 2.0**exponent
    return scales[(scales - scale).abs().argsort()]


def _margins(values: Tensor, scales: Tensor, target: CodeGrid) -> Tensor:
    """Return the least distance of a result from the middle of two codes, (S,)."""
    codes = values / scales[:, None] + target.zero_point  # (S, results)
    inside = (codes > -1) & (codes < target.qmax + 1)
    distance = (codes - codes.floor() - 0.5).abs()
    return distance.masked_fill(~inside, 0.5).amin(1)


class IntegerMap:
    """Computes a layer as 8-bit kernels do, to the last bit, with whole floats.

    The sum of products is exact. Its scale is applied as ONNX Runtime does it: one
    product in float32, rounded to a step of the output's grid (``target``; None for
    logits).

    The weight is quantized once, and again when a tensor it depends on has changed
    (which torch counts; a write through ``.data`` is not counted).
    """

    def __init__(
        self, source: ActivationQuantizer, target: ActivationQuantizer | None
    ) -> None:
        self.source, self.target = source, target
        self._key: tuple[Any, ...] = ()
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, layer: QuantizedLayer, x: Tensor) -> Tensor:
        """Return the layer's output for x (N, C, ...), which lies on its grid."""
        weight, bias, ratio = self._weight(layer)
        # In place where it can be: these tensors are large, and no gradient is kept.
        levels = (x / self.source.scale).round_().to(weight.dtype)
        sums = linear_map(layer, levels, weight, None)
        # A fast algorithm of convolution may leave a sum near its whole number.
        sums = sums.round_().add_(like_channels(bias, layer, sums)).float()
        scaled = sums.mul_(like_channels(ratio, layer, sums))
        if self.target is None:
            return scaled.to(x.dtype)
        return scaled.round_().to(x.dtype).mul_(self.target.scale)

    def _weight(self, layer: QuantizedLayer) -> tuple[Tensor, Tensor, Tensor]:
        """Return weight (O, ...) and bias (O,) in whole floats, and the ratio (O,)."""
        target = self.target
        read = [layer.weight, layer.weight_scale, layer.weight_zero_point, layer.bias]
        read += [self.source.scale, self.source.zero_point]
        read += [] if target is None else [target.scale]
        key = tuple(
            (t.data_ptr(), t._version, t.dtype, t.device) for t in read if t is not None
        )
        if self._prepared is None or key != self._key:
            grid = code_grid(self.source)
            found = layer_weight(layer, grid)
            kind = torch.float32
            if int(found.largest_sum(grid).max()) >= _WHOLE_FLOATS:
                kind = torch.float64
            ratio = self.source.scale.detach().float() * found.scale.float()
            if target is not None:
                ratio = ratio / target.scale.detach().float()
            self._prepared = found.values.to(kind), found.bias.to(kind), ratio
            self._key = key
        return self._prepared


def link_layers(model: nn.Module, links: Iterable[Link]) -> None:
    """Let linked layers compute with whole numbers, the others with floats."""
    layers, quantizers = quantized_layers(model), activation_quantizers(model)
    for layer in layers.values():
        layer.integers = None
    for link in links:
        layers[link.layer].integers = IntegerMap(
            quantizers[link.source], quantizers[link.target] if link.target else None
        )
