"""How options are declared, and how what was typed becomes a configuration.

A command takes groups of options. Each is a dataclass whose fields are declared as
Typer options; :func:`spread` turns them into the flat arguments that Typer expects. An
option for a field of a configuration is declared with :func:`config_option`, which
takes help, limits and default from the field; :func:`apply_options` applies what was
given.

Names have hyphens on the command line and underscores in Python; :func:`kebab` is the
only place that knows.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import wraps
from math import inf
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from ompq.cli.console import View, opened, render
from ompq.configuration_checks import (
    Config,
    Setting,
    SettingError,
    field_types,
    is_union,
    settings,
)
from ompq.errors import CheckpointError, suggestion
from ompq.files import PLAN

REQUIRED = MISSING  # the default of an option that must be given


def argument(metavar: str, text: str, **more: Any) -> Any:
    """Return a positional argument."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, **more)


def spread(function: Callable[..., View | None]) -> Callable[..., None]:
    """Return the function in the form Typer expects, with one argument per option.

    An argument whose type is a dataclass is replaced by the fields of that class; they
    share the help panel named by its ``PANEL``. A function that returns a view also
    gets the output options, which set up its ``console``, if it takes one, and decide
    how the view is printed. Other arguments are left as they are.
    """
    hints = get_type_hints(function, include_extras=True)
    shows, takes_console = hints.pop("return") is not NoneType, "console" in hints
    hints.pop("console", None)
    groups: dict[str, Any] = {k: v for k, v in hints.items() if is_dataclass(v)}
    defaults = inspect.signature(function).parameters
    parameters: list[inspect.Parameter] = []
    for name, hint in hints.items():
        if name in groups:
            parameters += _parameters(hint)
        else:
            parameters.append(_parameter(name, hint, defaults[name].default))
    parameters += _parameters(OutputOptions) if shows else []

    @wraps(function)
    def run(**values: Any) -> None:
        _TYPED.set({"command": function.__name__, **_typed_values(parameters, values)})
        for name, group in groups.items():
            values[name] = _taken(group, values)
        if not shows:
            function(**values)
            return
        with opened(**vars(_taken(OutputOptions, values))) as console:
            view = function(**values, **({"console": console} if takes_console else {}))
            if view is not None:
                render(view, console)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _taken(group: Any, values: dict[str, Any]) -> Any:
    """Remove the values of a group's fields from all values, and build the group."""
    return group(**{one.name: values.pop(one.name) for one in fields(group)})


# The options given to the running command, by name.
_TYPED: ContextVar[dict[str, Any]] = ContextVar("typed")
# Options of one invocation, which do not belong in a file that repeats the run.
_TRANSIENT = {
    *("json", "quiet", "debug", "resume", "overwrite"),
    *("cache", "no_cache"),
}


