"""LayerGraph: the units of a network, found by observing one forward pass."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd

from ompq.errors import OmpqError, PatternError, TraceError, shortened
from ompq.recording import Call, ModuleCall, Recording, is_linear_map, record
from ompq.samples import Samples, SamplesLike, model_device, to_device


class Choice(NamedTuple):
    """Bit-widths that a unit may get: of its weight, and of its input."""

    weight: int
    activation: int

    def __str__(self) -> str:
        return f"W{self.weight}A{self.activation}"


@dataclass(frozen=True)
class Unit:
    """One layer whose bits are chosen.

    Attributes:
        name: The module's name, for example ``layer1.0.conv1``.
        kind: ``conv``, ``depthwise``, ``pointwise``, ``grouped``, ``transposed``,
            ``linear`` or ``attention``.
        parameter: The weight's key in the network's ``state_dict``.
        weight_shape: Shape of the weight.
        out_channels: Number of output channels; one scale each.
        bias_parameters: Length of the bias; 0 without one.
        norm: Name of the batch norm that follows directly and can be folded, or "".
        norm_parameters: Its affine parameters, or 0.
        activation: Function that alone reads the (normalised) output, or "".
        macs: Multiply-accumulates for one input, all calls together.
        calls: How often one forward pass calls the layer.
        block: Name of the block; the unit's own name when it stands alone.
        stage: Number of the stage: it grows where the resolution changes.
        group: Units with the same group share their bits.
        feature: Position, among the observed calls, of the output that represents
            the unit (after batch norm and activation, after a residual sum).
    """

    name: str
    kind: str
    parameter: str
    weight_shape: tuple[int, ...]
    out_channels: int
    bias_parameters: int
    norm: str
    norm_parameters: int
    activation: str
    macs: int
    calls: int
    block: str
    stage: int
    group: str
    feature: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return prod(self.weight_shape)


@dataclass(frozen=True)
class Skipped:
    """A layer or operation that is not quantized, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class LayerGraph:
    """The units of a network in execution order, and what is not a unit.

    Attributes:
        units: Units in execution order.
        skipped: Layers that are not units, with reasons.
        float_parameters: Parameters and buffers that stay float once the batch norms
            that follow a unit are folded into it.
    """

    units: tuple[Unit, ...]
    skipped: tuple[Skipped, ...] = ()
    float_parameters: int = 0

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, name: str) -> Unit:
        try:
            return self._by_name[name]
        except KeyError:
            raise PatternError(_no_match(name, self.names)) from None

    @cached_property
    def _by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the units, in execution order."""
        return tuple(unit.name for unit in self.units)

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Group name → positions of its units, in order of first execution."""
        found: dict[str, list[int]] = {}
        for position, unit in enumerate(self.units):
            found.setdefault(unit.group, []).append(position)
        return {name: tuple(members) for name, members in found.items()}

    @cached_property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Block name → positions of its units, in order of first execution."""
        found: dict[str, list[int]] = {}
        for position, unit in enumerate(self.units):
            found.setdefault(unit.block, []).append(position)
        return {name: tuple(members) for name, members in found.items()}

    def tie(self, patterns: Iterable[str | Sequence[str]]) -> "LayerGraph":
        """Return a graph in which the units that match one pattern share their bits.

        Args:
            patterns: Each ties its matches: a pattern, or several patterns together.

        Raises:
            PatternError: A pattern matches nothing.
        """
        group_of = {unit.name: unit.group for unit in self.units}
        for pattern in patterns:
            several = [pattern] if isinstance(pattern, str) else pattern
            names = [name for one in several for name in select(self.names, one)]
            merged = {group_of[name] for name in names}
            target = group_of[names[0]]
            group_of = {n: target if g in merged else g for n, g in group_of.items()}
        return replace(
            self, units=tuple(replace(u, group=group_of[u.name]) for u in self.units)
        )

    def untie(self) -> "LayerGraph":
        """Return a graph in which every unit is free."""
        return replace(self, units=tuple(replace(u, group=u.name) for u in self.units))

    def differing(self, other: "LayerGraph") -> list[str]:
        """Return the units that only one of two graphs has, or with another shape."""
        ours, theirs = (
            {unit.name: unit.weight_shape for unit in graph.units}
            for graph in (self, other)
        )
        changed = [name for name in ours if ours[name] != theirs.get(name)]
        return changed + [name for name in theirs if name not in ours]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LayerGraph":
        """Rebuild a graph from :meth:`to_json`."""
        units = tuple(
            Unit(**{**unit, "weight_shape": tuple(unit["weight_shape"])})
            for unit in data["units"]
        )
        skipped = tuple(Skipped(**entry) for entry in data["skipped"])
        return cls(units, skipped, data["float_parameters"])


def select(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that match a pattern.

    Args:
        names: Unit names in execution order.
        pattern: An exact name, a glob (``layer4.*``), a regular expression
            (``re:conv[12]$``, searched), ``@first`` or ``@last``.

    Raises:
        PatternError: Nothing matches, or the regular expression is malformed.

    Example:
        >>> select(["stem", "a.conv1", "a.conv2"], "a.*")
        ['a.conv1', 'a.conv2']
    """
    if pattern in ("@first", "@last") and names:
        return [names[0 if pattern == "@first" else -1]]
    if pattern in names:
        return [pattern]
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise PatternError(
                f"{pattern!r} is no regular expression: {error}"
            ) from error
        matches = [name for name in names if expression.search(name)]
    else:
        matches = fnmatch.filter(names, pattern)
    if not matches:
        raise PatternError(_no_match(pattern, names))
    return matches


