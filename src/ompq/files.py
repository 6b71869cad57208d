"""Files: text, JSON, tensors, checkpoints, and functions in the user's Python files.

A file is written completely or not at all. torch is imported only when a tensor is
read or written, so that commands which only read JSON start quickly.
"""

import errno
import hashlib
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin

from ompq.errors import CheckpointError, FileError, OmpqError, shortened, suggestion
from ompq.processes import is_main, wait_for_all

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

# The files of a run.
PLAN, PACKED, ONNX = "plan.json", "network.ompq.safetensors", "network.onnx"
REPORT, RESULT, CONFIG = "report.html", "result.json", "config.toml"
_METADATA = "ompq"  # the metadata entry of a safetensors file that holds our header
_DIGEST = "sha256"
_MAX_DIGITS = 19  # a signed 64-bit integer has no more
_Record = TypeVar("_Record")  # a dataclass
# What safetensors may raise when it reads a file with flipped bits.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)


def library_version() -> str:
    """Return the installed version of ompq, or ``source`` if it is not installed."""
    try:
        return metadata.version("ompq")
    except metadata.PackageNotFoundError:
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
            dir=target.parent, prefix=f".{target.name[:32]}.", suffix=suffix
        )
        os.close(handle)
        temporary = Path(name)
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


LOCK = ".ompq.lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs; the lock is released even if we are killed.

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


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that appears only when it is complete."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read a JSON file; the message of a ValueError is meant to follow a colon."""
    try:
        return parse_json(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except IsADirectoryError as error:
        raise ValueError("it is a folder") from error
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def parse_json(text: str) -> Any:
    """Parse JSON whose numbers are finite and fit 64 bits; see :func:`read_json`."""
    try:
        data = json.loads(
            text, parse_int=_integer, parse_float=_number, parse_constant=_number
        )
        if "\\ud" in text.lower():  # a lone surrogate cannot be encoded
            json.dumps(data, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not JSON ({error.msg} at {where})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds text that is not Unicode") from error
    return data


def _integer(digits: str) -> int:
    count = len(digits.lstrip("-"))
    if count > _MAX_DIGITS:
        raise ValueError(
            f"it holds an integer of {count} digits (limit: {_MAX_DIGITS})"
        )
    return int(digits)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds the number {text:.20}, which is not finite")
    return value


_LARGEST = 2**63 - 1  # the largest count a file may hold


def json_object(value: Any, what: str) -> dict[str, Any]:
    """Return a JSON object; like its siblings, raise a ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, not {_brief(value)}")
    return value


def json_list(value: Any, what: str, most: int = 2**20) -> list[Any]:
    """Return a JSON list of at most ``most`` entries."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(
            f"{what} must be a list of at most {most:,} entries, not {_brief(value)}"
        )
    return value


def json_text(value: Any, what: str) -> str:
    """Return a JSON string."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be text, not {_brief(value)}")
    return value


def json_whole(value: Any, what: str, low: int = 0, high: int = _LARGEST) -> int:
    """Return a whole number within limits."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{what} must be a whole number from {low} to {high}, not {_brief(value)}"
        )
    return value


def json_number(value: Any, what: str) -> float:
    """Return a finite number."""
    if type(value) not in (int, float) or not -1e300 <= value <= 1e300:
        raise ValueError(f"{what} must be a finite number, not {_brief(value)}")
    return float(value)


def json_table(value: Any, what: str, shape: tuple[int, ...]) -> list[Any]:
    """Return nested lists of finite numbers, of a given shape."""
    rows = json_list(value, what)
    if len(rows) != shape[0]:
        raise ValueError(f"{what} must have {shape[0]} entries, not {len(rows)}")
    if len(shape) == 1:
        return [json_number(entry, what) for entry in rows]
    return [json_table(row, what, shape[1:]) for row in rows]


def _brief(value: Any) -> str:
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}..."


