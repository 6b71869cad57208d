"""The console: streams, progress, logging, tables, and budgets that people read."""

import io
import logging
import sys

import numpy as np
import pytest
from rich.console import Console as RichConsole

from cli_tools import stream
from ompq import progress, progress_bar
from ompq.allocation.problem import Problem
from ompq.cli.console import (
    Column,
    Console,
    View,
    facts,
    fit_table,
    middle_cut,
    mute_warnings,
    opened,
    plain,
    render,
)
from ompq.cli.plan_commands import budget_rows
from ompq.cost_tables import Cost
from ompq.network.units import Choice


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress_bar, "perf_counter", found)
    monkeypatch.setattr(progress, "perf_counter", found)
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
        with mute_warnings():
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


LONG = "encoder.layers.encoder_layer_11.self_attention.out_proj"


def rendered(table, width: int) -> list[str]:
    console = RichConsole(file=io.StringIO(), width=width)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def columns() -> list[Column]:
    return [
        Column("layer", ["conv1", LONG], "left", shorten=True),
        Column("kind", ["pointwise", "linear"], "left", rank=1),
        Column("shape", ["64×3×7×7", "768×768"], rank=2),
        Column("bits", ["8", "4"]),
    ]


def test_a_wide_table_is_whole():
    text = "\n".join(rendered(fit_table(columns(), 200), 200))
    assert LONG in text
    assert "768×768" in text


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 90, 100])
def test_a_table_keeps_to_its_width_without_being_cut_by_the_terminal(width):
    lines = rendered(fit_table(columns(), width), width)
    assert max(map(len, lines)) <= width
    assert lines[0].split()[0] == "layer"
    assert lines[0].endswith("bits")
    assert lines[-1].endswith(" 4")
    assert len(lines) == 4
    # the name keeps its two ends, however narrow
    assert lines[3].startswith("encoder.la")
    assert "out_proj" in lines[3]


def test_columns_go_by_rank():
    widths = {
        width: rendered(fit_table(columns(), width), 200)[0] for width in (60, 45)
    }
    assert "kind" in widths[60] and "shape" in widths[60]
    assert "kind" in widths[45] and "shape" not in widths[45]


def test_rich_markup_in_names_is_text():
    table = fit_table([Column("layer", ["[red]x[/red]"], "left")], 40)
    assert "[red]x[/red]" in rendered(table, 40)[-1]
    assert "[b]y" in rendered(facts([("name", "[b]y")]), 40)[0]


def test_names_are_cut_in_the_middle():
    assert middle_cut("conv1", 5) == "conv1"
    assert middle_cut("features.12.block.3.1", 12) == "featur…k.3.1"
    assert all(len(middle_cut(LONG, n)) == n for n in range(3, len(LONG)))


def test_uniform_bits_give_a_pinned_unit_what_it_may_get():
    choices = (Choice(2, 8), Choice(4, 8), Choice(8, 8))
    size = np.array([[2.0, 4.0, 8.0], [20.0, 40.0, 80.0]])
    costs = {
        "bytes": Cost("bytes", size, constant=1.0, reference=400.0),
        "weight_bits": Cost("weight_bits", 8 * size, reference=88.0),
        "bit_ops": Cost("bit_ops", size),
        "milliseconds": Cost("milliseconds", size),
    }
    problem = Problem(
        names=("stem", "fc"),
        choices=choices,
        damage=np.zeros((2, 3)),
        costs=costs,
        allowed=np.array([[False, False, True], [True, True, False]]),
        groups=np.arange(2),
    )
    rows = {row["mark"]: row for row in budget_rows(problem)}
    assert rows["all W2A8"]["bytes"] == 1 + 8 + 20
    assert rows["all W4A8"]["bytes"] == 1 + 8 + 40
    assert rows["all W8A8"]["bytes"] == 1 + 8 + 40  # the nearest that fc may get
    assert rows["smallest"]["percent"] == 100 * 29 / 400
    assert rows["largest"]["average_bits"] == 8 * 48 / 88


def test_a_line_of_progress_names_its_stage_once(monkeypatch):
    now = iter(range(0, 1000, 20))
    monkeypatch.setattr(progress_bar, "perf_counter", lambda: float(next(now)))
    said = io.StringIO()
    with progress_bar.shown_stages(RichConsole(file=said)).stage(
        "evaluating"
    ) as report:
        report(1, 9, "evaluating: top-1 50 %")
        report(2, 9, "batch")
    first, second = said.getvalue().splitlines()
    assert first.startswith("evaluating: top-1 50 %, 1/9")
    assert second.startswith("evaluating: batch, 2/9")
