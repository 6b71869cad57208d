"""From a quantized network to steps, by watching one forward pass of it.

Quantized layers and activation quantizers are seen as wholes; of everything else each
torch function that reads a quantized tensor must be one that has an integer form.
"""

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import code_grid, layer_weight
from ompq.integer.operators import (
    FORMS,
    CodeGrid,
    Codes,
    Convolution,
    Moved,
    Observed,
    Operation,
    Pending,
    Product,
    Quantize,
    Requantize,
    Sides,
    Step,
    Steps,
    Value,
    as_codes,
    pair,
)
from ompq.layers import (
    ActivationQuantizer,
    QuantizedConv2d,
    QuantizedLayer,
    QuantizedLinear,
)
from ompq.recording import function_name, tensors_in, watched_modules
from ompq.samples import (
    Samples,
    SamplesLike,
    call,
    evaluating,
    model_device,
    to_device,
)

# Functions and properties that tell of a tensor without its values.
_HARMLESS = {
    *("device", "dim", "dtype", "get_device", "grad_fn", "hash", "is_complex"),
    *(
        "is_contiguous",
        "is_cuda",
        "is_floating_point",
        "is_leaf",
        "is_sparse",
        "layout",
    ),
    *("len", "ndim", "nelement", "numel", "requires_grad", "shape", "size", "stride"),
}


def lower(quantized: nn.Module, samples: SamplesLike) -> Steps:
    """Return the steps of a quantized network.

    Args:
        quantized: From :func:`ompq.quantize`; left as it is.
        samples: Inputs; one or two are run.

    Raises:
        QuantizationError: An operation has no integer form, or a layer stays float.
    """
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
    with evaluating(quantized), modules, _Watch(lowering):
        output = call(quantized, batch)
    steps, shape = lowering.finished(output), tuple(images.shape[1:])
    return Steps(steps, shape, tuple(lowering.sites))


class _Watch(TorchFunctionMode):
    """Shows every torch function that is called, also those that return no tensor."""

    def __init__(self, lowering: "_Lowering") -> None:
        super().__init__()
        self.lowering = lowering

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            self.lowering.refuse_written(tensor)
        output = func(*args, **kwargs)
        self.lowering.visit(func, args, kwargs, output)
        return output


