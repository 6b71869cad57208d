"""The program ``ompq``: its commands, error messages and exit codes.

A command is one line in ``_GROUPS`` and one function in the module named there, which
takes groups of options and returns what to print. Modules are imported when their
command is used, so that ``ompq --help`` does not import PyTorch.
"""

import ctypes
import os
import sys
import tomllib
import traceback
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from ompq.errors import MissingExtraError, OmpqError
from ompq.files import USER_MODULE, library_version
from ompq.processes import distributed, told_by_main

_MAX_NAME = 200  # characters of a file name in an error


class Command(NamedTuple):
    """Where a command is defined, and its place and line in the help."""

    module: str
    panel: str
    summary: str

    def load(self, name: str) -> Any:
        """Import the command's module and return the command."""
        spread = import_module("ompq.cli.options").spread
        function = getattr(import_module(f"ompq.{self.module}"), name)
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        # Options after the file of ompq run belong to the command that the file names.
        settings = {"ignore_unknown_options": name == "run"}
        add = single.command(
            name, help=_unwrapped(function.__doc__), context_settings=settings
        )
        add(spread(function))
        return typer.main.get_command(single)


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph of a docstring; examples keep their lines."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(
        part if "\n  " in part else part.replace("\n", " ") for part in paragraphs
    )


# (Help panel, module) → its commands, in the order of the help.
_GROUPS = {
    ("Get started", "cli.demo"): {
        "demo": "Try everything on a small network that comes with ompq.",
    },
    ("Plan", "cli.decisions"): {
        "budget": "Show which budgets a network can meet.",
        "plan": "Choose a bit width for every layer within a budget.",
        "scores": "List the scores that estimate the damage of low bit widths.",
        "audit": "Measure how well each score chooses bits for a network.",
    },
    ("Plan", "cli.saved_plans"): {
        "replan": "Solve a saved plan for another budget, without the network.",
    },
    ("Quantize", "cli.runs"): {
        "quantize": "Plan, quantize, reconstruct, evaluate and save.",
        "train": "Plan, quantize, train on labelled images, evaluate and save.",
        "evaluate": "Measure a network's accuracy, with a confidence interval.",
    },
    ("Quantize", "cli"): {
        "run": "Run a command with the options in a TOML or YAML file.",
    },
    ("Quantize", "cli.artifacts"): {
        "export": "Export a quantized network to ONNX and verify the file.",
    },
    ("Quantize", "cli.saved_plans"): {
        "unpack": "Write the ONNX file inside a packed network, without PyTorch.",
    },
    ("Inspect", "cli.saved_plans"): {
        "explain": "Explain why a layer got its bits.",
        "pareto": "Show the trade-off between size and damage.",
        "compare": "Compare plans or results: size, damage, accuracy, bits.",
        "report": "Write a plan as one HTML page that works offline.",
    },
    ("Inspect", "cli.reproduction"): {
        "reproduce": "Reproduce a table or figure of the OMPQ paper.",
    },
    ("Inspect", "cli.artifacts"): {
        "inspect": "Show what takes space in a packed network or ONNX file.",
        "bench": "Time an exported network against the float one.",
    },
}
COMMANDS = {
    name: Command(module, panel, summary)
    for (panel, module), group in _GROUPS.items()
    for name, summary in group.items()
}


class _Lazy(TyperCommand):
    """A command whose module is imported only when the command is used."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Load the command and let it parse its arguments."""
        assert self.name is not None
        # PyTorch takes seconds to import; without a sign of life it would look stuck.
        with Console(stderr=True).status("starting", spinner="line"):
            command = COMMANDS[self.name].load(self.name)
        return command.make_context(*args, **extra)