def _no_match(pattern: str, names: Sequence[str]) -> str:
    return f"{pattern!r} matches no unit; the {len(names)} units are {shortened(names)}"


_NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
_ACTIVATIONS = {
    "relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu",
    "selu", "celu", "leaky_relu", "prelu", "mish", "sigmoid", "tanh", "softplus",
    "clamp", "clip", "clamp_min", "clamp_max", "threshold",
}  # fmt: skip
_LAYOUT = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "contiguous",
    "clone", "detach", "to", "type_as", "permute", "transpose", "movedim", "view",
    "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
}  # fmt: skip
_SCALINGS = {"add", "sub", "mul", "div"}


def find_features(
    recording: Recording, outputs: Mapping[str, int]
) -> dict[str, tuple[int, bool]]:
    """Follow each unit's output to the tensor that represents it.

    The path goes through norms, activations and residual sums for as long as nothing
    else reads the tensor: so an inner convolution is represented by what its
    activation returns and a block's last convolution by what the block returns.

    Args:
        recording: A forward pass.
        outputs: Unit name → position of the call that made its output.

    Returns:
        Unit name → (position of its feature, whether a residual sum was passed).
    """
    consumers = recording.consumers()
    return {name: _follow(recording, consumers, at) for name, at in outputs.items()}


def _follow(
    recording: Recording, consumers: Mapping[int, list[int]], at: int
) -> tuple[int, bool]:
    joined = False
    while len(readers := consumers.get(at, [])) == 1:
        reader = recording.calls[readers[0]]
        if is_sum(reader):
            joined = True
        elif not _passes_on(reader):
            break
        at = reader.position
    return at, joined


def is_sum(call: Call) -> bool:
    """Whether a call adds two activations, as a residual connection does."""
    return call.function == "add" and len(call.inputs) == 2


def _passes_on(call: Call) -> bool:
    if call.function in _SCALINGS:  # by a constant or a parameter
        return len(call.inputs) == 1
    return call.function in _NORMS | _ACTIVATIONS | _LAYOUT


