"""The commands, and the modules that they are in."""

from importlib import import_module
from inspect import cleandoc
from typing import Any, NamedTuple

import typer

from ompq.registry import extensions


class Command(NamedTuple):
    """Where a command is defined, and its place and line in the help."""

    module: str
    panel: str
    summary: str

    def load(self, name: str) -> Any:
        """Import the command's module and return the command."""
        spread = import_module("ompq.cli.options").spread
        function = getattr(import_module(self.module), name)
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
    },
    ("Plan", "cli.saved_plans"): {
        "replan": "Solve a saved plan for another budget, without the network.",
    },
    ("Quantize", "cli.runs"): {
        "quantize": "Plan, quantize, reconstruct, evaluate and save.",
        "train": "Plan, quantize, train on labelled images, evaluate and save.",
        "evaluate": "Measure a network's accuracy, with a confidence interval.",
    },
    ("Quantize", "cli.run_files"): {
        "run": "Run a command with the options in a TOML or YAML file.",
    },
    ("Quantize", "cli.artifacts"): {
        "export": "Export a quantized network for a runtime and verify the file.",
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
    ("Inspect", "cli.artifacts"): {
        "inspect": "Show what takes space in a packed network or ONNX file.",
        "bench": "Time an exported network against the float one.",
    },
}
COMMANDS = {
    name: Command(f"ompq.{module}", panel, summary)
    for (panel, module), group in _GROUPS.items()
    for name, summary in group.items()
}
COMMANDS |= {n: Command(**one) for n, one in extensions().get("command", {}).items()}
