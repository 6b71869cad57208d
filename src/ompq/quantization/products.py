"""Products of two activations, as in attention, and their quantizers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ompq.errors import QuantizationError
from ompq.network.observation import Call, Recording, function_name

ATTENTION = "scaled_dot_product_attention"
OPERANDS = {
    "matmul": ("left", "right"),
    "bmm": ("left", "right"),
    ATTENTION: ("query", "key", "value", "probabilities"),
}
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

# Called with the name of an operand and its values; returns them rounded.
Rounding: TypeAlias = Callable[[str, Tensor], Tensor]


class ProductCall(NamedTuple):
    """A product of activations that a module computes itself, not in a child."""

    module: str
    number: int  # among the module's products, from 0
    call: Call


def find_products(recording: Recording) -> list[ProductCall]:
    """Return the products of activations in modules that are called once."""
    call_counts = Counter({"": 1})
    call_counts.update(call.name for call in recording.module_calls)
    calls = [call for call in recording.calls if call.function in OPERANDS]
    owners = {call.module for call in calls}
    # Left out, since products of children would be counted among their own.
    parents = {
        owner
        for owner in owners
        for other in owners
        if other != owner and other.startswith(f"{owner}." if owner else "")
    }
    numbers: Counter[str] = Counter()
    found = []
    for call in calls:
        owner, number = call.module, numbers[call.module]
        numbers[owner] += 1
        # A product with a parameter is not one of two activations.
        if call_counts[owner] == 1 and owner not in parents and not call.parameters:
            found.append(ProductCall(owner, number, call))
    return found


def operands(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the operands of a product, from its arguments, by name."""
    name = function_name(function)
    if name not in OPERANDS:
        raise QuantizationError(
            f"the network calls {name} where it multiplied activations before, so it "
            "depends on earlier calls; clear its caches at the start of forward"
        )
    names = OPERANDS[name]
    if names[0] == "left":
        return dict(zip(names, [*args, *kwargs.values()], strict=False))
    given = attention_arguments(args, kwargs)
    return {name: given[name] for name in names[:3]}


def attention_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of fused attention by name."""
    return {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


def probabilities(given: Mapping[str, Any]) -> Tensor:
    """Return the attention probabilities, (..., L, S), from the arguments by name."""
    query, key = given["query"], for_each_head(given, "key")
    scale = given.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Scaled afterwards, so that a runtime can multiply two integer tensors.
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
    """Return keys or values, repeated where several query heads share one of them."""
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
    """Holds the quantizers of the operands of a module's products, as children."""

    def __init__(self) -> None:
        super().__init__()
        self._modes: list[_RoundOperands] = []  # one for each active call of the module

    def enter(self, _module: nn.Module, _args: Any) -> None:
        """Forward pre-hook of the module: start to round operands."""
        self._modes.append(_RoundOperands(self))
        self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Forward hook of the module, called even if it fails: stop."""
        mode = self._modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _RoundOperands(TorchFunctionMode):
    """Rounds the operands of products while a module runs."""

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
        quantizers = dict(self.quantizers.named_children())

        def rounded(operand: str, tensor: Tensor) -> Tensor:
            quantizer = quantizers.get(f"{number}_{operand}")
            return tensor if quantizer is None else quantizer(tensor)

        return rounded_product(func, args, kwargs, rounded)
