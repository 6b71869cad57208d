"""What export() wrote, and how closely it computes what it should."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ompq.amounts import in_bytes
from ompq.runtimes.onnx.weight_containers import StoredWeight
from ompq.runtimes.verification import Agreement


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A verified file."""

    path: Path
    bytes: int
    format: str  # onnx, tflite, pte, mlpackage, gguf or compressed-tensors
    weights: tuple[StoredWeight, ...]
    simulated: Agreement  # agreement of the file with the finalized network in PyTorch
    # Agreement with the integer engine, codes included; None if some of it is float.
    engine: Agreement | None
    given: Agreement  # agreement with the network as it was given, before finalizing
    runtime: str  # what it was verified with, for example ``onnxruntime 1.31.1``
    opset: int = 0  # of an ONNX file
    # Whether no processor's 8-bit kernels can saturate. If False, processors without
    # VNNI give other results unless the session option ``session.x64quantprecision``
    # is "1".
    saturation_safe: bool = True
    # Number of nodes of each kind that compute with floats.
    floats: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""  # why not everything is in integers; "" if everything is
    # How much logits were allowed to differ, as ``simulated.logits``; infinity where
    # all codes must be equal to those of the integer engine instead.
    limit: float

    def __repr__(self) -> str:
        """One line: the file, its size, and how it was compared."""
        return (
            f"ExportResult({self.path.name}, {in_bytes(self.bytes)}; "
            f"{self.simulated} in {self.runtime})"
        )
