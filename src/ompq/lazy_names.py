"""Names of a package that are imported when they are first used.

The package lists them once, as imports for type checkers under ``TYPE_CHECKING``.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_names(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    A submodule that is listed (``from ompq import scores as scores``) is imported too.
    """
    homes = _listed(package)
    public = [name for name in homes if not name.startswith("_")]
    names = sorted(public, key=lambda name: (not name.isupper(), name))

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            return _import(f"{package}.{name}")
        value = getattr(_import(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: [*names], names


def _import(module: str) -> Any:
    """Import a module of ours, which a device may not have."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise ImportError(
                f"{module} is not in ompq-runtime, the part of ompq for devices, which "
                "is installed here. Run: pip install ompq"
            ) from error
        raise


def _listed(package: str) -> dict[str, str]:
    """Return the module of each name in the package's list."""
    spec = find_spec(package)
    assert spec is not None and spec.loader is not None
    source = spec.loader.get_source(package)  # type: ignore[attr-defined]
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    return {
        alias.name: node.module
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
