"""Activation sites: where activations are quantized, and what they see there."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ompq.costs import FLOAT_BITS, SUM_BITS
from ompq.errors import QuantizationError
from ompq.graph import is_sum, unit_calls
from ompq.layers import ActivationQuantizer
from ompq.ranges import (
    Observed,
    observe_range,
    value_bins,
    with_importance,
)
from ompq.recording import Call, Recording, function_name, tensors_in, watch
from ompq.results import Progress
from ompq.samples import (
    Samples,
    cudnn_kernels,
    first_tensor,
    map_batch,
    model_device,
    to_device,
)
from ompq.units import Choice, LayerGraph, Skipped

# These return values of their input, so their output is on the grid of their input.
_PASSIVE = {
    "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "flatten",
    "unflatten", "view", "reshape", "permute", "transpose", "movedim", "contiguous",
    "clone", "detach", "to", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "squeeze", "unsqueeze", "chunk", "split", "getitem", "channel_shuffle",
    "boolean_dispatch", "pad", "pixel_shuffle",
}  # fmt: skip
_AVERAGES = {"avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
             "mean"}  # fmt: skip
# Their outputs have a long tail, which a grid of powers may represent better.
_LONG_TAILED = {"gelu"}
_FLOAT_NORMS = {"layer_norm", "rms_norm", "group_norm"}
_CLIPS = {"relu", "relu6", "clamp_min"}
_UNPLACED = "no single module returns or reads this tensor: it stays float"


@dataclass(frozen=True)
class ActivationSite:
    """A quantized tensor, or several that share a grid."""

    # Calls whose outputs are quantized; -1 is the network's input.
    positions: tuple[int, ...]
    bits: int
    after: tuple[str, ...]  # modules whose outputs are quantized
    before: tuple[str, ...]  # modules whose inputs are quantized; "" is the network
    # For an operand of a product inside the module ``before[0]``: the number of the
    # product within the module, and the operand.
    product: int = 0
    operand: str = ""
    # Whether the grid consists of powers; before calibration, whether it may.
    powers: bool = False
    shift: float = 0.0  # added to the values before they are rounded to powers


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
    sum_bits: int = SUM_BITS,
) -> tuple[list[ActivationSite], list[Skipped]]:
    """Return the sites of a network, and the tensors that stay float.

    With ``sum_bits`` above 8, whatever residual sums read and return has that many
    bits, and the layers that read it round it once more, to their own.
    """
    # If all activations stay float, there is no integer arithmetic to prepare.
    if all(choice.activation >= FLOAT_BITS for choice in bits.values()):
        return [], []
    finder = _Finder(model, recording, graph, sum_bits)
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
    sites, skipped = finder.sites(widths)
    return [*sites, *_product_sites(finder, recording, bits)], skipped


def _product_sites(
    finder: "_Finder", recording: Recording, bits: Mapping[str, Choice]
) -> list[ActivationSite]:
    """Return a site for each operand of a product of activations.

    It gets the most activation bits of the layers in its module. With few bits,
    probabilities need a grid of powers: most are small, and their sum matters.
    """
    sites = []
    for module, number, call in find_products(recording):
        inside = [b for name, b in bits.items() if name.startswith(f"{module}.")]
        width = max(choice.activation for choice in inside or bits.values())
        if width >= FLOAT_BITS:
            continue
        as_powers = {"probabilities", "left" if finder.left_is_softmax(call) else ""}
        sites += [
            ActivationSite(
                (call.position,),
                width,
                (),
                (module,),
                number,
                operand,
                powers=operand in as_powers and width < SUM_BITS,
            )
            for operand in OPERANDS[call.function]
        ]
    return sites


class _Finder:
    def __init__(
        self, model: nn.Module, recording: Recording, graph: LayerGraph, sum_bits: int
    ) -> None:
        self.model, self.sum_bits = model, sum_bits
        self.calls = recording.calls
        self.consumers = recording.consumers()
        self.call_counts: dict[str, int] = {}
        self.producers: dict[int, list[str]] = {}  # position → modules that return it
        for call in recording.module_calls:
            self.call_counts[call.name] = self.call_counts.get(call.name, 0) + 1
            if call.output is not None:
                self.producers.setdefault(call.output, []).append(call.name)
        found = unit_calls(recording, graph.units).items()
        self.unit_of = {position: unit.name for position, unit in found}
        self.parent: dict[int, int] = {}  # union-find: sources that share a grid
        self.ends_in_float = self._ends_in_float()

    def _ends_in_float(self) -> set[int]:
        """Return the positions of tensors that reach a float norm through sums.

        Such sums are not computed in integers: a transformer's residual stream stays
        float.
        """
        found: set[int] = set()
        for call in reversed(self.calls):
            carries = is_sum(call) or call.function in _PASSIVE
            if call.function in _FLOAT_NORMS or (carries and call.position in found):
                found.update(call.inputs)
        return found

    def left_is_softmax(self, call: Call) -> bool:
        """Whether the first operand of a product comes from a softmax."""
        sources = self._sources(call.inputs[0]) if call.inputs else []
        return [self.calls[at].function for at in sources if at >= 0] == ["softmax"]

    def read_by(self, call: Call) -> list[int]:
        """Return the sources that a call reads, directly or through passive calls."""
        return [source for at in call.inputs for source in self._sources(at)]

    def _sources(self, at: int) -> list[int]:
        """Return the calls that computed a tensor's values; concatenated ones merge."""
        if at < 0:
            return [-1]
        call = self.calls[at]
        if call.function == "cat":
            sources = self.read_by(call)
            for source in sources[1:]:
                self.parent[self._root(source)] = self._root(sources[0])
            return sources
        if len(call.inputs) == 1 and self._passes_on(call):
            return self._sources(call.inputs[0])
        return [at] if call.inputs else []  # computed from parameters alone: a constant

    def _passes_on(self, call: Call) -> bool:
        """Whether a call with one input returns values of its input."""
        if call.function in _PASSIVE:
            return True
        (source,) = call.inputs
        same_shape = source >= 0 and self.calls[source].shape == call.shape
        # An adaptive pool that keeps the shape averages single values.
        return same_shape and call.function.startswith("adaptive_avg_pool")

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
            bits = max(widths[source] for source in members)
            if bits >= FLOAT_BITS:
                continue
            placed = [s for s in members if self._after(s) or self._before(s)]
            unplaced = [self.calls[s] for s in members if s not in placed]
            skipped += [
                Skipped(f"{call.module or '(network)'}.{call.function}()", _UNPLACED)
                for call in unplaced
            ]
            if placed and self.sum_bits > SUM_BITS and self._in_stream(members):
                sites += self._stream_sites(placed, bits)
            elif placed:
                sites.append(self._site(placed, bits or SUM_BITS))
        return sites, skipped

    def _in_stream(self, members: Sequence[int]) -> bool:
        """Whether residual sums read or return one of these tensors."""
        read = {at for call in self.calls if is_sum(call) for at in self.read_by(call)}
        return any(at in read or self._is_sum(at) for at in members)

    def _is_sum(self, at: int) -> bool:
        if at >= 0 and self.calls[at].function in _CLIPS:
            (at,) = self.calls[at].inputs[:1]
        return at >= 0 and is_sum(self.calls[at])

    def _stream_sites(self, members: Sequence[int], bits: int) -> list[ActivationSite]:
        """Return the site of a residual stream, and that of the layers that read it."""
        stream = self._site(members, self.sum_bits)
        readers = tuple(dict.fromkeys(n for at in members for n in self._before(at)))
        if not bits or not readers or not stream.after:
            return [replace(stream, bits=bits or self.sum_bits)]
        return [stream, replace(stream, bits=bits, after=(), before=readers)]

    def _site(self, members: Sequence[int], bits: int) -> ActivationSite:
        after = [name for s in members for name in self._after(s)]
        before = [n for s in members if not self._after(s) for n in self._before(s)]
        functions = {self.calls[s].function if s >= 0 else "" for s in members}
        return ActivationSite(
            tuple(members),
            bits,
            tuple(dict.fromkeys(after)),
            tuple(dict.fromkeys(before)),
            powers=bits < SUM_BITS and functions <= _LONG_TAILED,
        )

    def _after(self, at: int) -> list[str]:
        """Return the innermost module called once that returns this tensor, if any."""
        for name in self.producers.get(at, ()):
            module = self.model.get_submodule(name)
            if self.call_counts[name] == 1 and not isinstance(module, nn.Sequential):
                return [name]
        # An activation without a module: a grid with the same range clips as well, so
        # the quantizer may come before it.
        if at >= 0 and self.calls[at].function in _CLIPS:
            source = self.calls[at].inputs[0]
            if self.consumers.get(source) == [at]:
                return self._after(source)
        return []

    def _before(self, at: int) -> list[str]:
        """Return the modules of the units that read this tensor."""
        if at < 0:
            return [""]
        found = []
        for consumer in self.consumers.get(at, ()):
            if consumer in self.unit_of:
                found.append(self.calls[consumer].module)
            elif self.calls[consumer].function in _PASSIVE:
                found += self._before(consumer)
        return [name for name in found if self.call_counts.get(name) == 1]


