"""What training learns: steps, rates, limits, gradients."""

import copy
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ompq
from ompq.errors import MissingExtraError
from ompq.layers import ActivationQuantizer, activation_quantizers
from ompq.quantizers import Grid
from ompq.training import run as runs
from ompq.training.run import Alone, Run
from ompq.training.step import memory_layout, training_loss
from quantized import quantized
from training_script import QUICK, equal, made, state, toy


@pytest.fixture(scope="module")
def toys():
    return toy()


def test_training_lowers_the_loss(toys):
    _, network, data = toys
    trained = ompq.train(network, data, replace(QUICK, epochs=12))

    def loss(one):
        with torch.no_grad():
            return F.cross_entropy(one(data.inputs), data.targets).item()

    assert loss(trained) < 0.5 * loss(network)


def test_a_step_is_that_of_gradient_descent(toys):
    _, network, data = toys
    config = replace(QUICK, epochs=1, batch_size=32, weight_decay=0.1, step_rate=0.5)
    trained = state(ompq.train(network, data, config))
    # The same by hand: autograd through the network, one update a kind of parameter.
    copied = copy.deepcopy(network)
    for parameter in copied.parameters():
        parameter.requires_grad_(True)
    F.cross_entropy(copied(data.inputs), data.targets).backward()
    for name, parameter in copied.named_parameters():
        rate = 0.05 * (0.5 if "scale" in name else 1.0)
        decay = 0.1 if parameter.dim() > 1 else 0.0
        moved = parameter - rate * (parameter.grad + decay * parameter)
        assert torch.allclose(trained[name], moved, rtol=1e-9), name


