"""Files: text, JSON and tensors, written completely or not at all.

torch is imported only when a tensor is read or written, so that commands which only
read JSON start quickly.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from unicodedata import category

from ompq.errors import FileError, OmpqError
from ompq.parallel import is_main, wait_for_all
from ompq.untrusted_json import convert_json, parse_json

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


# The files of a run.
PLAN, PACKED, ONNX = "plan.json", "network.ompq.safetensors", "network.onnx"
GGUF = "network.gguf"
REPORT, RESULT, CONFIG = "report.html", "result.json", "config.toml"
_METADATA = "ompq"  # the metadata entry of a safetensors file that holds our header
_DIGEST = "sha256"

# What safetensors may raise when it reads a file with flipped bits.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)


def library_version() -> str:
    """Return the installed version of ompq, or ``source`` if it is not installed."""
    for name in ("ompq", "ompq-runtime"):  # the latter on a device
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "source"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that is moved to ``path`` if the block succeeds.

    In a distributed run only the main process writes; the others wait for it.

    Raises:
        FileError: The file cannot be written. No partial file is left behind, and an
            existing file is untouched.
    """
    target, temporary = Path(path).absolute(), None
    if not is_main():
        with tempfile.TemporaryDirectory() as unused:
            yield Path(unused, target.name[-32:])
        wait_for_all()
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            target.lstat()  # a name that is too long fails now, not after the work
        suffix = target.suffix if len(target.suffix) < 20 else ""
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f"{UNFINISHED}{target.name[:32]}.", suffix=suffix
        )
        os.close(handle)
        temporary = Path(name)
        with _claimed(temporary):
            yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp creates files as 0600
        temporary.replace(target)
        wait_for_all()
    except Exception as error:
        why = _why_not_written(error, target)
        if why is None:
            raise
        raise FileError(f"{path} cannot be written: {why}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


UNFINISHED = ".unfinished."  # begins the name of what is not complete yet


@contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside a folder, first removing those of killed runs."""
    remove_unfinished(folder)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED) as name,
        _claimed(Path(name)),
    ):
        yield Path(name)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left in a folder, but nothing that is in use."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with _claimed(path) as free:
            if free and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif free:
                path.unlink(missing_ok=True)


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Lock a file or folder while the block runs; yield whether that was possible.

    The system releases the lock if the process is killed.
    """
    if sys.platform == "win32":  # Windows has no fcntl
        yield False
        return
    import fcntl

    with ExitStack() as stack:
        free = False
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free


LOCK = ".ompq.lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs; the lock ends with the process, even if killed.

    In a distributed run only the main process locks it.

    Raises:
        FileError: Another process is using the folder.
    """
    if not is_main() or sys.platform == "win32":  # Windows has no fcntl
        yield
        return
    import fcntl

    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            who = file.read(20).strip() or "unknown"
            raise FileError(
                f"another process ({who}) is using {folder}; wait for it, or use "
                "another folder"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _why_not_written(error: Exception, target: Path) -> str | None:
    """Return why a file cannot be written, or None if something else failed."""
    # safetensors raises its own errors, which quote the number of the OS error.
    quoted = re.search(r"\(os error (\d+)\)", str(error))
    number = int(quoted[1]) if quoted else getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full. Free some space, or use another path"
    if number is None or not (quoted or isinstance(error, OSError)):
        return None
    failed = Path(getattr(error, "filename", None) or target)
    ours = failed.parent == target.parent or target.is_relative_to(failed)
    return f"{os.strerror(number)}. Use another path" if ours else None


Check: TypeAlias = Callable[[Path], object]  # reads a file, or raises an error


def write_text(path: str | Path, text: str, check: Check | None = None) -> None:
    """Write a text file that appears only when it is complete.

    Args:
        check: Reads the file before it appears.

    Raises:
        FileError: It cannot be written, or not be read again.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        _read_back(temporary, path, check)


def _read_back(temporary: Path, path: str | Path, check: Check | None) -> None:
    try:
        if check is not None:
            check(temporary)
    except (OmpqError, ValueError) as error:
        why = str(error).replace(str(temporary), "the new file")
        raise FileError(
            f"{path} was not written, since it could not be read again: {why}"
        ) from error


def write_tensors(
    path: str | Path,
    header: Mapping[str, Any],
    tensors: "Mapping[str, Tensor]",
    check: Check | None = None,
) -> None:
    """Write a safetensors file with a header and a digest of header and tensors.

    As in :func:`write_text`, ``check`` reads it before it appears. The header's
    ``format`` is a name and a version: ``ompq-packed/1``. The same header and tensors
    give the same bytes.
    """
    from safetensors.torch import save_file

    stored, used = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory.
        stored[name] = tensor.clone() if memory in used else tensor
        used.add(memory)
    entries = {**header, _DIGEST: tensors_digest(header, stored)}
    with replacing(path) as temporary:
        save_file(stored, temporary, {_METADATA: _compact(entries)})
        _read_back(temporary, path, check)


def read_tensors(
    path: str | Path, *kinds: str
) -> "tuple[dict[str, Any], dict[str, Tensor]]":
    """Return the header and the tensors of a file that :func:`write_tensors` wrote.

    The header's ``format`` must be one of ``kinds``, which are listed newest first. As
    in :func:`read_json`, error messages are fragments; callers add the path.
    """
    return _read(path, kinds, "pt")


def read_arrays(
    path: str | Path, *kinds: str
) -> "tuple[dict[str, Any], dict[str, NDArray[Any]]]":
    """Like :func:`read_tensors`, but return NumPy arrays and do not import torch."""
    return _read(path, kinds, "np")


def _read(
    path: str | Path, kinds: Sequence[str], framework: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework=framework) as file:
            text = (file.metadata() or {}).get(_METADATA, "")
            header = _checked_header(text, kinds)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        found = header.pop(_DIGEST, None)
        damaged = found != tensors_digest(header, tensors)
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except (OSError, SafetensorError, *_DAMAGE) as error:
        if Path(path).is_dir():
            raise ValueError("it is a folder") from error
        raise ValueError(
            f"it is damaged, cut short, or not a safetensors file ({error})"
        ) from error
    if damaged:
        raise ValueError("it is damaged: its contents do not match its digest")
    return header, tensors


def _checked_header(text: str, kinds: Sequence[str]) -> dict[str, Any]:
    try:
        header = convert_json(parse_json(text), dict[str, Any], "header")
    except ValueError:
        header = {}
    found = str(header.get("format", ""))
    if found.partition("/")[0] != kinds[0].partition("/")[0]:
        raise ValueError(f"it is a safetensors file, but not of the kind {kinds[0]}")
    if found not in kinds:
        raise ValueError(
            f"its format is {found:.40}; ompq {library_version()} reads {kinds[0]}. "
            "Write it again, or install the version of ompq that wrote it"
        )
    return header


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def tensors_digest(header: Any, tensors: "Mapping[str, Tensor | NDArray[Any]]") -> str:
    """Return a digest of plain data and of contiguous tensors in host memory.

    NumPy arrays have the same digest as equal tensors.
    """
    import numpy as np

    digest = hashlib.sha256(_compact(header).encode())
    for name, tensor in sorted(tensors.items()):
        kind = str(tensor.dtype).removeprefix("torch.")
        described = [name, f"torch.{kind}", list(tensor.shape)]
        digest.update(_compact(described).encode())
        if not isinstance(tensor, np.ndarray):
            import torch

            tensor = tensor.reshape(-1).view(torch.uint8).numpy()
        digest.update(tensor.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


LONGEST_TEXT = 1000  # characters of a name in a file
# Unicode categories that control a terminal or are half a character.
_UNSHOWN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def shown(text: str) -> str:
    r"""Return text that files may hold and terminals show; the rest is escaped.

    Example:
        >>> shown("a\nb")
        'a\\nb'
    """
    if text.isprintable() and len(text) <= LONGEST_TEXT:
        return text
    escaped = "".join(
        one.encode("unicode_escape").decode() if category(one) in _UNSHOWN else one
        for one in text[:LONGEST_TEXT]
    )
    whole = len(text) <= LONGEST_TEXT and len(escaped) <= LONGEST_TEXT
    return escaped if whole else f"{escaped[: LONGEST_TEXT - 1]}…"
