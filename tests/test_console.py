"""The console: streams, progress, logging; and options that are dataclasses."""

import io
import logging
import sys

import pytest
from rich.console import Console as RichConsole

from ompq import stages
from ompq.cli import console as consoles
from ompq.cli.console import Column, Console, View, muted, opened, plain, render


def stream(*, terminal: bool) -> RichConsole:
    return RichConsole(file=io.StringIO(), width=100, force_terminal=terminal)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(consoles, "perf_counter", found)
    monkeypatch.setattr(stages, "perf_counter", found)
    return found


def test_stages_are_timed(clock):
    console = Console(stream(terminal=False), stream(terminal=False))
    with console.stage("reading"):
        clock.now += 2
    with console.stage("reading"):
        clock.now += 3
    assert console.stages.seconds == {"reading": 5}


def test_messages_can_be_stages(clock):
    console = Console(stream(terminal=False), stream(terminal=False))
    with console.stages.named_by_messages("planning") as progress:
        clock.now += 7  # before the first message: nobody's time
        progress(0, 2, "tracing")
        clock.now += 1
        progress(1, 10, "tracing")
        progress(1, 2, "scoring")
        clock.now += 4
        progress(2, 2, "done")
    assert console.stages.seconds == {"tracing": 1, "scoring": 4}


def test_a_message_that_comes_again_tells_how_far_its_stage_is(clock):
    console = Console(stream(terminal=False), stream(terminal=False))
    with console.stages.named_by_messages("quantizing") as progress:
        progress(1, 4, "reading ranges")
        for batch in range(1, 4):
            clock.now += 40
            progress(batch, 8, "reading ranges")
        progress(2, 4, "rounding")
    assert console.stages.seconds == {"reading ranges": 120, "rounding": 0}
    assert console.err.file.getvalue().splitlines()[-1] == (
        "quantizing: reading ranges, 3/8, 3 min 20 s left"
    )


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left(clock):
    console = Console(stream(terminal=False), stream(terminal=False))
    with console.stage("learning") as progress:
        for step in range(1, 8):
            progress(step, 8, f"block {step}")
            clock.now += 6
        progress(8, 8, "done")
    lines = console.err.file.getvalue().splitlines()
    # at 12, 24 and 36 seconds; two, four and six steps after the first
    assert lines == [
        "learning: block 3, 3/8, 30.0 s left",
        "learning: block 5, 5/8, 18.0 s left",
        "learning: block 7, 7/8, 6.00 s left",
    ]


def test_a_resumed_run_estimates_from_where_it_began(clock):
    console = Console(stream(terminal=False), stream(terminal=False))
    with console.stage("learning") as progress:
        progress(90, 100, "block")
        clock.now += 50
        progress(95, 100, "block")
    assert console.err.file.getvalue() == "learning: block, 95/100, 50.0 s left\n"


def test_a_terminal_gets_a_bar_that_goes_away():
    console = Console(stream(terminal=True), stream(terminal=True))
    with console.stage("learning") as progress:
        progress(3, 8, "block three")
    shown = console.err.file.getvalue()
    assert "learning" in shown or "block three" in shown
    assert shown.endswith("\x1b[2K")  # the last thing is to clear the line
    assert console.out.file.getvalue() == ""


def test_quiet_shows_no_progress(clock):
    console = Console(stream(terminal=True), stream(terminal=True), quiet=True)
    with console.stage("learning") as progress:
        clock.now += 100
        progress(3, 8, "block three")
    assert console.err.file.getvalue() == ""


def test_results_have_no_trailing_blanks():
    console = Console(stream(terminal=False), stream(terminal=False))
    console.show("one   ", "two")
    assert console.out.file.getvalue() == "one\ntwo\n"


def test_json_keeps_brackets_and_refuses_what_is_no_json():
    console = Console(stream(terminal=False), stream(terminal=False))
    console.show_json({"a": "[red]é"})
    assert console.out.file.getvalue() == '{\n  "a": "[red]é"\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.show_json(float("nan"))


def test_warnings_of_the_library_are_told_and_the_log_on_demand(capsys):
    logger = logging.getLogger("ompq.somewhere")
    with opened():
        logger.warning("mind %s", "this")
        logger.info("nothing new")
        with muted():
            logger.warning("not this")
    assert capsys.readouterr().err == "warning: mind this\n"
    with opened(debug=True):
        logger.info("nothing new")
    assert capsys.readouterr().err == "info: nothing new\n"
    assert logging.getLogger("ompq").handlers == []
    assert logging.getLogger("ompq").level == logging.NOTSET


def test_what_others_print_is_no_result(capfd):
    with opened() as console:
        sys.stdout.write("noise\n")
        console.show("result")
    sys.stdout.write("afterwards\n")
    out, err = capfd.readouterr()
    assert out == "result\nafterwards\n"
    assert err == "noise\n"


def test_a_pipe_has_no_width_unless_it_is_given(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with opened() as console:
        assert console.out.width > 1000
    monkeypatch.setenv("COLUMNS", "80")
    with opened() as console:
        assert console.out.width == 80


VIEW = View(
    data={"name": "[b]\x9b1m"},
    line="[/x] one\x1b[31m",
    body=[[Column("columns", ["80"])], "[/x]"],
)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"json": True}, '{\n  "name": "[b]\\u009b1m"\n}\n'),
        ({"quiet": True}, "[/x] one\\x1b[31m\n"),
        ({"json": True, "quiet": True}, '{\n  "name": "[b]\\u009b1m"\n}\n'),
        ({}, "columns\n───────\n     80\n[/x]\n"),
    ],
)
def test_a_result_shows_itself_as_the_options_ask(settings, shown):
    console = Console(stream(terminal=False), stream(terminal=False), **settings)
    render(VIEW, console)
    assert console.out.file.getvalue() == shown


def test_what_a_terminal_would_obey_is_written_out():
    assert plain("conv\x1b[31m\u202e\r\n") == "conv\\x1b[31m\\u202e\\r\n"
    assert plain("blöcke.1 × 2") == "blöcke.1 × 2"
    console = Console(stream(terminal=True), stream(terminal=True))
    with console.stage("learning") as progress:
        progress(1, 2, "[/x]\x1b]0;title\x07")
    assert "\x07" not in console.err.file.getvalue()


def test_a_quiet_result_is_one_line_however_narrow_the_terminal():
    console = Console(stream(terminal=False), stream(terminal=False), quiet=True)
    render(View({}, "word " * 40 + "end", ["more"]), console)
    assert console.out.file.getvalue() == "word " * 40 + "end\n"
