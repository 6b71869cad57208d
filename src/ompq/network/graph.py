"""LayerGraph: the units of a network, found by observing one forward pass."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from ompq.errors import OmpqError, QuantizationError, SampleError, TraceError, shorten
from ompq.files import shown
from ompq.network.attention import with_layers
from ompq.network.blocks import find_blocks, find_stages
from ompq.network.dataflow import (
    ACTIVATIONS,
    NORMS,
    OUTSIDE,
    call_flow,
    follows_unit,
    is_sum,
    is_view,
)
from ompq.network.observation import (
    Call,
    ModuleCall,
    Recording,
    is_batch_norm,
    is_linear_map,
    is_script,
    open_modules,
    record,
    tensors_in,
)
from ompq.network.passive import LAYOUTS
from ompq.network.units import IN_PLACE, LayerGraph, LiveTensor, Skipped, Unit
from ompq.samples import (
    Batch,
    Samples,
    SamplesLike,
    check_network,
    evaluating,
    model_device,
    run_batch,
    to_device,
    usual_settings,
)
from ompq.user_functions import reason

# Products of two activations: arithmetic that no weight's bits describe.
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"}
_MOST_OPERANDS = 4  # of a product: attention's queries, keys, values, probabilities
_LONGEST_NAME = 800  # characters; quantizers' names add to it
_MOST_SHAPES = 16  # of samples that are tried at once
COUNTER = "num_batches_tracked"  # of batch norms: computes nothing, files may lack it


@usual_settings()
def trace(model: nn.Module, samples: SamplesLike, *, tie: bool = True) -> LayerGraph:
    """Observe one forward pass and return the network's units.

    Args:
        model: Any network; it may be in train mode, it is observed in eval mode.
        samples: Inputs; the first one is enough.
        tie: Whether units whose outputs meet in one addition share their bits, as a
            ResNet's downsample convolution does with its block's last convolution.

    Raises:
        TraceError: The network fails on the samples or has no layer to quantize.
        QuantizationError: The network is already quantized.
    """
    samples = Samples.of(samples)  # once: a generator yields its samples only once
    model = with_layers(float_network(model), samples)
    return find_units(model, observe(model, samples), tie=tie)


RECORD = "ompq_quantization"  # the attribute that says how a network was quantized


def float_network(model: nn.Module) -> nn.Module:
    """Return the network if it can be quantized and saved, and is not quantized yet."""
    if hasattr(model, RECORD):
        raise QuantizationError(
            f"{type(model).__name__} is already quantized; give the float network"
        )
    check_network(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TraceError(
                f"{name} is not initialized: run the network on one batch first"
            )
        if tensor.is_meta:
            raise TraceError(f"{name} is on the meta device: load the weights first")
    _check_names(model)
    return model


def _check_names(model: nn.Module) -> None:
    """Raise an error for names that no file may hold."""
    names = chain(dict(model.named_modules()), model.state_dict(keep_vars=True))
    for name in names:
        if len(name) > _LONGEST_NAME or shown(name) != name:
            raise QuantizationError(
                f"the network has a module or tensor {shown(name)[:80]!r}; names must "
                f"have at most {_LONGEST_NAME} characters, and none that control a "
                "terminal, such as a line break. Rename it"
            )


def observe(model: nn.Module, samples: SamplesLike) -> Recording:
    """Record one forward pass of the first sample; try one of every other shape."""
    if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
        raise TraceError(
            "the network was compiled by torch.compile, which hides its layers: give "
            f"what was compiled, model._orig_mod, a {type(compiled).__name__}"
        )
    samples, device = Samples.of(samples), model_device(model)
    batch = to_device(_one_sample(samples), device)
    try:
        recording = record(model, batch)
    except OmpqError:
        raise
    except Exception as error:
        several = isinstance(batch, tuple) and isinstance(error, TypeError)
        hint = f"; samples are tuples of {len(batch)}, one for each argument" * several
        raise TraceError(
            f"the network failed on the samples: {type(error).__name__}: {error}{hint}"
        ) from error
    if recording.inference:
        raise TraceError(
            "the network runs in torch.inference_mode(), so nothing can be computed "
            "from what its layers read: use torch.no_grad() in its forward instead"
        )
    _try_shapes(model, samples)
    return recording


def _one_sample(samples: Samples) -> Batch:
    """Return the first sample or, where samples have masks, the one with most padding.

    Encoders leave out a mask that hides nothing, and with it calls that others need.
    """
    first = samples.runs[0]
    mask = first.get("attention_mask") if isinstance(first, dict) else None
    at = 0 if mask is None else int(mask.flatten(1).count_nonzero(1).argmin())
    return samples[at]


def _try_shapes(model: nn.Module, samples: Samples) -> None:
    """Run the network on one sample of each further shape, of a few of them."""
    first, *others = {str(_shapes(run)): run for run in samples.runs}.values()
    for run in others[:_MOST_SHAPES]:
        try:
            with evaluating(model):
                run_batch(model, Samples((run,)).first_batch(1))
        except OmpqError:
            raise
        except Exception as error:
            raise SampleError(
                f"the network takes samples of shape {_shapes(first)}, but not of "
                f"{_shapes(run)} ({reason(error)}); give samples that it takes"
            ) from error


def _shapes(batch: Batch) -> str:
    """Return the shapes of an input's tensors as text."""
    shapes = [tuple(tensor.shape[1:]) for tensor in tensors_in(batch)]
    return " and ".join(map(str, shapes))


