"""Integer networks: the steps of a quantized network, their engine, and finalizing.

:func:`lower` observes one forward pass. Quantized layers and activation quantizers
become steps as a whole. Elsewhere, every torch function that reads a quantized tensor
must have an integer kernel. :class:`IntegerNetwork` runs the steps, and
:func:`finalize` makes the simulated network compute exactly what they do.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, frexp, log2, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import WIDE, CodeGrid
from ompq.integer.operators import (
    OPERATORS,
    Codes,
    Convolution,
    FunctionCall,
    Layer,
    Operator,
    Pending,
    Quantize,
    Requantize,
    Step,
    Value,
    as_codes,
    layer_operator,
    layer_weight,
)
from ompq.layers import (
    ActivationQuantizer,
    QuantizedLayer,
    activation_quantizers,
    linear_map,
    quantized_layers,
)
from ompq.quantization import keep_rates, quantization_of, with_quantization
from ompq.quantization.channels import like_channels
from ompq.quantization.sites import Link
from ompq.quantizers import STREAM_BITS
from ompq.recording import copied, function_name, tensors_in, watched_modules
from ompq.samples import (
    Batch,
    Samples,
    SamplesLike,
    call,
    evaluating,
    model_device,
    to_device,
)

INPUT, OUTPUT = "input", "logits"
_OUTPUT_BITS = 30  # of the logits: finer than any difference that could decide a class
# Functions and properties that do not read a tensor's values.
_HARMLESS = {
    *("device", "dim", "dtype", "get_device", "grad_fn", "hash", "is_complex"),
    *("is_contiguous", "is_cuda", "is_floating_point", "is_leaf", "is_sparse"),
    *("layout", "len", "ndim", "nelement", "numel", "requires_grad", "shape"),
    *("size", "stride"),
}
INTEGERS = "integers; the integer engine and ONNX compute the same"
_ELEMENTS = 1 << 24  # values a layer may hold at once; larger batches are split
_BYTE = 8  # bits of a weight that ONNX stores unpacked
# ONNX Runtime's fast convolutions need signed weights from this many input channels on.
_SIGNED_CHANNELS = 4
_WHOLE_FLOATS = 1 << 24  # float32 holds every integer up to this one
# Smallest distance of any result from the midpoint of two codes, in steps: about the
# error of float32 arithmetic near code 255.
_MARGIN = 4e-5
_INTERVALS = 128  # per factor of two; a scale is moved within its interval
_CANDIDATES = 512  # scales to try in an interval
_AT_ONCE = 1 << 18  # results times scales tried at once: 2 MiB, which fit in the cache
# With more possible results than this, some are always close to a midpoint.
_MOST_RESULTS = 1 << 18
_ROUNDS = 8  # moving one scale may require moving another; usually two rounds suffice


@dataclass(frozen=True, eq=False)
class Steps:
    """A network as a list of integer operators."""

    steps: tuple[Step, ...]  # in order of execution; the first is ``Quantize``
    input_shape: tuple[int, ...]  # shape of one input, (C, H, W) or (I,)
    outputs: Mapping[str, int]  # name of each output → position of its step
    # For each call of an activation quantizer, the position of the step that computes
    # its codes; None if it does not depend on the input.
    sites: tuple[int | None, ...] = ()

    def sources(self, step: Step) -> list[CodeGrid]:
        """Return the grids of a step's inputs."""
        return [self.steps[source].grid for source in step.inputs]

    def pairs(self, step: Step) -> bool:
        """Return whether 8-bit kernels add the products of a step in pairs.

        ONNX Runtime's kernels for depthwise convolutions do not, but these kernels
        exist only for outputs that are rounded to a grid.
        """
        operator = step.operator
        if isinstance(operator, Convolution) and operator.depthwise:
            return step.grid.wide
        return isinstance(operator, Layer)

    def saturating(self) -> list[str]:
        """Return the names of layers in which two products may exceed 16 bits."""
        return [
            step.name
            for step in self.steps
            if isinstance(step.operator, Layer)
            and self.pairs(step)
            and step.operator.weight.pair_excess(*self.sources(step)).max() > 1
        ]


def code_grid(quantizer: ActivationQuantizer) -> CodeGrid:
    """Return the grid of a quantizer as plain numbers."""
    zero_point = round(float(quantizer.zero_point))
    return CodeGrid(float(quantizer.scale), zero_point, quantizer.bits)