def find_norms(
    model: nn.Module, recording: Recording, outputs: Mapping[str, int]
) -> dict[str, str]:
    """Return, for each unit, the batch norm that alone reads its output.

    Args:
        model: The network.
        recording: A forward pass of it.
        outputs: Unit name → position of its output, for units called once.
    """
    consumers = recording.consumers()
    calls_of: dict[str, int] = {}
    for call in recording.module_calls:
        calls_of[call.name] = calls_of.get(call.name, 0) + 1
    found = {}
    for name, at in outputs.items():
        readers = consumers.get(at, [])
        if len(readers) != 1:
            continue
        reader = recording.calls[readers[0]]
        if reader.function != "batch_norm" or calls_of.get(reader.module) != 1:
            continue
        norm = model.get_submodule(reader.module)
        # A subclass may do more than normalise (timm fuses the activation into it);
        # its batch_norm call is still the plain one, so folding it stays right.
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            found[name] = reader.module
    return found


def find_activation(recording: Recording, at: int) -> str:
    """Return the activation that alone reads a unit's output, past a norm, or ""."""
    consumers = recording.consumers()
    while len(readers := consumers.get(at, [])) == 1:
        reader = recording.calls[readers[0]]
        if reader.function in _ACTIVATIONS:
            return reader.function
        if reader.function not in _NORMS:
            break
        at = reader.position
    return ""


def find_blocks(
    model: nn.Module, recording: Recording, units: Sequence[str]
) -> dict[str, str]:
    """Return the block of each unit: the module that reconstructs as one piece.

    A class whose ``forward`` itself adds or concatenates activations makes blocks; so
    does every other module of that class (a MobileNetV2 block without a shortcut). A
    unit belongs to its innermost such module, or stands alone.
    """
    classes = {
        type(model.get_submodule(call.module))
        for call in recording.calls
        if call.module and len(call.inputs) > 1 and (is_sum(call) or _joins(call))
    }
    blocks = {name for name, m in model.named_modules() if name and type(m) in classes}
    # A block that holds another is a container; its own units stand alone.
    holders = {
        outer for inner in blocks for outer in _ancestors(inner) if outer in blocks
    }
    found = {}
    for unit in units:
        inside = [name for name in _ancestors(unit) if name in blocks]
        innermost = inside[-1] if inside else unit
        found[unit] = unit if innermost in holders else innermost
    return found


def _joins(call: Call) -> bool:
    return call.function == "cat"


def _ancestors(name: str) -> list[str]:
    """Return the modules that hold ``name``, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def find_stages(
    recording: Recording,
    features: Mapping[str, tuple[int, bool]],
    blocks: Mapping[str, str],
) -> dict[str, int]:
    """Number the stages: a new one begins where a block's resolution changes."""
    resolution = {
        blocks[unit]: _resolution(recording.calls[at].shape)
        for unit, (at, _) in features.items()
    }  # the block's last unit wins: it is the block's output
    stages: dict[str, int] = {}
    numbers: dict[str, int] = {}
    stage, previous = -1, None
    for unit in features:
        block = blocks[unit]
        if block not in numbers:
            stage += resolution[block] != previous
            previous = resolution[block]
            numbers[block] = stage
        stages[unit] = numbers[block]
    return stages


def _resolution(shape: tuple[int, ...]) -> int:
    """Number of positions of an image feature (N, C, H, W); 1 for any other."""
    return prod(shape[2:]) if len(shape) > 3 else 1


# Products of two activations: arithmetic that no weight's bits describe.
_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")


def may_be_unit(module: nn.Module) -> bool:
    """Whether a module's weight is one whose bits may be chosen."""
    return isinstance(module, _ConvNd | nn.Linear | nn.MultiheadAttention)


def float_layers(
    model: nn.Module, planned: Set[int], named: Set[str]
) -> Iterator[Skipped]:
    """Name the modules whose own parameters stay float.

    Args:
        model: The network.
        planned: ids of the units' weights.
        named: Modules that are accounted for already.
    """
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in planned]
        if not own or name in named or may_be_unit(module):
            continue
        count = sum(p.numel() for p in own)
        yield Skipped(
            name or "(network)",
            f"{type(module).__name__} stays float: {count:,} parameters",
        )


