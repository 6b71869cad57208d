"""The bar that progress=True shows."""

import io
import re

import pytest
import torch
from rich.console import Console as RichConsole

import ompq
from cli_tools import stream
from nets import TinyResNet, images, seeded
from ompq import progress as told, progress_bar
from ompq.cli.console import Console
from ompq.progress import Stages, callback, no_progress
from ompq.progress_bar import shows_progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(told, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress_bar, "perf_counter", lambda: now[0])
    return now


def test_a_terminal_gets_a_bar_that_goes_away():
    console = Console(stream(terminal=True), stream(terminal=True))
    with console.stage("learning") as progress:
        progress(3, 8, "block three")
    shown = console.err.file.getvalue()
    assert "learning" in shown or "block three" in shown
    assert shown.endswith("\x1b[2K")  # the last thing is to clear the line
    assert console.out.file.getvalue() == ""


def test_the_bar_of_a_run_goes_on_from_stage_to_stage(clock):
    file = io.StringIO()
    console = RichConsole(file=file, force_terminal=True, width=78)
    stages = progress_bar.shown_stages(console)
    stages.left.expect({"reading": 60.0, "learning": 60.0})
    with stages.stage("reading"):
        clock[0] = 60.0
    with stages.stage("learning") as progress:
        clock[0] = 90.0
        progress(1, 2, "block 1")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    last = text.replace("\r", "\n").rstrip().splitlines()[-1]
    assert last.startswith("block 1")
    # 90 of 120 seconds are over: 15 of 20 parts of the bar.
    assert "━" * 15 + "╺" + "━" * 4 in last
    assert "1/2" in last
    assert "1:30" in last
    assert "30.0 s left" in last


def test_true_shows_a_bar_whatever_the_verb(monkeypatch):
    said = []

    class Recorded:
        def stage(self, name):
            return Stages(self._open).stage(name)

        def named_by_messages(self, name):
            return Stages(self._open).named_by_messages(name)

        def _open(self, name):
            said.append(name)
            return told.silent(name)

    monkeypatch.setattr(progress_bar, "shown_stages", Recorded)
    model, inputs = seeded(TinyResNet()), images()
    plan = ompq.plan(model, inputs, "60%", progress=True)
    made = ompq.quantize(model, plan, inputs, progress=True)
    rounding = ompq.RoundingConfig(iterations=2)
    config = ompq.ReconstructConfig(rounding=rounding)
    made = ompq.reconstruct(made, model, inputs, config, progress=True)
    targets = torch.zeros(8, dtype=torch.long)
    ompq.evaluate(made, [(inputs, targets)], progress=True)
    assert said == ["planning", "quantizing", "reconstructing", "evaluating"]


def test_a_function_is_called_and_nothing_else_is_shown():
    messages = []
    model, inputs = seeded(TinyResNet()), images()
    plan = ompq.plan(model, inputs, "60%", progress=False)
    ompq.quantize(
        model,
        plan,
        inputs,
        progress=lambda _done, _total, message: messages.append(message),
    )
    stages = list(dict.fromkeys(messages))
    assert stages == [
        "observing the network",
        "calibrating activations",
        "rounding weights",
        "bias correction",
        "done",
    ]
    # Each unit reports that its biases were corrected.
    assert messages.count("bias correction") == 1 + len(plan.graph)


def test_what_is_no_progress_is_an_error():
    verb = shows_progress("working")(lambda progress=None: callback(progress))
    assert verb() is no_progress
    with pytest.raises(TypeError, match="progress=5 is neither True nor a function"):
        verb(progress=5)
