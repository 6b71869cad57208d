"""Lowering: a quantized network becomes a list of steps in integers.

:func:`lower` observes one forward pass. Quantized layers and activation quantizers
become steps as a whole. Elsewhere, every torch function that reads a quantized tensor
must have an integer kernel. :class:`IntegerNetwork` runs the steps, and
:func:`finalize` makes the simulated network compute exactly what they do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import WIDE, CodeGrid
from ompq.integer.operators import (
    OPERATORS,
    Codes,
    Convolution,
    FunctionCall,
    Layer,
    Pending,
    Quantize,
    Requantize,
    Step,
    Value,
    as_codes,
    layer_operator,
)
from ompq.layers import ActivationQuantizer, QuantizedLayer
from ompq.network.observation import function_name, tensors_in, watched_modules
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
                "pooling, resizing to the nearest value, concatenation, slices, zero "
                "padding and flattening"
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
            shape = tuple(output.shape[1:])
            result = layer_operator(layer, name, source, shape)
        except QuantizationError as error:
            raise QuantizationError(f"{name} {error}") from error
        self._set(output, result)

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
