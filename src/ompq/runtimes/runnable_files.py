"""Exported files as networks that PyTorch can call, each run in its runtime."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ompq.errors import ExportError
from ompq.runtimes.executorch.executorch_network import ExecutorchNetwork
from ompq.runtimes.file_metadata import FileMetadata
from ompq.runtimes.litert.litert_network import LitertNetwork
from ompq.runtimes.onnx.onnx_network import OnnxNetwork
from ompq.runtimes.onnx.openvino_network import OpenvinoNetwork

# Suffix → network that runs a file; its ``texts`` are the file's metadata.
RUNNABLE: Mapping[str, Callable[[Path], Any]] = {
    ".onnx": OnnxNetwork,
    ".tflite": LitertNetwork,
    ".pte": ExecutorchNetwork,
}
NETWORKS: Mapping[str, Callable[[Path], Any]] = {  # by runtime
    "onnxruntime": OnnxNetwork,
    "openvino": OpenvinoNetwork,
    "litert": LitertNetwork,
    "executorch": ExecutorchNetwork,
}


def is_runnable(name: str | Path) -> bool:
    """Return whether a name is that of an exported file."""
    return Path(name).suffix in RUNNABLE


def open_runnable(path: str | Path) -> tuple[nn.Module, FileMetadata]:
    """Load an exported file into its runtime.

    Raises:
        ExportError: There is no such file, or it cannot be loaded.
        MissingExtraError: The runtime is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise ExportError(f"there is no file {path}; ompq export writes one")
    network = RUNNABLE[path.suffix](path)
    return network, FileMetadata.read(network.texts, path)
