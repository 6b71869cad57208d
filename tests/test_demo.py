"""The demonstration: contest, numbers and files, and what the terminal shows."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ompq
from cli_tools import run, run_json
from nets import TinyMobileNet, demo_network, scenes, seeded
from ompq.cli import commands, demo as job
from ompq.cli.demo import (
    COPIES,
    DIGITS,
    NOISE,
    NOISY,
    DemoConfig,
    contender,
    line_up,
    run_demo,
)
from ompq.errors import ExportError
from ompq.models.builtin_networks import DemoNetwork, demo_data
from ompq.report_sections import sections_from_json
from ompq.workflow import Workflow

SAMPLES = scenes(32)
MODEL = seeded(TinyMobileNet())
RECONSTRUCT = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))


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
    assert sizes[0] < sizes[1] <= 37 * 1024 < sizes[2]
    assert [one.within for one in found.contenders] == [True, True, False]
    assert 2.6 <= found.plan.totals["average_bits"] < 2.7
    assert found.uniform.name == "uniform 2 bits"
    assert found.mixed.plan is found.plan


def test_coded_weights_keep_the_answers_in_fewer_bytes(made):
    found = made[0]
    largest, coded = found.contenders[-1], found.coded
    size = coded.plan.totals["bytes"]
    assert size <= 0.85 * largest.plan.totals["bytes"]
    assert any(choice.rate for choice in coded.plan.allocation.values())
    assert agreement(coded.network) >= agreement(largest.network)
    assert f"(uniform 3 bits) → {size / 1024:.1f} KiB, with" in found.coded_text
    none = replace(found, coded=None)
    assert none.coded_text.startswith("no smaller file keeps")
    assert none.to_json()["coded"] is None


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
    assert size <= found.plan.totals["bytes"] * 1
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
    with torch.no_grad():  # gradients would have rounding of their own
        ours = found.mixed.network(images).argmax(1)
    equal = (theirs == ours).double().mean()
    assert equal >= 0.995
    assert found.exported.given.top1 == pytest.approx(equal)


def test_the_result_can_be_given_to_ompq_report(made):
    found, folder = made
    data = json.loads((folder / "result.json").read_text())
    assert data["budget"] == "37KiB"
    assert data["plan"]["hash"] == ompq.Plan.load(folder / "plan.json").hash
    kinds = [type(one).__name__ for one in sections_from_json(data["sections"])]
    assert kinds.count("Accuracy") == 4 + 3  # digits, and noisy ones
    assert kinds.count("BlockErrorSection") == 9
    assert kinds.count("AgreementSection") == 3  # packed file, ONNX against both
    assert kinds.count("Histogram") == 6  # weights and inputs of three layers
    assert set(data["seconds"]) >= {
        *("scoring the choices", "reconstructing", "finalizing integers"),
        *("evaluating", "packing", "exporting to ONNX"),
    }
    assert data["contenders"][1]["bytes"] == found.plan.totals["bytes"]


def test_the_report_shows_it(made):
    text = (made[1] / "report.html").read_text()
    assert "Handwritten digits in 37KiB" in text
    for word in ("uniform, 2 bits", "noisy: mixed", "network.onnx", "packed file"):
        assert word in text


def test_a_failure_leaves_old_files_as_they_were(made, tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text("old")

    def stop(*_args, **_settings):
        (_args[0] / "network.onnx").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "contender", lambda *_: made[0].mixed)  # takes long
    monkeypatch.setattr(job, "_write_files", stop)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "old"


def test_without_onnx_the_rest_is_there_and_it_is_said(made, monkeypatch, caplog):
    def refuse(*_args, **_named):
        raise ExportError("the file disagrees")

    monkeypatch.setattr(job, "export", refuse)
    exported, why = job._export(made[0].mixed.network, Path("x.onnx"), torch.ones(1))
    assert exported is None
    assert why == "the file disagrees"
    assert "no ONNX file: the file disagrees" in caplog.text
    without = replace(made[0], exported=None, no_export=why).reported()
    assert "network.onnx" not in without.files
    data = without.to_json()
    assert data["onnx"] is None
    assert data["no_onnx"] == "the file disagrees"
    texts = [one.get("text", "") for one in data["sections"]]
    assert "not written: the file disagrees" in texts


@pytest.fixture(scope="module")
def plan():
    return ompq.plan(MODEL, SAMPLES, "4.5bits")


def test_uniform_widths_enclose_the_budget(plan):
    contenders = line_up(plan)
    assert list(contenders) == ["uniform 4 bits", "mixed", "uniform 5 bits"]
    assert contenders["mixed"] is plan
    for width in (4, 5):
        bits = contenders[f"uniform {width} bits"].allocation.values()
        assert {choice.weight for choice in bits} == {width}
    assert [one.meets_budget() for one in contenders.values()] == [True, True, False]


def test_sizes_of_uniform_networks_are_those_of_their_bits(plan):
    weights = sum(parameter.numel() for parameter in weights_of(MODEL))
    for name, one in line_up(plan).items():
        if name != "mixed":
            width = int(name.split()[1])
            assert one.totals["weight_bits"] == width * weights


def weights_of(model):
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    return [m.weight for m in model.modules() if isinstance(m, kinds)]


def test_nothing_is_larger_than_a_budget_for_everything(plan):
    loose = plan.with_budget("8bits")
    assert list(line_up(loose)) == ["uniform 8 bits", "mixed"]
    assert line_up(loose)["uniform 8 bits"].allocation == loose.allocation


def test_contenders_are_measured_rounded_and_reconstructed(plan):
    targets = torch.zeros(len(SAMPLES), dtype=torch.long)
    tests = {"same": [(SAMPLES, targets)]}
    work = Workflow(MODEL, SAMPLES)
    small, mixed, large = (
        contender(work, name, one, tests, RECONSTRUCT)
        for name, one in line_up(plan).items()
    )
    assert {"reconstructing", "finalizing integers", "evaluating"} <= set(
        work.stages.seconds
    )
    assert (small.within, mixed.within, large.within) == (True, True, False)
    for one in (small, mixed, large):
        assert ompq.quantization_of(one.network).allocation == one.plan.allocation
        # The float network's answers are what agreement is measured by.
        with torch.no_grad():
            same = one.network(SAMPLES).argmax(1) == MODEL(SAMPLES).argmax(1)
        assert one.final["same"].agreement == pytest.approx(same.double().mean())
    rounded = ompq.evaluate(
        ompq.finalize(ompq.quantize(MODEL, plan, SAMPLES), SAMPLES),
        tests["same"],
        reference=MODEL,
    )
    assert mixed.rounded["same"].divergence == rounded.divergence


# As the terminal shows it.


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

    monkeypatch.setattr(job, "run_demo", instead)
    return asked


def test_the_help_tells_which_budgets_can_be_met(made):
    sizes = [made[0].plan.pareto("bytes", 2)[end].cost / 1024 for end in (0, -1)]
    low, high = (float(end) for end in re.findall(r"([\d.]+)KiB", demo_range()))
    assert 0 <= low - sizes[0] < 0.1
    assert 0 <= high - sizes[1] < 0.1
    assert low < 32  # the budget of the examples


def demo_range() -> str:
    return commands.demo.__doc__.partition("Budgets from")[2]


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
    assert stem.split()[-4] == str(bits)  # before "260 B" and the bar
    assert stem.endswith(f" {'▬' * bits}")
    assert "blocks.4.conv2 and blocks.4.downsample share their bits" in text
    mixed = next(line for line in lines if line.startswith("mixed"))
    for found in (made[0].mixed.rounded, made[0].mixed.final):
        assert f"{100 * found[NOISY].agreement:.1f}%" in mixed
    assert "loaded again it gives the same logits" in text
    assert "ompq-demo/report.html: open it in a browser" in text


def test_a_narrow_terminal_cuts_no_number(made, shown):
    lines = run("demo", env={"COLUMNS": "60"}).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert not [line for line in lines if re.search("…( |$)", line)]


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
        == f"error: --output {tmp_path / 'out'} is a file; give a folder\n"
    )


def with_agreement(one, value):
    noisy = one.final[NOISY]
    order = np.random.default_rng(0).permutation(noisy.count)
    right = order < value * noisy.count
    packed = np.packbits(right).tobytes()
    noisy = replace(noisy, agreement=value, correct=packed)
    return replace(one, final={**one.final, NOISY: noisy})


@pytest.mark.parametrize(
    ("agreements", "end"),
    [
        ((0.90, 0.97, 0.95), "Even uniform 3 bits (40.3 KiB) keep only 95.0%."),
        ((0.90, 0.95, 0.97), "to 6.0% more (95 % interval)."),
        ((0.97, 0.95, 0.98), "450 digits cannot show a difference that small."),
        ((0.95, 0.951, 0.95), "450 digits cannot show a difference that small."),
    ],
)
def test_the_verdict_says_what_was_found(made, agreements, end):
    contenders = map(with_agreement, made[0].contenders, agreements)
    verdict = replace(made[0], contenders=tuple(contenders)).verdict
    assert verdict.startswith(f"Within 37KiB, mixed bits keep {agreements[1]:.1%} of ")
    assert verdict.endswith(end)


def test_the_verdict_says_when_mixed_is_uniform(made):
    small, mixed, _ = made[0].contenders
    same = replace(mixed, plan=small.plan)
    verdict = replace(made[0], contenders=(small, same)).verdict
    assert verdict == "At 37KiB every layer gets the same: uniform 2 bits."


def test_layers_that_are_free_are_not_said_to_be_tied(made):
    plan = made[0].plan
    free = replace(plan, graph=plan.graph.untie())
    assert job.ties(free) == []


def test_a_missing_onnx_file_is_explained(made):
    without = replace(made[0], exported=None, no_export="the file disagrees")
    rows = job.closing(without, Path("out"))
    assert ("ONNX", "not written: the file disagrees") in rows