class _Lowering:
    """Gives every tensor of a forward pass its value, and collects the steps."""

    def __init__(self, images: Tensor) -> None:
        source = Pending(Quantize(), (), "input", tuple(images.shape[1:]))
        self.count = images.shape[0]
        self.values: dict[int, Value] = {id(images): source}
        self.alive: list[Any] = [images]  # so that no id is used twice
        self.versions = {id(images): _version(images)}
        self.steps: list[Step] = []
        self.made: dict[tuple[int, CodeGrid | None, float, float], int] = {}
        self.sites: list[int | None] = []
        self.scopes = [""]
        self.inside = 0  # depth of modules that are seen as wholes

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
        elif isinstance(module, ActivationQuantizer):
            self._quantizer(name, module, args[0], output)
        self.inside -= isinstance(module, QuantizedLayer | ActivationQuantizer)
        self.scopes.pop()

    def visit(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Give the output of a torch function its value."""
        read = list(tensors_in((args, kwargs)))
        if self.inside or not any(id(tensor) in self.values for tensor in read):
            return
        name, where = _called(function), self.scopes[-1] or "the network"
        if name in _HARMLESS:
            return
        if not any(True for _ in tensors_in(output)):
            raise QuantizationError(
                f"{name} in {where} reads or writes a tensor out of sight of the "
                "export; use functions that return a new tensor"
            )
        if name not in FORMS or "out" in kwargs or not isinstance(output, Tensor):
            raise QuantizationError(
                f"{name} in {where} has no integer form; integers cover convolutions, "
                "linear layers, ReLU and clipping, residual sums, pooling, "
                "concatenation, slices, padding with zeros and flattening"
            )
        form, defaults = FORMS[name]
        call = Observed(
            module=self.scopes[-1] or name,
            values=tuple(self.values.get(id(tensor)) for tensor in read),
            arguments=defaults | dict(zip(defaults, args[1:], strict=False)) | kwargs,
            shape=tuple(output.shape[1:]),
            whole=output.dim() > 0 and output.shape[0] == self.count,
        )
        try:
            found = form(call)
        except QuantizationError as error:
            raise QuantizationError(f"{name} in {where} {error}") from error
        if isinstance(found, Moved):
            found = self._moved(found, call)
        self._set(output, found)

    def refuse_written(self, tensor: Tensor) -> None:
        """Refuse a tensor that was written in place since its value was noted."""
        if _version(tensor) != self.versions.get(id(tensor), _version(tensor)):
            raise QuantizationError(
                f"{self.scopes[-1] or 'the network'} reads a tensor that was written "
                "in place through a view of it; use functions that return a new tensor"
            )

    def _moved(self, moved: Moved, call: Observed) -> Codes:
        step = Step(
            name=self._unique(call.module),
            operation=moved.operation,
            inputs=moved.inputs,
            shape=call.shape,
            grid=moved.grid,
            low=moved.low,
            high=moved.high,
            quantizer=self.steps[moved.inputs[0]].quantizer,
        )
        return Codes(self._add(step), moved.grid, call.shape)

    def _set(self, output: Tensor, value: Value) -> None:
        self.alive.append(output)
        self.values[id(output)] = value
        self.versions[id(output)] = _version(output)

    def _layer(
        self, name: str, layer: QuantizedLayer, x: Tensor, output: Tensor
    ) -> None:
        try:
            source = as_codes(self.values.get(id(x)))
            operation = _layer_operation(layer, x, source.grid)
        except QuantizationError as error:
            raise QuantizationError(f"{name} {error}") from error
        shape = tuple(output.shape[1:])
        self._set(output, Pending(operation, (source.step,), name, shape))

    def _quantizer(
        self, name: str, quantizer: ActivationQuantizer, x: Tensor, output: Tensor
    ) -> None:
        value = self.values.get(id(x))
        if not quantizer.enabled:
            return
        if value is None:
            self.sites.append(None)
            return
        grid = code_grid(quantizer)
        shape = tuple(output.shape[1:])
        if isinstance(value, Codes) and value.grid != grid:
            value = Pending(Requantize(), (value.step,), name, shape)
        if isinstance(value, Pending):
            value = Codes(self._finish(value, grid, name), grid, shape)
        self.sites.append(value.step)
        self._set(output, value)

    def _finish(self, value: Pending, grid: CodeGrid | None, quantizer: str) -> int:
        """Make the step of a value whose grid is known now; return its position."""
        key = (id(value.operation), grid, value.low, value.high)
        if key not in self.made:
            step = Step(
                name=self._unique(value.module),
                operation=value.operation,
                inputs=value.inputs,
                shape=value.shape,
                grid=grid,
                low=value.low,
                high=value.high,
                quantizer=quantizer,
                module=value.module,
            )
            self.made[key] = self._add(step)
        at = self.made[key]
        for operation, shape in value.moves:
            name = self._unique(value.module)
            step = Step(name, operation, (at,), shape, grid, quantizer=quantizer)
            at = self._add(step)
        return at

    def _unique(self, name: str) -> str:
        taken = {step.name for step in self.steps}
        again = (f"{name}.{number}" for number in range(2, len(taken) + 3))
        return next(each for each in (name, *again) if each not in taken)

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def finished(self, output: Any) -> tuple[Step, ...]:
        """Return the steps, the last of which gives the output."""
        first = next(tensors_in(output), None)
        if first is not None:
            self.refuse_written(first)
        value = self.values.get(id(first))
        if value is None:
            raise QuantizationError("the network's output does not come from its input")
        last = value.step if isinstance(value, Codes) else self._finish(value, None, "")
        return tuple(self.steps[: last + 1])


def _version(tensor: Tensor) -> int:
    """Return how often a tensor, or what it is a view of, was written in place."""
    return 0 if tensor.is_inference() else tensor._version


def _called(function: Any) -> str:
    """Return a function's plain name; of a property such as ``x.data``, its own."""
    name = function_name(function)
    return function_name(function.__self__) if name == "get" else name


def _layer_operation(layer: QuantizedLayer, x: Tensor, grid: CodeGrid) -> Operation:
    if isinstance(layer, QuantizedLinear) and x.dim() == 2:
        return Product(layer_weight(layer, grid).cpu())
    if isinstance(layer, QuantizedConv2d) and layer.padding_mode == "zeros":
        return Convolution(
            layer_weight(layer, grid).cpu(),
            pair(layer.stride),
            _sides(layer),
            pair(layer.dilation),
            layer.groups,
        )
    mode = getattr(layer, "padding_mode", "zeros")
    raise QuantizationError(
        f"({type(layer).__name__}, {x.dim()} dimensions, padding {mode}) has no "
        "integer form; there is one for Conv2d with zeros and Linear on rows"
    )


def _sides(layer: nn.Conv2d) -> Sides:
    # torch keeps what any spelling of the padding comes to, last dimension first.
    left, right, qmax, bottom = layer._reversed_padding_repeated_twice
    return qmax, left, bottom, right
