"""write_compressed(): a folder in the format compressed-tensors, loaded and compared.

The folder is what ``save_pretrained`` of transformers would write, but weights are
codes packed into 32-bit words. transformers and vLLM load it.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ompq.bit_widths import FLOAT_BITS
from ompq.entropy_coding.bit_packing import pack_bits
from ompq.errors import ExportError, shorten
from ompq.files import unfinished_folder
from ompq.layers import QuantizedLayer, activation_quantizers, quantized_layers
from ompq.network.graph import RECORD
from ompq.network.observation import tensors_in
from ompq.network.units import Unit
from ompq.optional_libraries import optional_library
from ompq.quantization.record import Quantization, quantization_of
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.onnx.weight_containers import StoredWeight
from ompq.runtimes.verification import compare_outputs
from ompq.samples import Samples, call, evaluating, model_device
from ompq.targets import load_target
from ompq.tokenizers import load_tokenizer

_FORMAT, _TARGET = "pack-quantized", "compressed-tensors"
_EXTRA = "compressed-tensors"
_COMPARED = 4  # samples whose outputs are compared
_LIMIT = 1e-3  # how much these may differ: by the order of sums
_WORD = 32  # bits


def write_compressed(network: nn.Module, path: Path, samples: Samples) -> ExportResult:
    """Write a quantized network of transformers as a folder of compressed-tensors.

    transformers loads it before it appears, and must compute the same outputs.

    Args:
        network: Planned with ``target="compressed-tensors"`` and quantized.
        path: The folder; it must be new or empty.
        samples: Inputs; the first few are computed by both.

    Raises:
        ExportError: The network is none of transformers, something is quantized that
            the format does not hold, or the outputs differ.
        MissingExtraError: compressed-tensors is not installed.
    """
    optional_library("compressed_tensors", _EXTRA)
    units = _stored_units(network)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ExportError(f"{path} is not an empty folder; give a new one")
    path.mkdir(parents=True, exist_ok=True)
    with unfinished_folder(path) as work:
        weights = _write(network, units, work)
        agreement = _compare(network, work, samples)
        for file in sorted(work.iterdir()):
            file.replace(path / file.name)
    return ExportResult(
        path=path,
        bytes=sum(file.stat().st_size for file in path.iterdir()),
        format=_TARGET,
        weights=weights,
        simulated=agreement,
        engine=None,
        given=agreement,
        runtime=f"transformers {version('transformers')}",
        reason="weights are unpacked to floats, or by kernels to 16-bit floats",
        limit=_LIMIT,
    )


def _stored_units(network: nn.Module) -> dict[str, Unit]:
    """Return the units with packed weights, by name, checked."""
    record = getattr(network, RECORD, None)
    if not isinstance(record, Quantization) or not hasattr(network, "config"):
        raise ExportError(
            f"{type(network).__name__} is no quantized network of transformers, which "
            "is what compressed-tensors describes"
        )
    rounded = [name for name, site in activation_quantizers(network).items() if site]
    if rounded:
        raise ExportError(
            f"inputs of layers are rounded ({shorten(rounded)}), but ompq writes only "
            f"weights as compressed-tensors: plan with target={_TARGET!r}"
        )
    bits, layers = record.allocation, quantized_layers(network)
    units = {
        unit.name: unit
        for unit in record.graph.units
        if bits[unit.name].weight < FLOAT_BITS
    }
    for name, unit in units.items():
        layer = layers.get(name)
        if layer is None or unit.kind != "linear":
            raise ExportError(
                f"{name} ({unit.kind}{', tied' if unit.shared else ''}) is quantized, "
                "but only linear layers of their own can be: pin it to 32 bits"
            )
        middle = 1 << (bits[name].weight - 1)
        if bits[name].rate or not (layer.weight_zero_point == middle).all():
            raise ExportError(
                f"{name} has codes that compressed-tensors does not hold: the code of "
                f"0 must be {middle} everywhere. Plan with target={_TARGET!r}"
            )
        if layer.group_size and unit.row_length % layer.group_size:
            raise ExportError(
                f"{name} has {unit.row_length} inputs, which compressed-tensors cannot "
                f"divide into groups of {layer.group_size}: pin it to 32 bits"
            )
    _check_fused(record)
    return units


def _check_fused(record: Quantization) -> None:
    """Raise an ExportError if layers that vLLM computes as one differ in bits."""
    for names in load_target(_TARGET).siblings(record.graph.names):
        found = {str(record.allocation[name]) for name in names}
        if len(found) > 1:
            raise ExportError(
                f"{', '.join(names)} have different bits ({', '.join(sorted(found))}), "
                f"but vLLM computes them as one layer: plan with target={_TARGET!r}"
            )


def _write(
    network: nn.Module, units: dict[str, Unit], folder: Path
) -> tuple[StoredWeight, ...]:
    layers, record = quantized_layers(network), quantization_of(network)
    tensors: dict[str, Tensor] = {}
    stored = []
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for key, value in _own_tensors(network):
        name, _, leaf = key.rpartition(".")
        if name not in units:
            tensors[key] = value
        elif leaf == "weight":
            layer = layers[name]
            bits = record.allocation[name].weight
            parts = _packed(layer, bits)
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            groups[bits, layer.group_size].append(name)
            size = sum(one.numel() * one.element_size() for one in parts.values())
            stored.append(StoredWeight(name, bits, _FORMAT, size))
        elif leaf == "bias":
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: Any = network.config
    about = {**config.to_dict(), "architectures": [_class_name(network)]}
    ignored = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name not in units
    ]
    about["quantization_config"] = _description(groups, ignored)
    text = json.dumps(about, indent=1, default=str)
    (folder / "config.json").write_text(f"{text}\n")
    source = str(getattr(network, "name_or_path", ""))
    if source and Path(source).exists():
        with suppress(OSError, ValueError):  # it may have none
            load_tokenizer(source, local_files_only=True).save_pretrained(folder)
    return tuple(stored)


def _own_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the ``state_dict``; tied ones once."""
    seen = set()
    for key, value in network.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield key, value.detach().cpu().contiguous()