def json_flag(value: Any, what: str) -> bool:
    """Return a JSON boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, not {_brief(value)}")
    return value


def json_record(kind: type[_Record], value: Any) -> _Record:
    """Return a dataclass built from a JSON object after checking keys and types.

    Fields may be ``str``, ``int`` (at least -1), ``float``, ``bool``, other such
    dataclasses, or tuples of any length of one of these.
    """
    name = kind.__name__
    given = json_object(value, name)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    missing = [n for n, f in known.items() if f.default is MISSING and n not in given]
    unknown = [key for key in given if key not in known]
    if missing or unknown:
        what, names = ("lacks", missing) if missing else ("has no field", unknown)
        raise ValueError(f"{name} {what} {shortened(names):.200}")
    return kind(**{n: _checked(one, n, known[n].type) for n, one in given.items()})


def _checked(value: Any, what: str, kind: Any) -> Any:
    if is_dataclass(kind):
        return json_record(cast(type, kind), value)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return tuple(_checked(one, what, inner) for one in json_list(value, what))
    if kind is int:
        return json_whole(value, what, -1)
    return {str: json_text, float: json_number, bool: json_flag}[kind](value, what)


def write_tensors(
    path: str | Path, header: Mapping[str, Any], tensors: "Mapping[str, Tensor]"
) -> None:
    """Write a safetensors file with a header and a digest of header and tensors.

    The header's ``format`` is a name and a version: ``ompq-packed/1``. The same header
    and tensors give the same bytes.
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


def read_tensors(
    path: str | Path, *kinds: str
) -> "tuple[dict[str, Any], dict[str, Tensor]]":
    """Return the header and the tensors of a file that :func:`write_tensors` wrote.

    The header's ``format`` must be one of ``kinds``, which are listed newest first. As
    in :func:`read_json`, the message of a ValueError is meant to follow a colon.
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
        header = parse_json(text)
    except ValueError:
        header = None
    found = str(header.get("format")) if isinstance(header, dict) else ""
    if found.partition("/")[0] != kinds[0].partition("/")[0]:
        raise ValueError(f"it is a safetensors file, but not of the kind {kinds[0]}")
    if found not in kinds:
        raise ValueError(
            f"its format is {found:.40}; this version of ompq reads {kinds[0]}"
        )
    assert isinstance(header, dict)
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


def run_identity(settings: Any, tensors: "Iterable[Tensor]") -> str:
    """Return a digest of everything that must match for a run to be resumed."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_checkpoint(
    path: str | Path,
    tensors: "Mapping[str, Tensor]",
    text: Mapping[str, str],
    *,
    kind: str,
    identity: str,
) -> None:
    """Write a checkpoint that only runs of the same identity can resume."""
    header = {"format": f"ompq-{kind}/2", "identity": identity, "text": dict(text)}
    write_tensors(path, header, tensors)


def read_checkpoint(
    path: str | Path, *, kind: str, identity: str
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the tensors and the text of a checkpoint."""
    try:
        header, tensors = read_tensors(path, f"ompq-{kind}/2")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of {kind}: {error}. Remove it to start over"
        ) from error
    if header["identity"] != identity:
        raise CheckpointError(
            f"{path} belongs to another run (another network, data or settings); "
            "remove it, or use another path"
        )
    return tensors, header["text"]


USER_MODULE = "ompq_user_"  # names of modules that are a user's files begin so
_USER_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")


def is_user_function(name: str) -> bool:
    """Return whether a name has the form ``file.py:function``."""
    return _USER_FUNCTION.fullmatch(name) is not None


def call_user_function(name: str, error_type: type[OmpqError]) -> Any:
    """Run the user's file, call ``file.py:function`` and return its result.

    An error of the given type is raised if the file or function is missing or fails.
    """
    function = user_function(name, error_type)
    if not isinstance(function, type) and hasattr(function, "forward"):
        kind, short = type(function).__name__, name.rpartition(":")[2]
        raise error_type(
            f"{name} is a {kind}, not a function; name a function that returns {short}"
        )
    with _importable(Path(name.rpartition(":")[0]).resolve().parent):
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise error_type(f"{name} failed: {reason(error)}") from error


def user_function(name: str, error_type: type[OmpqError]) -> Callable[..., Any]:
    """Run the user's file and return the function that ``file.py:function`` names."""
    file, _, short = name.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise error_type(f"{name}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"{USER_MODULE}{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    with _importable(path.parent):
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise error_type(f"{name} failed: {reason(error)}") from error
    function = getattr(module, short, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise error_type(f"{file} has no function {short}{suggestion(short, names)}")
    return function  # type: ignore[no-any-return]


def reason(error: BaseException) -> str:
    """Return an error's type and first line, shortened to 120 characters."""
    first = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a file import the modules next to it, as when it is run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:  # the user's code may have changed sys.path
            sys.path.remove(str(folder))
