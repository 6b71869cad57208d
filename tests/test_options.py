"""Options that are dataclasses."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from ompq.cli.console import Console, View
from ompq.cli.options import option, spread


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