def uncounted(recording: Recording) -> Iterator[Skipped]:
    """Name the operations that multiply two activations."""
    found: dict[str, int] = {}
    for call in recording.calls:
        plain = call.function in _PRODUCTS and len(call.inputs) > 1
        if plain or call.function == "multi_head_attention_forward":
            found[call.function] = found.get(call.function, 0) + 1
    for function, count in found.items():
        yield Skipped(
            f"{function}()",
            f"{count} calls multiply activations: they stay float and are not counted",
        )


def float_parameters(model: nn.Module, units: Sequence[Unit]) -> int:
    """Count the numbers that stay float after folding, buffers included."""
    gone = {unit.parameter for unit in units}
    gone |= {f"{unit.parameter.removesuffix('weight')}bias" for unit in units}
    folded = tuple(f"{unit.norm}." for unit in units if unit.norm)
    state = dict((*model.named_parameters(), *_float_buffers(model)))
    return sum(
        tensor.numel()
        for key, tensor in state.items()
        if key not in gone and not key.startswith(folded)
    )


def _float_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict()
    for key, buffer in model.named_buffers():
        if key in kept and buffer.is_floating_point():
            yield key, buffer


def normalised_by(model: nn.Module, unit: Unit) -> str:
    """Return the module that gives what a unit gives after its batch norm.

    Batch norms of timm hold the activation that follows; what comes first in them, a
    dropout that does nothing in eval mode, returns what was normalised.
    """
    if not unit.norm:
        return unit.name
    held = list(model.get_submodule(unit.norm).named_children())
    if held and isinstance(held[0][1], nn.Identity | _DropoutNd):
        return f"{unit.norm}.{held[0][0]}"
    return unit.norm


def norm_affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return the scale and shift that a batch norm applies in eval mode, (C,) each."""
    assert norm.running_mean is not None  # only norms with statistics are folded
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    if norm.affine:
        shift = shift + norm.bias
    return scale, shift


def channel_axis(module: nn.Module) -> int:
    """Return the weight's axis of output channels (within a group, if transposed)."""
    return 1 if isinstance(module, _ConvTransposeNd) else 0


def scaled_channels(weight: Tensor, scale: Tensor, module: nn.Module) -> Tensor:
    """Multiply each output channel of a layer's weight by its scale.

    Args:
        weight: The weight, (C, ...); transposed convolutions have (in, C/groups, ...).
        scale: One factor a channel, (C,).
        module: The layer, which says where its output channels are.
    """
    if not isinstance(module, _ConvTransposeNd):
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    groups = module.groups
    parts = weight.reshape(groups, -1, *weight.shape[1:])  # (g, in/g, C/g, ...)
    factor = scale.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))
    return (parts * factor).reshape(weight.shape)