def lower(quantized: nn.Module, samples: SamplesLike) -> Steps:
    """Convert a quantized network to integer steps; runs one or two samples."""
    batch = to_device(Samples.of(samples).first_batch(2), model_device(quantized))
    images, *more = tensors_in(batch)
    if more:
        raise QuantizationError(
            f"the network takes {1 + len(more)} inputs; integer arithmetic supports one"
        )
    lowering = _Lowering(images)
    # These hooks run before those of quantizers that read a module's output.
    modules = watched_modules(quantized, lowering.enter, lowering.leave, first=True)
    with evaluating(quantized), modules, lowering:
        output = call(quantized, batch)
    outputs = lowering.finish_outputs(output)
    shape = tuple(images.shape[1:])
    return Steps(tuple(lowering.steps), shape, outputs, tuple(lowering.sites))


def input_names(batch: Batch) -> list[str]:
    """Return a name for each tensor of a batch: the keys of a dict, else numbered.

    Example:
        >>> input_names((torch.zeros(1), torch.zeros(1)))
        ['input', 'input_2']
    """
    if isinstance(batch, dict):
        return list(batch)
    count = sum(1 for _ in tensors_in(batch))
    return [INPUT, *(f"{INPUT}_{number}" for number in range(2, count + 1))]


def output_names(output: Any) -> list[str]:
    """Return a name for each tensor that a network returned.

    A single tensor is ``logits``; several have the keys of their dict or are numbered.

    Example:
        >>> output_names((torch.zeros(1), [torch.zeros(1)]))
        ['logits', 'output_2']
    """
    count = sum(1 for _ in tensors_in(output))
    if count > 1 and isinstance(output, dict) and len(output) == count:
        keys = [str(key).replace("/", "_") for key in output]
        if len({INPUT, *keys}) == count + 1:
            return keys
    return [OUTPUT, *(f"output_{number}" for number in range(2, count + 1))][:count]


