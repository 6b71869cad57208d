"""save(), load() and inspect_file(): networks in files as small as promised."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ompq.budgets import Budget
from ompq.costs import coded_bytes
from ompq.entropy_coding.bit_packing import pack_bits
from ompq.errors import PackedFileError, PlanError, QuantizationError, shorten
from ompq.files import library_version, shown
from ompq.grids import Grid
from ompq.integer.links import link_layers
from ompq.layers import QuantizedLayer, activation_quantizers, quantized_layers
from ompq.network.attention import with_named_layers
from ompq.network.graph import COUNTER, bias_key
from ompq.network.observation import is_batch_norm
from ompq.network.units import Unit
from ompq.packed.embedded_graph import drop_weights
from ompq.packed.format import (
    Contents,
    PackedUnit,
    broadcast_grid,
    quantized_units,
    read_contents,
    stored_units,
    vectors,
    write_contents,
    zero_step,
)
from ompq.plans import Plan, check_plan
from ompq.quantization.assembly import assemble, quantizer_names
from ompq.quantization.record import Quantization, quantization_of, with_quantization
from ompq.samples import usual_settings

_logger = logging.getLogger(__name__)
# Between these scales, scale * (code - zero) rounds back to the same code.
_SCALES = (1e-36, 1e36)


@usual_settings()
def save(
    quantized: nn.Module,
    path: str | Path,
    *,
    plan: Plan | None = None,
    network: str = "",
    coded: bool = False,
) -> None:
    """Write a quantized network, each weight at its true width.

    Units that were planned with a rate are entropy-coded.

    Args:
        quantized: From :func:`ompq.quantize` or what came after it.
        path: The file to write, usually named ``*.ompq.safetensors``.
        plan: The plan; the file records its figures.
        network: The network's name, for example ``torchvision:resnet18``.
        coded: Whether units of a fixed width are also entropy-coded, without loss,
            where that is smaller. The file takes longer to load.

    Raises:
        QuantizationError: The network is not quantized, or was changed afterwards.
        PlanError: The network's bits differ from the plan's.
    """
    record = quantization_of(quantized)
    if plan is not None:
        check_plan(plan)
    for layer in quantized_layers(quantized).values():
        layer.check_uniform()
    about = {
        "network": shown(network),
        "versions": {"ompq": library_version(), "torch": torch.__version__},
        "plan": None if plan is None else _figures(plan, record),
    }
    write_contents(path, _pack(quantized, record, about, coded=coded))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Make PyTorch use one thread.

    Loading consists of many short operations: on a busy machine, threads wait for each
    other much longer than they save.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
@usual_settings()
def load(path: str | Path, model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the quantized network of a file, in eval mode.

    On the CPU its outputs equal those of the saved network bit for bit. It is finalized
    if that one was.

    Args:
        path: A file that :func:`save` wrote.
        model: The float network with any weights, or a function that constructs it.
            Only its structure is used; it is not changed.

    Raises:
        PackedFileError: The file is damaged, or of another network.
    """
    contents = read_contents(path)
    names = contents.record.graph.names
    network = with_named_layers(_float_network(model), names)
    _check(path, _differing(network, contents))
    units = {one.unit.name: one for one in contents.units}

    def weight_grid(unit: Unit, weight: Tensor, _axis: int) -> tuple[Grid, Tensor]:
        return broadcast_grid(units[unit.name].grid, unit, weight.device), weight

    record = contents.record
    quantized = assemble(
        network,
        record.graph,
        record.allocation,
        record.sites,
        weight_grid=weight_grid,
        activation_grids=contents.activations,
    )
    _check(path, _unlike(quantized, contents))
    try:
        _fill(quantized, contents)
    except PackedFileError as error:
        raise PackedFileError(f"{path} cannot be read: {error}") from error
    link_layers(quantized, record.links)
    return with_quantization(quantized, record)


def add_onnx(path: str | Path, onnx: str | Path, output: str | Path) -> int:
    """Write a copy of a packed file that carries its ONNX file.

    :func:`ompq.packed.unpack` writes the ONNX file again.

    Codes, scales and biases are stored only once: constants of the ONNX file that
    follow from them are left out.

    Args:
        path: A packed file of a finalized network.
        onnx: The file that :func:`ompq.export` wrote for the same network.

    Returns:
        The number of bytes that the ONNX file adds.

    Raises:
        PackedFileError: The packed file is damaged, the ONNX file has none of its
            weights, or the two together exceed the plan's budget.
    """
    contents = read_contents(path)
    try:
        graph = _drop_weights(Path(onnx).read_bytes(), contents)
    except PackedFileError as error:
        raise PackedFileError(f"{onnx} is not of {path}: {error}") from error
    write_contents(output, replace(contents, graph=graph))
    planned = contents.about.get("plan")
    if planned is not None:
        size = Path(output).stat().st_size
        excess = Budget.of(planned["budget"]).excess("graph_bytes", size)
        if excess:
            Path(output).unlink()
            raise PackedFileError(f"{output}: {excess}")
    return len(graph)


