"""Where activations are quantized: found from the observed flow of data.

So are the operands of products of two activations. ``torch.matmul`` has the operands
``left`` and ``right``. Fused attention has a ``query``, ``key`` and ``value``, and
``probabilities`` that are not visible from outside: where they are rounded, it is
computed step by step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ompq.costs import FLOAT_BITS, SUM_BITS
from ompq.errors import QuantizationError
from ompq.graph import is_sum, unit_calls
from ompq.layers import ActivationQuantizer
from ompq.recording import Call, Recording, function_name
from ompq.units import Choice, LayerGraph, Skipped

# These pass on the values they get: their output is on the grid of their input.
_PASSIVE = {
    "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "flatten",
    "unflatten", "view", "reshape", "permute", "transpose", "movedim", "contiguous",
    "clone", "detach", "to", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "squeeze", "unsqueeze", "chunk", "split", "getitem", "channel_shuffle",
    "boolean_dispatch", "pad", "pixel_shuffle",
}  # fmt: skip
_AVERAGES = {"avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
             "mean"}  # fmt: skip
# Their outputs have a long tail, which few bits may hold better as powers.
_LONG_TAILED = {"gelu"}
_FLOAT_NORMS = {"layer_norm", "rms_norm", "group_norm"}
_CLIPS = {"relu", "relu6", "clamp_min"}
_LOST = "no module makes or reads this tensor alone: it stays float"


@dataclass(frozen=True)
class ActivationSite:
    """A quantized tensor, or several that share a grid."""

    # Calls whose outputs it stands for; -1 is the network's input.
    positions: tuple[int, ...]
    bits: int
    after: tuple[str, ...]  # modules after which it is applied
    before: tuple[str, ...]  # modules before which it is applied; "" is the network
    # The operand of a product that it rounds instead, inside the module it names
    # first: which of the module's products, and which operand.
    product: int = 0
    operand: str = ""
    # Whether its grid is one of powers; before calibration, whether it may be.
    powers: bool = False
    shift: float = 0.0  # what is added to its values before they are rounded to powers


class Link(NamedTuple):
    """A layer that computes with integers, made by :func:`ompq.finalize`."""

    layer: str
    source: str  # name of the quantizer of its input
    target: str  # name of the quantizer of its output; "" for logits


def find_sites(
    model: nn.Module,
    recording: Recording,
    graph: LayerGraph,
    bits: Mapping[str, Choice],
) -> tuple[list[ActivationSite], list[Skipped]]:
    """Return the sites of a network, and the tensors that stay float."""
    finder = _Finder(model, recording, graph)
    widths: dict[int, int] = {}  # source → bits
    for call in recording.calls:
        unit = finder.unit_of.get(call.position)
        if unit is None and not (is_sum(call) or call.function in _AVERAGES):
            continue
        if unit is None and call.position in finder.ends_in_float:
            continue
        width = bits[unit].activation if unit else 0
        for source in finder.read_by(call):
            widths[source] = max(widths.get(source, 0), width)
    # With float activations everywhere there is no integer arithmetic to prepare.
    integer = any(choice.activation < FLOAT_BITS for choice in bits.values())
    if not integer:
        return [], []
    sites, skipped = finder.sites(widths)
    return [*sites, *_product_sites(finder, recording, bits)], skipped


def _product_sites(
    finder: "_Finder", recording: Recording, bits: Mapping[str, Choice]
) -> list[ActivationSite]:
    """Return a site for each operand of a product of activations.

    It is as wide as the widest input of the layers in its module. Few bits hold
    probabilities only as powers: most are small, and their sum counts.
    """
    sites = []
    for module, number, call in find_products(recording):
        inside = [b for name, b in bits.items() if name.startswith(f"{module}.")]
        width = max(choice.activation for choice in inside or bits.values())
        if width >= FLOAT_BITS:
            continue
        probable = {"probabilities"} | (
            {"left"} if finder.left_is_softmax(call) else set()
        )
        sites += [
            ActivationSite(
                (call.position,),
                width,
                (),
                (module,),
                number,
                operand,
                powers=operand in probable and width < SUM_BITS,
            )
            for operand in OPERANDS[call.function]
        ]
    return sites


class _Finder:
    def __init__(
        self, model: nn.Module, recording: Recording, graph: LayerGraph
    ) -> None:
        self.model = model
        self.calls = recording.calls
        self.consumers = recording.consumers()
        self.times: dict[str, int] = {}
        self.producers: dict[int, list[str]] = {}  # position → modules that return it
        for call in recording.module_calls:
            self.times[call.name] = self.times.get(call.name, 0) + 1
            if call.output is not None:
                self.producers.setdefault(call.output, []).append(call.name)
        found = unit_calls(recording, graph.units).items()
        self.unit_of = {position: unit.name for position, unit in found}
        self.parent: dict[int, int] = {}  # concatenated sources share a grid
        self.ends_in_float = self._ends_in_float()

    def _ends_in_float(self) -> set[int]:
        """Return the positions of tensors that sums carry to a norm that stays float.

        No integer adds them: the residual stream of a transformer stays float.
        """
        found: set[int] = set()
        for call in reversed(self.calls):
            carries = is_sum(call) or call.function in _PASSIVE
            if call.function in _FLOAT_NORMS or (carries and call.position in found):
                found.update(call.inputs)
        return found

    def left_is_softmax(self, call: Call) -> bool:
        """Whether the first operand of a product comes from a softmax."""
        found = self._sources(call.inputs[0]) if call.inputs else []
        return [self.calls[at].function for at in found if at >= 0] == ["softmax"]

    def read_by(self, call: Call) -> list[int]:
        """Return the sources that a call reads, through passive calls."""
        return [source for at in call.inputs for source in self._sources(at)]

    def _sources(self, at: int) -> list[int]:
        if at < 0:
            return [-1]
        call = self.calls[at]
        if call.function == "cat":
            found = self.read_by(call)
            for source in found[1:]:
                self.parent[self._root(source)] = self._root(found[0])
            return found
        if len(call.inputs) == 1 and self._passes_on(call):
            return self._sources(call.inputs[0])
        return [at] if call.inputs else []  # made from parameters alone: a constant

    def _passes_on(self, call: Call) -> bool:
        """Whether a call of one input returns the values it gets."""
        if call.function in _PASSIVE:
            return True
        (source,) = call.inputs
        same = source >= 0 and self.calls[source].shape == call.shape
        return same and call.function.startswith("adaptive_avg_pool")  # of one value

    def _root(self, source: int) -> int:
        while (parent := self.parent.get(source, source)) != source:
            source = parent
        return source

    def sites(
        self, widths: Mapping[int, int]
    ) -> tuple[list[ActivationSite], list[Skipped]]:
        groups: dict[int, list[int]] = {}
        for source in sorted(widths):
            groups.setdefault(self._root(source), []).append(source)
        sites, skipped = [], []
        for members in groups.values():
            bits = max(widths[source] for source in members) or SUM_BITS
            if bits >= FLOAT_BITS:
                continue
            placed = [s for s in members if self._after(s) or self._before(s)]
            lost = [self.calls[s] for s in members if s not in placed]
            skipped += [
                Skipped(f"{call.module or '(network)'}.{call.function}()", _LOST)
                for call in lost
            ]
            if placed:
                sites.append(self._site(placed, bits))
        return sites, skipped

    def _site(self, members: Sequence[int], bits: int) -> ActivationSite:
        after = [site for s in members for site in self._after(s)]
        before = [s for m in members if not self._after(m) for s in self._before(m)]
        functions = {self.calls[s].function if s >= 0 else "" for s in members}
        return ActivationSite(
            tuple(members),
            bits,
            tuple(dict.fromkeys(after)),
            tuple(dict.fromkeys(before)),
            powers=bits < SUM_BITS and functions <= _LONG_TAILED,
        )

    def _after(self, at: int) -> list[str]:
        """Return the innermost module, called once, that returns this tensor."""
        for name in self.producers.get(at, ()):
            module = self.model.get_submodule(name)
            if self.times[name] == 1 and not isinstance(module, nn.Sequential):
                return [name]
        # A clip without a module of its own: a grid that ends where it clips does
        # the clipping, so the quantizer may stand before it.
        if at >= 0 and self.calls[at].function in _CLIPS:
            (before, *_) = self.calls[at].inputs
            if self.consumers.get(before) == [at]:
                return self._after(before)
        return []

    def _before(self, at: int) -> list[str]:
        """Return the modules of the units that read this tensor."""
        if at < 0:
            return [""]
        found = []
        for consumer in self.consumers.get(at, ()):
            call = self.calls[consumer]
            if consumer in self.unit_of:
                found.append(call.module)
            elif call.function in _PASSIVE:
                found += self._before(consumer)
        return [name for name in found if self.times.get(name) == 1]


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