def test_the_rate_falls_as_a_cosine_after_a_rise(toys):
    _, network, data = toys
    run = Run(network, data, replace(QUICK, warmup=4), teacher=None)
    rates = []
    for step in range(run.steps + 1):
        run.step = step
        rates.append(run.rate())
    assert rates[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    cosine = [0.05 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
    assert rates[4:] == pytest.approx(cosine)


def test_what_is_fixed_stays(toys):
    _, network, data = toys
    config = replace(QUICK, learn_weight_scales=False, activations="fixed")
    before, after = state(network), state(ompq.train(network, data, config))
    for key in before:
        fixed = key.endswith(("scale", "zero_point"))
        assert torch.equal(before[key], after[key]) == fixed, key


def test_zeros_stay_and_scales_stay_positive_whatever_the_rate(toys):
    _, network, data = toys
    config = replace(QUICK, step_rate=1e4)
    before, after = state(network), state(ompq.train(network, data, config))
    for key, value in before.items():
        if key.endswith("zero_point"):
            assert torch.equal(value, after[key])
        if key.endswith("scale"):
            assert (after[key] >= value / 16).all()
            assert not torch.equal(value, after[key])


def test_clipping_moves_the_limit_by_the_gradient_beyond_it():
    quantizer = ActivationQuantizer(Grid(torch.tensor(0.5), torch.tensor(2.0), 3))
    quantizer.clips = True
    quantizer.scale.requires_grad = True
    x = torch.tensor([[-9.0, -0.3, 0.4, 9.0, 7.0]])
    gradient = torch.tensor([[1.0, 10.0, 100.0, 1000.0, 2000.0]])
    (quantizer(x) * gradient).sum().backward()
    # Codes 0 to 7, zero 2: the range is -2/5 of the limit to the limit, 5 steps up.
    of_limit = 3000.0 - 2 / 5 * 1.0
    before = quantizer.scale.item() * 5
    with torch.no_grad():
        quantizer.scale -= 1e-3 * quantizer.scale.grad
    assert quantizer.scale.item() * 5 == pytest.approx(before - 1e-3 * of_limit)


def test_learned_limits_are_trained(toys):
    _, network, data = toys
    trained = ompq.train(network, data, replace(QUICK, activations="clip"))
    assert not any(q.clips for q in activation_quantizers(trained).values())
    moved = [
        not torch.equal(one.scale, other.scale)
        for one, other in zip(
            activation_quantizers(network).values(),
            activation_quantizers(trained).values(),
            strict=True,
        )
    ]
    assert any(moved)


def test_steps_learn_alike_from_batches_that_are_cut():
    grid = Grid(torch.tensor(0.3), torch.tensor(0.0), 4)
    x = torch.rand(8, 5, generator=torch.Generator().manual_seed(0))

    def gradient(part):
        quantizer = ActivationQuantizer(grid)
        quantizer.scale.requires_grad = True
        quantizer(part).square().sum(1).mean().backward()
        return quantizer.scale.grad

    halves = (gradient(x[:4]) + gradient(x[4:])) / 2
    assert torch.allclose(gradient(x), halves)


def test_distillation_weighs_labels_and_the_teachers_answers():
    generator = torch.Generator().manual_seed(0)
    logits, taught = torch.randn(2, 6, 4, generator=generator).double()
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    config = ompq.TrainConfig(distill=0.3, temperature=2.0)
    p, q = (taught / 2).softmax(1), (logits / 2).softmax(1)
    divergence = (p * (p / q).log()).sum(1).mean()
    labels = -logits.softmax(1)[range(6), targets].log().mean()
    loss = training_loss(logits, targets, taught, config)
    assert torch.allclose(loss, 0.7 * labels + 0.3 * 4 * divergence)
    assert torch.allclose(training_loss(logits, targets, None, config), labels)


def test_a_student_comes_nearer_to_its_teacher(toys):
    model, network, data = toys
    network = copy.deepcopy(network)
    network.head.bias.data += torch.linspace(-1, 1, 5)  # it has much to learn
    config = replace(QUICK, distill=1.0, epochs=8)
    trained = ompq.train(network, data, config, teacher=model)
    batches = made(data)
    before = ompq.evaluate(network, batches, reference=model).divergence
    after = ompq.evaluate(trained, batches, reference=model).divergence
    assert after < 0.2 * before


def test_accumulated_gradients_are_those_of_the_whole_batch(toys):
    _, network, data = toys
    whole = state(ompq.train(network, data, QUICK))
    parts = state(ompq.train(network, data, replace(QUICK, accumulate=2)))
    assert all(torch.allclose(whole[key], parts[key], rtol=1e-9) for key in whole)


def test_one_process_needs_no_accelerate(toys, monkeypatch):
    _, network, data = toys
    expected = ompq.train(network, data, QUICK)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert equal(ompq.train(network, data, QUICK), expected)
    needed = r"accelerate is not installed. Run: pip install 'ompq\[train\]'"
    with pytest.raises(MissingExtraError, match=needed):
        ompq.train(network, data, replace(QUICK, accumulate=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MissingExtraError, match=needed):
        ompq.train(network, data, QUICK)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own
def test_a_compiled_network_learns_the_same(toys, monkeypatch):
    _, network, data = toys
    expected = state(ompq.train(network, data, replace(QUICK, epochs=1)))
    # Tracing without a break is what can go wrong; generating code takes a minute.
    traced = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", traced)
    config = replace(QUICK, epochs=1, compile=True)
    compiled = state(ompq.train(network, data, config))
    for key, value in expected.items():
        assert torch.allclose(value, compiled[key], rtol=1e-6), key


def test_gradients_are_cut_to_length(toys):
    _, network, data = toys
    config = replace(QUICK, epochs=1, batch_size=32, weight_decay=0.0)
    cut = state(ompq.train(network, data, replace(config, gradient_norm=1e-3)))
    before = state(network)
    moved = sum((cut[key] - before[key]).square().sum() for key in before) ** 0.5
    assert moved.item() == pytest.approx(0.05 * 1e-3, rel=1e-3)


class ScalingEngine(Alone):
    """Multiplies the loss before the backward pass, as Accelerate does for fp16."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def prepare(self, model, optimizer):
        self.optimizer = optimizer
        return model, self

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip_grad_norm_(self, parameters, longest):
        self.scaler.unscale_(self.optimizer)
        return super().clip_grad_norm_(parameters, longest)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self):
        self.optimizer.zero_grad()


def test_gradients_of_a_scaled_loss_are_cut_to_the_same_length(toys, monkeypatch):
    _, network, data = toys
    config = replace(QUICK, gradient_norm=0.1)
    expected = state(ompq.train(network, data, config))
    monkeypatch.setattr(runs, "make_engine", lambda *_, **__: ScalingEngine())
    found = state(ompq.train(network, data, config))
    for key, value in expected.items():
        assert torch.allclose(value, found[key], rtol=1e-6), key


def test_images_lie_channel_by_channel_of_a_pixel_on_gpus_alone():
    for device, wanted, layout in (
        ("cuda", True, torch.channels_last),
        ("cuda", False, torch.contiguous_format),
        ("cpu", True, torch.contiguous_format),
    ):
        config = ompq.TrainConfig(channels_last=wanted)
        assert memory_layout(config, torch.device(device)) is layout


def test_convolutions_of_few_channels_train_on_a_cpu():
    # In channels_last PyTorch crashes in the backward pass of this shortcut.
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 8, 1, 2), torch.nn.Flatten()
    ).eval()
    inputs = torch.rand(8, 3, 72, 72, generator=torch.Generator().manual_seed(0))
    network = quantized(model, inputs, weight=4)
    batch = inputs.contiguous(memory_format=torch.channels_last), torch.arange(8)
    trained = ompq.train(network, [batch], QUICK)
    assert not torch.equal(trained[1].weight, network[1].weight)


def test_the_protocol_of_the_paper():
    protocol = ompq.TRAIN_PROTOCOLS["paper-qat"]
    assert (protocol.epochs, protocol.batch_size) == (90, 128)
    assert protocol.learning_rate == protocol.weight_decay == 1e-4
    assert ompq.PLAN_PROTOCOLS["paper-qat"].choices == (4, 5, 6, 7, 8)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("norms", ["folded", "fold-and-train"])
def test_a_recorded_step_learns_the_same(norms):
    model, network, data = toy()
    model, network = model.cuda(), network.cuda()
    data = replace(data, inputs=data.inputs.cuda(), targets=data.targets.cuda())
    config = replace(QUICK, batch_norm=norms)
    expected = state(ompq.train(network, data, config, teacher=model))
    recorded = replace(config, cuda_graph=True)
    found = state(ompq.train(network, data, recorded, teacher=model))
    for key, value in expected.items():
        assert torch.allclose(value, found[key], rtol=1e-6), key


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_half_precision_learns_as_well():
    _, network, data = toy()
    network = network.float().cuda()
    data = replace(data, inputs=data.inputs.float().cuda(), targets=data.targets.cuda())
    config = replace(QUICK, epochs=12, precision="bfloat16")
    trained = ompq.train(network, data, config)
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < 0.5 * before
