"""Core ML packages: weights in few bits, unpacked to floats when the network is loaded.

Core ML runs on Apple devices only. So the package is not run; its weights are read back
and compared, and run in PyTorch.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ompq.errors import ExportError, MissingExtraError
from ompq.files import unfinished_folder
from ompq.layers import (
    QuantizedLayer,
    activation_quantizers,
    plain_class,
    quantized_layers,
    replace_module,
)
from ompq.network.folding import channel_axis
from ompq.network.observation import copy_network
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.integer_files import compare_networks
from ompq.runtimes.onnx.weight_containers import StoredWeight
from ompq.samples import Samples, evaluating, first_tensor

Array: TypeAlias = NDArray[Any]
Sizes: TypeAlias = dict[tuple[str, int], int]  # kind and width → bytes
_PALETTES = (2, 3, 4, 6, 8)  # widths of indices into a palette; Core ML also has 1
_INTEGERS = (4, 8)  # widths of integers with a scale and a zero point a channel
_HALF = 2  # bytes of a float16
_LARGEST_ERROR = 2.0**-10  # of a weight that is stored as float16


def write_coreml(
    quantized: nn.Module,
    path: Path,
    samples: Samples,
    metadata: Mapping[str, str],
) -> ExportResult:
    """Write a quantized network as a Core ML package, with few bits a weight.

    Activations are floats there, and one sample is one call.

    Args:
        path: The package, which is a folder; it must be new or empty.

    Raises:
        ExportError: coremltools cannot convert the network, or weights that were read
            back differ.
        MissingExtraError: coremltools is not installed.
    """
    layers = quantized_layers(quantized)
    plain = _with_float_layers(quantized)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ExportError(f"{path} is not an empty folder; give a new one")
    with _quiet():
        tools = _coremltools()
        model = _converted(tools, plain, first_tensor(samples.first_batch(1)))
        program = _program(model)
        weights, names = [], {}
        for name, layer in layers.items():
            stored, names[name] = _compress(program, name, layer)
            weights.append(stored)
        model = tools.convert(program, **_options(tools))
        model.user_defined_metadata.update(metadata)
        path.mkdir(parents=True, exist_ok=True)
        with unfinished_folder(path) as work:
            package = work / "network.mlpackage"  # no other suffix is accepted
            model.save(str(package))
            read = _read_weights(tools, package, names, plain)
            agreement = compare_networks(plain, read, samples)
            for part in sorted(package.iterdir()):
                part.replace(path / part.name)
    return ExportResult(
        path=path,
        format="mlpackage",
        bytes=sum(one.stat().st_size for one in path.rglob("*") if one.is_file()),
        runtime=f"coremltools {version('coremltools')} (weights read back; not run: "
        "Core ML needs an Apple device)",
        weights=tuple(weights),
        simulated=agreement,
        engine=None,
        given=compare_networks(quantized, plain, samples),
        reason="Core ML unpacks weights and computes with floats",
        limit=inf,
    )


def _coremltools() -> Any:
    try:
        import coremltools
    except ImportError as error:
        raise MissingExtraError("coremltools", "coreml") from error
    return coremltools


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars, and the search for libraries that only Macs have."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _with_float_layers(quantized: nn.Module) -> nn.Module:
    """Return a copy whose layers are plain ones with rounded weights."""
    result = copy_network(quantized)
    for quantizer in activation_quantizers(result).values():
        quantizer.enabled = False
    for name, layer in quantized_layers(result).items():
        layer.check_uniform()
        plain: Any = plain_class(layer).__new__(plain_class(layer))
        plain.__dict__ = layer.__dict__
        weight = layer.rounded_weight().detach()
        plain.weight = nn.Parameter(weight, requires_grad=False)
        replace_module(result, name, plain)
    return result.cpu().float().eval()


def _options(tools: Any) -> dict[str, Any]:
    return {
        "minimum_deployment_target": tools.target.iOS18,  # palettes per channel
        "skip_model_load": True,
    }


def _converted(tools: Any, network: nn.Module, sample: Tensor) -> Any:
    try:
        with evaluating(network):
            exported = torch.export.export(network, (sample.cpu().float(),))
        return tools.convert(exported.run_decompositions({}), **_options(tools))
    except Exception as error:  # it raises anything on operations it does not know
        raise ExportError(
            f"coremltools cannot convert the network: {str(error).strip()[:300]}"
        ) from error


def _program(model: Any) -> Any:
    """Return the operations of a package."""
    from coremltools.converters.mil.frontend.milproto.load import load

    spec = model.get_spec()
    return load(spec, spec.specificationVersion, model.weights_dir)


def _compress(
    program: Any, name: str, layer: QuantizedLayer
) -> tuple[StoredWeight, str]:
    """Store a layer's weight in few bits; also return the name of its operation."""
    from coremltools.converters.mil.mil import Builder

    rounded = layer.rounded_weight().detach().cpu().float().numpy()
    function = program.functions["main"]
    constant = _constant(function, name, rounded)
    axis = channel_axis(layer)
    ways = _palette_sizes(layer, axis) | _integer_sizes(layer)
    (kind, bits), size = min(ways.items(), key=lambda pair: (pair[1], pair[0]))
    named = f"{constant.name}_packed"
    if kind == "palette":
        indices, palette = _palette(rounded, axis, bits)
        make, given = Builder.constexpr_lut_to_dense, {"lut": palette}
        given["indices"] = indices
    else:
        make = Builder.constexpr_blockwise_shift_scale
        given = _integers(layer, bits)
    with function:
        new = make(**given, name=named, before_op=constant)
        function.replace_uses_of_var_after_op(
            anchor_op=constant,
            old_var=constant.outputs[0],
            new_var=new,
            no_check_var_types=True,
            force_replace=True,
        )
        function.remove_ops([constant])
    return StoredWeight(name, layer.bits, f"{kind}{bits}", size), named


