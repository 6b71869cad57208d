"""The demonstration: its contest, its numbers and its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ompq
from nets import TinyMobileNet, scenes, seeded
from ompq import demo as job
from ompq.demo import (
    COPIES,
    DIGITS,
    NOISE,
    NOISY,
    DemoConfig,
    coded_rival,
    contender,
    line_up,
    run_demo,
)
from ompq.errors import ExportError
from ompq.models.networks import DemoNetwork, demo_data, demo_network
from ompq.report.sections import sections_from_json
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
    tests = job._tests(demo_data(), demo_network(), 0)
    work = Workflow(demo_network(), demo_data().train_images[:64])
    largest = found.contenders[-1]
    coded = coded_rival(work, largest, tests, RECONSTRUCT)
    size = coded.plan.totals["bytes"]
    assert size <= 0.85 * largest.plan.totals["bytes"]
    assert any(choice.rate for choice in coded.plan.allocation.values())
    assert agreement(coded.network) >= agreement(largest.network)
    text = replace(found, coded=coded).coded_text
    assert f"(uniform 3 bits) → {size / 1024:.1f} KiB, with" in text
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
    assert kinds.count("BlockError") == 9
    assert kinds.count("Agreement") == 3  # packed file, ONNX against both
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

    monkeypatch.setattr(job, "_packed", stop)
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