def find_units(
    model: nn.Module, recording: Recording, *, tie: bool = True
) -> LayerGraph:
    """Return the units of a network, given a recorded forward pass."""
    modules = dict(open_modules(model))
    units, skipped = _find_layers(modules, recording)
    if not units:
        itself = "the network itself, a single layer: wrap it in nn.Sequential"
        names = [entry.name or itself for entry in skipped]
        raise TraceError(
            "no convolution or linear layer was called, so there is nothing to plan"
            + (f"; skipped: {shorten(names)}" if names else "")
        )
    _check_weights(modules, recording)
    units = _place_units(modules, recording, units)
    named = {entry.name for entry in skipped} | {u.norm for u in units if u.norm}
    skipped += _float_layers(modules, units, named)
    skipped += _products(recording)
    floats = _float_state(model, units)
    graph = LayerGraph(
        units=tuple(units),
        skipped=tuple(skipped),
        float_bytes=sum(t.numel() * stored_dtype(t).itemsize for t in floats),
        other_tensors=len(floats) + _tensors_read(recording, units) - len(units),
        movable_channels=_movable_channels(recording, units),
    )
    return graph if tie else graph.untie()


def live_tensors(
    recording: Recording, graph: LayerGraph, inputs: int
) -> tuple[LiveTensor, ...]:
    """Return every activation that takes memory of its own while the network runs.

    Norms and activation functions that alone read a tensor work in place, and views
    take no memory. What a call reads is alive together with what it returns.
    ``inputs`` is the number of values in one input of the network.
    """
    dataflow, calls = call_flow(recording), recording.calls
    home = {-1: -1}  # call → the call whose memory holds its output
    values = {-1: inputs}
    for call in calls:
        source = home.get(call.inputs[0], -1) if len(call.inputs) == 1 else -2
        size = prod(call.shape)
        alone = call.inputs and dataflow.readers(call.inputs[0]) == [call.position]
        in_place = call.function in LAYOUTS or (
            alone and call.function in NORMS | ACTIVATIONS
        )
        same = source >= -1 and values[source] == size
        home[call.position] = source if in_place and same else call.position
        values.setdefault(home[call.position], size)
    last = dict.fromkeys(values, -1)
    owner = {unit.parameter: place for place, unit in enumerate(graph.units)}
    readers: dict[int, list[int]] = {}
    for call in calls:
        for source in call.inputs:
            last[home[source]] = call.position
            maps = is_linear_map(call.function)
            found = [owner[k] for k in call.parameters if maps and k in owner]
            readers.setdefault(home[source], []).extend(found)
    returned = {home[place] for place in recording.returned}
    for place in returned:
        last[place] = len(calls)
    return tuple(
        LiveTensor(
            values[place],
            max(place, 0),
            max(last[place], place, 0),
            tuple(dict.fromkeys(readers.get(place, ()))),
            place in returned and not readers.get(place),
        )
        for place in sorted(values)
    )


