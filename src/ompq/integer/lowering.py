"""From a quantized network to integer steps, by watching one forward pass of it.

Quantized layers and activation quantizers are seen as wholes; of everything else each
torch function that reads a quantized tensor must be one that has an integer kernel.
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
from ompq.recording import function_name, tensors_in, watched_modules
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
# Outputs use 30 bits: finer than any difference that could decide between two classes.
_OUTPUT_BITS = 30
# Functions and properties that do not read a tensor's values.
_HARMLESS = {
    *("device", "dim", "dtype", "get_device", "grad_fn", "hash", "is_complex"),
    *("is_contiguous", "is_cuda", "is_floating_point", "is_leaf", "is_sparse"),
    *("layout", "len", "ndim", "nelement", "numel", "requires_grad", "shape"),
    *("size", "stride"),
}


@dataclass(frozen=True, eq=False)
class Steps:
    """All of a network in integers."""

    steps: tuple[Step, ...]  # in order of execution; the first is ``Quantize``
    input_shape: tuple[int, ...]  # shape of one input, (C, H, W) or (I,)
    outputs: Mapping[str, int]  # name of each output → the step that gives it
    # For each call of an activation quantizer, the step that gives its codes; None
    # where it does not depend on the input.
    sites: tuple[int | None, ...] = ()

    def sources(self, step: Step) -> list[CodeGrid]:
        """Return the grids of what a step reads."""
        return [self.steps[source].grid for source in step.inputs]

    def pairs(self, step: Step) -> bool:
        """Return whether 8-bit kernels add the products of a step in pairs.

        Those of ONNX Runtime for depthwise convolutions do not, but they need a grid to
        round to.
        """
        operator = step.operator
        if isinstance(operator, Convolution) and operator.depthwise:
            return step.grid.wide
        return isinstance(operator, Layer)

    def saturating(self) -> list[str]:
        """Return the layers in which two products may exceed 16 bits."""
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
    """Return the steps of a quantized network; one or two samples are run."""
    batch = to_device(Samples.of(samples).first_batch(2), model_device(quantized))
    images, *more = tensors_in(batch)
    if more:
        raise QuantizationError(
            f"the network takes {1 + len(more)} inputs: integer arithmetic covers one"
        )
    lowering = _Lowering(images)
    # Before all other hooks: a quantizer that stands after a module sees what the
    # module gives.
    modules = watched_modules(quantized, lowering.enter, lowering.leave, first=True)
    with evaluating(quantized), modules, lowering:
        output = call(quantized, batch)
    outputs = lowering.finish_outputs(output)
    shape = tuple(images.shape[1:])
    return Steps(tuple(lowering.steps), shape, outputs, tuple(lowering.sites))


def input_names(batch: Batch) -> list[str]:
    """Return a name for each tensor of a batch: keys of a dict, else a number.

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

    A single one is ``logits``; those of a dict have its keys; others a number.

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
    """Gives every tensor of a forward pass its value, and collects the steps."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.count = images.shape[0]
        self.values: dict[int, Value] = {}
        self.versions: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no id is used twice
        self.steps: list[Step] = []
        self.names: set[str] = set()
        self.made: dict[tuple[int, CodeGrid, float, float], int] = {}
        self.sites: list[int | None] = []
        self.scopes = [""]
        self.inside = 0  # depth of modules that are seen as wholes
        self._set(images, Pending(Quantize(), (), INPUT, tuple(images.shape[1:])))

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that a module begins."""
        self.scopes.append(name)
        self.inside += isinstance(module, QuantizedLayer | ActivationQuantizer)

    def leave(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Give the output of a quantized layer or a quantizer its value."""
        if isinstance(module, QuantizedLayer):
            self._layer(name, module, next(tensors_in((args, kwargs))), output)
        elif isinstance(module, ActivationQuantizer) and module.enabled:
            self._quantizer(name, module, args[0], output)
        self.inside -= isinstance(module, QuantizedLayer | ActivationQuantizer)
        self.scopes.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function and give its output a value."""
        kwargs = kwargs or {}
        read = list(tensors_in((args, kwargs)))
        for tensor in read:
            self._refuse_written(tensor)
        output = func(*args, **kwargs)
        if not self.inside and any(id(tensor) in self.values for tensor in read):
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
                f"{name} in {where} reads or writes a tensor where the export "
                "cannot follow it; use functions that return a new tensor"
            )
        if name not in OPERATORS or "out" in kwargs or not isinstance(output, Tensor):
            raise QuantizationError(
                f"{name} in {where} has no integer kernel; integers cover "
                "convolutions, linear layers, ReLU and clipping, residual sums, "
                "pooling, concatenation, slices, padding with zeros and flattening"
            )
        recognized, defaults = OPERATORS[name]
        given = defaults | dict(zip(defaults, args[1:], strict=False)) | kwargs
        observed = FunctionCall(
            module=self.scopes[-1] or name,
            values=tuple(self.values.get(id(t)) for t in tensors_in((args, kwargs))),
            arguments=given,
            shape=tuple(output.shape[1:]),
            same_batch=output.dim() > 0 and output.shape[0] == self.count,
        )
        try:
            value = recognized(observed)
        except QuantizationError as error:
            raise QuantizationError(f"{name} in {where} {error}") from error
        if isinstance(value, Pending) and value.grid is not None:
            quantizer = self.steps[value.inputs[0]].quantizer
            value = self._finish(value, value.grid, quantizer)
        self._set(output, value)

    def _refuse_written(self, tensor: Tensor) -> None:
        """Refuse a tensor that was written in place since its value was noted."""
        if _version(tensor) != self.versions.get(id(tensor), _version(tensor)):
            raise QuantizationError(
                f"{self.scopes[-1] or 'the network'} reads a tensor that was written "
                "in place through a view of it; use functions that return a new tensor"
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
        """Make the step of a value whose grid is known now."""
        key = (id(value.operator), grid, value.low, value.high)
        if key not in self.made:
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
            self.made[key] = self._add(step)
        at, shape = self.made[key], value.shape
        for operator, shape in value.moves:
            name = self._unique(value.module)
            step = Step(name, operator, (at,), shape, grid, quantizer=quantizer)
            at = self._add(step)
        return Codes(at, grid, shape)

    def _unique(self, name: str) -> str:
        again = (f"{name}.{number}" for number in range(2, len(self.names) + 3))
        found = next(each for each in (name, *again) if each not in self.names)
        self.names.add(found)
        return found

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def finish_outputs(self, output: Any) -> dict[str, int]:
        """Return the name of each output, and the step that gives it."""
        found = {}
        tensors = list(tensors_in(output))
        for name, tensor in zip(output_names(output), tensors, strict=True):
            self._refuse_written(tensor)
            value = self.values.get(id(tensor))
            if value is None or (isinstance(value, Pending) and not value.inputs):
                raise QuantizationError(
                    "the network's output does not come from its input through a layer"
                )
            if isinstance(value, Pending):
                sources = [self.steps[source].grid for source in value.inputs]
                scale = value.operator.largest(sources) / (1 << _OUTPUT_BITS)
                value = self._finish(value, CodeGrid(scale, 0, WIDE), "")
            found[name] = value.step
        if not found:
            raise QuantizationError("the network returns no tensor")
        return found


def _version(tensor: Tensor) -> int:
    """Return how often a tensor, or what it is a view of, was written in place."""
    return 0 if tensor.is_inference() else tensor._version
