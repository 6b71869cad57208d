"""The program ``ompq``: its commands, found by name, and how it ends.

A command is one line in :data:`COMMANDS` and one function in the module named there.
Modules are imported when their command is used: ``ompq --help`` needs no PyTorch.
"""

import sys
import traceback
from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from ompq.cli.arguments import spread
from ompq.cli.memory import keep_freed_memory
from ompq.errors import OmpqError
from ompq.files import library_version

_BEGIN, _DECIDE, _DO, _LOOK = "Begin", "Decide", "Do", "Look"


@dataclass(frozen=True)
class Command:
    """Where a command is: ``module:function``, a line of help, a part of the help."""

    function: str
    summary: str
    panel: str

    def load(self, name: str) -> Any:
        """Import the command's module and return the command."""
        module, _, function = self.function.partition(":")
        command = getattr(import_module(module), function)
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(name, help=_flowing(command.__doc__))(spread(command))
        return typer.main.get_command(alone)


def _flowing(text: str) -> str:
    """Return a docstring whose prose fits any terminal; examples keep their lines."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(
        part if "\n  " in part else part.replace("\n", " ") for part in paragraphs
    )


COMMANDS = {
    "demo": Command(
        "ompq.cli.demonstrating:demo",
        "Show the whole path at once, on a network that comes with ompq.",
        _BEGIN,
    ),
    "plan": Command(
        "ompq.cli.planning:plan",
        "Choose bits for every layer so that a budget is met.",
        _DECIDE,
    ),
    "budget": Command(
        "ompq.cli.planning:budget",
        "Tell which budgets a network can meet, before one is chosen.",
        _DECIDE,
    ),
    "replan": Command(
        "ompq.cli.planning:replan",
        "Solve a saved plan again for another budget; needs no network.",
        _DECIDE,
    ),
    "quantize": Command(
        "ompq.cli.quantizing:quantize",
        "Plan, quantize, reconstruct, evaluate and save, in one command.",
        _DO,
    ),
    "train": Command(
        "ompq.cli.training:train",
        "Plan, quantize, train on labelled images, evaluate and save.",
        _DO,
    ),
    "evaluate": Command(
        "ompq.cli.evaluating:evaluate",
        "Measure a network's accuracy, with an interval.",
        _DO,
    ),
    "export": Command(
        "ompq.cli.exporting:export",
        "Write a quantized network for other programs; ONNX is verified first.",
        _DO,
    ),
    "bench": Command(
        "ompq.cli.benchmarking:bench",
        "Measure an exported network beside the float one, on this CPU.",
        _LOOK,
    ),
    "explain": Command(
        "ompq.cli.looking:explain",
        "Tell why a layer of a plan got its bits.",
        _LOOK,
    ),
    "pareto": Command(
        "ompq.cli.looking:pareto",
        "Show what each size costs: damage against bytes, step by step.",
        _LOOK,
    ),
    "compare": Command(
        "ompq.cli.comparing:compare",
        "Show plans or results side by side: size, damage, accuracy, bits.",
        _LOOK,
    ),
    "report": Command(
        "ompq.cli.looking:report",
        "Write a plan as one HTML page that needs no network.",
        _LOOK,
    ),
    "inspect": Command(
        "ompq.cli.inspecting:inspect",
        "Tell what a network takes on disk, item by item.",
        _LOOK,
    ),
}


class _Later(TyperCommand):
    """A command whose module is imported only when the command is used."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Load the command and let it read its arguments."""
        assert self.name is not None
        # PyTorch takes seconds to import; a blank terminal would look stuck.
        with Console(stderr=True).status("starting", spinner="line"):
            command = COMMANDS[self.name].load(self.name)
        return command.make_context(*args, **extra)


class _Commands(TyperGroup):
    """All commands; ends with one line on stderr whatever goes wrong."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            self.add_command(
                _Later(name=name, help=entry.summary, rich_help_panel=entry.panel)
            )

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the commands in the order of the table."""
        return list(COMMANDS)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C says so and gives 130."""
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
            _say(text)
        sys.exit(code if isinstance(code, int) else 0)


def explained(error: Exception) -> tuple[str, int]:
    """Return what to tell the user about an error, and the exit code."""
    if hasattr(error, "format_message"):  # Typer's: an option that cannot be
        return f"error: {_usage(error)}", 2
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"error: {where}{error.strerror}", 2
    if isinstance(error, OmpqError | ValueError):
        return f"error: {_one_line(error)}", 2
    if type(error).__name__ == "OutOfMemoryError":
        return (
            "error: the GPU's memory does not suffice; "
            "take fewer --samples or --device cpu",
            2,
        )
    kind = type(error).__name__
    return (
        f"error: unexpected {kind}: {_one_line(error)} (--debug shows where; "
        "this is a bug of ompq: please report it)",
        1,
    )


def _usage(error: Any) -> str:
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    command = "ompq" if context is None else context.command_path
    wanted = getattr(getattr(error, "param", None), "help", None)
    if message.startswith("missing") and wanted:
        message = f"{message}: {wanted.rstrip('.')}"
    end = "" if message.endswith("?") else "."
    return f"{message}{end} See {command} --help"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _say(text: str) -> None:
    console = Console(stderr=True, highlight=False)
    style = "red" if text.startswith("error") else ""
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


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
            "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
    debug: Annotated[  # noqa: ARG001
        bool, typer.Option("--debug", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Decide how many bits each layer of a network needs; make the small network.

    Examples:
      ompq demo
      ompq budget torchvision:resnet18
      ompq plan torchvision:resnet18 --data images/ --budget 4.0MiB -o plan.json
      ompq quantize torchvision:resnet18 --data images/ --budget 4.0MiB -o out/

    Each command teaches by example: ompq plan --help.
    Exit codes: 0 done, 1 a bug, 2 an error that is explained, 130 Ctrl-C.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    keep_freed_memory()
