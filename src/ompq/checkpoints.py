"""Checkpoints: tensors, a little text, and the run that they belong to.

Safetensors, so that nothing in them is ever executed.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ompq.errors import CheckpointError
from ompq.files import replacing


def write_checkpoint(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    text: Mapping[str, str],
    *,
    kind: str,
    identity: str,
) -> None:
    """Write a checkpoint, whole or not at all.

    Args:
        path: Where.
        tensors: Tensors of any shapes, on any device.
        text: What else belongs to it, by name.
        kind: What it is a checkpoint of, for example ``training``.
        identity: What must be equal for it to continue a run.
    """
    # Cloned: two names may share memory, which the format refuses.
    kept = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    with replacing(path) as temporary:
        save_file(kept, temporary, {**text, "ompq": f"{kind}/1", "identity": identity})


def read_checkpoint(
    path: str | Path, *, kind: str, identity: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return tensors and text of a checkpoint.

    Raises:
        CheckpointError: It is none, one of another kind, or of another run.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}") from error
    if text.get("ompq") != f"{kind}/1":
        raise CheckpointError(f"{path} is no checkpoint of a {kind}")
    if text["identity"] != identity:
        raise CheckpointError(
            f"{path} belongs to another run (other network, data or settings); "
            "remove it, or choose another place"
        )
    return tensors, text
