"""Exported ONNX files: where their bytes go, and how fast they run.

Nothing here imports torch, so that a process can weigh what a runtime alone takes.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ompq.errors import ExportError, shorten
from ompq.packed.embedded_graph import parse_onnx

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
_PLANES = {f"plane{bits}": bits for bits in (1, 2, 4)}


@dataclass(frozen=True)
class OnnxAccount:
    """The bytes of a file."""

    path: Path
    bytes: int
    # Bytes by item, which add up to the file. ``float`` is what is stored unchanged,
    # ``graph`` everything that is not a constant: nodes, names, unpacking.
    items: Mapping[str, int]
    layers: Mapping[str, int]  # layer → bytes of its constants
    bits: Mapping[str, int]  # layer → width of its weight's codes; 8 if it is bytes

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
    """Read the account of a file that :func:`ompq.export` wrote.

    Raises:
        MissingExtraError: onnx is not installed.
        ExportError: The file cannot be read, or another program wrote it.
    """
    model = load_exported(Path(path))
    items: dict[str, int] = {}
    layers: dict[str, int] = {}
    planes: Counter[str] = Counter()
    for tensor in model.graph.initializer:
        layer, _, kind = tensor.name.rpartition("/")
        size = len(tensor.raw_data)
        item = _item(layer, kind)
        items[item] = items.get(item, 0) + size
        if item not in ("activations", "float", "graph"):
            layers[layer] = layers.get(layer, 0) + size
            planes[layer] += _PLANES.get(kind, 0)
    total = Path(path).stat().st_size
    items["graph"] = total - sum(items.values()) + items.get("graph", 0)
    bits = {layer: planes[layer] or 8 for layer in layers}
    return OnnxAccount(Path(path), total, items, layers, bits)


def _item(layer: str, kind: str) -> str:
    if layer in ("scale", "zero", "code"):  # of a tensor's grid; layers share them
        return "activations"
    if layer.partition("/")[0] in ("table", "shape", "times"):  # for unpacking
        return "graph"
    if not layer:  # named as in the network, because it stays float
        return "float"
    return "weights" if kind.startswith("plane") else _ITEMS.get(kind, "activations")


def load_exported(path: Path) -> Any:
    """Return the content of a file that :func:`ompq.export` wrote."""
    model = load_onnx(path)
    if model.producer_name != "ompq":
        writer = model.producer_name or "another program"
        raise ExportError(
            f"{path} was written by {ascii(writer[:80])[1:-1]}, not by ompq, and "
            "cannot be itemised"
        )
    return model


def load_onnx(path: Path) -> Any:
    """Return the content of any ONNX file."""
    try:
        model = parse_onnx(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ExportError(f"{path} cannot be read as ONNX: {error}") from error
    graph = model.graph
    names = [tensor.name for tensor in graph.initializer]
    for node in graph.node:
        names += [node.op_type, *node.input, *node.output]
    sound = all(
        isinstance(name, str)  # text that is not Unicode comes as bytes
        and name.isprintable()
        and len(name) < _LONGEST_NAME
        for name in names
    )
    if not (sound and graph.input and all(node.output for node in graph.node)):
        raise ExportError(f"{path} is damaged: names in it are not those of a network")
    return model


_THIN = 4  # input channels that an 8-bit dot product takes at once
_LONGEST_NAME = 2000  # of a tensor: a layer's name and a word
LENGTH = "length"  # the entry that says for texts of how many tokens it was made
_LONGEST_TEXT = 999_999  # tokens; a file may claim anything


def without_gain(path: str | Path) -> list[str]:
    """Return a sentence for each thing that gains no speed; needs no runtime."""
    model = load_exported(Path(path))
    graph, bits = model.graph, inspect_onnx(path).bits
    if not any(node.op_type == "QuantizeLinear" for node in graph.node):
        return [
            "activations are float: weights become floats when the file is loaded, so "
            "that it is smaller and not faster"
        ]
    found = []
    narrow = [name for name, width in bits.items() if width < 8]
    if narrow:
        found.append(
            f"{len(narrow)} of {len(bits)} layers below 8 bits ({shorten(narrow, 3)})"
            ": they save size, not time; a CPU computes them in 8 bits"
        )
    convolutions = _convolutions(model, bits)
    depthwise = [layer for layer, groups in convolutions.items() if groups > 1]
    if depthwise:
        found.append(
            f"depthwise or grouped convolutions ({shorten(depthwise, 3)}): "
            "8 bits gain less there than elsewhere"
        )
    thin = [
        layer
        for layer, groups in convolutions.items()
        if groups == 1 and 0 < _weight_shape(model, layer)[1] < _THIN
    ]
    if thin:
        found.append(
            f"convolutions of fewer than {_THIN} channels ({shorten(thin, 3)}): "
            "8 bits gain nothing there, and may cost"
        )
    clips = [n for n in graph.node if n.op_type == "Clip" and "codes" in n.input[0]]
    if clips:
        found.append(
            f"{len(clips)} tensors below 8 bits, or clipped: a Clip of codes each, "
            "which takes time that 8 bits would not"
        )
    return found


def text_tokens(model: Any) -> int:
    """Return for texts of how many tokens a file was made; 1 if it does not say."""
    entries = (str(one.value) for one in model.metadata_props if one.key == LENGTH)
    given = next(entries, "")
    known = given.isascii() and given.isdigit() and len(given) < 7
    return min(max(1, int(given)), _LONGEST_TEXT) if known else 1


def _convolutions(model: Any, layers: Collection[str]) -> dict[str, int]:
    """Return the groups of each layer that is a convolution.

    PyTorch names nodes after their operator, so a layer is found by its weight.
    """
    made = {node.output[0]: node for node in model.graph.node if node.output}
    found = {}
    for node in model.graph.node:
        if node.op_type != "Conv" or len(node.input) < 2:
            continue
        unseen, name = dict(made), node.input[1]
        while name.rpartition("/")[0] not in layers and name in unseen:
            name = next(iter(unseen.pop(name).input), "")
        if (layer := name.rpartition("/")[0]) in layers:
            groups = (int(one.i) for one in node.attribute if one.name == "group")
            found[layer] = next(groups, 1)
    return found


def _weight_shape(model: Any, layer: str) -> tuple[int, ...]:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for name in (f"{layer}/bytes", f"{layer}/plane4"):
        if name in tensors and len(tensors[name].dims) > 1:
            return tuple(tensors[name].dims)
    # It is stored in planes: go back from its bytes to the node that sets their shape.
    made = {node.output[0]: node for node in model.graph.node}
    node = made.pop(f"{layer}/bytes", None)
    while node is not None and node.op_type != "Reshape":
        node = made.pop(node.input[0], None) if node.input else None
    shape = node.input[1] if node is not None and len(node.input) > 1 else ""
    if shape not in tensors:
        return (0, 0)  # the file is damaged
    sizes = np.frombuffer(tensors[shape].raw_data[:64], dtype="<i8")
    return tuple(map(int, sizes)) if len(sizes) > 1 else (0, 0)
