"""A .pte file, run like any network."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ompq.errors import ExportError, MissingExtraError


class ExecutorchNetwork(nn.Module):
    """A .pte file as a network: (N, C, H, W) in, outputs out, one sample at a time."""

    def __init__(self, file: str | Path | bytes) -> None:
        super().__init__()
        runtime = _runtime()
        content = file if isinstance(file, bytes) else Path(file).read_bytes()
        try:
            self.program = runtime.load_program(content)
            self.method: Any = self.program.load_method("forward")
        except RuntimeError as error:
            named = "the network" if isinstance(file, bytes) else str(file)
            raise ExportError(f"ExecuTorch cannot load {named}: {error}") from error
        # Scale and zero point of the inputs and outputs, if these are signed bytes.
        self.grids: dict[str, list[tuple[float, float]]] = {}
        for name in {"input_grid", "output_grids"} & self.program.method_names:
            numbers = self._constants(name)
            self.grids[name] = [*zip(numbers[::2], numbers[1::2], strict=True)]

    @property
    def texts(self) -> dict[str, str]:
        """The texts in the file, by name."""
        names = sorted(self.program.method_names - {"forward", *self.grids})
        return {name: self._constants(name)[0] for name in names}

    def _constants(self, name: str) -> Any:
        return self.program.load_method(name).execute(())

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output for a batch, or a tuple of several."""
        given = x.cpu()
        if self.grids:
            ((scale, zero_point),) = self.grids["input_grid"]
            codes = (given / scale).round() + zero_point
            given = codes.clamp(-128, 127).to(torch.int8)
        found = [torch.from_numpy(one) for one in self.run(given.numpy())]
        if self.grids:
            pairs = zip(found, self.grids["output_grids"], strict=True)
            found = [(codes.float() - zero) * scale for codes, (scale, zero) in pairs]
        outputs = tuple(one.to(x.device) for one in found)
        return outputs if len(outputs) > 1 else outputs[0]

    def run(self, x: Any) -> list[Any]:
        """Return the outputs as they are, for a batch of floats or of signed bytes."""
        rows = [
            [one.numpy().copy() for one in self.method.execute((sample,))]
            for sample in torch.from_numpy(np.ascontiguousarray(x))[:, None]
        ]
        return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


def _runtime() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own use of what Python deprecates
            from executorch.runtime import Runtime
    except ImportError as error:
        raise MissingExtraError("executorch", "executorch") from error
    return Runtime.get()
