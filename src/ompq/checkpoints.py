"""What long work is resumed from: identities of content, and files that keep results.

Score tables, measurements, reconstructed blocks and epochs of training are all kept in
a :class:`Store`: a file that belongs to one *identity*, a digest of everything that its
content depends on. Work of another identity never reads it.
"""

import functools
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ompq.errors import CheckpointError
from ompq.files import read_tensors, write_tensors, write_text
from ompq.parallel import process_count, share_out
from ompq.untrusted_json import json_object, read_json

if TYPE_CHECKING:
    from torch import Tensor

_Result = TypeVar("_Result")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_INSTALLED = ("site-packages", "dist-packages")  # folders of installed modules


def identity(*parts: Any) -> str:
    """Return a digest of content: values, tensors, networks, functions.

    A function is identified by its code, its defaults, and the variables that it reads,
    an object by its class and its attributes. Functions and classes of installed
    packages are identified by their names.

    Raises:
        CheckpointError: Something has no content to be identified by, such as an open
            file.

    Example:
        >>> identity(lambda x: x + 1) == identity(lambda x: x + 2)
        False
    """
    content = _Content()
    content.add(parts)
    return content.digest.hexdigest()


class _Content:
    """Feeds a digest with values, each marked by its kind."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        # Objects may refer to themselves; kept here, none is freed meanwhile.
        self.seen: dict[int, tuple[int, Any]] = {}

    def mark(self, *texts: object) -> None:
        self.digest.update(repr(texts).encode("utf-8", "surrogatepass"))

    def add(self, value: Any) -> None:
        """Add a value of any kind."""
        if isinstance(value, _PLAIN) and not isinstance(value, Enum):
            self.mark(type(value).__name__, value)
        elif isinstance(value, Mapping):
            self.mark("mapping", len(value))
            for pair in value.items():
                self.several(pair)
        elif isinstance(value, Sequence):
            self.mark("sequence", len(value))
            self.several(value)
        elif isinstance(value, Set):
            self.mark("set", *sorted(map(identity, value)))
        elif self.is_new(value):
            self.add_object(value)

    def several(self, values: Sequence[Any]) -> None:
        for value in values:
            self.add(value)

    def is_new(self, value: Any) -> bool:
        """Number an object; return whether it was not added before."""
        new = id(value) not in self.seen
        self.seen.setdefault(id(value), (len(self.seen), value))
        self.mark("object", self.seen[id(value)][0])
        return new

    def add_object(self, value: Any) -> None:
        if isinstance(value, Path | Enum):
            self.mark(type(value).__qualname__, str(value))
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            self.add_array(value)
        elif isinstance(value, CodeType):
            self.add_code(value)
        elif isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type):
            self.add_definition(value)
        elif isinstance(value, functools.partial):
            self.several(["partial", value.func, value.args, value.keywords])
        elif type(value).__module__ == "torch":  # a device, a type of numbers, ...
            self.mark(type(value).__name__, repr(value))
        else:
            self.several([type(value), self.attributes(value)])

    def add_array(self, value: Any) -> None:
        kind = str(value.dtype).removeprefix("torch.")
        self.mark("array", kind, tuple(value.shape))
        if not hasattr(value, "detach"):
            self.digest.update(value.tobytes())
            return
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        self.digest.update(flat.view(torch.uint8).numpy().data)

    def add_definition(self, value: Any) -> None:
        """Add a function or a class."""
        self.mark(value.__qualname__)
        if isinstance(value, MethodType):
            self.several([value.__self__, value.__func__])
        elif isinstance(value, BuiltinFunctionType) or _is_installed(value.__module__):
            self.mark(value.__module__)
        elif isinstance(value, type):
            self.several(value.__bases__)
            self.add(dict(_members(value)))
        else:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            self.several([value.__code__, value.__defaults__, value.__kwdefaults__])
            self.several(cells)
            for name in sorted({*_names(value.__code__)} & {*value.__globals__}):
                self.add(value.__globals__[name])

    def add_code(self, code: CodeType) -> None:
        self.mark(code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        self.several(code.co_consts)

    def attributes(self, value: Any) -> Mapping[str, Any]:
        if isinstance(value, ModuleType | logging.Logger):
            name = value.__name__ if isinstance(value, ModuleType) else value.name
            return {"name": name}
        if is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in fields(value)}
        if not hasattr(value, "__dict__") or type(value).__module__ == "_io":
            raise CheckpointError(
                f"an object of type {type(value).__name__} cannot be identified, so "
                "what depends on it cannot be resumed; leave it out of the function "
                "or the object that refers to it, or keep no checkpoint"
            )
        own: Mapping[str, Any] = vars(value)
        return own


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the functions inside it read."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the functions and the plain data that a class defines."""
    for name, value in vars(kind).items():
        for inner in ("__func__", "fget", "func"):  # of methods and properties
            value = getattr(value, inner, value)
        function = isinstance(value, FunctionType)
        hidden = name.startswith(("__", "_abc")) or hasattr(type(value), "__get__")
        if function or not hidden:
            yield name, value