ATTENTION = "scaled_dot_product_attention"
OPERANDS = {
    "matmul": ("left", "right"),
    "bmm": ("left", "right"),
    ATTENTION: ("query", "key", "value", "probabilities"),
}
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_CHILD = "products"  # name of the submodule with the quantizers of a module's products

# Called with the name of an operand and its values; returns them rounded.
Rounding: TypeAlias = Callable[[str, Tensor], Tensor]


class Product(NamedTuple):
    """A product of activations that a module computes itself, not in a child."""

    module: str
    number: int  # among the module's products, from 0
    call: Call


def find_products(recording: Recording) -> list[Product]:
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
            found.append(Product(owner, number, call))
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


def attach_to_operand(
    model: nn.Module, site: ActivationSite, quantizer: ActivationQuantizer
) -> None:
    """Quantize an operand of a product that a module of the network computes."""
    owner = model.get_submodule(site.before[0])
    quantizers = owner._modules.get(_CHILD)
    if not isinstance(quantizers, ProductQuantizers):
        quantizers = ProductQuantizers()
        owner.add_module(_CHILD, quantizers)
        owner.register_forward_pre_hook(quantizers.enter)
        owner.register_forward_hook(quantizers.leave, always_call=True)
    quantizers.add_module(f"{site.product}_{site.operand}", quantizer)


