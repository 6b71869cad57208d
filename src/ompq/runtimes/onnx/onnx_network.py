"""An ONNX file, run like any network."""

from pathlib import Path
from typing import Any

from torch import nn

from ompq.errors import ExportError
from ompq.network.observation import tensors_in
from ompq.runtimes.verification import open_session, run_session


class OnnxNetwork(nn.Module):
    """An ONNX file as a network: tensors in, its outputs as a tensor or a tuple."""

    def __init__(self, file: str | Path) -> None:
        super().__init__()
        try:
            self.session = open_session(Path(file))
        except Exception as error:  # ONNX Runtime's own derive from nothing else
            first = str(error).strip().splitlines()[0]
            raise ExportError(f"ONNX Runtime cannot load {file}: {first}") from error
        self.texts = dict(self.session.get_modelmeta().custom_metadata_map)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs for a batch."""
        batch = named or (inputs if len(inputs) > 1 else inputs[0])
        device = next(iter(tensors_in(batch))).device
        found = [one.to(device) for one in run_session(self.session, batch)]
        return found[0] if len(found) == 1 else tuple(found)
