"""Options as dataclasses, and those that need no network.

A command takes groups of options, each a dataclass whose fields are annotated as Typer
options; :func:`spread` turns them into the flat arguments that Typer wants.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import typer

from ompq.userfiles import suggestion


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function as Typer wants it: every option an argument of its own.

    An argument whose type is a dataclass stands for all fields of that class; they
    share the help panel that its ``PANEL`` names. Other arguments stay as they are.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(function, include_extras=True)
    for name, given in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _parameters(hints[name])
        else:
            parameters.append(_parameter(name, hints[name], given.default))

    @wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            own = {one.name: values.pop(one.name) for one in fields(group)}
            values[name] = group(**own)
        function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parameters(group: Any) -> list[inspect.Parameter]:
    """Return an argument for each field of a group of options."""
    found = []
    for name, hint in get_type_hints(group, include_extras=True).items():
        if name == "PANEL":
            continue
        kind, (info, *_) = hint.__origin__, hint.__metadata__
        default = group.__dataclass_fields__[name].default
        if isinstance(info, typer.models.OptionInfo):
            info = copy(info)
            info.rich_help_panel = getattr(group, "PANEL", None)
        default = inspect.Parameter.empty if default is MISSING else default
        found.append(_parameter(name, Annotated[kind, info], default))
    return found


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def option(metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    """Return an option; its text names its default, where it has one."""
    return typer.Option(
        *names, metavar=metavar, help=text, show_default=False, **settings
    )


def flag(text: str, *names: str) -> Any:
    """Return an option that takes no value."""
    return option(None, text, *names)


def argument(metavar: str, text: str) -> Any:
    """Return a positional argument."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def one_of(known: Iterable[str], text: str, **settings: Any) -> Any:
    """Return an option that takes one of several names, completed by the shell."""
    names = list(known)

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(
                f"{value!r} is not one of {', '.join(names)}{suggestion(value, names)}"
            )
        return value

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    settings |= {"callback": check, "autocompletion": complete}
    return option("NAME", f"{', '.join(names)}: {text}", **settings)


BudgetOption = Annotated[
    str,
    option(
        "BUDGET",
        "The limit: 4.0MiB, 4.2MB, 12.5%, 3.2bits, 75GBOPs, 8ms; join several with "
        "commas.",
    ),
]
PlanFile = Annotated[Path, argument("PLAN", "A plan file.")]
PlanOutput = Annotated[Path | None, option("FILE", "Save the plan.", "--output", "-o")]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How results are printed."""

    PANEL: ClassVar[str] = "Output"

    json: Annotated[bool, flag("Print JSON on stdout.", "--json")] = False
    quiet: Annotated[
        bool, flag("No progress; one line instead of tables.", "--quiet", "-q")
    ] = False
    debug: Annotated[
        bool, flag("Show the library's log and the traceback of an error.", "--debug")
    ] = False


def check_writable(path: Path | None) -> None:
    """Make sure, before the work, that a file can be written.

    Raises:
        ValueError: It cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; name a file in it")
    _check_access(path, path.absolute().parent, "--output")


def check_folder(path: Path | None, option: str = "--output") -> None:
    """Make sure, before the work, that files can be written into a folder.

    Raises:
        ValueError: They cannot.
    """
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {path} is a file; name a folder")
    _check_access(path, path.absolute(), option)


def _check_access(path: Path, folder: Path, option: str) -> None:
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{option} {path}: {there} is not a writable folder")