def quantizer_name(site: ActivationSite) -> str:
    """Return the name of an operand's quantizer among the network's modules."""
    name = f"{site.before[0]}.{_CHILD}.{site.product}_{site.operand}"
    return name.removeprefix(".")


logger = logging.getLogger(__name__)
READING = "calibrating activations"

# Number of samples that importance is estimated from, and the largest batch, small
# because a backward pass needs all activations in memory.
_IMPORTANCE_SAMPLES, _BACKWARD_BATCH = 64, 16


def read_ranges(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    *,
    batch_size: int,
    report: Progress,
) -> list[Observed]:
    """Run the float network and return a histogram of the values at each site."""
    found: dict[int, Observed] = {}
    by_position = _sites_by_position(sites)

    def visit(at: int, *call: Any) -> None:
        for site in by_position.get(at, ()):
            values = _values(sites[site], *call)
            found[site] = observe_range(values, found.get(site))

    total, device = samples.batch_count(batch_size), model_device(model)
    for done, batch in enumerate(samples.batches(batch_size), 1):
        moved = to_device(batch, device)
        visit(-1, None, (), {}, moved)
        watch(model, moved, visit)
        report(done, total, READING)
    return [found[site] for site in sorted(found)]


def weigh_ranges(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    seen: Sequence[Observed],
    *,
    batch_size: int,
    report: Progress,
) -> list[Observed]:
    """Add the importance of the values at each site for the network's output.

    To second order, an error changes the network's output distribution by a divergence
    of half its square times the Fisher information: the squared gradient of the
    network's own log-likelihood, here on the first 64 samples. If the network cannot be
    differentiated, all values get the same weight and a warning is logged.
    """
    found = list(seen)
    visit = _importance_hook(sites, found)
    generator = torch.Generator().manual_seed(0)
    first, device = samples.first(_IMPORTANCE_SAMPLES), model_device(model)
    size = min(batch_size, _BACKWARD_BATCH)
    try:
        for done, batch in enumerate(first.batches(size), 1):
            leaf = map_batch(to_device(batch, device), _leaf)
            leaves = [t for t in tensors_in(leaf) if t.requires_grad]
            with _differentiating(model, parameters=not leaves) as parameters:
                # The network may modify its input in place, which a leaf forbids.
                inputs = map_batch(leaf, torch.clone)
                visit(-1, None, (), {}, inputs)
                output = watch(model, inputs, visit, gradients=True)
                loss = _loss(first_tensor(output), generator)
                torch.autograd.grad(loss, leaves or parameters, allow_unused=True)
            report(done, first.batch_count(size), READING)
    except RuntimeError as error:
        logger.warning(
            "all values of an activation get the same weight: the network cannot be "
            "differentiated (%s)",
            str(error).splitlines()[0],
        )
        return list(seen)
    return found


