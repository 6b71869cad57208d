"""The settings of training, and its step."""

from dataclasses import replace

import pytest
import torch

import ompq
from ompq.costs import can_be_coded, coded_bytes
from ompq.entropy_coding.rates import code_bits, code_bytes
from ompq.errors import QuantizationError
from ompq.grids import Grid
from ompq.layers import ActivationQuantizer, quantized_layers
from ompq.network.units import Choice
from ompq.training.step import (
    CodePenalty,
    cross_entropy,
    memory_layout,
    with_distillation,
)
from quantized import quantized
from training_script import QUICK, state, toy


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": 0}, r"'epochs' of TrainConfig must be at least 1"),
        ({"epochs": 2.5}, r"'epochs' of TrainConfig must be a whole number"),
        ({"epochs": True}, r"'epochs' of TrainConfig must be a whole number"),
        ({"warmup": -1}, r"'warmup' of TrainConfig must be at least 0"),
        (
            {"gradient_norm": float("nan")},
            "'gradient_norm' of TrainConfig must be a number",
        ),
        ({"momentum": 1}, "'momentum' of TrainConfig must be at least 0 and below 1"),
        (
            {"range_momentum": 1.0},
            "'range_momentum' of TrainConfig must be at least 0 and below 1",
        ),
        ({"distill": 2}, r"'distill' of TrainConfig must be from 0 to 1"),
        ({"weight_decay": "x"}, r"'weight_decay' of TrainConfig must be a number"),
        ({"compile": 1}, r"'compile' of TrainConfig must be True or False"),
        ({"tensorboard": 3}, r"'tensorboard' of TrainConfig must be text or None"),
        ({"learning_rate": 0.0}, "'learning_rate' of TrainConfig must be above 0"),
        ({"distill": 1.5}, r"'distill' of TrainConfig must be from 0 to 1"),
        ({"weights": "dorfa"}, "'weights' of TrainConfig must be one of 'stored'"),
        ({"weights": 3}, "'weights' of TrainConfig must be text or a function"),
        ({"keep": "lats"}, "must be one of 'best', 'last'"),
        ({"keep": "all"}, "'keep' of TrainConfig must be one of 'best', 'last'"),
        (
            {"activations": "no"},
            "'activations' of TrainConfig must be one of 'step', 'clip'",
        ),
        (
            {"code_penalty": 1.0, "weights": "minmax"},
            r"code_penalty=1 needs weights='stored' and batch_norm='folded', not 'min",
        ),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        ompq.TrainConfig(**wrong)


def test_the_protocol_of_the_paper():
    protocol = ompq.TrainConfig.from_protocol("paper-qat")
    assert protocol == ompq.TrainConfig.from_protocol("hawq-v3")
    assert (protocol.weights, protocol.activations) == ("minmax", "ema")
    assert (protocol.start, protocol.distill) == ("float", 0.0)
    assert (protocol.batch_norm, protocol.freeze_norm_epoch) == ("fold-and-train", 0)
    assert ompq.TrainConfig.from_protocol("ours") == ompq.TrainConfig()
    assert (protocol.epochs, protocol.batch_size) == (90, 128)
    assert protocol.learning_rate == protocol.weight_decay == 1e-4
    assert ompq.PlanConfig.from_protocol("paper-qat").choices == (4, 5, 6, 7, 8)


def test_clipping_moves_the_limit_by_the_gradient_beyond_it():
    quantizer = ActivationQuantizer(Grid(torch.tensor(0.5), torch.tensor(2.0), 3))
    quantizer.gradient = "clip"
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
    loss = cross_entropy(logits, targets, config)
    assert torch.allclose(loss, labels)
    assert with_distillation(loss, logits, None, config) is loss
    mixed = with_distillation(loss, logits, taught, config)
    assert torch.allclose(mixed, 0.7 * labels + 0.3 * 4 * divergence)
    # Logits of a segmentation, (N, classes, H, W), are those of its pixels.
    dense, other = (
        one.view(2, 3, 1, 4).permute(0, 3, 1, 2) for one in (logits, taught)
    )
    assert torch.allclose(with_distillation(loss, dense, other, config), mixed)


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


def coded_toy(rate=4.0):
    """Return the toy with weights that may take so many bits."""
    model, _, data = toy()
    choice = Choice(8, 8, rate)
    bits = {
        unit.name: choice if can_be_coded(unit, choice) else Choice(8, 8)
        for unit in ompq.trace(model.float(), data.inputs.float()).units
    }
    network = ompq.quantize(model, ompq.Allocation(bits), data.inputs.float())
    return network, replace(data, inputs=data.inputs.float())


def test_a_penalty_on_codes_makes_them_take_fewer_bytes():
    network, data = coded_toy()
    sizes = []
    for penalty in (0.0, 30.0):
        config = replace(QUICK, code_penalty=penalty, learning_rate=0.02)
        trained = quantized_layers(ompq.train(network, data, config)).values()
        taken = [(code_bytes(x.codes()), x) for x in trained if x.rate]
        for size, layer in taken:
            assert size <= coded_bytes(layer.weight.numel(), layer.rate)
        sizes.append(sum(size for size, _ in taken))
    assert sizes[1] < 0.9 * sizes[0]


def test_the_penalty_is_the_mean_bits_of_coded_weights():
    network, _ = coded_toy()
    layers = [x for x in quantized_layers(network).values() if x.rate]
    for layer in layers:  # exactly on their codes, where nothing is interpolated
        layer.weight.data.copy_(layer.rounded_weight())
    count = sum(layer.weight.numel() for layer in layers)
    bits = [code_bits(x.codes())[x.codes().long()].sum() for x in layers]
    expected = 0.5 * float(sum(bits)) / count
    assert CodePenalty(network, 0.5)().item() == pytest.approx(expected, rel=1e-4)


def test_a_penalty_on_codes_needs_coded_weights():
    _, network, _ = toy()
    with pytest.raises(QuantizationError, match="code_penalty=0.1 needs coded weights"):
        CodePenalty(network, 0.1)