def _constant(function: Any, name: str, weight: Array) -> Any:
    """Return the operation that holds a weight, which is known by its values."""
    for operation in function.operations:
        value = operation.outputs[0].val if operation.op_type == "const" else None
        if not isinstance(value, np.ndarray) or value.shape != weight.shape:
            continue
        if np.array_equal(value, weight.astype(value.dtype)):
            return operation
    raise ExportError(
        f"{name}: coremltools changed its weight while it converted the network, so it "
        "cannot be stored in few bits"
    )


def _palette_sizes(layer: QuantizedLayer, axis: int) -> Sizes:
    """Return the bytes of a weight with a palette of float16 for each channel."""
    count, channels = layer.weight.numel(), layer.weight.shape[axis]
    return {
        ("palette", bits): -(-count * bits // 8) + channels * _HALF * (1 << bits)
        for bits in _PALETTES
        if bits >= layer.bits
    }


def _integer_sizes(layer: QuantizedLayer) -> Sizes:
    """Return the bytes of a weight as integers with a scale and a zero point."""
    if layer.rounding is not None:
        return {}
    count, channels = layer.weight.numel(), layer.weight_scale.numel()
    return {
        ("uint", bits): -(-count * bits // 8) + channels * (_HALF + 1)
        for bits in _INTEGERS
        if bits >= layer.bits + _has_halves(layer)
    }


def _has_halves(layer: QuantizedLayer) -> bool:
    """Whether a zero point lies between two codes, which then count double."""
    return bool((layer.weight_zero_point != layer.weight_zero_point.round()).any())


def _palette(weight: Array, axis: int, bits: int) -> tuple[Array, Array]:
    """Return indices shaped as a weight, and palettes (..., channels, ..., 2^bits, 1).

    Palettes are sorted; entries that are not used repeat the largest.
    """
    from coremltools.converters.mil.mil import types

    rows = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    palettes = np.empty((len(rows), 1 << bits), np.float16)
    indices = np.empty(rows.shape, np.uint8)
    for row, palette, index in zip(rows, palettes, indices, strict=True):
        values, index[:] = np.unique(row, return_inverse=True)
        palette[:] = np.pad(values, (0, palette.size - values.size), "edge")
    others = [size for at, size in enumerate(weight.shape) if at != axis]
    shaped = np.moveaxis(indices.reshape(-1, *others), 0, axis)
    like = [1] * weight.ndim
    like[axis] = -1
    kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    return shaped.astype(kind), palettes.reshape(
        *like[:axis], len(rows), *like[axis + 1 :], -1, 1
    )


def _integers(layer: QuantizedLayer, bits: int) -> dict[str, Array]:
    """Return codes, scales and zero points of a weight."""
    from coremltools.converters.mil.mil import types

    kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    grid, unit = layer.grid_like_weight(), 1 + _has_halves(layer)
    found = layer.codes() * unit, grid.scale / unit, grid.zero_point * unit
    data, scale, offset = (one.detach().cpu().numpy() for one in found)
    return {
        "data": data.astype(kind),
        "scale": scale.astype(np.float16),
        "offset": offset.astype(np.uint8).astype(kind),
    }


def _read_weights(
    tools: Any, package: Path, names: Mapping[str, str], expected: nn.Module
) -> nn.Module:
    """Return a network with the weights of a package, which must be those expected."""
    program = _program(tools.models.MLModel(str(package), skip_model_load=True))
    found = {
        operation.name: operation.materialized_val_inference()
        for operation in program.functions["main"].operations
        if operation.op_type.startswith("constexpr_")
    }
    result = copy_network(expected)
    for name, packed in names.items():
        weight = result.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        read = torch.from_numpy(np.asarray(found[packed], np.float32))
        apart = float((read - weight).abs().max())
        if not apart <= _LARGEST_ERROR * float(weight.abs().max()):
            raise ExportError(
                f"{name}: the weight read back from the package is {apart:.3g} away"
            )
        weight.copy_(read)
    return result