class _Commands(TyperGroup):
    """All commands; any error ends the program with one line on stderr."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            self.add_command(
                _Lazy(name=name, help=entry.summary, rich_help_panel=entry.panel)
            )

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the commands in the order of the help."""
        return list(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; after Ctrl-C say so and exit with 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("stopped")
            raise typer.Exit(130) from None

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the program; errors become one line and an exit code."""
        typed = args[0] if args else settings.get("args")
        settings["standalone_mode"] = False
        try:
            code = super().main(*args, **settings)
        except Exception as error:
            if "--debug" in (sys.argv if typed is None else typed):
                traceback.print_exception(error)
            text, code = explained(error)
            if not told_by_main():
                process = os.environ.get("RANK", "0")  # set by the launcher
                where = "" if process == "0" else f"in process {process}: "
                _say(f"error: {where}{text}", style="red")
        sys.exit(code if isinstance(code, int) else 0)


def explained(error: Exception) -> tuple[str, int]:
    """Return an error's message for the user, and the exit code."""
    text = " ".join(str(error).split())
    if hasattr(error, "format_message"):  # an error of Typer: a wrong option
        return _usage(error), 2
    if isinstance(error, OSError):
        name, half = str(error.filename), _MAX_NAME // 2
        short = name if len(name) <= _MAX_NAME else f"{name[:half]}…{name[-half:]}"
        where = "" if error.filename is None else f"{short}: "
        return f"{where}{error.strerror or text or 'the system reports an error'}", 2
    if isinstance(error, OmpqError | ValueError):
        return text, 2
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU is out of memory; use fewer --samples or --device cpu", 2
    if place := _user_line(error):
        return f"{place} failed: {type(error).__name__}: {text}", 2
    return (
        f"unexpected {type(error).__name__}: {text} (this is a bug in ompq; please "
        "report it with the output of --debug)",
        1,
    )


def _user_line(error: Exception) -> str:
    """Return the file and line of a user's function that failed, or ""."""
    frames = [
        (frame.f_globals.get("__name__", ""), f"{frame.f_code.co_filename}:{line}")
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    ours = [one for one in frames if one[0].startswith(("ompq.", USER_MODULE))]
    return ours[-1][1] if ours and ours[-1][0].startswith(USER_MODULE) else ""


def _usage(error: Any) -> str:
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    command = "ompq" if context is None else context.command_path
    option_help = getattr(getattr(error, "param", None), "help", None)
    if message.startswith("missing") and option_help:
        message = f"{message}: {option_help.rstrip('.')}"
    end = "" if message.endswith("?") else "."
    return f"{message}{end} See {command} --help"


def _say(text: str, style: str = "") -> None:
    from ompq.cli.console import say

    say(Console(stderr=True, highlight=False), text, style)


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


def _version(value: bool) -> None:
    if value:
        Console().print(f"ompq {library_version()}", highlight=False)
        raise typer.Exit


@app.callback()
def ompq(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Show the version.",
            metavar="",
        ),
    ] = False,
    debug: Annotated[  # noqa: ARG001
        bool, typer.Option("--debug", help="Show tracebacks of errors.", metavar="")
    ] = False,
) -> None:
    """Choose a bit width for each layer of a network, then quantize the network.

    Examples:
      ompq demo
      ompq budget torchvision:resnet18
      ompq plan torchvision:resnet18 --data images/ --budget 4.0MiB -o plan.json
      ompq quantize torchvision:resnet18 --data images/ --budget 4.0MiB -o out/

    Each command has examples: ompq plan --help.
    Exit codes: 0 success, 1 a bug in ompq, 2 an error in the input, 130 Ctrl-C.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    keep_freed_memory()
    if ctx.invoked_subcommand != "train":  # Accelerate distributes training
        ctx.with_resource(distributed())


# Option after the file → the file's options that it makes void.
_WITHOUT = {"--no-reconstruct": ("iterations", "merge-blocks", "tune-epochs")}


def run(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="A TOML or YAML file.", show_default=False
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPTIONS",
            help="Options that override the file's: -o again/.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a command with the options in a TOML or YAML file.

    Examples:
      ompq run out/config.toml --overwrite
      ompq run config.yaml --budget 3.5MiB -o smaller/

    ompq quantize and ompq train write such a file, config.toml, next to their results.
    It holds the command and its options by name. Paths are relative to the current
    directory.
    """
    kind, given = _config(file)
    name = given.pop("command", None)
    if name not in COMMANDS or name == "run":
        example = {"TOML": 'command = "quantize"', "YAML": "command: quantize"}[kind]
        raise ValueError(
            f"{file} must name its command, for example {example}"
            + (f"; there is no {name}" if name else "")
        )
    for option in set(more or ()) & set(_WITHOUT):
        for key in _WITHOUT[option]:
            given.pop(key, None)
    command = COMMANDS[name].load(name)
    places = [one.name for one in command.params if one.param_type_name == "argument"]
    words = [str(given.pop(place)) for place in places if place in given]
    for key, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                words += [f"--{key}"] if one is True else [f"--{key}", str(one)]
    with command.make_context(f"ompq {name}", [*words, *(more or [])]) as context:
        command.invoke(context)


def _config(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the format of a configuration file (TOML or YAML), and its contents."""
    kind, read = "TOML", tomllib.loads
    if file.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise MissingExtraError("PyYAML", "yaml") from None
        kind, read = "YAML", yaml.safe_load
    text = file.read_bytes()
    try:
        given = read(text.decode())
    except Exception as error:  # PyYAML also raises errors of its converters
        raise ValueError(f"{file} is not {kind}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{file} must hold options by name, like command: quantize")
    return kind, given


# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _LARGEST = -1, -3, (1 << 31) - 1
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory, unless the user has tuned it.

    By default it returns every large block to the system, and the next layer requests
    it again. Clearing its pages each time took half of a forward pass of MobileNetV2 on
    a virtual machine. The price is a somewhat larger process.

    Returns:
        Whether the setting was changed.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _LARGEST)
    )
