"""Products of two activations, as attention has them: their operands, rounded.

``torch.matmul`` of two activations has the operands ``left`` and ``right``. Fused
attention has a ``query``, ``key`` and ``value``, and ``probabilities`` that are
not visible from outside: where they are rounded, it is computed step by step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ompq.errors import QuantizationError
from ompq.layers import ActivationQuantizer
from ompq.recording import Call, Recording, function_name

ATTENTION = "scaled_dot_product_attention"
OPERANDS = {
    "matmul": ("left", "right"),
    "bmm": ("left", "right"),
    ATTENTION: ("query", "key", "value", "probabilities"),
}
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_CHILD = "products"  # the module that holds the quantizers of another one's products

# Called with the name of an operand and its values; returns them rounded.
Rounding: TypeAlias = Callable[[str, Tensor], Tensor]


class Product(NamedTuple):
    """A product of activations that a module computes, itself and not in a child."""

    module: str
    number: int  # of the products that the module computes, from 0
    call: Call


def find_products(recording: Recording) -> list[Product]:
    """Return the products of activations, of modules that are called once."""
    times: dict[str, int] = {"": 1}
    for one in recording.module_calls:
        times[one.name] = times.get(one.name, 0) + 1
    calls = [call for call in recording.calls if call.function in OPERANDS]
    owners = {call.module for call in calls}
    # What a child computes would be counted among its parent's.
    outer = {
        o
        for o in owners
        for i in owners
        if i != o and i.startswith(f"{o}." * (o != ""))
    }
    numbers: dict[str, int] = {}
    found = []
    for call in calls:
        number = numbers.get(call.module, 0)
        numbers[call.module] = number + 1
        # A product with a parameter is none of two activations.
        if times[call.module] == 1 and call.module not in outer and not call.parameters:
            found.append(Product(call.module, number, call))
    return found


def operands(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the operands that the arguments of a product hold, by name."""
    name = function_name(function)
    if name not in OPERANDS:
        raise QuantizationError(
            f"the network calls {name} where it multiplied activations before, so what "
            "it does depends on earlier calls; empty its caches when forward begins"
        )
    names = OPERANDS[name]
    if names[0] == "left":
        return dict(zip(names, [*args, *kwargs.values()], strict=False))
    given = attention_arguments(args, kwargs)
    return {name: given[name] for name in names[:3]}


def attention_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an attention by name."""
    return {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


def probabilities(given: Mapping[str, Any]) -> Tensor:
    """Return the probabilities of an attention from its arguments."""
    query, key = given["query"], for_each_head(given, "key")
    scale = given.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Scaled afterwards, so that a runtime multiplies two tensors of integers.
    logits = (query @ key.transpose(-2, -1)) * scale
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
        mask = mask.tril()
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        logits = logits + mask
    found: Tensor = logits.softmax(-1)
    return found


def for_each_head(given: Mapping[str, Any], name: str) -> Tensor:
    """Return keys or values, repeated where several queries share a head of them."""
    tensor: Tensor = given[name]
    if not given.get("enable_gqa"):
        return tensor
    return tensor.repeat_interleave(given["query"].shape[-3] // tensor.shape[-3], -3)


def rounded_product(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rounded: Rounding
) -> Any:
    """Compute a product with rounded operands."""
    names = OPERANDS[function_name(function)]
    if names[0] == "left":
        pairs = zip(names, [*args, *kwargs.values()], strict=False)
        left, right, *rest = (rounded(name, tensor) for name, tensor in pairs)
        return function(left, right, *rest)
    given = attention_arguments(args, kwargs)
    given |= {name: rounded(name, given[name]) for name in names[:3]}
    found = rounded("probabilities", probabilities(given))
    return found @ for_each_head(given, "value")


class ProductQuantizers(nn.Module):
    """The quantizers of the operands of a module's products, which are its children."""

    def __init__(self) -> None:
        super().__init__()
        self._modes: list[_Rounded] = []  # of the calls that are running

    def add(self, number: int, operand: str, quantizer: ActivationQuantizer) -> None:
        """Round an operand of a product from now on."""
        self.add_module(f"{number}_{operand}", quantizer)

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Forward pre-hook of the module."""
        self._modes.append(_Rounded(self))
        self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Forward hook of the module, also when it fails."""
        mode = self._modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Rounded(TorchFunctionMode):
    """Rounds operands while a module runs."""

    def __init__(self, quantizers: ProductQuantizers) -> None:
        super().__init__()
        self.quantizers, self.number = quantizers, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function_name(func) not in OPERANDS:
            return func(*args, **kwargs)
        number, self.number = self.number, self.number + 1
        held = dict(self.quantizers.named_children())

        def rounded(operand: str, tensor: Tensor) -> Tensor:
            quantizer = held.get(f"{number}_{operand}")
            return tensor if quantizer is None else quantizer(tensor)

        return rounded_product(func, args, kwargs, rounded)


def attach(
    model: nn.Module,
    module: str,
    number: int,
    operand: str,
    quantizer: ActivationQuantizer,
) -> None:
    """Round an operand of a product that a module of the network computes."""
    owner = model.get_submodule(module)
    held = owner._modules.get(_CHILD)
    if not isinstance(held, ProductQuantizers):
        held = ProductQuantizers()
        owner.add_module(_CHILD, held)
        owner.register_forward_pre_hook(held.enter)
        owner.register_forward_hook(held.leave, always_call=True)
    held.add(number, operand, quantizer)


def quantizer_name(module: str, number: int, operand: str) -> str:
    """Return the name of an operand's quantizer among the network's modules."""
    return f"{module}.{_CHILD}.{number}_{operand}".removeprefix(".")
