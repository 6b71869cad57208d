"""Which commands there are: ours, and those that extensions add.

Ours are the functions marked with :func:`command`, in :mod:`ompq.cli.commands`.
Extensions offer theirs as the kind ``command`` of :mod:`ompq.registry`: name → module,
help panel and a line for the help. The module has a function of that name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from inspect import cleandoc
from typing import Any, TypeVar

import typer

from ompq.cli.console import starting
from ompq.cli.options import spread
from ompq.registry import extensions

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: where it is, and its place and line in the help."""

    name: str
    panel: str
    summary: str
    module: str

    def load(self) -> Any:
        """Import the command's module and return the command."""
        function = getattr(import_module(self.module), self.name)
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        # Options after the file of ompq run belong to the command that the file names.
        settings = {"ignore_unknown_options": self.name == "run"}
        add = single.command(
            self.name, help=_unwrapped(function.__doc__), context_settings=settings
        )
        add(spread(function))
        return typer.main.get_command(single)


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph of a docstring; examples keep their lines."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(
        part if "\n  " in part else part.replace("\n", " ") for part in paragraphs
    )


_OWN: dict[str, Command] = {}


def calls(work: str) -> Callable[[_Function], Callable[..., Any]]:
    """Let a function that only declares arguments call another, ``module:function``.

    Its module is imported when it is called. It takes the same arguments, by name.
    """

    def add(declared: _Function) -> Callable[..., Any]:
        @wraps(declared)
        def call(**arguments: Any) -> Any:
            module, _, name = work.partition(":")
            with starting():
                function = getattr(import_module(module), name)
            return function(**arguments)

        return call

    return add


def command(panel: str, work: str) -> Callable[[_Function], Callable[..., Any]]:
    """Declare a command: its panel in the help, and the function that does its work."""

    def add(declared: _Function) -> Callable[..., Any]:
        name, text = declared.__name__, declared.__doc__ or ""
        summary = text.partition("\n")[0]
        module = declared.__module__
        _OWN[name] = Command(name=name, panel=panel, summary=summary, module=module)
        return calls(work)(declared)

    return add


class _Commands(Mapping[str, Command]):
    """All commands by name, in the order of the help, once ours are marked."""

    def __getitem__(self, name: str) -> Command:
        if name in _OWN:
            return _OWN[name]
        return Command(name=name, **extensions().get("command", {})[name])

    def __iter__(self) -> Iterator[str]:
        return iter({**_OWN, **extensions().get("command", {})})

    def __len__(self) -> int:
        return sum(1 for _ in self)


COMMANDS: Mapping[str, Command] = _Commands()
