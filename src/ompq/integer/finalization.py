"""Finalization: scales and sums that integer arithmetic represents exactly."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor, frexp, log2

import torch
from torch import Tensor, nn

from ompq.errors import QuantizationError
from ompq.grids import STREAM_BITS
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.links import link_layers
from ompq.integer.lowering import Steps, code_grid, lower
from ompq.integer.operators import Operator, Requantize, Step, layer_weight
from ompq.layers import QuantizedLayer, activation_quantizers, quantized_layers
from ompq.network.folding import channel_axis
from ompq.network.observation import copy_network
from ompq.quantization.activation_sites import Link
from ompq.quantization.record import keep_rates, quantization_of, with_quantization
from ompq.samples import Samples, SamplesLike, usual_settings

INTEGERS = "integers; the integer engine and ONNX compute the same"

_BYTE = 8  # bits of a weight that ONNX stores unpacked
# ONNX Runtime's fast convolutions need signed weights from this many input channels on.
_SIGNED_CHANNELS = 4

# Smallest distance of any result from the midpoint of two codes, in steps: about the
# error of float32 arithmetic near code 255.
_MARGIN = 4e-5
_INTERVALS = 128  # per factor of two; a scale is moved within its interval
_CANDIDATES = 512  # scales to try in an interval
_AT_ONCE = 1 << 18  # results times scales tried at once: 2 MiB, which fit in the cache
# With more possible results than this, some are always close to a midpoint.
_MOST_RESULTS = 1 << 18
_ROUNDS = 8  # moving one scale may require moving another; usually two rounds suffice


@usual_settings()
def finalize(
    quantized: nn.Module,
    samples: SamplesLike,
    *,
    saturation_safe: bool = True,
    stretched: bool = True,
) -> nn.Module:
    """Return a copy that computes exactly what its integer engine and ONNX file do.

    Only forward passes without gradients are exact, so it can still be trained and
    reconstructed; finalize it again afterwards. Finalizing twice changes nothing.

    Args:
        quantized: From :func:`ompq.quantize`, possibly reconstructed or trained.
        saturation_safe: Whether to round 8-bit weights of convolutions on a coarser
            grid where kernels would saturate on processors without VNNI. It costs a
            channel up to one of its eight bits; without it, the ONNX file is wrong on
            such processors. Depthwise convolutions, those that read an image, and
            linear layers keep their grids: their kernels do not saturate, or not with
            unsigned weights.
        stretched: Whether weights of few bits are stretched to bytes, which makes the
            step of the bias finer. ONNX files do so; runtimes that compute with 4 bits
            do not.

    Raises:
        QuantizationError: The named operation has no integer kernel.
    """
    record, samples = quantization_of(quantized), Samples.of(samples)
    result = copy_network(quantized)
    for layer in quantized_layers(result).values():
        layer.stretched = stretched
    steps = lower(result, samples)
    if saturation_safe:
        _avoid_saturation(result, steps)
        keep_rates(result)
    for _ in range(_ROUNDS):
        if not _clear_scales(result, steps):
            break
        # Tensors whose grids happened to be equal may need another step now.
        steps = lower(result, samples)
    links = _links(result, steps)
    link_layers(result, links)
    return with_quantization(result, replace(record, links=links))


def finalize_if_possible(
    quantized: nn.Module, samples: SamplesLike
) -> tuple[nn.Module, str]:
    """Finalize a network if possible; also return which arithmetic it uses.

    A network with an operation that has no integer kernel is returned unchanged, with a
    text such as ``float: hardswish in features.0.2 has no integer kernel``.
    """
    try:
        return finalize(quantized, samples), INTEGERS
    except QuantizationError as error:
        return quantized, f"float: {error}"


def _avoid_saturation(model: nn.Module, steps: Steps) -> None:
    """Coarsen the grids of channels until no two products can exceed 16 bits."""
    layers = quantized_layers(model)
    for step in steps.steps:
        if not steps.pairs(step):
            continue
        layer, (grid,) = layers[step.module], steps.sources(step)
        shape = layer.weight.transpose(0, channel_axis(layer)).shape
        unsigned = len(shape) == 2 or shape[1] < _SIGNED_CHANNELS
        if unsigned and layer.bits == _BYTE:
            continue  # equally fast with unsigned bytes, which do not saturate
        own, before = layer.grid_like_weight(), layer.weight_scale.detach().clone()
        low, high = -own.zero_point * own.scale, (own.qmax - own.zero_point) * own.scale
        with torch.no_grad():
            # Rounding may raise a weight by half a step, so one pass may not suffice.
            while (excess := layer_weight(layer, grid).pair_excess(grid)).max() > 1:
                # Weights that the old grid clipped must not grow on the wider one.
                layer.weight.clamp_(low, high)
                layer.weight_scale.mul_(excess.clamp(min=1).to(layer.weight_scale))
            _keep_sums(layer, layer.weight_scale != before)


def _keep_sums(layer: QuantizedLayer, channels: Tensor) -> None:
    """Round the weights of selected channels (O,) so that their sums are preserved.

    Inputs are mostly positive after a ReLU, so an error of the sum would shift the
    whole output. Weights nearest to a midpoint are rounded the other way, except the
    largest, which would saturate.
    """
    grid = layer.grid_like_weight()
    scale, zero_point = (t.flatten()[:, None] for t in (grid.scale, grid.zero_point))
    weight = layer.weight.transpose(0, channel_axis(layer))  # (O, I, ...)
    exact = weight.flatten(1) / scale  # (O, K)
    levels = (exact + zero_point).round() - zero_point
    missing = (exact - levels).sum(1, keepdim=True).round()
    direction = missing.sign()
    limit = (levels * direction).topk(min(2, levels.shape[1]), dim=1).values[:, -1:]
    gain = ((exact - levels) * direction).masked_fill(levels * direction >= limit, 0)
    order = gain.argsort(1, descending=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    moved = (rank < missing.abs()) & (gain > 0)
    rounded = ((levels + moved * direction) * scale).view(weight.shape)
    like = (-1, *[1] * (weight.dim() - 1))
    weight.copy_(torch.where(channels.view(like), rounded, weight))


def _clear_scales(model: nn.Module, steps: Steps) -> bool:
    """Move scales so that no sum, average or requantized code is near a midpoint.

    Sums of 16 bits have too many results for that. Their scales become powers of two,
    so that floats add them up exactly, and layers that read them have odd multiples of
    these scales. Returns whether any scale changed.
    """
    quantizers = activation_quantizers(model)
    by_quantizer: dict[str, list[Step]] = {}
    for step in steps.steps:
        if step.quantizer and not step.operator.moves:
            by_quantizer.setdefault(step.quantizer, []).append(step)
    moved = False
    for name, group in by_quantizer.items():
        made = []
        for step in group:
            sources = [steps.steps[i].quantizer for i in step.inputs]
            grids = [code_grid(quantizers[source]) for source in sources]
            made.append((step.operator, grids))
        before = code_grid(quantizers[name])
        scale = _better_scale(made, before)
        with torch.no_grad():
            quantizers[name].scale.fill_(scale)
        moved |= scale != before.scale
    return moved


def _better_scale(
    made: Sequence[tuple[Operator, list[CodeGrid]]], target: CodeGrid
) -> float:
    """Return a scale for the results of operators on codes of these grids."""
    if target.bits == STREAM_BITS:
        return float(2.0 ** ceil(log2(target.scale)))
    results = []
    for operator, sources in made:
        if isinstance(operator, Requantize) and sources[0].bits == STREAM_BITS:
            return odd_multiple(target.scale, sources[0].scale)
        possible = operator.possible_results(sources)
        results += [] if possible is None else [possible]
    return clear_scale(torch.cat(results), target) if results else target.scale


def _links(model: nn.Module, steps: Steps) -> tuple[Link, ...]:
    """Return each layer with the quantizers of its input and output, in order."""
    layers = quantized_layers(model)
    found: dict[str, list[Link]] = {}
    for step in steps.steps:
        if step.module in layers:
            source = steps.steps[step.inputs[0]].quantizer
            link = Link(step.module, source, step.quantizer)
            found.setdefault(step.module, []).append(link)
    # One link if all calls of a layer read and return the same grids, else one a call.
    same = {name: len({*links}) == 1 for name, links in found.items()}
    return tuple(
        link
        for name, links in found.items()
        for link in (links[:1] if same[name] else links)
    )


def odd_multiple(scale: float, step: float) -> float:
    """Return the odd multiple of a step that is nearest to a scale.

    Example:
        >>> odd_multiple(6.2, 1.0)
        7.0
    """
    return (2 * floor(scale / step / 2) + 1) * step


def clear_scale(results: Tensor, target: CodeGrid) -> float:
    """Return a scale near the target's at which no result (R,) is near a midpoint.

    The target's own scale is returned if it is clear already. Otherwise it is the
    nearest clear scale in a fixed interval less than 0.8 % wide, or the best one there.
    So calling this again for the result changes nothing.
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
        widest_here = int(margins.argmax())
        if float(margins[widest_here]) > widest:
            best, widest = float(scales[widest_here]), float(margins[widest_here])
    return best


def _candidates(scale: float) -> Tensor:
    """Return the scales of the interval around one, exact in float32, nearest first."""
    mantissa, exponent = frexp(scale)  # 0.5 to 1
    interval = int(mantissa * 2 * _INTERVALS)
    places = interval + torch.arange(_CANDIDATES).double() / _CANDIDATES
    scales = places / (2 * _INTERVALS) * 2.0**exponent
    return scales[(scales - scale).abs().argsort()]


def _margins(values: Tensor, scales: Tensor, target: CodeGrid) -> Tensor:
    """Return each scale's smallest distance of a result from a midpoint, (S,)."""
    codes = values / scales[:, None] + target.zero_point  # (S, results)
    inside = (codes > -1) & (codes < target.qmax + 1)
    distance = (codes - codes.floor() - 0.5).abs()
    return distance.masked_fill(~inside, 0.5).amin(1)
