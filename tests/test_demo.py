"""The demonstration: its job, and the command that shows it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ompq
from cli_tools import run, run_json
from ompq import demo as job
from ompq.cli import demonstrating
from ompq.demo import COPIES, DIGITS, NOISE, NOISY, DemoConfig, run_demo
from ompq.errors import ExportError
from ompq.models.demo_network import DemoNetwork, demo_data, demo_network
from ompq.report import sections_from_json

QUICK = DemoConfig(samples=64, iterations=2)
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
    before, told = torch.get_rng_state(), []
    found = run_demo(folder, QUICK, planned=lambda *what: told.append(what))
    assert torch.equal(before, torch.get_rng_state())
    assert told == [(found.plan, found.reference)]
    return found, folder


@pytest.fixture
def shown(made, monkeypatch):
    """The command, with that run instead of its own; and what it asked for."""
    asked = {}

    def instead(folder, config, *, stage, planned):
        asked.update(folder=folder, config=config)
        with stage("planning"):
            pass
        planned(made[0].plan, made[0].reference)
        return made[0]

    monkeypatch.setattr(demonstrating, "run_demo", instead)
    return asked


def agreement(network) -> float:
    """Return on how many noisy digits a network answers as the float one does."""
    images = demo_data().test_images.repeat(COPIES, 1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(images.shape, generator=generator)
    noisy = (images + NOISE * noise).clamp(0, 1)
    with torch.no_grad():
        same = network(noisy).argmax(1) == demo_network()(noisy).argmax(1)
    return float(same.double().mean())


def test_every_file_is_there_and_nothing_else(made):
    found, folder = made
    assert {path.name for path in folder.iterdir()} == FILES == set(found.files)
    assert found.exported.path == folder / "network.onnx"
    assert found.account.path == folder / "network.ompq.safetensors"


def test_the_default_budget_is_kept_by_mixed_and_by_one_uniform_width(made):
    found, _ = made
    names = [one.name for one in found.contenders]
    assert names == ["uniform 2 bits", "mixed", "uniform 3 bits"]
    sizes = [one.plan.totals["bytes"] for one in found.contenders]
    assert sizes[0] < sizes[1] <= 34 * 1024 < sizes[2]
    assert [one.within for one in found.contenders] == [True, True, False]
    assert 2.5 <= found.plan.totals["average_bits"] < 2.6
    assert found.uniform.name == "uniform 2 bits"
    assert found.mixed.plan is found.plan


def test_mixed_bits_keep_more_of_the_float_answers_than_uniform_ones(made):
    """The point of it all; rounded to nearest, so that it does not take a minute."""
    small, mixed, large = (one.rounded[NOISY].agreement for one in made[0].contenders)
    assert small + 0.05 < mixed
    assert large < mixed


def test_the_numbers_are_those_of_the_networks(made):
    found, _ = made
    data = demo_data()
    with torch.no_grad():
        right = demo_network()(data.test_images).argmax(1) == data.test_targets
    assert found.reference[DIGITS].top1 == pytest.approx(right.double().mean())
    assert found.mixed.final[NOISY].agreement == agreement(found.mixed.network)
    assert found.reference[NOISY].count == 450 * COPIES


def test_the_packed_file_has_the_size_that_was_promised(made):
    found, folder = made
    size = (folder / "network.ompq.safetensors").stat().st_size
    assert size == found.account.file_bytes
    assert size <= found.plan.totals["bytes"] * 1.01 + 16 * 1024
    assert found.same_logits
    loaded = ompq.load(folder / "network.ompq.safetensors", DemoNetwork)
    images = demo_data().test_images[:20]
    assert torch.equal(loaded(images), found.mixed.network(images))


def test_the_onnx_file_answers_as_the_network_does(made):
    found, folder = made
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(folder / "network.onnx"))
    images = demo_data().test_images
    name = session.get_inputs()[0].name
    theirs = torch.from_numpy(session.run(None, {name: images.numpy()})[0]).argmax(1)
    ours = found.mixed.network(images).argmax(1)
    equal = (theirs == ours).double().mean()
    assert equal >= 0.995
    assert found.exported.given.top1 == pytest.approx(equal)


def test_the_result_can_be_given_to_ompq_report(made):
    found, folder = made
    data = json.loads((folder / "result.json").read_text())
    assert data["budget"] == "34KiB"
    assert data["plan"] == ompq.Plan.load(folder / "plan.json").hash
    kinds = [type(one).__name__ for one in sections_from_json(data["sections"])]
    assert kinds.count("Accuracy") == 4 + 3  # digits, and noisy ones
    assert kinds.count("BlockError") == 9
    assert kinds.count("Agreement") == 3  # packed file, ONNX against both
    assert kinds.count("Histogram") == 6  # weights and inputs of three layers
    stages = {"planning", "quantizing", "reconstructing", "evaluating", "packing"}
    assert set(data["seconds"]) == stages | {"exporting to ONNX", "writing the report"}
    assert data["contenders"][1]["bytes"] == found.plan.totals["bytes"]


def test_the_report_shows_it(made):
    text = (made[1] / "report.html").read_text()
    assert "Handwritten digits in 34KiB" in text
    for word in ("uniform, 2 bits", "noisy: mixed", "network.onnx", "packed file"):
        assert word in text


def test_the_help_tells_which_budgets_can_be_met(made):
    sizes = [made[0].plan.pareto("bytes", 2)[end].cost / 1024 for end in (0, -1)]
    low, high = (float(end) for end in re.findall(r"([\d.]+)KiB", demo_range()))
    assert 0 <= low - sizes[0] < 0.1
    assert 0 <= high - sizes[1] < 0.1
    assert low < 30  # the budget of the examples


def demo_range() -> str:
    return demonstrating.demo.__doc__.partition("can be met is")[2]


def test_a_budget_that_cannot_be_met_leaves_nothing(tmp_path):
    result = run("demo", "--budget", "20KiB", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "error: a budget of 20.00 KiB cannot be met: allocations take from 28.46 KiB"
    )
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_old_files_as_they_were(made, tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text("old")

    def stop(*_args, **_settings):
        (_args[0] / "network.onnx").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_computed", stop)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "old"


def test_without_onnx_the_rest_is_there_and_it_is_said(made, monkeypatch, caplog):
    def refuse(*_args):
        raise ExportError("the file disagrees")

    monkeypatch.setattr(job, "export_onnx", refuse)
    exported, why = job._exported(made[0].mixed.network, Path("x.onnx"), torch.ones(1))
    assert exported is None
    assert why == "the file disagrees"
    assert "no ONNX file: the file disagrees" in caplog.text
    without = replace(made[0], exported=None, no_export=why)
    assert "network.onnx" not in without.files
    data = without.to_json()
    assert data["onnx"] is None
    assert data["no_onnx"] == "the file disagrees"
    texts = [one.get("text", "") for one in data["sections"]]
    assert "not written: the file disagrees" in texts
    assert ("ONNX", "not written: the file disagrees") in demonstrating._facts(
        without, Path("out")
    )


def test_the_terminal_tells_the_whole_story_within_80_columns(made, shown):
    result = run("demo", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert shown == {"folder": Path("ompq-demo"), "config": DemoConfig()}
    text, lines = " ".join(result.stdout.split()), result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "21 layers, 78,400 weights, 314 KiB in float" in text
    assert "It shall fit into 34KiB." in text
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
    data = run_json("demo", "--budget", "30KiB", "-o", tmp_path, "--seed", "3")
    assert shown["folder"] == tmp_path
    assert shown["config"] == DemoConfig(budget="30KiB", seed=3)
    assert set(data["files"]) == FILES
    assert data["folder"] == str(tmp_path)
    quiet = run("demo", "--quiet")
    assert quiet.stdout.count("\n") == 1
    assert quiet.stdout.startswith("ompq-demo/report.html: Within 34KiB, mixed bits ")
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
    noisy = replace(one.final[NOISY], agreement=value)
    return replace(one, final={**one.final, NOISY: noisy})


@pytest.mark.parametrize(
    ("agreements", "end"),
    [
        ((0.90, 0.97, 0.95), "Even 3 bits everywhere, 38.0 KiB, keep but 95.0%."),
        ((0.90, 0.95, 0.97), "2 bits everywhere keep 90.0%."),
        ((0.97, 0.95, 0.98), "Here mixing does not pay."),
        ((0.95, 0.95, 0.95), "Here mixing does not pay."),
    ],
)
def test_the_verdict_says_what_was_found(made, agreements, end):
    contenders = map(with_agreement, made[0].contenders, agreements)
    verdict = demonstrating._verdict(replace(made[0], contenders=tuple(contenders)))
    assert verdict.startswith(f"Within 34KiB, mixed bits keep {agreements[1]:.1%} of ")
    assert verdict.endswith(end)


def test_the_verdict_says_when_mixed_is_uniform(made):
    small, mixed, _ = made[0].contenders
    same = replace(mixed, plan=small.plan)
    verdict = demonstrating._verdict(replace(made[0], contenders=(small, same)))
    assert verdict == "At 34KiB every layer gets the same: uniform 2 bits."


def test_layers_that_are_free_are_not_said_to_be_tied(made):
    plan = made[0].plan
    free = replace(plan, graph=plan.graph.untie())
    assert demonstrating.ties(free) == []
