"""What names stand for: scores, solvers, protocols and commands, also of extensions.

An extension is a table, kind → name → what the name stands for: the value itself, or
text ``package.module:attribute``, which is imported when the name is used. A package
offers its table under the entry point ``ompq.extensions``; a subpackage of ompq that
has a module ``registration`` offers that module's ``EXTENSIONS``. Tables are read when
a name is asked for that is not our own, so a table should import nothing slow.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from ompq.errors import ExtensionError, check_known

GROUP = "ompq.extensions"  # of entry points
_TABLE = "EXTENSIONS"  # in a subpackage's module ``registration``
_LOG = logging.getLogger(__name__)
_Value = TypeVar("_Value")
Extension = Mapping[str, Mapping[str, Any]]  # kind → name → value


class Names(Mapping[str, _Value], Generic[_Value]):
    """What the names of one kind stand for: our own first, then those of extensions.

    Attributes:
        kind: What is named, in the singular: ``score``.
        field: What a setting that takes such a name is called; usually the same.

    Example:
        >>> shades = Names("shade", {"red": 1})
        >>> shades["red"], "blue" in shades, list(shades)
        (1, False, ['red'])
    """

    def __init__(self, kind: str, own: Mapping[str, _Value], field: str = "") -> None:
        self.kind, self.own = kind, own
        self.field = field or kind.replace(" ", "_")

    def __getitem__(self, name: str) -> _Value:
        if name in self.own:
            return self.own[name]
        return cast(_Value, load_value(self._added()[name]))

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self._added()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.own, *self._added())))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Names({self.kind!r}, {', '.join(self)})"

    def find(self, name: str, more: str = "") -> _Value:
        """Return what a name stands for.

        Args:
            more: What may be given instead of a name, for the message.

        Raises:
            ValueError: The name is unknown.
        """
        if name not in self:
            check_known(self.field, name, self, more)
        return self[name]

    def _added(self) -> Mapping[str, Any]:
        return extensions().get(self.kind, {})


def load_value(value: Any) -> Any:
    """Return a value of an extension's table, imported if it is given as text.

    Raises:
        ExtensionError: The text names nothing that can be imported.
    """
    if not isinstance(value, str):
        return value
    module, _, attribute = value.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ExtensionError(
            f"an extension offers {value!r}, which cannot be imported: {error}. "
            "Update or uninstall the extension"
        ) from error


@cache
def extensions() -> Extension:
    """Return the tables of all extensions, merged; the first offer of a name wins."""
    merged: dict[str, dict[str, Any]] = {}
    for source, table in (*_subpackages(), *_installed_tables()):
        for kind, offered in table.items():
            known = merged.setdefault(kind, {})
            for name in known.keys() & offered.keys():
                _LOG.warning("%s offers the %s %s again: ignored", source, kind, name)
            merged[kind] = {**offered, **known}
    return merged


def _subpackages() -> Iterator[tuple[str, Extension]]:
    """Yield the tables of our own subpackages; a source tree needs no installation."""
    for path in sorted(Path(__file__).parent.glob("*/registration.py")):
        name = f"{__package__}.{path.parent.name}"
        yield name, getattr(import_module(f"{name}.{path.stem}"), _TABLE)


def _installed_tables() -> Iterable[tuple[str, Extension]]:
    """Yield the tables of installed packages; one that is broken is skipped."""
    for point in sorted(entry_points(group=GROUP)):
        try:
            table = point.load()
            if not isinstance(table, Mapping):
                raise TypeError(f"it is {type(table).__name__}, not a table")
        except Exception as error:  # another package's code may raise anything
            _LOG.warning("the extension %s is left out: %s", point.value, error)
        else:
            yield point.name, table