def _packed(layer: QuantizedLayer, bits: int) -> dict[str, Tensor]:
    """Return a weight as compressed-tensors stores it."""
    codes = layer.codes().cpu().numpy()
    channels, width = codes.shape
    # Every row is filled up to whole words.
    rows = np.pad(codes, ((0, 0), (0, -width % _WORD)))
    words = pack_bits(rows, bits).reshape(channels, -1).view("<i4")
    used = -(-width * bits // _WORD)
    packed = torch.from_numpy(words[:, :used].astype(np.int32))
    scale = layer.weight_scale.detach().float().cpu().reshape(channels, -1)
    return {
        "weight_packed": packed.contiguous(),
        "weight_scale": scale.contiguous(),
        "weight_shape": torch.tensor([channels, width]),
    }


def _description(
    groups: dict[tuple[int, int], list[str]], ignored: Sequence[str]
) -> dict[str, Any]:
    """Return the ``quantization_config``: a group for all layers of a width."""
    described = {}
    for number, ((bits, size), names) in enumerate(sorted(groups.items())):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if size else "channel",
            "dynamic": False,
        }
        weights |= {"group_size": size} if size else {}
        described[f"group_{number}"] = {
            "targets": names,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": _FORMAT,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": list(ignored),
    }


def _class_name(network: nn.Module) -> str:
    library = optional_library("transformers", "transformers")
    return next(
        one.__name__ for one in type(network).__mro__ if hasattr(library, one.__name__)
    )


def _compare(network: nn.Module, folder: Path, samples: Samples) -> Any:
    """Load the folder with transformers and compare outputs."""
    library = optional_library("transformers", "transformers")
    kind = getattr(library, _class_name(network))
    batch = samples.first_batch(_COMPARED)
    try:
        loaded = kind.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ExportError(f"transformers cannot load the folder: {error}") from error
    outputs = []
    for one in (network, loaded.to(model_device(network)).eval()):
        with evaluating(one):
            outputs.append(next(tensors_in(call(one, batch))).float().cpu())
    ours, theirs = outputs
    agreement = replace(compare_outputs([ours], [theirs]), what="tokens")
    if not agreement.logits <= _LIMIT:
        raise ExportError(
            f"transformers' outputs differ from ompq's: {agreement}. Nothing was "
            "written; please report this with the versions of transformers "
            f"({version('transformers')}) and compressed-tensors "
            f"({version('compressed-tensors')})"
        )
    return agreement
