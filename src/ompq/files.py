"""Files that are either whole or not there: text, JSON, checkpoints."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ompq.errors import CheckpointError

if TYPE_CHECKING:  # commands that only read JSON need not wait for torch
    from torch import Tensor


def library_version() -> str:
    """Return the installed version, or ``source`` where nothing was installed."""
    try:
        return metadata.version("ompq")
    except metadata.PackageNotFoundError:
        return "source"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that is moved to ``path`` if the block succeeds."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=target.suffix
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp's 0600 is for secrets
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that appears only when it is complete."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: It cannot be read; says why in words that may follow a colon.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except IsADirectoryError as error:
        raise ValueError("it is a folder") from error
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is no text") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is no JSON ({error.msg} at {where})") from error


def write_checkpoint(
    path: str | Path,
    tensors: "Mapping[str, Tensor]",
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
    from safetensors.torch import save_file

    # Cloned: two names may share memory, which the format refuses.
    kept = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    about = {**text, "ompq": f"{kind}/1", "identity": identity}
    with replacing(path) as temporary:
        # One entry: the format writes several in a random order, and a run should
        # write the same bytes every time.
        save_file(kept, temporary, {"about": json.dumps(about, sort_keys=True)})


def read_checkpoint(
    path: str | Path, *, kind: str, identity: str
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return tensors and text of a checkpoint.

    Raises:
        CheckpointError: It is none, one of another kind, or of another run.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = json.loads((file.metadata() or {}).get("about", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no checkpoint: {error}") from error
    if text.get("ompq") != f"{kind}/1":
        raise CheckpointError(f"{path} is no checkpoint of a {kind}")
    if text["identity"] != identity:
        raise CheckpointError(
            f"{path} belongs to another run (other network, data or settings); "
            "remove it, or choose another place"
        )
    return tensors, text