def _importance_hook(
    sites: Sequence[ActivationSite], found: list[Observed]
) -> Callable[..., None]:
    """Return a visitor of calls: backward passes then add importance to ``found``."""
    by_position = _sites_by_position(sites)

    def add(site: int, bins: Tensor, factor: Tensor | None, gradient: Tensor) -> None:
        gradient = gradient if factor is None else gradient @ factor
        found[site] = with_importance(found[site], bins, gradient)

    def visit(at: int, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        for site in by_position.get(at, ()):
            with torch.no_grad():
                tensor, factor = (
                    _values(sites[site], function, args, kwargs, output),
                    None,
                )
                # Computed now, because the tensor may be modified in place later.
                bins = value_bins(found[site], tensor)
            if sites[site].operand == "probabilities":
                # Fused attention does not return them. Their gradient is that of the
                # output times the transposed values.
                given = attention_arguments(args, kwargs)
                factor = for_each_head(given, "value").detach().transpose(-2, -1)
                tensor = output
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    partial(add, site, bins, factor)
                )

    return visit


def _values(
    site: ActivationSite, function: Any, args: Any, kwargs: Any, output: Any
) -> Tensor:
    """Return the tensor of a call that a site quantizes."""
    if site.operand == "probabilities":
        return probabilities(attention_arguments(args, kwargs))
    if site.operand:
        return operands(function, args, kwargs)[site.operand]
    return next(tensors_in(output))


def _sites_by_position(sites: Sequence[ActivationSite]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, site in enumerate(sites):
        for at in site.positions:
            found.setdefault(at, []).append(index)
    return found


@contextmanager
def _differentiating(model: nn.Module, *, parameters: bool) -> Iterator[list[Tensor]]:
    """Enable deterministic gradients; yield the network's floating-point parameters.

    They require gradients only if ``parameters`` is true. Otherwise gradients flow to
    the input alone, and layers save less for the backward pass.
    """
    found: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in found]
    try:
        for parameter in found:
            parameter.requires_grad_(parameters)
        with torch.enable_grad(), cudnn_kernels(repeatable=True):
            yield found
    finally:
        for parameter, flag in zip(found, flags, strict=True):
            parameter.requires_grad_(flag)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy that requires gradients if it is floating-point."""
    tensor = tensor.detach().clone()
    return tensor.requires_grad_(tensor.is_floating_point())


def _loss(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return a loss whose squared gradients estimate the Fisher information.

    For logits, it is −log p of classes drawn from p; otherwise the sum of the elements
    with random signs, which corresponds to a squared error.
    """
    if output.dim() == 2 and output.shape[1] > 1:
        log_p = output.float().log_softmax(1)
        # The argmax of log p + Gumbel noise is a class drawn from p.
        noise = -torch.empty(log_p.shape).exponential_(generator=generator).log()
        drawn = (log_p.detach() + noise.to(log_p.device)).argmax(1, keepdim=True)
        return -log_p.gather(1, drawn).sum()
    signs = torch.randint(2, output.shape, generator=generator) * 2 - 1
    return (output * signs.to(output.device)).sum()
