"""What identifies content, so that only a run on the same content is resumed."""

import functools
import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ompq.errors import CheckpointError

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
    """Feeds values into a digest, each marked by its kind."""

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
        """Number an object; return whether it is new."""
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
