"""``file.py:function``: what the user's own Python file gives."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ompq.errors import OmpqError, suggestion

_USER_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")


def is_user_function(name: str) -> bool:
    """Return whether the name has the form ``file.py:function``."""
    return _USER_FUNCTION.fullmatch(name) is not None


def call_user_function(name: str, error_type: type[OmpqError]) -> Any:
    """Run the user's file and return what ``file.py:function`` in it returns.

    The file can import its neighbours, as if Python had been started with it. An error
    of the given type says that file or function is missing or fails.
    """
    function = user_function(name, error_type)
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
    with _importable(path.parent):
        try:
            module = _execute(path)
        except (Exception, SystemExit) as error:
            raise error_type(f"{name} failed: {reason(error)}") from error
    function = getattr(module, short, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise error_type(f"{file} has no function {short}{suggestion(short, names)}")
    return function  # type: ignore[no-any-return]


def reason(error: BaseException) -> str:
    """Return an error's type and first line, for a message of one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:  # the user's file may have changed the list
            sys.path.remove(str(folder))


def _execute(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ompq_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module
