"""Options that are dataclasses."""

import os
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from cli_tools import run
from ompq.cli.console import Console, View
from ompq.cli.options import check_threads, option, spread


@dataclass(frozen=True, kw_only=True)
class Where:
    PANEL: ClassVar[str] = "Where to go"

    place: Annotated[str, typer.Argument(metavar="PLACE")]
    floor: int = option("FLOOR", "Which floor.", "--floor", "-f", default=3)


def test_a_dataclass_stands_for_its_options():
    seen = []

    @spread
    def go(where: Where, times: int = option("TIMES", "How often.", default=1)) -> None:
        """Go there."""
        seen.append((where, times))

    app = typer.Typer()
    app.command()(go)
    assert CliRunner().invoke(app, ["roof", "-f", "9"]).exit_code == 0
    assert CliRunner().invoke(app, ["roof", "--times", "2"]).exit_code == 0
    assert CliRunner().invoke(app, []).exit_code == 2
    assert seen == [
        (Where(place="roof", floor=9), 1),
        (Where(place="roof", floor=3), 2),
    ]
    assert go.__doc__ == "Go there."
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert "Where to go" in shown and "Which floor." in shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["3"], "3 steps\n"),
        (["3", "--quiet"], "3\n"),
        (["3", "--json", "--quiet"], '{\n  "steps": 3,\n  "quiet": true\n}\n'),
    ],
)
def test_what_a_command_returns_is_printed_as_its_options_ask(words, shown):
    @spread
    def walk(steps: Annotated[int, typer.Argument()], console: Console) -> View:
        data = {"steps": steps, "quiet": console.quiet}
        return View(data, str(steps), [f"{steps} steps"])

    app = typer.Typer()
    app.command()(walk)
    assert CliRunner().invoke(app, words).stdout == shown


def test_a_view_without_tables_is_a_line():
    @spread
    def walk() -> View:
        return View({}, "one line")

    app = typer.Typer()
    app.command()(walk)
    assert CliRunner().invoke(app, []).stdout == "one line\n"


@pytest.mark.parametrize("words", ["budget ompq:demo", "bench net.onnx"])
@pytest.mark.parametrize(
    ("cores", "told"), [(1, "1 CPU core is"), (2, "2 CPU cores are")]
)
def test_more_threads_than_cores_are_refused(monkeypatch, words, cores, told):
    granted = {3, 7} if cores == 2 else {7}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: granted, raising=False)
    refused = run(*words.split(), "--threads", "3")
    assert refused.exit_code == 2
    words = f"--threads 3: only {told} available; give at most {cores}\n"
    assert refused.stderr.endswith(words)


def test_cores_are_counted_where_a_process_has_no_share_of_them(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_threads(2)
    with pytest.raises(ValueError, match="--threads 3: only 2 CPU cores are available"):
        check_threads(3)