def _find_layers(
    modules: Mapping[str, nn.Module], recording: Recording
) -> tuple[list[Unit], list[Skipped]]:
    """Return the layers with a weight in order of execution, and those left out.

    The feature of each is its plain output; the layers around it are not looked at.
    """
    calls: dict[str, list[ModuleCall]] = {}
    for each in (*recording.module_calls, *_functional_calls(modules, recording)):
        calls.setdefault(each.name, []).append(each)
    units: list[Unit] = []
    skipped: list[Skipped] = []
    owner: dict[int, str] = {}  # id of a weight → the unit that has it
    holders = Counter(id(p) for m in modules.values() for p in m._parameters.values())
    # A weight that is a layer's as well is the layer's.
    embeddings_last = sorted(
        modules.items(), key=lambda each: isinstance(each[1], nn.Embedding)
    )
    for name, module in embeddings_last:
        if not _may_be_unit(module):
            continue
        reason = _why_not(module, calls.get(name, []))
        if reason:
            skipped.append(Skipped(name, reason))
            continue
        for unit in _units_of(name, module, calls[name]):
            weight = id(_parameter(modules, unit.parameter))
            first = owner.setdefault(weight, unit.name)
            if first == unit.name:
                shared = holders[weight] > 1
                units.append(replace(unit, shared=True) if shared else unit)
            else:
                reason = f"shares the weight of {first} and gets its bits"
                skipped.append(Skipped(unit.name, reason))
    return sorted(units, key=lambda unit: unit.feature), skipped


def _parameter(modules: Mapping[str, nn.Module], key: str) -> nn.Parameter:
    """Return the parameter that has a key in the ``state_dict``."""
    owner, _, name = key.rpartition(".")
    found = modules[owner]._parameters[name]
    assert found is not None  # keys are those of parameters that were read
    return found


def _functional_calls(
    modules: Mapping[str, nn.Module], recording: Recording
) -> Iterator[ModuleCall]:
    """Yield the uses of a layer's weight while the layer itself is never called.

    Torchvision's Swin hands ``self.qkv.weight`` to a function, for example.
    """
    called = {call.name for call in recording.module_calls}
    for call in recording.calls:
        for key in call.parameters if is_linear_map(call.function) else ():
            name = key.removesuffix(".weight")
            if not key.endswith(".weight") or name in called:
                continue
            if isinstance(modules[name], nn.Linear):
                yield ModuleCall(name, (), call.shape, call.position, weight_used=True)


def _may_be_unit(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd | nn.Linear) or _kind_in_place(module) != ""


def _kind_in_place(module: nn.Module) -> str:
    """Return the kind of the units that a module holds as parameters, or ""."""
    if isinstance(module, nn.RNNBase):
        # With projections or without, its weights are a flat list.
        return "recurrent"
    return "embedding" if isinstance(module, nn.Embedding) else ""


def _why_not(module: nn.Module, calls: list[ModuleCall]) -> str:
    if not calls:
        return "never called in the forward pass"
    if not isinstance(module, nn.RNNBase):
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is computed (a parametrization), not stored"
        if not weight.is_floating_point():
            return f"its weight is {weight.dtype}, not floating point"
        if not weight.numel():
            return "its weight is empty"
        if not any(call.weight_used for call in calls):
            return f"{type(module).__name__} does not use its weight as it is stored"
    return "returned no tensor" if calls[-1].output is None else ""


