"""What training learns, and that it leaves the rest alone."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import ompq
from nets import TinyResNet, scenes, seeded, tokens
from ompq.entropy_coding.rates import to_multiples
from ompq.errors import TrainingError
from ompq.layers import activation_quantizers
from quantized import quantized
from training_script import QUICK, ToyData, made, state, toy


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


def test_learned_limits_are_trained(toys):
    _, network, data = toys
    trained = ompq.train(network, data, replace(QUICK, activations="clip"))
    quantizers = activation_quantizers(trained).values()
    assert all(one.gradient == "step" for one in quantizers)
    moved = [
        not torch.equal(one.scale, other.scale)
        for one, other in zip(
            activation_quantizers(network).values(),
            activation_quantizers(trained).values(),
            strict=True,
        )
    ]
    assert any(moved)


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


@pytest.mark.parametrize("more", [{"distill": 0.5}, {"batch_norm": "fold-and-train"}])
def test_what_needs_the_float_network_says_so(toys, more):
    _, network, data = toys
    with pytest.raises(ValueError, match=r"need the float network; pass teacher="):
        ompq.train(network, data, replace(QUICK, **more))


def test_a_trained_network_is_saved_loaded_and_exported(tmp_path):
    inputs = scenes(32)
    model = seeded(TinyResNet())
    network = quantized(model, inputs, weight=(3, 4, 8), activation=6)
    targets = model(inputs).argmax(1)
    trained = ompq.train(network, [(inputs, targets)], replace(QUICK, epochs=3))
    ompq.save(trained, tmp_path / "net.ompq.safetensors")
    loaded = ompq.load(tmp_path / "net.ompq.safetensors", TinyResNet)
    with torch.no_grad():
        assert torch.equal(loaded(inputs), trained(inputs))
    result = ompq.export(trained, tmp_path / "net.onnx", inputs)
    assert result.engine.top1 == result.simulated.top1 == 1.0


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


def test_steps_of_groups_are_learned():
    model, inputs = tokens(), scenes(16)
    data = ToyData(inputs, torch.arange(16) % 5)
    config = ompq.QuantizeConfig(group_size=32)
    network = ompq.quantize(model, {"*": (3, 32)}, inputs, config)
    trained = ompq.train(network, data, replace(QUICK, epochs=1, batch_size=16))
    # The same by hand: the gradient of each step, by the formula of LSQ.
    layer = copy.deepcopy(network).up
    seen = []
    hook = network.up.register_full_backward_hook(
        lambda _module, grad_in, grad_out: seen.append(grad_out[0])
    )
    given = network.up.register_forward_hook(
        lambda _module, args, _output: seen.append(args[0].detach())
    )
    F.cross_entropy(network(inputs.requires_grad_()), data.targets).backward()
    hook.remove(), given.remove()
    x, gradient = (each.flatten(0, 1) for each in seen)
    of_weight = gradient.T @ x  # (72, 40)
    grid = layer.grid_like_weight()
    position = layer.weight / grid.scale + grid.zero_point
    levels = position.round().clamp(0, 7) - grid.zero_point
    inside = (position >= 0) & (position <= 7)
    slope = of_weight * (levels - (position - grid.zero_point) * inside)
    sums = torch.stack([slope[:, :32].sum(1), slope[:, 32:].sum(1)], 1)
    shared = layer.weight.numel() / layer.weight_scale.numel()
    zero = layer.weight_zero_point
    factor = ((7 - zero).clamp(min=1) * shared).rsqrt()
    moved = layer.weight_scale - 0.05 * sums * factor
    moved = to_multiples(moved.detach())  # as a packed file holds them
    assert (moved != layer.weight_scale).float().mean() > 0.5
    torch.testing.assert_close(trained.up.weight_scale.detach(), moved)
    with pytest.raises(TrainingError, match="weights='minmax' needs one scale per cha"):
        ompq.train(network, data, replace(QUICK, weights="minmax"))
