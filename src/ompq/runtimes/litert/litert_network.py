"""A .tflite file, run like any network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.errors import ExportError, MissingExtraError
from ompq.runtimes.litert.litert_graph import litert_schema


class LitertNetwork(nn.Module):
    """A .tflite file as a network: (N, C, H, W) in, logits out.

    Inputs and outputs of signed bytes are converted with the grids in the file.
    """

    def __init__(self, file: str | Path | bytes, threads: int | None = None) -> None:
        super().__init__()
        self.file = file
        given: dict[str, Any] = {"model_path": str(file)}
        if isinstance(file, bytes):
            given = {"model_content": file}
        threads = threads or torch.get_num_threads()
        try:
            self.interpreter = _interpreter()(**given, num_threads=threads)
        except (ValueError, RuntimeError) as error:
            raise ExportError(f"LiteRT cannot load {_named(file)}: {error}") from error
        (self.input,) = self.interpreter.get_input_details()
        self.outputs = self.interpreter.get_output_details()
        self.count = 0  # samples that the tensors have room for

    @property
    def texts(self) -> dict[str, str]:
        """The texts in the file's metadata, by name."""
        content = self.file if isinstance(self.file, bytes) else None
        content = content or Path(str(self.file)).read_bytes()
        model = litert_schema().ModelT.InitFromPackedBuf(content)
        return {
            one.name.decode(): bytes(model.buffers[one.buffer].data).decode()
            for one in model.metadata or ()
        }

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the output for a batch, or a dict of several by name."""
        found = self.run(x.detach().cpu().numpy())
        named = {
            one["name"]: torch.from_numpy(_floats(array, one)).to(x.device)
            for one, array in zip(self.outputs, found, strict=True)
        }
        return named if len(named) > 1 else next(iter(named.values()))

    def run(self, x: Any) -> list[Any]:
        """Return the outputs as they are, for a batch of floats or of signed bytes."""
        if len(x) != self.count:
            shape = [len(x), *self.input["shape"][1:]]
            self.interpreter.resize_tensor_input(self.input["index"], shape)
            self.interpreter.allocate_tensors()
            self.count = len(x)
        if x.ndim == 4:
            x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
        self.interpreter.set_tensor(self.input["index"], _codes(x, self.input))
        self.interpreter.invoke()
        return [
            _channels_first(self.interpreter.get_tensor(one["index"]))
            for one in self.outputs
        ]


def _interpreter() -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise MissingExtraError("ai_edge_litert", "litert") from error
    return Interpreter


def _named(file: str | Path | bytes) -> str:
    return "the network" if isinstance(file, bytes) else str(file)


def _channels_first(array: Any) -> Any:
    return array.transpose(0, 3, 1, 2) if array.ndim == 4 else array


def _codes(x: Any, tensor: Mapping[str, Any]) -> Any:
    """Return floats as the type of a tensor; signed bytes stay what they are."""
    kind = tensor["dtype"]
    if x.dtype == kind or not np.issubdtype(kind, np.integer):
        return x.astype(kind)
    scale, zero_point = tensor["quantization"]
    ends = np.iinfo(kind)
    levels = np.round(x / np.float32(scale)) + zero_point
    return levels.clip(ends.min, ends.max).astype(kind)


def _floats(array: Any, tensor: Mapping[str, Any]) -> Any:
    scale, zero_point = tensor["quantization"]
    if not scale or np.issubdtype(array.dtype, np.floating):
        return array.astype(np.float32)
    return (array.astype(np.float32) - zero_point) * np.float32(scale)