def folded(module: nn.Module, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer with the batch norm folded into it."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    scale, shift = norm_affine(norm)
    if isinstance(bias, Tensor):
        shift = shift + bias * scale
    return scaled_channels(weight, scale, module), shift


@dataclass(frozen=True)
class _Layer:
    """A weight that may become a unit, before it is known where it stands."""

    name: str
    kind: str
    parameter: str
    bias: int
    weight: torch.Tensor
    out_channels: int
    macs: int
    calls: int
    output: int


def trace(model: nn.Module, samples: SamplesLike, *, tie: bool = True) -> LayerGraph:
    """Observe one forward pass and return the network's units.

    Args:
        model: Any network; it may be in train mode, it is observed in eval mode.
        samples: Inputs; the first one is enough.
        tie: Whether units whose outputs meet in one addition share their bits, as a
            ResNet's downsample convolution does with its block's last convolution.

    Raises:
        TraceError: The network fails on the samples or has no layer to quantize.
    """
    batch = to_device(Samples.of(samples).first_batch(1), model_device(model))
    try:
        recording = record(model, batch)
    except OmpqError:
        raise
    except Exception as error:
        raise TraceError(
            f"the network failed on the samples: {type(error).__name__}: {error}"
        ) from error
    layers, skipped = _find_layers(model, recording)
    if not layers:
        raise TraceError(
            "no convolution or linear layer was called, so there is nothing to plan"
            + (f"; skipped: {shortened([s.name for s in skipped])}" if skipped else "")
        )
    _check_weights(model, recording)
    graph = _assemble(model, recording, layers, skipped)
    return graph if tie else graph.untie()


def _find_layers(
    model: nn.Module, recording: Recording
) -> tuple[list[_Layer], list[Skipped]]:
    calls: dict[str, list[ModuleCall]] = {}
    for each in (*recording.module_calls, *_functional_calls(model, recording)):
        calls.setdefault(each.name, []).append(each)
    layers: list[_Layer] = []
    skipped: list[Skipped] = []
    owner: dict[int, str] = {}  # id of a weight → the unit that has it
    inside_attention = tuple(
        f"{name}." for name, m in model.named_modules() if _is_attention(m)
    )
    for name, module in model.named_modules():
        if name.startswith(inside_attention) or not may_be_unit(module):
            continue
        reason = _why_not(module, calls.get(name, []))
        if reason:
            skipped.append(Skipped(name, reason))
            continue
        for layer in _layers_of(name, module, calls[name]):
            first = owner.setdefault(id(layer.weight), layer.name)
            if first == layer.name:
                layers.append(layer)
            else:
                reason = f"shares the weight of {first} and gets its bits"
                skipped.append(Skipped(layer.name, reason))
    return sorted(layers, key=lambda layer: layer.output), skipped


def _functional_calls(model: nn.Module, recording: Recording) -> Iterator[ModuleCall]:
    """Yield the uses of a layer's weight while the layer itself is never called.

    Torchvision's Swin hands ``self.qkv.weight`` to a function, for example.
    """
    called = {call.name for call in recording.module_calls}
    for call in recording.calls:
        for key in call.parameters if is_linear_map(call.function) else ():
            name = key.removesuffix(".weight")
            if key.endswith(".weight") and name not in called:
                module = model.get_submodule(name)
                if isinstance(module, nn.Linear):
                    yield ModuleCall(
                        name=name,
                        input_shape=(),
                        output_shape=call.shape,
                        output=call.position,
                        weight_used=True,
                    )


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def _why_not(module: nn.Module, calls: list[ModuleCall]) -> str:
    if not calls:
        return "never called in the forward pass"
    if _is_attention(module):
        return "" if calls[-1].output is not None else "returned no tensor"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed (a parametrization), not stored"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not floating point"
    if not any(call.weight_used for call in calls):
        return f"{type(module).__name__} does not use its weight as it is stored"
    if calls[-1].output is None:
        return "returned no tensor"
    return ""


def _layers_of(
    name: str, module: nn.Module, calls: list[ModuleCall]
) -> Iterator[_Layer]:
    output = calls[-1].output
    assert output is not None  # _why_not has seen to it
    if isinstance(module, nn.MultiheadAttention):
        tokens = sum(prod(call.output_shape[:-1]) for call in calls)
        for key, weight in module.named_parameters():
            if key.endswith("weight"):
                inner = key.removesuffix("weight").strip("._")
                biases = module.embed_dim if module.in_proj_bias is not None else 0
                yield _Layer(
                    name=f"{name}.{inner}",
                    kind="attention",
                    parameter=f"{name}.{key}",
                    bias=biases * weight.shape[0] // module.embed_dim,
                    weight=weight,
                    out_channels=weight.shape[0],
                    macs=tokens * weight.numel(),
                    calls=len(calls),
                    output=output,
                )
        return
    assert isinstance(module, _ConvNd | nn.Linear)
    yield _Layer(
        name=name,
        kind=_kind(module),
        parameter=f"{name}.weight",
        bias=0 if module.bias is None else module.bias.numel(),
        weight=module.weight,
        out_channels=_out_channels(module),
        macs=sum(_macs(module, call) for call in calls),
        # A function that is handed the weight is no call of the layer.
        calls=sum(call.input_shape != () for call in calls),
        output=output,
    )


def _kind(module: _ConvNd | nn.Linear) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _ConvTransposeNd):
        return "transposed"
    if module.groups > 1:
        return "depthwise" if module.groups == module.in_channels else "grouped"
    return "pointwise" if prod(module.kernel_size) == 1 else "conv"


