"""A verb leaves its arguments as it found them: weights, modes, hooks, generators."""

import copy
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from nets import TinyMobileNet, TinyResNet, images, scenes, seeded

SAMPLES = scenes(16)


def state(network):
    return {
        "values": {k: v.clone() for k, v in network.state_dict().items()},
        "modes": [m.training for m in network.modules()],
        "gradients": [p.requires_grad for p in network.parameters()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in network.modules()
        ],
        "names": [name for name, _ in network.named_modules()],
    }


def same(before, after):
    values = before["values"].items()
    if not all(torch.equal(value, after["values"][key]) for key, value in values):
        return False
    return all(before[key] == after[key] for key in before if key != "values")


@pytest.fixture(scope="module")
def made():
    model = seeded(TinyMobileNet())
    model.train()
    model.blocks[1].eval()
    plan = ompq.plan(model, SAMPLES, "4bits")
    return model, plan, ompq.quantize(model, plan, SAMPLES)


QUICK = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=5))
TRAINING = ompq.TrainConfig(epochs=2, batch_norm="fold-and-train", distill=0.5)
BATCHES = [(SAMPLES, torch.zeros(16, dtype=torch.long))]
VERBS = {
    "trace": lambda m, p, q: ompq.trace(m, SAMPLES),
    "plan": lambda m, p, q: ompq.plan(m, SAMPLES, "4bits"),
    "quantize": lambda m, p, q: ompq.quantize(m, p, SAMPLES),
    "refine": lambda m, p, q: ompq.refine(p, m, SAMPLES, ompq.RefineConfig(count=1)),
    "reconstruct": lambda m, p, q: ompq.reconstruct(q, m, SAMPLES, QUICK),
    "finalize": lambda m, p, q: ompq.finalize(q, SAMPLES),
    "evaluate": lambda m, p, q: ompq.evaluate(q, BATCHES, reference=m),
    "train": lambda m, p, q: ompq.train(q, BATCHES, TRAINING, teacher=m),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verb_leaves_its_arguments_alone(made, verb):
    model, plan, quantized = made
    before = [state(model), state(quantized)]
    samples, text = SAMPLES.clone(), copy.deepcopy(plan.allocation)
    generator = torch.get_rng_state()
    VERBS[verb](model, plan, quantized)
    assert same(before[0], state(model))
    assert same(before[1], state(quantized))
    assert torch.equal(samples, SAMPLES)
    assert plan.allocation == text
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_files_leave_their_arguments_alone(made, verb, tmp_path):
    model, plan, quantized = made
    path = tmp_path / "net.ompq.safetensors"
    ompq.save(quantized, path, plan=plan)
    before = [state(model), state(quantized)]
    ompq.save(quantized, path) if verb == "save" else ompq.load(path, model)
    assert same(before[0], state(model))
    assert same(before[1], state(quantized))


class Overwriting(nn.Module):
    """Normalises its input in place, and counts its calls in two buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x):
        x.sub_(0.5).div_(0.25)
        self.calls += 1
        self.replaced = self.replaced + 1
        return self.second(self.first(x).relu_()).mean((2, 3))


class Pure(Overwriting):
    def forward(self, x):
        x = (x - 0.5) / 0.25
        return self.second(self.first(x).relu()).mean((2, 3))


@pytest.fixture(scope="module")
def overwriting():
    return seeded(Overwriting()), seeded(Pure())


@pytest.mark.parametrize("score", ["sensitivity", "output_divergence", "fisher"])
def test_a_forward_that_changes_its_input_is_planned_like_one_that_does_not(
    overwriting, score
):
    config, found = ompq.PlanConfig(score=score), []
    for model in overwriting:
        given = SAMPLES.clone()
        found.append(ompq.plan(model, given, "4bits", config))
        assert torch.equal(given, SAMPLES)
        assert (model.calls, model.replaced) == (0, 0)
    np.testing.assert_allclose(*(p.scores.damage for p in found), rtol=1e-4)


def test_a_forward_that_changes_its_input_is_quantized_like_one_that_does_not(
    overwriting,
):
    outputs, divergences = [], []
    for model in overwriting:
        given = SAMPLES.clone()
        quantized = ompq.quantize(model, {"*": 8}, given)
        result = ompq.evaluate(quantized, ompq.Samples.of(given), reference=model)
        learned = ompq.reconstruct(quantized, model, given, QUICK)
        assert torch.equal(given, SAMPLES)
        assert (model.calls, quantized.calls, learned.calls) == (0, 0, 0)
        divergences.append(result.divergence)
        with torch.no_grad():
            outputs.append((quantized(given.clone()), model(SAMPLES.clone())))
            model.calls.zero_()
            model.replaced.zero_()
    assert divergences[0] == pytest.approx(divergences[1], rel=1e-3)
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    error = (outputs[0][0] - outputs[0][1]).norm() / outputs[0][1].norm()
    assert error < 0.05


def test_a_file_of_a_forward_that_changes_its_input_computes_the_same(
    overwriting, tmp_path
):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, _ = overwriting
    given = SAMPLES.clone()
    quantized = ompq.quantize(model, {"*": 8}, given)
    ompq.export(quantized, tmp_path / "net.onnx", given)
    assert torch.equal(given, SAMPLES)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: SAMPLES.numpy()})
    with torch.no_grad():
        expected = quantized(SAMPLES.clone())
    assert np.abs(found - expected.numpy()).max() < 0.05 * expected.abs().max()


def test_a_generator_is_read_once():
    model = nn.Sequential(nn.Linear(6, 6), nn.TransformerEncoderLayer(6, 2, 8))
    parts = (part for part in torch.randn(4, 3, 6).split(2))
    assert len(ompq.trace(model, parts)) > 4


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def export_path(tmp_path, name):
    pytest.importorskip("onnxruntime")
    return tmp_path / f"{name}.onnx"


@pytest.mark.parametrize(
    "setting", [default_dtype, torch.inference_mode, lambda: torch.device("meta")]
)
def test_settings_of_the_caller_change_nothing(setting, tmp_path):
    model, samples = seeded(TinyResNet()), images(8)
    labels = torch.arange(8) % 4
    config = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))

    def results(name):
        plan = ompq.plan(model, samples, "4bits")
        quantized = ompq.quantize(model, plan, samples)
        better = ompq.reconstruct(quantized, model, samples, config)
        path = export_path(tmp_path, name)
        ompq.export(better, path, samples)
        trained = ompq.train(better, [(samples, labels)], ompq.TrainConfig(epochs=1))
        weights = [value.tolist() for value in trained.state_dict().values()]
        result = ompq.evaluate(trained, [(samples, labels)], reference=model)
        found = result.top1, result.divergence, weights
        return plan.scores.damage.tolist(), path.read_bytes(), found

    plain = results("plain")
    with setting():
        inside = torch.get_default_dtype(), torch.get_default_device()
        assert results("set") == plain
        assert (torch.get_default_dtype(), torch.get_default_device()) == inside