def _units_of(name: str, module: nn.Module, calls: list[ModuleCall]) -> Iterator[Unit]:
    """Yield the unit of a layer, or the units of a recurrent one."""
    output = calls[-1].output
    assert output is not None  # checked by _why_not
    unplaced = partial(
        Unit, norm="", norm_parameters=0, activation="", stage=0, feature=output
    )
    if kind := _kind_in_place(module):
        tokens = sum(prod(call.output_shape[:-1]) for call in calls)
        parameters = dict(module.named_parameters())
        for key, weight in parameters.items():
            if "weight" not in key:
                continue
            inner = f"{name}.{key.removesuffix('weight').strip('._')}".rstrip(".")
            bias = parameters.get(f"{key.removesuffix('weight')}bias")
            yield unplaced(
                name=inner,
                kind=kind,
                parameter=f"{name}.{key}",
                weight_shape=tuple(weight.shape),
                out_channels=weight.shape[0],
                bias_parameters=0 if bias is None else bias.numel(),
                macs=0 if kind == "embedding" else tokens * weight.numel(),
                calls=len(calls),
                block=inner,
                group=inner,
                element_size=weight.element_size(),
            )
        return
    assert isinstance(module, _ConvNd | nn.Linear)
    # Each output, of a transposed convolution each input, meets one kernel.
    transposed = isinstance(module, _ConvTransposeNd)
    values = [c.input_shape if transposed else c.output_shape for c in calls]
    yield unplaced(
        name=name,
        kind=_kind(module),
        parameter=f"{name}.weight",
        weight_shape=tuple(module.weight.shape),
        out_channels=module.out_features
        if isinstance(module, nn.Linear)
        else module.out_channels,
        bias_parameters=0 if module.bias is None else module.bias.numel(),
        macs=sum(map(prod, values)) * prod(module.weight.shape[1:]),
        # A function that is given the weight is not a call of the layer.
        calls=sum(call.input_shape != () for call in calls),
        block=name,
        group=name,
        element_size=module.weight.element_size(),
    )


def _kind(module: _ConvNd | nn.Linear) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _ConvTransposeNd):
        return "transposed"
    if module.groups > 1:
        return "depthwise" if module.groups == module.in_channels else "grouped"
    return "pointwise" if prod(module.kernel_size) == 1 else "conv"


def _check_weights(modules: Mapping[str, nn.Module], recording: Recording) -> None:
    """Make sure that what the network computes with is finite."""
    tensors: dict[str, Tensor] = {
        key: _parameter(modules, key)
        for call in recording.calls
        for key in call.parameters
    }
    for name in {call.name: None for call in recording.module_calls}:
        if isinstance(modules[name], _BatchNorm):
            for key, buffer in modules[name]._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    tensors[f"{name}.{key}"] = buffer
    # An empty tensor has no norm.
    tensors = {key: tensor for key, tensor in tensors.items() if tensor.numel()}
    with torch.no_grad():
        largest = torch.stack(torch._foreach_norm([*tensors.values()], torch.inf))
    pairs = zip(tensors, largest.isfinite().tolist(), strict=True)
    broken = [key for key, good in pairs if not good]
    if broken:
        raise TraceError(
            f"weights hold NaN or infinity in {shorten(broken)}; "
            "repair them, or load other weights"
        )


def _place_units(
    modules: Mapping[str, nn.Module], recording: Recording, units: Sequence[Unit]
) -> list[Unit]:
    """Add norm, activation, block and stage from neighbouring calls."""
    times = Counter(call.name for call in recording.module_calls)
    blocks = find_blocks(modules, recording, [unit.name for unit in units])
    dataflow = call_flow(recording)
    chains = [[*dataflow.chain(unit.feature, follows_unit)] for unit in units]
    # An inner convolution is represented by what its activation returns, a block's
    # last convolution by what the block returns.
    features = [
        readers[-1].position if readers else unit.feature
        for unit, readers in zip(units, chains, strict=True)
    ]
    stages = find_stages(recording, [blocks[unit.name] for unit in units], features)
    heads: dict[int, Unit] = {}  # position of a sum → the first unit that it represents
    placed = []
    for unit, readers, feature in zip(units, chains, features, strict=True):
        computed = unit.kind not in IN_PLACE
        # Tables that are added up, such as those of tokens and positions, are only
        # looked up: no arithmetic asks them for equal bits.
        summed = computed and any(map(is_sum, readers))
        head = heads.setdefault(feature, unit) if summed else unit
        once = computed and unit.calls == 1
        norm = _find_norm(modules, readers, times) if once else ""
        held = modules[norm].parameters() if norm else ()
        first = next((c.function for c in readers if c.function not in NORMS), "")
        placed.append(
            replace(
                unit,
                norm=norm,
                norm_parameters=sum(p.numel() for p in held),
                activation=first if first in ACTIVATIONS else "",
                block=blocks[unit.name],
                stage=stages[blocks[unit.name]],
                # Weights of one recurrent layer share its output, not their bits.
                group=(head if head.feature != unit.feature else unit).name,
                feature=feature,
            )
        )
    return placed


