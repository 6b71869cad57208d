import inspect
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from cli_tools import run
from ompq.cli.commands import COMMANDS

DOCS = Path(__file__).parents[1] / "docs" / "cli.md"


def options_of(name: str) -> set[str]:
    command = COMMANDS[name].load()
    return {word for one in command.params for word in one.opts if word[:2] == "--"}


def test_help_names_every_command_and_imports_none_of_them():
    """Help and completion must be quick; PyTorch takes seconds to import."""
    code = (
        "import sys, ompq\n"
        "before = set(sys.modules)\n"
        "from ompq.cli.main import app\n"
        "try:\n    app(['--help'])\n"
        "finally:\n    print(*(set(sys.modules) - before), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0
    imported = result.stderr.split()
    assert "ompq.cli.main" in imported
    assert not {"torch", "numpy", "scipy", "ompq.cli.plan_commands"} & set(imported)
    for name, entry in COMMANDS.items():
        assert re.search(rf"{name} +{re.escape(entry.summary[:40])}", result.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_has_examples_before_its_options(name):
    result = run(name, "--help", env={"COLUMNS": "80"})
    assert result.exit_code == 0
    examples = result.stdout.index("Examples:")
    assert f"ompq {name} " in result.stdout[examples:]
    assert examples < result.stdout.index("Options")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert COMMANDS[name].summary.split(",")[0].rstrip(".")[:30] in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_breaks_its_lines_where_the_terminal_ends(name):
    shown = run(name, "--help", env={"COLUMNS": "80"}).stdout.partition("╭")[0]
    paragraphs = re.split(r"\n *\n", shown)
    for part in paragraphs:
        lines = [line.strip() for line in part.strip().splitlines()]
        if "Examples:" in lines:
            assert all(re.match(r"ompq |-", line) for line in lines[1:]), lines
        else:
            assert lines == textwrap.wrap(" ".join(lines), 78)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_of_options_that_exist(name):
    help_text = COMMANDS[name].load().help
    examples = help_text.partition("Examples:")[2].partition("\n\n")[0]
    for example in re.split(r"^  ompq ", examples, flags=re.MULTILINE)[1:]:
        command = example.split()[0]
        # Options after the file of ompq run are of the command that the file names.
        known = options_of("quantize" if command == "run" else command)
        assert set(re.findall(r"--[a-z-]+", example)) <= known, example


@pytest.mark.parametrize("name", COMMANDS)
def test_docs_name_each_command_and_all_its_options(name):
    text = DOCS.read_text()
    assert f"## ompq {name}\n" in text
    for word in options_of(name):
        assert re.search(rf"`{word}\b", text), word


def test_docs_name_no_option_that_does_not_exist():
    known = {word for name in COMMANDS for word in options_of(name)}
    known |= {"--help", "--version", "--install-completion", "--show-completion"}
    known |= {"--no-deps"}  # of pip
    assert set(re.findall(r"--[a-z-]+[a-z]", DOCS.read_text())) <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_declare_what_their_work_takes(name):
    declared = getattr(import_module(COMMANDS[name].module), name)
    work = inspect.getclosurevars(declared).nonlocals["work"]
    module, _, function = work.partition(":")
    taken = getattr(import_module(module), function)
    assert get_type_hints(declared) == get_type_hints(taken)
