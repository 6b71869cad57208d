"""trace(): from a network and a few samples to its LayerGraph, by observation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ompq.errors import OmpqError, TraceError, shortened
from ompq.graph.leftovers import float_layers, float_parameters, may_be_unit, uncounted
from ompq.graph.observation import ModuleCall, Recording, is_linear_map, record
from ompq.graph.structure import (
    find_activation,
    find_blocks,
    find_features,
    find_norms,
    find_stages,
)
from ompq.graph.units import LayerGraph, Skipped, Unit
from ompq.samples import Samples, first_samples, model_device, to_device


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


def trace(model: nn.Module, samples: Samples, *, tie: bool = True) -> LayerGraph:
    """Observe one forward pass and return the network's units.

    Args:
        model: Any network; it may be in train mode, it is observed in eval mode.
        samples: Inputs; the first one is enough.
        tie: Whether units whose outputs meet in one addition share their bits, as a
            ResNet's downsample convolution does with its block's last convolution.

    Raises:
        TraceError: The network fails on the samples or has no layer to quantize.
    """
    batch = to_device(first_samples(samples, 1), model_device(model))
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
