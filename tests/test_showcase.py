"""demo, as the terminal shows it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cli_tools import run, run_json
from ompq.cli import showcase
from ompq.cli.showcase import DemoView
from ompq.demo import NOISY, DemoConfig, run_demo

FILES = {
    "plan.json",
    "network.ompq.safetensors",
    "network.onnx",
    "report.html",
    "result.json",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One run, and where its files are."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    return run_demo(folder, DemoConfig(samples=64, iterations=2)), folder


@pytest.fixture
def shown(made, monkeypatch):
    """The command, with that run instead of its own; and what it asked for."""
    asked = {}

    def instead(folder, config, *, bar, planned):
        asked.update(folder=folder, config=config)
        with bar("planning"):
            pass
        planned(made[0].plan, made[0].reference)
        return made[0]

    monkeypatch.setattr(showcase, "run_demo", instead)
    return asked


def test_the_help_tells_which_budgets_can_be_met(made):
    sizes = [made[0].plan.pareto("bytes", 2)[end].cost / 1024 for end in (0, -1)]
    low, high = (float(end) for end in re.findall(r"([\d.]+)KiB", demo_range()))
    assert 0 <= low - sizes[0] < 0.1
    assert 0 <= high - sizes[1] < 0.1
    assert low < 32  # the budget of the examples


def demo_range() -> str:
    return showcase.demo.__doc__.partition("Budgets from")[2]


def test_a_budget_that_cannot_be_met_leaves_nothing(tmp_path):
    result = run("demo", "--budget", "20KiB", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "error: a budget of 20.00 KiB cannot be met: allocations take from 30."
    )
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_terminal_tells_the_whole_story_within_80_columns(made, shown):
    result = run("demo", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert shown == {"folder": Path("ompq-demo"), "config": DemoConfig()}
    text, lines = " ".join(result.stdout.split()), result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "21 layers, 78,400 weights, 314 KiB in float" in text
    assert "It has to fit into 37KiB." in text
    stem = next(line for line in lines if line.startswith("stem"))
    bits = made[0].plan.allocation["stem"].weight
    assert f"{'▬' * bits} {bits}" in stem
    assert "blocks.4.conv2 and blocks.4.downsample share their bits" in text
    mixed = next(line for line in lines if line.startswith("mixed"))
    for found in (made[0].mixed.rounded, made[0].mixed.final):
        assert f"{100 * found[NOISY].agreement:.1f}%" in mixed
    assert "read back it gives the same logits" in text
    assert "ompq-demo/report.html: open it in a browser" in text


def test_json_and_quiet(made, shown, tmp_path):
    data = run_json("demo", "--budget", "32KiB", "-o", tmp_path, "--seed", "3")
    assert shown["folder"] == tmp_path
    assert shown["config"] == DemoConfig(budget="32KiB", seed=3)
    assert set(data["files"]) == FILES
    assert data["folder"] == str(tmp_path)
    quiet = run("demo", "--quiet")
    assert quiet.stdout.count("\n") == 1
    assert quiet.stdout.startswith("ompq-demo/report.html: Within 37KiB, mixed bits ")
    assert quiet.stderr == ""


def test_an_output_that_is_a_file_is_refused_at_once(tmp_path):
    (tmp_path / "out").write_text("")
    result = run("demo", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert (
        result.stderr
        == f"error: --output {tmp_path / 'out'} is a file; name a folder\n"
    )


def with_agreement(one, value):
    noisy = one.final[NOISY]
    order = np.random.default_rng(0).permutation(noisy.count)
    right = order < value * noisy.count
    packed = np.packbits(right).tobytes()
    noisy = replace(noisy, agreement=value, correct=packed)
    return replace(one, final={**one.final, NOISY: noisy})


def view(made, contenders):
    return DemoView(replace(made[0], contenders=tuple(contenders)), made[1])


@pytest.mark.parametrize(
    ("agreements", "end"),
    [
        ((0.90, 0.97, 0.95), "Even uniform 3 bits (40.3 KiB) keep only 95.0%."),
        ((0.90, 0.95, 0.97), "to 6.0% more (95 % interval)."),
        ((0.97, 0.95, 0.98), "That is no difference that 450 digits can show."),
        ((0.95, 0.951, 0.95), "That is no difference that 450 digits can show."),
    ],
)
def test_the_verdict_says_what_was_found(made, agreements, end):
    contenders = map(with_agreement, made[0].contenders, agreements)
    verdict = view(made, contenders).verdict()
    assert verdict.startswith(f"Within 37KiB, mixed bits keep {agreements[1]:.1%} of ")
    assert verdict.endswith(end)


def test_the_verdict_says_when_mixed_is_uniform(made):
    small, mixed, _ = made[0].contenders
    same = replace(mixed, plan=small.plan)
    verdict = view(made, (small, same)).verdict()
    assert verdict == "At 37KiB every layer gets the same: uniform 2 bits."


def test_layers_that_are_free_are_not_said_to_be_tied(made):
    plan = made[0].plan
    free = replace(plan, graph=plan.graph.untie())
    assert showcase.ties(free) == []


def test_a_missing_onnx_file_is_explained(made):
    without = replace(made[0], exported=None, no_export="the file disagrees")
    rows = DemoView(without, Path("out")).rows()
    assert ("ONNX", "not written: the file disagrees") in rows