def _find_norm(
    modules: Mapping[str, nn.Module], readers: Sequence[Call], times: Mapping[str, int]
) -> str:
    """Return the batch norm, called once, that is the first consumer, or ""."""
    first = readers[0] if readers else None
    if first is None or first.function != "batch_norm" or times.get(first.module) != 1:
        return ""
    norm = modules[first.module]
    # A subclass may do more than normalise (timm fuses the activation into it); its
    # batch_norm call is still the plain one, so folding stays right.
    folds = is_batch_norm(norm) and norm._buffers.get("running_mean") is not None
    return first.module if folds else ""


def _float_layers(
    modules: Mapping[str, nn.Module], units: Sequence[Unit], named: Set[str]
) -> Iterator[Skipped]:
    """Name modules whose own parameters stay float, unless already named."""
    planned = {id(_parameter(modules, unit.parameter)) for unit in units}
    for name, module in modules.items():
        script = is_script(module)  # its layers cannot be seen
        own = [p for p in module.parameters(script) if id(p) not in planned]
        if own and name not in named and not _may_be_unit(module):
            count = sum(p.numel() for p in own)
            kind = "TorchScript module" if script else type(module).__name__
            yield Skipped.parameters_of(name or "(network)", kind, count)


def _products(recording: Recording) -> Iterator[Skipped]:
    """Name the operations that multiply two activations."""
    found = Counter(
        call.function
        for call in recording.calls
        if (call.function in _PRODUCTS and len(call.inputs) > 1)
        or call.function == "multi_head_attention_forward"
    )
    for function, count in found.items():
        yield Skipped(
            f"{function}()",
            f"multiplies activations ({count} ×): no BOPs are counted for this",
        )


def _tensors_read(recording: Recording, units: Sequence[Unit]) -> int:
    """Return how many tensors units, sums, averages and products read, at most."""
    owned = {unit.parameter for unit in units}
    called = [call for call in recording.calls if owned & set(call.parameters)]
    joined = [
        call
        for call in recording.calls
        if call.function in ("add", "cat", "mean") or "avg_pool" in call.function
    ]
    products = [call for call in recording.calls if call.function in _PRODUCTS]
    read = sum(len(call.inputs) for call in joined) + _MOST_OPERANDS * len(products)
    return max(len(units), len(called)) + read


def _movable_channels(recording: Recording, units: Sequence[Unit]) -> int:
    """Return how many inputs linear units read from a LayerNorm or an attention."""
    linear = {u.parameter: u.weight_shape[1] for u in units if u.kind == "linear"}
    calls, dataflow = recording.calls, call_flow(recording)
    return sum(
        linear[key]
        for call in calls
        for key in call.parameters
        if key in linear
        for at in call.inputs
        if any(
            calls[source].function in ("layer_norm", *_PRODUCTS)
            for source in dataflow.back([at], is_view).ends
            if source != OUTSIDE
        )
    )


def _float_state(model: nn.Module, units: Sequence[Unit]) -> list[Tensor]:
    """Return what a packed file holds that belongs to no unit."""
    state = model.state_dict(keep_vars=True)
    held = {key for unit in units for key in (unit.parameter, bias_key(unit))}
    # Folding gives a layer a weight of its own; until then a tied one is stored once.
    folded_into = {unit.parameter for unit in units if unit.norm}
    seen = {id(state[key]) for key in held - folded_into if key in state}
    norms = {unit.norm for unit in units if unit.norm}
    found = []
    for key, value in state.items():
        owner, _, leaf = key.rpartition(".")
        if key in held or owner in norms or leaf == COUNTER or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
    return found


def bias_key(unit: Unit) -> str:
    """Return the key of a unit's bias in the ``state_dict``, if it has one."""
    return f"{unit.parameter.removesuffix('weight')}bias"


def stored_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type a packed file stores a tensor in: for integers the least."""
    kind = tensor.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        return kind
    values = tensor.detach().long() if tensor.numel() else torch.zeros(1)
    low, high = int(values.min()), int(values.max())
    for narrower in (torch.uint8, torch.int16, torch.int32):
        limits = torch.iinfo(narrower)
        if limits.min <= low and high <= limits.max:
            return narrower if narrower.itemsize < kind.itemsize else kind
    return kind
