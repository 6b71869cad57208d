"""Commands: ours, and those of extensions."""

import sys
from types import ModuleType

import pytest

from ompq.cli import command_registry
from ompq.cli.command_registry import COMMANDS, command
from ompq.cli.options import option


@pytest.fixture
def painted(monkeypatch):
    """The shades that the command of an extension was called with."""
    shades = []

    def paint(shade: str = option("SHADE", "The shade.", default="red")) -> None:
        """Paint a network
        in one colour.

        Examples:
          ompq paint --shade blue
        """
        shades.append(shade)

    module = ModuleType("painter")
    module.paint = paint
    module.draw = lambda shade: shades.append(f"drawn in {shade}")
    monkeypatch.setitem(sys.modules, "painter", module)
    entry = {"module": "painter", "panel": "Art", "summary": "Paint a network."}
    offered = {"command": {"paint": entry}}
    monkeypatch.setattr(command_registry, "extensions", lambda: offered)
    monkeypatch.setattr(command_registry, "_OWN", {})
    return shades


def test_ours_come_before_those_of_extensions(painted):
    @command("Plan", "painter:draw")
    def sketch(shade: str) -> None:
        """Draw a plan.

        More of it.
        """

    assert [*COMMANDS] == ["sketch", "paint"] and len(COMMANDS) == 2
    own = COMMANDS["sketch"]
    assert (own.panel, own.summary, own.module) == ("Plan", "Draw a plan.", __name__)
    assert COMMANDS["paint"].panel == "Art"
    with pytest.raises(KeyError, match="carve"):
        COMMANDS["carve"]
    sketch(shade="blue")  # calls the function that does the work
    assert painted == ["drawn in blue"]


def test_a_command_is_made_of_its_function(painted):
    made = COMMANDS["paint"].load()
    assert made.name == "paint"
    assert made.help == (
        "Paint a network in one colour.\n\nExamples:\n  ompq paint --shade blue"
    )
    made(["--shade", "blue"], standalone_mode=False)
    assert painted == ["blue"]
