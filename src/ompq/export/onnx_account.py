"""What an exported ONNX file takes, item by item."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ompq.errors import ExportError, MissingExtraError
from ompq.export.containers import DOMAIN

# What a constant is, by the last part of its name.
_ITEMS = {
    "bytes": "weights",
    "plane": "weights",
    "offset": "zero points",
    "stretch": "zero points",
    "zeros": "zero points",
    "scale": "scales",
    "bias": "biases",
}


@dataclass(frozen=True)
class OnnxAccount:
    """What a file takes.

    Attributes:
        path: The file.
        bytes: Its size on disk.
        items: Bytes by item; they sum up to the file. ``float`` is what is stored as
            it was, ``graph`` all that is no constant: nodes, names, the functions that
            unpack weights.
        layers: Layer → bytes of its constants.
        bits: Layer → width of its weight's codes; 8 for one that is stored as bytes.
    """

    path: Path
    bytes: int
    items: Mapping[str, int]
    layers: Mapping[str, int]
    bits: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "path": str(self.path),
            "file_bytes": self.bytes,
            "items": dict(self.items),
            "units": [
                {"name": name, "weight_bits": self.bits[name], "bytes": size}
                for name, size in self.layers.items()
            ],
        }


def inspect_onnx(path: str | Path) -> OnnxAccount:
    """Read the account of a file that :func:`ompq.export_onnx` wrote.

    Raises:
        MissingExtraError: onnx is not installed.
        ExportError: The file cannot be read, or another program wrote it.
    """
    model = load_exported(Path(path))
    items: dict[str, int] = {}
    layers: dict[str, int] = {}
    for tensor in model.graph.initializer:
        layer, _, kind = tensor.name.rpartition("/")
        size = len(tensor.raw_data)
        item = _item(layer, kind)
        items[item] = items.get(item, 0) + size
        if item not in ("activations", "float"):
            layers[layer] = layers.get(layer, 0) + size
    total = Path(path).stat().st_size
    items["graph"] = total - sum(items.values())
    unpacked = {
        node.output[0].rpartition("/")[0]: int(node.op_type.removeprefix("Weight"))
        for node in model.graph.node
        if node.domain == DOMAIN
    }
    bits = {layer: unpacked.get(layer, 8) for layer in layers}
    return OnnxAccount(Path(path), total, items, layers, bits)


def _item(layer: str, kind: str) -> str:
    if layer in ("scale", "zero", "code"):  # of a tensor's grid; layers share them
        return "activations"
    if not layer:  # named as in the network: what stays float
        return "float"
    return "weights" if kind.startswith("plane") else _ITEMS.get(kind, "activations")


def load_exported(path: Path) -> Any:
    """Return the content of a file that :func:`ompq.export_onnx` wrote.

    Raises:
        MissingExtraError: onnx is not installed.
        ExportError: The file cannot be read, or another program wrote it.
    """
    try:
        import onnx
        from google.protobuf.message import (  # type: ignore[import-untyped]
            DecodeError,
        )
    except ImportError as error:
        raise MissingExtraError(error.name or "onnx", "onnx") from error
    try:
        model = onnx.load(path)
    except (OSError, DecodeError) as error:
        raise ExportError(f"{path} cannot be read as ONNX: {error}") from error
    if model.producer_name != "ompq":
        raise ExportError(
            f"{path} was written by {model.producer_name or 'another program'}, not by "
            "ompq; there is no account of it"
        )
    return model