def _typed_values(
    parameters: Sequence[inspect.Parameter], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that differ from their defaults, by option name."""
    typed = {}
    for one in parameters:
        info, value = one.annotation.__metadata__[0], values[one.name]
        if value is None or value == one.default or one.name in _TRANSIENT:
            continue
        # Until Typer processes the annotation, it stores the first name as a default.
        declared = [info.default, *(info.param_decls or ())]
        names = [n for n in declared if isinstance(n, str) and n.startswith("--")]
        key = (names or [kebab(one.name)])[0].removeprefix("--")
        typed[key] = value
    return typed


def typed_toml() -> str:
    """Return the options of the running command as TOML, for ``ompq run``."""
    rows = ["# ompq run config.toml repeats this run; options after it override it."]
    for key, value in _TYPED.get({}).items():
        plain = value if isinstance(value, bool | int | float | list) else str(value)
        rows.append(f"{key} = {json.dumps(plain, ensure_ascii=False)}")
    return "\n".join(rows) + "\n"


def _parameters(group: Any) -> list[inspect.Parameter]:
    """Return an argument for each field of a group of options."""
    hints = get_type_hints(group, include_extras=True)
    parameters = [_parameter(one.name, hints[one.name], one) for one in fields(group)]
    for one in parameters:
        info = one.annotation.__metadata__[0]
        if isinstance(info, typer.models.OptionInfo):
            info.rich_help_panel = getattr(group, "PANEL", None)
    return parameters


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    if isinstance(default, Field):
        info, default = copy(default.metadata.get("typer")), default.default
        if info is not None:
            if annotation is bool and info.default is ...:
                # The first name. Without it, Typer would add --no-NAME.
                info.default = f"--{kebab(name)}"
            annotation = Annotated[annotation, info]
    default = inspect.Parameter.empty if default is REQUIRED else default
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def option(
    metavar: str, text: str, *names: str, default: Any = None, **more: Any
) -> Any:
    """Return an option, for a dataclass field or as the default of an argument.

    The help text mentions the default if it is worth mentioning.
    """
    return _field(default, text, *names, metavar=metavar, **more)


def flag(text: str, *names: str) -> Any:
    """Return an option that takes no value, off by default; named by its field."""
    return _field(False, text, *names, metavar="")


def _field(default: Any, text: str, *names: str, **more: Any) -> Any:
    info = typer.Option(*names, help=text, show_default=False, **more)
    return field(default=default, metadata={"typer": info})


def number(
    text: str, *, default: Any = None, shown: Any = None, least: int | None = 1
) -> Any:
    """Return an option for a number; its help ends in the default, or in ``shown``."""
    shown = default if shown is None else shown
    text = text if shown is None else f"{text} Default: {shown}."
    return option("NUMBER", text, default=default, min=least)


def output_path(text: str, metavar: str = "FILE", default: Any = None) -> Any:
    """Return the option that says where to write: ``--output`` or ``-o``."""
    return option(metavar, text, "--output", "-o", default=default)


def kebab(name: str) -> str:
    """Return a name as it is written on the command line.

    Example:
        >>> kebab("weight_noise")
        'weight-noise'
    """
    return name.replace("_", "-")


def snake(name: str) -> str:
    """Return a name as it is written in Python, whichever way it was typed."""
    return name.replace("-", "_")


def one_of(
    known: Iterable[str],
    text: str,
    *,
    default: Any = None,
    others: Callable[[str], bool] | None = None,
) -> Any:
    """Return an option that takes one of several names, with shell completion.

    Names may be typed with hyphens or underscores. ``others`` says which further values
    are allowed, such as functions of the user.
    """
    names = {kebab(name): name for name in known}

    def check(value: str | None) -> str | None:
        if value is None or value in names.values() or (others and others(value)):
            return value
        if value in names:
            return names[value]
        similar = suggestion(value, names)
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}{similar}")

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    text = f"{', '.join(names)}: {text}"
    more = {"callback": check, "autocompletion": complete}
    return option("NAME", text, default=default, **more)


class _Home(NamedTuple):
    """The field of a configuration that an option sets."""

    config: type[Config]
    field: str
    parse: Callable[[str], Any] | None  # what turns the text typed into a value


def config_option(
    config: type[Config],
    name: str,
    *names: str,
    parse: Callable[[str], Any] | None = None,
    text: str = "",
) -> Any:
    """Return an option for a field of a configuration.

    Help, default, allowed names and limits are the field's. The option is None, or
    False for a flag, unless it is given.

    Args:
        names: Of the option, if not that of the field of the group of options.
        parse: Turns text into the value, where a number or a name is not enough.
        text: Replaces the help, where other words suit the command line better.
    """
    one, kind = settings(config)[name], field_types(config)[name]
    default = getattr(config, name, None)
    text = text or one.help
    if kind is bool:
        made = flag(text, *names)
    else:
        shown = f" Default: {_shown(default)}." if _shown(default) else ""
        known = choices_of(kind, one)
        if known and parse is None:
            made = one_of(known, _inner(text) + shown)
        else:
            least = _least(kind, one)
            metavar = one.metavar or ("NUMBER" if _is_number(kind) else "TEXT")
            made = option(metavar, text + shown, *names, min=least)
    metadata = {**made.metadata, "home": _Home(config, name, parse)}
    return field(default=made.default, metadata=metadata)


def _inner(text: str) -> str:
    """Return a sentence as it continues after a colon."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _shown(default: Any) -> str:
    """Return a default as the help shows it; "" if it says nothing."""
    if isinstance(default, tuple):
        return ", ".join(map(_shown, default))
    if isinstance(default, str):
        return kebab(default)
    return (
        ""
        if default is None or not isinstance(default, int | float)
        else f"{default:g}"
    )


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, without None."""
    kinds = get_args(kind) if is_union(kind) else (kind,)
    return tuple(one for one in kinds if one is not NoneType)


def choices_of(kind: Any, one: Setting) -> list[str]:
    """Return the names that a field may have; none if it is not a name."""
    if one.names is not None and str in _parts(kind):
        return list(one.names)
    return [value for part in _parts(kind) for value in literals(part)]


def literals(kind: Any) -> list[str]:
    """Return the words of a ``Literal``, or none."""
    values = get_args(kind) if get_origin(kind) is Literal else ()
    return [value for value in values if isinstance(value, str)]


def _is_number(kind: Any) -> bool:
    return bool({int, float} & {*_parts(kind)})


def _least(kind: Any, one: Setting) -> int | None:
    """Return the smallest whole number that Typer itself should take."""
    whole = _parts(kind) == (int,) and one.bounds is not None
    low = one.bounds.low if whole and one.bounds else -inf
    return None if low == -inf else int(low)


_Changed = TypeVar("_Changed", bound=Config)


def apply_options(config: _Changed, options: Any) -> _Changed:
    """Return a configuration with the options of a group that were given for it.

    Raises:
        ValueError: The configuration cannot have a value; the option is named.
    """
    changes, typed = given_for(type(config), options)
    with naming_options(typed):
        return replace(cast(Any, config), **changes)  # type: ignore[no-any-return]


def given_for(
    config: type[Config], options: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that options give for fields, and what was typed for them."""
    changes: dict[str, Any] = {}
    typed: dict[str, str] = {}
    for one in fields(options):
        home, value = one.metadata.get("home"), getattr(options, one.name)
        if home is None or home.config is not config:
            continue
        if value is None or value is False:  # not given; 0 is
            continue
        name = f"--{kebab(one.name)}"
        changes[home.field] = _convert(home, value, name)
        typed[home.field] = name if value is True else f"{name} {value}"
    return changes, typed


@contextmanager
def naming_options(typed: Mapping[str, str]) -> Iterator[None]:
    """Make errors of a configuration name what was typed for the field, if anything."""
    try:
        yield
    except SettingError as error:
        given = typed.get(error.field)
        if given is None:
            raise
        raise ValueError(f"{given} must be {error.requirement}") from error


def _convert(home: _Home, value: Any, name: str) -> Any:
    """Return the value of a field for what was typed."""
    if home.parse is not None:
        return home.parse(value)
    kind = field_types(home.config)[home.field]
    if kind is bool:
        return not getattr(home.config, home.field)
    if get_origin(kind) is tuple and isinstance(value, str):
        return number_list(name, value, get_args(kind)[0])
    return tuple(value) if isinstance(value, list) else value


def number_list(
    name: str, text: str, kind: type[int] | type[float] = int
) -> tuple[Any, ...]:
    """Return numbers joined by commas, in ascending order."""
    try:
        return tuple(sorted({kind(part) for part in text.split(",")}))
    except ValueError:
        what, example = ("bits", "2,4,8") if kind is int else ("rates", "1.5,2,4")
        raise ValueError(
            f"{name} {text} is not a list of {what}; write for example {name} {example}"
        ) from None


BUDGET = (
    "4.0MiB, 4.2MB or 12.5% of the packed file; 3.2bits, 75GBOPs, 8ms, "
    "activations:512KiB, total:2MiB, onnx:5MiB, graph:5MiB, gguf:80MiB; join several "
    "with commas"
)
BudgetOption = Annotated[
    str, typer.Option(metavar="BUDGET", help=f"The limit: {BUDGET}.")
]


def _plan_in_folder(path: Path) -> Path:
    return path / PLAN if (path / PLAN).exists() else path


_PLAN_HELP = "A plan file, or a folder of ompq quantize."
PlanFile = Annotated[Path, argument("PLAN", _PLAN_HELP, callback=_plan_in_folder)]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How results are printed."""

    PANEL: ClassVar[str] = "Output"

    json: bool = flag("Print JSON on stdout.")
    quiet: bool = flag("No progress, and one line instead of tables.", "--quiet", "-q")
    debug: bool = flag("Show the library's log, and tracebacks of errors.")


def check_writable(
    path: Path | None, option: str = "--output", *, folder: bool = False
) -> None:
    """Raise a ValueError early if a file, or files in a folder, cannot be written."""
    if path is None:
        return
    if path.exists() and path.is_dir() != folder:
        wrong = "file; give a folder" if folder else "folder; give a file in it"
        raise ValueError(f"{option} {path} is a {wrong}")
    parent = path.absolute() if folder else path.absolute().parent
    existing = next(one for one in (parent, *parent.parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"{option} {path}: {existing} is not a writable folder")


def check_threads(threads: int) -> None:
    """Raise a ValueError for more threads than cores, which run very slowly."""
    # Containers and job schedulers may grant fewer cores than the machine has.
    granted = getattr(os, "sched_getaffinity", None)
    cores = len(granted(0)) if granted else os.cpu_count() or 1
    if threads > cores:
        has = "1 CPU core is" if cores == 1 else f"{cores} CPU cores are"
        raise ValueError(
            f"--threads {threads}: only {has} available; give at most {cores}"
        )


def check_needed(needed: str, value: Any, **others: Any) -> None:
    """Raise a ValueError if options are given without the one that they depend on."""
    alone = [f"--{kebab(name)}" for name, given in others.items() if given]
    if value is None and alone:
        raise ValueError(f"{alone[0]} has no effect without {needed}; give both")


def check_resumed(
    folder: Path | None, left: Path | None, what: str, *, resume: bool
) -> None:
    """Raise an error unless ``--resume`` is given if and only if ``left`` exists."""
    if resume and left is None:
        if folder is None:
            raise ValueError(f"--resume needs the folder of the stopped {what}: -o DIR")
        raise CheckpointError(
            f"{folder} has no stopped {what} to resume; omit --resume"
        )
    if left is not None and not resume:
        over = "--overwrite" if what == "run" else f"remove {left}"
        raise CheckpointError(
            f"{left} is left from a stopped {what}; add --resume to continue it, or "
            f"{over} to start over"
        )