def _drop_weights(onnx: bytes, contents: Contents) -> bytes:
    arrays = {name: part.numpy() for name, part in vectors(contents).items()}
    return drop_weights(onnx, stored_units(contents.units), arrays)


def graph_bytes(quantized: nn.Module, onnx: bytes) -> int:
    """Return how many bytes a network's ONNX file would add to its packed file."""
    record = quantization_of(quantized)
    return len(_drop_weights(onnx, _pack(quantized, record, {}, coded=False)))


def _figures(plan: Plan, record: Quantization) -> dict[str, Any]:
    bits = record.allocation
    other = [n for n in plan.allocation if plan.allocation[n] != bits.get(n)]
    other += [name for name in bits if name not in plan.allocation]
    if other:
        raise PlanError(
            f"the network's bits differ from the plan's in {len(other)} units "
            f"({shorten(other)}); pass the plan that it was quantized by"
        )
    return {
        "hash": plan.hash,
        "budget": str(plan.budget),
        "score": plan.score_name,
        "method": plan.method,
        "accounting": plan.accounting,
        "bytes": plan.totals["bytes"],
    }


def _pack(
    quantized: nn.Module, record: Quantization, about: Mapping[str, Any], *, coded: bool
) -> Contents:
    state = quantized.state_dict(keep_vars=True)
    names = quantizer_names(quantized, record.sites)
    kinds = {"scale": torch.float32, "zero_point": torch.int32}
    grids = []
    for name, site in zip(names, record.sites, strict=True):
        scale, zero_point = (
            _exactly(state[f"{name}.{part}"], kind, f"{name}.{part}")
            for part, kind in kinds.items()
        )
        grids.append(Grid(scale, zero_point, site.bits))
    units = []
    for unit in quantized_units(record):
        owner = quantized.get_submodule(unit.parameter.rpartition(".")[0])
        choice = record.allocation[unit.name]
        one = _pack_unit(state, unit, choice.weight, owner)
        entropy_coded = coded or choice.rate > 0
        compact = entropy_coded or unit.group_size > 0
        units.append(one.compact(coded=entropy_coded) if compact else one)
    _warn_of_excess(units, quantized_layers(quantized))
    rest = {key: tensor.detach().cpu() for key, tensor in _rest(quantized, record)}
    return Contents(record, tuple(units), tuple(grids), rest, about)


def _warn_of_excess(
    units: Sequence[PackedUnit], layers: Mapping[str, QuantizedLayer]
) -> None:
    """Warn of coded units that take more bytes than they may."""
    over = {}
    for one in units:
        layer = layers.get(one.unit.name)
        if layer is not None and layer.rate:
            most = coded_bytes(one.unit.weights, layer.rate)
            over[one.unit.name] = one.stream.numel() - most
    names = [name for name, excess in over.items() if excess > 0]
    if names:
        _logger.warning(
            "%s: coded weights take %d bytes more than planned, so the file may exceed "
            "its budget; quantize or reconstruct the network again",
            shorten(names),
            sum(over[name] for name in names),
        )


def _pack_unit(
    state: Mapping[str, Tensor], unit: Unit, bits: int, owner: nn.Module
) -> PackedUnit:
    weight = state[unit.parameter].detach().cpu()
    swapped = isinstance(owner, QuantizedLayer)
    flat = _flat_grid(state, unit, bits, narrow=swapped and bool(owner.narrow))
    grid = broadcast_grid(flat, unit, weight.device)
    if not swapped and not weight.equal(grid.fake(weight)):
        raise QuantizationError(
            f"{unit.name}: its weight was changed after it was rounded to {bits} bits; "
            "quantize the network again"
        )
    bias = state.get(bias_key(unit))
    if bias is not None:
        bias = _exactly(bias, torch.float32, f"{unit.name}: bias")
    stream = torch.from_numpy(pack_bits(grid.quantize(weight).numpy(), bits))
    return PackedUnit(unit, flat, stream, bias)


def _flat_grid(
    state: Mapping[str, Tensor], unit: Unit, bits: int, *, narrow: bool
) -> Grid:
    """Return the grid of a unit's weight as it is stored, (C,) or (C, G)."""
    step = zero_step(bits)
    zero_point = state[f"{unit.parameter}_zero_point"].detach().cpu()
    if not unit.super_blocks:
        _exactly(zero_point / step, torch.uint8, f"{unit.name}: zero / {step:g}")
    scale = state[f"{unit.parameter}_scale"]
    scale = _exactly(scale, torch.float32, f"{unit.name}: scale")
    if not ((scale >= _SCALES[0]) & (scale <= _SCALES[1])).all():
        raise QuantizationError(
            f"{unit.name}: scales must be within {_SCALES[0]:g} and {_SCALES[1]:g}, "
            f"not {scale.min():g} to {scale.max():g}; quantize the network again"
        )
    return Grid(scale, zero_point.to(torch.float32), bits, narrow)


