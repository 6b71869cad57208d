"""A verb leaves its arguments as it found them: weights, modes, hooks, generators."""

import copy

import pytest
import torch

import ompq
from nets import TinyMobileNet, scenes, seeded

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
