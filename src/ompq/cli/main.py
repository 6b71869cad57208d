"""The program ``ompq``: its help, error messages and exit codes.

Commands are declared in :mod:`ompq.cli.commands`. The modules that do the work are
imported when a command runs, so that help needs no PyTorch.
"""

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from ompq.cli.commands import COMMANDS
from ompq.cli.freed_memory import keep_freed_memory
from ompq.errors import OmpqError
from ompq.files import library_version
from ompq.parallel import distributed, hear_from_main
from ompq.user_functions import USER_MODULE

_MAX_NAME = 200  # characters of a file name in an error


class _Lazy(TyperCommand):
    """A command whose module is imported only when the command is used."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Load the command and let it parse its arguments."""
        assert self.name is not None
        return COMMANDS[self.name].load().make_context(*args, **extra)


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
            text, code = explain_error(error)
            if not hear_from_main():
                process = os.environ.get("RANK", "0")  # set by the launcher
                where = "" if process == "0" else f"in process {process}: "
                _say(f"error: {where}{text}", style="red")
        sys.exit(code if isinstance(code, int) else 0)


def explain_error(error: Exception) -> tuple[str, int]:
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
    if isinstance(error, ModuleNotFoundError) and _is_missing(error.name):
        package = _PACKAGES.get(str(error.name).partition(".")[0], error.name)
        return f"{package} is not installed. Run: pip install {package}", 2
    if place := _user_line(error):
        return f"{place} failed: {type(error).__name__}: {text}", 2
    return (
        f"unexpected {type(error).__name__}: {text} (this is a bug in ompq; please "
        "report it with the output of --debug)",
        1,
    )


# Modules whose package has another name.
_PACKAGES = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
}


def _is_missing(module: str | None) -> bool:
    """Return whether a module of another package could not be found."""
    return module is not None and not module.startswith(("ompq", USER_MODULE))


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