def _exactly(values: Tensor, kind: torch.dtype, what: str) -> Tensor:
    values = values.detach().cpu()
    stored = values.to(kind)
    if not torch.equal(stored.to(values.dtype), values):
        lost = values[stored.to(values.dtype) != values][:5].tolist()
        double = values.dtype == torch.float64
        how = "in float32: model.float()" if double else "again"
        raise QuantizationError(
            f"{what} cannot be stored as {str(kind).removeprefix('torch.')}: {lost}; "
            f"quantize the network {how}"
        )
    return stored


def _rest(quantized: nn.Module, record: Quantization) -> Iterator[tuple[str, Tensor]]:
    """Yield the state that no unit or site holds; a shared tensor only once."""
    state = quantized.state_dict(keep_vars=True)
    held = {
        key
        for unit in quantized_units(record)
        for key in (
            *(unit.parameter + end for end in ("", "_scale", "_zero_point")),
            bias_key(unit),
        )
    }
    for name in quantizer_names(quantized, record.sites):
        held |= {f"{name}.scale", f"{name}.zero_point"}
    seen = {id(state[key]) for key in held if key in state}
    for key, value in state.items():
        if id(value) in seen or key.endswith(COUNTER):
            continue
        if not isinstance(value, Tensor):
            raise QuantizationError(
                f"{key} in the state_dict is {type(value).__name__}, not a tensor: "
                "a packed file cannot hold it"
            )
        seen.add(id(value))
        yield key, value


def _float_network(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if callable(model) and not isinstance(model, nn.Module):
        # Random weights that nobody uses must not advance the caller's generator.
        with torch.random.fork_rng(devices=[]):
            model = model()
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a network or a function that returns one, "
            f"not {type(model).__name__}"
        )
    if quantized_layers(model):
        raise ValueError("model is quantized already; pass the float network")
    return model


def _check(path: str | Path, differing: list[str]) -> None:
    if differing:
        raise PackedFileError(
            f"{path} was made for another network: {len(differing)} units or layers "
            f"differ ({shorten(differing)})"
        )


def _differing(model: nn.Module, contents: Contents) -> list[str]:
    """Describe the units and sites of the file that the float network lacks."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    unbiased = {one.unit.name for one in contents.units if one.bias is None}
    found = []
    for unit in contents.record.graph.units:
        weight = parameters.get(unit.parameter)
        if weight is None:
            found.append(f"{unit.name} is missing")
        elif tuple(weight.shape) != unit.weight_shape:
            shapes = f"{tuple(weight.shape)} instead of {unit.weight_shape}"
            found.append(f"{unit.name} is {shapes}")
        elif unit.norm and not is_batch_norm(modules.get(unit.norm, model)):
            found.append(f"{unit.norm} is not a batch norm")
        elif unit.name in unbiased and bias_key(unit) in parameters:
            found.append(f"{unit.name} has a bias")
    places = {place for p in contents.record.sites for place in p.after + p.before}
    return found + [f"{name} is missing" for name in sorted(places - set(modules))]


def _unlike(quantized: nn.Module, contents: Contents) -> list[str]:
    """Describe how the state that stays float differs from the file's."""
    own = dict(_rest(quantized, contents.record))
    given = contents.state
    shapes = [
        f"{key} is {tuple(own[key].shape)} instead of {tuple(given[key].shape)}"
        for key in given
        if key in own and own[key].shape != given[key].shape
    ]
    unexpected = [f"{key} is not in the file" for key in own if key not in given]
    layers, quantizers = quantized_layers(quantized), activation_quantizers(quantized)
    links = contents.record.links
    missing = [key for key in given if key not in own]
    missing += [link.layer for link in links if link.layer not in layers]
    ends = [end for link in links for end in (link.source, link.target or link.source)]
    missing += dict.fromkeys(end for end in ends if end not in quantizers)
    return [f"{key} is missing" for key in missing] + unexpected + shapes


@torch.no_grad()
def _fill(quantized: nn.Module, contents: Contents) -> None:
    state, layers = quantized.state_dict(), quantized_layers(quantized)
    for one in contents.units:
        unit, weight = one.unit, state[one.unit.parameter]
        if (layer := layers.get(unit.name)) is not None and layer.rate:
            layer.rate = max(layer.rate, 8 * one.stream.numel() / unit.weights)
        grid = broadcast_grid(one.grid, unit, weight.device)
        # Grid.dequantize in place: copies would take as long as everything else here.
        weight.copy_(one.codes)
        weight.sub_(grid.zero_point).mul_(grid.scale)
        if one.bias is None:
            continue
        key = bias_key(unit)
        if key not in state:  # it was added to correct for rounding
            owner, _, leaf = key.rpartition(".")
            bias = nn.Parameter(one.bias.to(weight), requires_grad=False)
            setattr(quantized.get_submodule(owner), leaf, bias)
        else:
            state[key].copy_(one.bias)
    for key, tensor in contents.state.items():
        state[key].copy_(tensor)
