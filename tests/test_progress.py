from console_cases import stream
from ompq.cli.console import Console


def test_a_terminal_gets_a_bar_that_goes_away():
    console = Console(stream(terminal=True), stream(terminal=True))
    with console.stage("learning") as progress:
        progress(3, 8, "block three")
    shown = console.err.file.getvalue()
    assert "learning" in shown or "block three" in shown
    assert shown.endswith("\x1b[2K")  # the last thing is to clear the line
    assert console.out.file.getvalue() == ""
