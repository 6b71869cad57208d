"""Functions that users name as ``FILE.py:FUNCTION``, and what goes wrong in them."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ompq.errors import OmpqError, suggestion

USER_MODULE = "ompq_user_"  # names of modules that are a user's files begin so
_USER_FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)", re.DOTALL)


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
