"""An ONNX file in OpenVINO, run like any network."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ompq.network.observation import tensors_in
from ompq.runtimes.benchmark import compile_openvino


class OpenvinoNetwork(nn.Module):
    """An ONNX file as a network: tensors in, its outputs as a tensor or a tuple."""

    def __init__(self, file: str | Path) -> None:
        super().__init__()
        self.compiled = compile_openvino(str(file), torch.get_num_threads())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs for a batch."""
        batch = {name: one.cpu().numpy() for name, one in named.items()}
        found = self.compiled(batch or [one.cpu().numpy() for one in inputs])
        device = next(iter(tensors_in(named or inputs))).device
        outputs = [torch.from_numpy(one.copy()).to(device) for one in found.values()]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
