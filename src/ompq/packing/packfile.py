"""The file of a packed network: safetensors, with nothing in it that could run.

Its tensors are those of :mod:`ompq.packing.contents`. Its metadata has one entry,
``ompq`` (several would be written in random order): JSON with the format, the
network's name, the bits of each unit, the plan's figures, versions and a digest of
everything.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ompq.errors import PackedFileError
from ompq.files import replacing

FORMAT = "ompq-packed/1"


def write_file(
    path: str | Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file that appears only when it is complete.

    The same header and tensors give the same bytes.

    Args:
        path: The file.
        header: Plain data.
        tensors: Contiguous, on the CPU.
    """
    entries = {"format": FORMAT, **header}
    entries["sha256"] = _digest(entries, tensors)
    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, {"ompq": _compact(entries)})


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a packed file.

    Raises:
        PackedFileError: It is missing, damaged, something else, or of a newer format.
    """
    header, tensors = _opened(path)
    digest = header.pop("sha256", None)
    if _digest(header, tensors) != digest:
        raise PackedFileError(
            f"{path} is damaged: its contents do not match its digest; copy it again"
        )
    del header["format"]
    return header, tensors


def _opened(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, (file.metadata() or {}).get("ompq", ""))
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise PackedFileError(f"there is no file {path}") from error
    except (OSError, SafetensorError) as error:
        if Path(path).is_dir():
            raise PackedFileError(
                f"{path} is a folder; give the packed network in it, for example "
                f"{Path(path) / 'network.ompq.safetensors'}"
            ) from error
        raise PackedFileError(
            f"{path} cannot be read ({error}): it is damaged, cut short, or no "
            "safetensors file"
        ) from error


def _header(path: str | Path, text: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    found = str(header.get("format")) if isinstance(header, dict) else ""
    kind, _, version = found.partition("/")
    if kind != FORMAT.partition("/")[0]:
        raise PackedFileError(
            f"{path} is a safetensors file but no packed network; "
            "give one that ompq.save wrote"
        )
    if found != FORMAT:
        raise PackedFileError(
            f"{path} has format version {version}; this ompq reads {FORMAT}: "
            "install a newer one"
        )
    assert isinstance(header, dict)
    return header


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of everything in the file that means something."""
    digest = hashlib.sha256()
    digest.update(_compact(header).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(_compact([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