def _out_channels(module: _ConvNd | nn.Linear) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels


def _macs(module: _ConvNd | nn.Linear, call: ModuleCall) -> int:
    if isinstance(module, _ConvTransposeNd):  # each input meets out/groups kernels
        return int(prod(call.input_shape) * module.weight[0].numel())
    per_output = module.weight.numel() // _out_channels(module)
    return int(prod(call.output_shape) * per_output)


def _check_weights(model: nn.Module, recording: Recording) -> None:
    """Make sure that what the network computes with is finite."""
    read = {key for call in recording.calls for key in call.parameters}
    tensors: dict[str, torch.Tensor] = {
        key: weight for key, weight in model.named_parameters() if key in read
    }
    called = {call.name for call in recording.module_calls}
    for name, module in model.named_modules():
        if name in called and isinstance(module, _BatchNorm):
            statistics = module.named_buffers(prefix=name)
            tensors.update((k, b) for k, b in statistics if b.is_floating_point())
    finite = torch.stack([torch.isfinite(t.detach().sum()) for t in tensors.values()])
    pairs = zip(tensors, finite.tolist(), strict=True)
    broken = [key for key, good in pairs if not good]
    if broken:
        raise TraceError(
            f"weights hold NaN or infinity in {shortened(broken)}; "
            "repair them, or load other weights"
        )


def _assemble(
    model: nn.Module,
    recording: Recording,
    layers: list[_Layer],
    skipped: list[Skipped],
) -> LayerGraph:
    outputs = {layer.name: layer.output for layer in layers}
    once = {layer.name for layer in layers if layer.calls == 1}
    features = find_features(recording, outputs)
    norms = find_norms(model, recording, {n: outputs[n] for n in once})
    blocks = find_blocks(model, recording, [layer.name for layer in layers])
    stages = find_stages(recording, features, blocks)
    groups = _tied(layers, features)
    units = []
    for layer in layers:
        norm = norms.get(layer.name, "")
        units.append(
            Unit(
                name=layer.name,
                kind=layer.kind,
                parameter=layer.parameter,
                weight_shape=tuple(layer.weight.shape),
                out_channels=layer.out_channels,
                bias_parameters=layer.bias,
                norm=norm,
                norm_parameters=_parameter_count(model, norm),
                activation=find_activation(recording, layer.output),
                macs=layer.macs,
                calls=layer.calls,
                block=blocks[layer.name],
                stage=stages[layer.name],
                group=groups[layer.name],
                feature=features[layer.name][0],
            )
        )
    planned = {id(layer.weight) for layer in layers}
    named = {entry.name for entry in skipped} | set(norms.values())
    return LayerGraph(
        units=tuple(units),
        skipped=(
            *skipped,
            *float_layers(model, planned, named),
            *uncounted(recording),
        ),
        float_parameters=float_parameters(model, units),
    )


def _tied(
    layers: list[_Layer], features: Mapping[str, tuple[int, bool]]
) -> dict[str, str]:
    """Name the group of each layer: the first whose output meets it in a sum."""
    heads: dict[int, _Layer] = {}
    groups = {}
    for layer in layers:
        feature, joined = features[layer.name]
        head = heads.setdefault(feature, layer) if joined else layer
        # Projections inside one attention call share its output, not its bits.
        groups[layer.name] = (head if head.output != layer.output else layer).name
    return groups


def _parameter_count(model: nn.Module, name: str) -> int:
    if not name:
        return 0
    return sum(p.numel() for p in model.get_submodule(name).parameters())