class _Lowering(TorchFunctionMode):
    """Tracks the values of tensors in a forward pass and collects the steps."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.count = images.shape[0]
        self.values: dict[int, Value] = {}  # by id of the tensor
        self.versions: dict[int, int] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that ids stay unique
        self.steps: list[Step] = []
        self.names: set[str] = set()
        self.finished: dict[tuple[int, CodeGrid, float, float], int] = {}
        self.sites: list[int | None] = []
        self.scopes = [""]  # names of the modules being called
        self.inside = 0  # nesting depth in quantized layers and quantizers
        self._set(images, Pending(Quantize(), (), INPUT, tuple(images.shape[1:])))

    def enter(self, name: str, module: nn.Module) -> None:
        """Handle the start of a module's call."""
        self.scopes.append(name)
        self.inside += isinstance(module, QuantizedLayer | ActivationQuantizer)

    def leave(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Handle the end of a module's call; sets the value of a quantized output."""
        if isinstance(module, QuantizedLayer):
            self._layer(name, module, next(tensors_in((args, kwargs))), output)
        elif isinstance(module, ActivationQuantizer) and module.enabled:
            self._quantizer(name, module, args[0], output)
        self.inside -= isinstance(module, QuantizedLayer | ActivationQuantizer)
        self.scopes.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function and set the value of its output."""
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        for tensor in inputs:
            self._check_unwritten(tensor)
        output = func(*args, **kwargs)
        if not self.inside and any(id(tensor) in self.values for tensor in inputs):
            self._function(func, args, kwargs, output)
        return output

    def _function(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        name, where = function_name(function), self.scopes[-1] or "the network"
        if name == "get":  # a property, such as x.data
            name = function_name(function.__self__)
        if name in _HARMLESS:
            return
        if not any(True for _ in tensors_in(output)):
            raise QuantizationError(
                f"{name} in {where} reads or writes a tensor in a way that cannot be "
                "followed; use functions that return a new tensor"
            )
        if name not in OPERATORS or "out" in kwargs or not isinstance(output, Tensor):
            raise QuantizationError(
                f"{name} in {where} has no integer kernel; there are kernels for "
                "convolutions, linear layers, ReLU and clipping, residual sums, "
                "pooling, concatenation, slices, zero padding and flattening"
            )
        recognize, defaults = OPERATORS[name]
        observed = FunctionCall(
            module=self.scopes[-1] or name,
            values=tuple(self.values.get(id(t)) for t in tensors_in((args, kwargs))),
            arguments=defaults | dict(zip(defaults, args[1:], strict=False)) | kwargs,
            shape=tuple(output.shape[1:]),
            same_batch=output.dim() > 0 and output.shape[0] == self.count,
        )
        try:
            value = recognize(observed)
        except QuantizationError as error:
            raise QuantizationError(f"{name} in {where} {error}") from error
        if isinstance(value, Pending) and value.grid is not None:
            quantizer = self.steps[value.inputs[0]].quantizer
            value = self._finish(value, value.grid, quantizer)
        self._set(output, value)

    def _check_unwritten(self, tensor: Tensor) -> None:
        """Refuse a tensor that was modified in place after its value was set."""
        if _version(tensor) != self.versions.get(id(tensor), _version(tensor)):
            raise QuantizationError(
                f"{self.scopes[-1] or 'the network'} reads a tensor that was modified "
                "in place through a view; use functions that return a new tensor"
            )

    def _set(self, output: Tensor, value: Value) -> None:
        self.alive.append(output)
        self.values[id(output)] = value
        self.versions[id(output)] = _version(output)

    def _layer(
        self, name: str, layer: QuantizedLayer, x: Tensor, output: Tensor
    ) -> None:
        try:
            source = as_codes(self.values.get(id(x)))
            operator = layer_operator(layer, x.dim(), source.grid)
        except QuantizationError as error:
            raise QuantizationError(f"{name} {error}") from error
        shape = tuple(output.shape[1:])
        self._set(output, Pending(operator, (source.step,), name, shape))

    def _quantizer(
        self, name: str, quantizer: ActivationQuantizer, x: Tensor, output: Tensor
    ) -> None:
        value = self.values.get(id(x))
        if value is None:
            self.sites.append(None)
            return
        grid = code_grid(quantizer)
        if isinstance(value, Codes) and value.grid != grid:
            value = Pending(Requantize(), (value.step,), name, value.shape)
        if isinstance(value, Pending):
            value = self._finish(value, grid, name)
        self.sites.append(value.step)
        self._set(output, value)

    def _finish(self, value: Pending, grid: CodeGrid, quantizer: str) -> Codes:
        """Add the step of a value once its grid is known, if it is not there yet."""
        key = (id(value.operator), grid, value.low, value.high)
        if key not in self.finished:
            step = Step(
                name=self._unique(value.module),
                operator=value.operator,
                inputs=value.inputs,
                shape=value.shape,
                grid=grid,
                low=value.low,
                high=value.high,
                quantizer=quantizer,
                module=value.module,
            )
            self.finished[key] = self._add(step)
        position, shape = self.finished[key], value.shape
        for operator, shape in value.moves:
            name = self._unique(value.module)
            step = Step(name, operator, (position,), shape, grid, quantizer=quantizer)
            position = self._add(step)
        return Codes(position, grid, shape)

    def _unique(self, name: str) -> str:
        numbered = (f"{name}.{number}" for number in range(2, len(self.names) + 3))
        unused = next(each for each in (name, *numbered) if each not in self.names)
        self.names.add(unused)
        return unused

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def finish_outputs(self, output: Any) -> dict[str, int]:
        """Return the name of each output and the position of its step."""
        positions = {}
        tensors = list(tensors_in(output))
        for name, tensor in zip(output_names(output), tensors, strict=True):
            self._check_unwritten(tensor)
            value = self.values.get(id(tensor))
            if value is None or (isinstance(value, Pending) and not value.inputs):
                raise QuantizationError(
                    "the network's output does not come from its input through a layer"
                )
            if isinstance(value, Pending):
                sources = [self.steps[source].grid for source in value.inputs]
                scale = value.operator.largest(sources) / (1 << _OUTPUT_BITS)
                value = self._finish(value, CodeGrid(scale, 0, WIDE), "")
            positions[name] = value.step
        if not positions:
            raise QuantizationError("the network returns no tensor")
        return positions


def _version(tensor: Tensor) -> int:
    """Return how often a tensor or its base was modified in place."""
    return 0 if tensor.is_inference() else tensor._version


class IntegerNetwork(nn.Module):
    """A network that computes with integers, on the CPU; call it like any module."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self._ratios = [
            step.operator.ratio(steps.sources(step) or [step.grid], step.grid)
            for step in steps.steps
        ]

    @classmethod
    def from_quantized(
        cls, quantized: nn.Module, samples: SamplesLike
    ) -> "IntegerNetwork":
        """Convert a quantized network, running two samples.

        Raises:
            QuantizationError: The named operation has no integer kernel.
        """
        return cls(lower(quantized, samples))

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the float output for images (N, C, H, W), or a dict of several."""
        outputs = self.run(images)
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))

    def run(self, images: Tensor) -> dict[str, Tensor]:
        """Return the float outputs for images (N, C, H, W), by name."""
        codes = self.input_codes(images)
        per_image = max(self._elements(step) for step in self.steps.steps)
        parts = torch.split(codes, max(1, _ELEMENTS // per_image))
        results = zip(*(self.integer_outputs(part) for part in parts), strict=True)
        outputs = {}
        names = self.steps.outputs.items()
        for (name, position), result in zip(names, results, strict=True):
            grid = self.steps.steps[position].grid
            values = (torch.cat(result).double() - grid.zero_point) * grid.scale
            outputs[name] = values.float().to(images.device)
        return outputs

    def input_codes(self, images: Tensor) -> Tensor:
        """Quantize images to uint8 codes, with float arithmetic."""
        if tuple(images.shape[1:]) != self.steps.input_shape:
            raise ValueError(
                f"images of shape {tuple(images.shape[1:])} do not fit: the integer "
                f"network was made for {self.steps.input_shape}"
            )
        grid = self.steps.steps[0].grid
        levels = (images.cpu().float() / torch.tensor(grid.scale)).round()
        return (levels + grid.zero_point).clamp(0, grid.qmax).to(torch.uint8)

    def integer_outputs(self, codes: Tensor) -> list[Tensor]:
        """Return the codes of every output, uint8 if they have 8 bits, else int32."""
        outputs = self.steps.outputs.values()
        last_use = {
            source: position
            for position, step in enumerate(self.steps.steps)
            for source in step.inputs
        }
        results = {0: codes}
        for position, step in enumerate(self.steps.steps[1:], 1):
            results[position] = self._execute(position, results)
            for source in {*step.inputs} - {*outputs}:
                if last_use[source] == position:
                    del results[source]
        return [results[position] for position in outputs]

    def codes(self, images: Tensor) -> list[Tensor]:
        """Return the result of every step for images (N, C, H, W)."""
        results = {0: self.input_codes(images)}
        for position in range(1, len(self.steps.steps)):
            results[position] = self._execute(position, results)
        return list(results.values())

    def assert_integer_only(self, images: Tensor) -> None:
        """Raise a QuantizationError if running images involves any float operation."""
        codes = self.input_codes(images)
        with _NoFloats():  # type: ignore[no-untyped-call]
            self.integer_outputs(codes)

    def _execute(self, position: int, results: dict[int, Tensor]) -> Tensor:
        step = self.steps.steps[position]
        values = [
            results[source].int() - self.steps.steps[source].grid.zero_point
            for source in step.inputs
        ]
        codes = step.operator.compute(values)
        if step.operator.moves:
            codes = codes + step.grid.zero_point
        else:
            codes = step.operator.rescale(codes, self._ratios[position], step.grid)
            codes = codes.clamp(*step.grid.limits(step.low, step.high))
        return codes.to(step.grid.dtype)

    def _elements(self, step: Step) -> int:
        """Return how many values a step holds at once per image."""
        window = 1
        if isinstance(step.operator, Convolution):
            channels = self.steps.steps[step.inputs[0]].shape[0]
            window = prod(step.operator.weight.values.shape[2:]) * channels
        return max(prod(step.shape), window * prod(step.shape[1:]))


class _NoFloats(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation with a float among its arguments or results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs, output))
        inexact = any(t.is_floating_point() or t.is_complex() for t in tensors)
        if inexact or any(isinstance(value, float) for value in args):
            raise QuantizationError(
                f"{func} computes with floats, so the network is not integer-only"
            )
        return output


def finalize(
    quantized: nn.Module, samples: SamplesLike, *, saturation_safe: bool = True
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

    Raises:
        QuantizationError: The named operation has no integer kernel.
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
        # Tensors whose grids happened to be equal may need another step now.
        steps = lower(result, samples)
    links = _links(result, steps)
    link_layers(result, links)
    return with_quantization(result, replace(record, links=links))


def finalized(quantized: nn.Module, samples: SamplesLike) -> tuple[nn.Module, str]:
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
        shape = layer.weight.shape
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
    exact = layer.weight.flatten(1) / scale  # (O, K)
    levels = (exact + zero_point).round() - zero_point
    missing = (exact - levels).sum(1, keepdim=True).round()
    direction = missing.sign()
    limit = (levels * direction).topk(min(2, levels.shape[1]), dim=1).values[:, -1:]
    gain = ((exact - levels) * direction).masked_fill(levels * direction >= limit, 0)
    order = gain.argsort(1, descending=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    moved = (rank < missing.abs()) & (gain > 0)
    rounded = ((levels + moved * direction) * scale).view_as(layer.weight)
    like = (-1, *[1] * (layer.weight.dim() - 1))
    layer.weight.copy_(torch.where(channels.view(like), rounded, layer.weight))


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
    """Return each layer with the quantizers of its input and output."""
    layers = quantized_layers(model)
    links = dict.fromkeys(
        Link(step.module, steps.steps[step.inputs[0]].quantizer, step.quantizer)
        for step in steps.steps
        if step.module in layers
    )
    times = Counter(link.layer for link in links)
    # A layer called with several grids stays float: it cannot round to all of them.
    return tuple(link for link in links if times[link.layer] == 1)


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


class IntegerMap:
    """Computes a layer bit-exactly as 8-bit kernels do, with integers held in floats.

    The sum of products is exact. It is scaled as in ONNX Runtime: by one product in
    float32, rounded to a code of the output's grid (``target``; None for logits).

    The quantized weight is cached until a tensor it depends on changes. torch's version
    counters tell; they miss writes through ``.data``.
    """

    def __init__(
        self, source: ActivationQuantizer, target: ActivationQuantizer | None
    ) -> None:
        self.source, self.target = source, target
        self._key: tuple[Any, ...] = ()
        self._prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, layer: QuantizedLayer, x: Tensor) -> Tensor:
        """Return the layer's output for x (N, C, ...) on the input's grid."""
        weight, bias, ratio = self._weight(layer)
        # In place where possible: these tensors are large, and there are no gradients.
        levels = (x / self.source.scale).round_().to(weight.dtype)
        sums = linear_map(layer, levels, weight, None)
        # Fast convolution algorithms may not give exact integers.
        sums = sums.round_().add_(like_channels(bias, layer, sums)).float()
        scaled = sums.mul_(like_channels(ratio, layer, sums))
        if self.target is None:
            return scaled.to(x.dtype)
        return scaled.round_().to(x.dtype).mul_(self.target.scale)

    def _weight(self, layer: QuantizedLayer) -> tuple[Tensor, Tensor, Tensor]:
        """Return integral weight (O, ...) and bias (O,), and the float ratio (O,)."""
        target = self.target
        read = [layer.weight, layer.weight_scale, layer.weight_zero_point, layer.bias]
        read += [self.source.scale, self.source.zero_point]
        read += [] if target is None else [target.scale]
        key = tuple(
            (t.data_ptr(), t._version, t.dtype, t.device) for t in read if t is not None
        )
        if self._prepared is None or key != self._key:
            grid = code_grid(self.source)
            weight = layer_weight(layer, grid)
            exact = int(weight.largest_sum(grid).max()) < _WHOLE_FLOATS
            dtype = torch.float32 if exact else torch.float64
            ratio = self.source.scale.detach().float() * weight.scale.float()
            if target is not None:
                ratio = ratio / target.scale.detach().float()
            self._prepared = weight.values.to(dtype), weight.bias.to(dtype), ratio
            self._key = key
        return self._prepared


def link_layers(model: nn.Module, links: Iterable[Link]) -> None:
    """Make linked layers compute with integers, and all others with floats."""
    layers, quantizers = quantized_layers(model), activation_quantizers(model)
    for layer in layers.values():
        layer.integers = None
    for link in links:
        layers[link.layer].integers = IntegerMap(
            quantizers[link.source], quantizers[link.target] if link.target else None
        )