def _is_installed(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names or root == __name__.partition(".")[0]:
        return root != "__main__"
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return any(folder in Path(file).parts for folder in _INSTALLED)


class Kept(NamedTuple):
    """What a file keeps."""

    data: Any  # plain data
    tensors: "Mapping[str, Tensor]"


@dataclass(frozen=True)
class Store:
    """A file for work of one kind and identity; without a path nothing is kept."""

    path: Path | None
    kind: str  # ``training``, ``search``, ...
    identity: str  # see :func:`identity`

    @classmethod
    def of(cls, path: str | Path | None, kind: str, *parts: Any) -> "Store":
        """Return the store for work that depends on these parts and nothing else."""
        if path is None:
            return cls(None, kind, "")
        return cls(Path(path), kind, identity(*parts))

    @property
    def _header(self) -> dict[str, str]:
        kind = self.kind.replace(" ", "-")
        return {"format": f"ompq-{kind}/3", "identity": self.identity}

    def read(self) -> Kept | None:
        """Return what the file keeps; None if there is no file.

        Raises:
            CheckpointError: The file is damaged, or belongs to other work.
        """
        if self.path is None or not self.path.exists():
            return None
        own = self._header
        try:
            header, tensors = _read(self.path, own["format"])
            if not {"identity", "kept"} <= {*header}:
                raise ValueError("it is incomplete")
        except ValueError as error:
            raise CheckpointError(
                f"{self.path} cannot be resumed: {error}. Remove it to start over"
            ) from error
        if header["identity"] != self.identity:
            raise CheckpointError(
                f"{self.path} belongs to another {self.kind} (another network, other "
                "data or other settings); remove it, or use another path"
            )
        return Kept(header["kept"], tensors)

    def write(self, data: Any, tensors: "Mapping[str, Tensor] | None" = None) -> None:
        """Replace what the file keeps: JSON, or a safetensors file with tensors."""
        if self.path is None:
            return
        header = {**self._header, "kept": data}
        if tensors is None:
            text = json.dumps(header, indent=1, default=asdict)
            write_text(self.path, text + "\n")
        else:
            write_tensors(self.path, header, tensors)


def _read(path: Path, kind: str) -> "tuple[dict[str, Any], Mapping[str, Tensor]]":
    """Return the header and the tensors of a file; a ValueError says what is wrong."""
    try:
        with path.open("rb") as file:
            binary = b"\0" in file.read(8)  # the length of a safetensors header
    except IsADirectoryError as error:
        raise ValueError("it is a folder") from error
    if binary:
        return read_tensors(path, kind)
    header = json_object(read_json(path), "it")
    if header.get("format") != kind:
        raise ValueError(f"its format is not {kind}")
    return header, {}


class Measurements(Generic[_Result]):
    """The measurements of a run so far, by name, in a store."""

    def __init__(self, store: Store, read: Callable[[Any], _Result]) -> None:
        """Read the store.

        Args:
            read: Converts plain data to a result, or raises a ValueError.

        Raises:
            CheckpointError: The file is damaged, or belongs to another run.
        """
        self._store, self._results = store, dict[str, _Result]()
        if (kept := store.read()) is None:
            return
        try:
            entries = json_object(kept.data, "its content")
            self._results = {name: read(entry) for name, entry in entries.items()}
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{store.path} cannot be resumed: {error}. Remove it to start over"
            ) from error

    def get(self, name: str, measure: Callable[[], _Result]) -> _Result:
        """Return the result of this name; measure and keep it if there is none yet."""
        if name not in self._results:
            self._keep({name: measure()})
        return self._results[name]

    def get_all(
        self, names: Sequence[str], measure: Callable[[str], _Result]
    ) -> Iterator[_Result]:
        """Yield the results of these names; processes share what must be measured."""
        count = process_count()
        for start in range(0, len(names), count):
            part = names[start : start + count]
            new = [name for name in part if name not in self._results]
            if new:
                self._keep(dict(zip(new, share_out(new, measure), strict=True)))
            yield from (self._results[name] for name in part)

    def _keep(self, results: Mapping[str, _Result]) -> None:
        self._results.update(results)
        self._store.write(self._results)
