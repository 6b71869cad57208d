"""What of an exported file a CPU does not run any faster than the float network."""

from pathlib import Path
from typing import Any

from ompq.errors import shortened
from ompq.export.containers import DOMAIN
from ompq.export.onnx_account import inspect_onnx, load_exported

_THIN = 4
NETWORK = "network"  # the entry of a file's metadata that names the network


def without_gain(path: str | Path) -> list[str]:
    """Return what brings no speed, a sentence each; needs no runtime.

    Raises:
        MissingExtraError: onnx is not installed.
        ExportError: The file cannot be read, or another program wrote it.
    """
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
            f"{len(narrow)} of {len(bits)} layers below 8 bits ({shortened(narrow, 3)})"
            ": they save size, not time; a CPU computes them in 8 bits"
        )
    depthwise = [_layer(n) for n in graph.node if _groups(n) > 1]
    if depthwise:
        found.append(
            f"{len(depthwise)} depthwise or grouped convolutions "
            f"({shortened(depthwise, 3)}): 8 bits gain less there than elsewhere"
        )
    thin = [layer for layer in bits if 0 < _channels(model, layer) < _THIN]
    if thin:
        found.append(
            f"convolutions of fewer than {_THIN} channels ({shortened(thin, 3)}): "
            "8 bits gain nothing there, and may cost"
        )
    clips = [n for n in graph.node if n.op_type == "Clip" and "codes" in n.input[0]]
    if clips:
        found.append(
            f"{len(clips)} tensors below 8 bits, or clipped: a Clip of codes each, "
            "which takes time that 8 bits would not"
        )
    return found


def network_name(path: str | Path) -> str:
    """Return the name of the network that a file was made of, or ""."""
    entries = load_exported(Path(path)).metadata_props
    return next((str(one.value) for one in entries if one.key == NETWORK), "")


def input_shape(path: str | Path) -> tuple[int, ...]:
    """Return the shape of one input, without the batch dimension."""
    sizes = load_exported(Path(path)).graph.input[0].type.tensor_type.shape.dim
    return tuple(int(size.dim_value) for size in sizes)[1:]


def _groups(node: Any) -> int:
    if node.op_type != "Conv" or node.domain == DOMAIN:
        return 1
    return next((int(one.i) for one in node.attribute if one.name == "group"), 1)


def _channels(model: Any, layer: str) -> int:
    """Return the channels that a convolution reads; 0 for others."""
    for node in model.graph.node:
        if node.op_type == "Conv" and _layer(node) == layer and _groups(node) == 1:
            return _weight_shape(model, layer)[1]
    return 0


def _weight_shape(model: Any, layer: str) -> tuple[int, ...]:
    for node in model.graph.node:
        if node.domain == DOMAIN and node.output[0] == f"{layer}/bytes":
            return next(tuple(a.ints) for a in node.attribute if a.name == "shape")
    tensors = model.graph.initializer
    return next(tuple(t.dims) for t in tensors if t.name == f"{layer}/bytes")


def _layer(node: Any) -> str:
    return str(node.output[0].rpartition("/")[0])
