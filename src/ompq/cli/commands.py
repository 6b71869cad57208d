"""The program ``ompq``: its commands, found by name, and how it ends.

A command is one line in ``_GROUPS`` and one function in the module named there, which
takes groups of options and returns what is shown. Modules are imported when their
command is used: ``ompq --help`` needs no PyTorch.
"""

import ctypes
import os
import sys
import traceback
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from ompq.errors import OmpqError
from ompq.files import library_version
from ompq.processes import distributed, told_by_main

_LONGEST = 200  # characters of a file's name in an error


class Command(NamedTuple):
    """A command: its module, its part of the help, and a line of help."""

    module: str
    panel: str
    summary: str

    def load(self, name: str) -> Any:
        """Import the command's module and return the command."""
        spread = import_module("ompq.cli.options").spread
        function = getattr(import_module(f"ompq.cli.{self.module}"), name)
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        # What follows the file of ompq run is for the command that the file names.
        settings = {"ignore_unknown_options": name == "run"}
        add = alone.command(
            name, help=_flowing(function.__doc__), context_settings=settings
        )
        add(spread(function))
        return typer.main.get_command(alone)


def _flowing(text: str) -> str:
    """Return a docstring whose prose fits any terminal; examples keep their lines."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(
        part if "\n  " in part else part.replace("\n", " ") for part in paragraphs
    )


# Panel of the help and module → its commands, in the order of the help.
_GROUPS = {
    ("Get started", "showcase"): {
        "demo": "Try everything on a small network that comes with ompq.",
    },
    ("Plan", "decisions"): {
        "budget": "Show which budgets a network can meet.",
        "plan": "Choose a bit width for every layer within a budget.",
        "scores": "List the scores that estimate the damage of low bit widths.",
        "audit": "Measure how well each score chooses bits for a network.",
    },
    ("Plan", "saved_plans"): {
        "replan": "Solve a saved plan for another budget, without the network.",
    },
    ("Quantize", "runs"): {
        "quantize": "Plan, quantize, reconstruct, evaluate and save.",
        "train": "Plan, quantize, train on labelled images, evaluate and save.",
        "evaluate": "Measure a network's accuracy, with a confidence interval.",
    },
    ("Quantize", "options"): {
        "run": "Run a command with the options in a TOML or YAML file.",
    },
    ("Quantize", "artifacts"): {
        "export": "Export a quantized network to ONNX and verify the file.",
    },
    ("Quantize", "saved_plans"): {
        "unpack": "Write the ONNX file inside a packed network, without PyTorch.",
    },
    ("Inspect", "saved_plans"): {
        "explain": "Explain why a layer got its bits.",
        "pareto": "Show the trade-off between size and damage.",
        "compare": "Compare plans or results: size, damage, accuracy, bits.",
        "report": "Write a plan as one HTML page that works offline.",
    },
    ("Inspect", "showcase"): {
        "reproduce": "Reproduce a table or figure of the OMPQ paper.",
    },
    ("Inspect", "artifacts"): {
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
                _Lazy(name=name, help=entry.summary, rich_help_panel=entry.panel)
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
            if not told_by_main():
                process = os.environ.get("RANK", "0")  # as a launcher numbers them
                where = "" if process == "0" else f"in process {process}: "
                _say(f"error: {where}{text}", style="red")
        sys.exit(code if isinstance(code, int) else 0)


def explained(error: Exception) -> tuple[str, int]:
    """Return what to tell the user about an error, and the exit code."""
    text = " ".join(str(error).split())
    if hasattr(error, "format_message"):  # Typer's: a wrong option
        return _usage(error), 2
    if isinstance(error, OSError):
        name, half = str(error.filename), _LONGEST // 2
        short = name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"
        where = "" if error.filename is None else f"{short}: "
        return f"{where}{error.strerror or text or 'the system reports an error'}", 2
    if isinstance(error, OmpqError | ValueError):
        return text, 2
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU is out of memory; use fewer --samples or --device cpu", 2
    return (
        f"unexpected {type(error).__name__}: {text} (this is a bug in ompq; please "
        "report it with the output of --debug)",
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
    Exit codes: 0 success, 1 a bug in ompq, 2 an error it explains, 130 Ctrl-C.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    keep_freed_memory()
    if ctx.invoked_subcommand != "train":  # which shares out its work by Accelerate
        ctx.with_resource(distributed())


# As malloc.h of the GNU C library numbers them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _LARGEST = -1, -3, (1 << 31) - 1
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the C library keep the memory that tensors free, where it can.

    By default it returns every large piece, and the next layer asks for it again: the
    system then clears its pages once more, which on a virtual machine takes longer
    than the layer (half of a forward pass of MobileNetV2). The price is a somewhat
    larger process. Returns whether it will: not if the user has settings of their own.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _LARGEST)
    )
