"""Rounding rules of training: min-max weights, running ranges, as in HAWQ-V3."""

import copy

import pytest
import torch

from nets import TinyResNet, scenes, seeded
from ompq.grids import Grid
from ompq.layers import ActivationQuantizer, quantized_layers
from ompq.training.batch_norms import fold_norms, keep_norms
from ompq.training.rounding_rules import ActivationRanges, WeightRanges
from quantized import quantized
from training_script import hawq, state


@pytest.fixture(scope="module")
def toys():
    return hawq()


def symmetric(weight, bits):
    """Round as HAWQ-V3 defines it, channel by channel, with Python's own numbers."""
    levels = 2 ** (bits - 1) - 1
    rows = []
    for channel in weight:
        scale = max(abs(value) for value in channel.flatten().tolist()) / levels
        codes = [round(value / scale) for value in channel.flatten().tolist()]
        assert all(abs(code) <= levels for code in codes)
        rows.append(torch.tensor([scale * code for code in codes]).double())
    return torch.stack(rows).reshape(weight.shape)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_are_rounded_as_the_recipe_defines(bits):
    network = quantized(seeded(TinyResNet()), scenes(16), weight=bits).double()
    WeightRanges(network)
    for layer in quantized_layers(network).values():
        expected = symmetric(layer.weight, bits)
        assert torch.allclose(layer.rounded_weight(), expected, rtol=1e-6)


def test_scales_are_those_of_the_folded_weight(toys):
    model, network, _, _ = toys
    kept, alone = copy.deepcopy(network), copy.deepcopy(network)
    keep_norms(kept, model)
    WeightRanges(kept)
    fold_norms(kept)
    WeightRanges(alone)
    for one, other in zip(state(kept).values(), state(alone).values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9)


def test_the_gradient_of_every_weight_passes_straight():
    network = quantized(seeded(TinyResNet()), scenes(16), weight=3)
    WeightRanges(network)
    for layer in quantized_layers(network).values():
        layer.weight.requires_grad_(True)
        weighting = torch.rand_like(layer.weight)
        (layer.rounded_weight() * weighting).sum().backward()
        assert torch.equal(layer.weight.grad, weighting)  # the largest one's, too


def quantizer(zero_point, bits=4):
    made = ActivationQuantizer(Grid(torch.tensor(1.0), torch.tensor(zero_point), bits))
    made.gradient = "straight"
    return made


@pytest.mark.parametrize("signed", [False, True])
def test_ranges_of_activations_are_running_means(signed):
    part = torch.nn.Sequential(quantizer(3.0 if signed else 0.0))
    ranges = ActivationRanges(part, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    low = high = None
    for _ in range(4):
        x = torch.randn(5, 7, generator=generator)
        x = x if signed else x.relu()
        smallest, largest = min(x.flatten().tolist()), max(x.flatten().tolist())
        low = smallest if low is None else 0.9 * low + 0.1 * smallest
        high = largest if high is None else 0.9 * high + 0.1 * largest
        out = part.train()(x)
        scale = max(-low, high) / 7 if signed else high / 15
        assert part[0].scale.item() == pytest.approx(scale, rel=1e-5)
        ends = (-8, 7) if signed else (0, 15)
        expected = (x / part[0].scale).round().clamp(*ends) * part[0].scale
        assert torch.allclose(out, expected)
    before = part[0].scale.item()
    part.eval()(100 * x)
    assert part[0].scale.item() == before
    ranges.detach()
    part.train()(100 * x)
    assert part[0].scale.item() == before
    assert part.state_dict().keys() == {"0.scale", "0.zero_point"}


def test_calibrated_ranges_stay_until_the_first_batch():
    # Codes 0 to 15 around 3 reach from -3 to 12; around 8, 12 must be 7 levels away.
    signed, unsigned = quantizer(3.0), quantizer(0.0)
    ActivationRanges(torch.nn.Sequential(signed, unsigned), momentum=0.9)
    assert signed.scale.item() == pytest.approx(12 / 7)
    assert signed.zero_point.item() == 8
    assert unsigned.scale.item() == 1 and unsigned.zero_point.item() == 0


def test_gradients_pass_straight_beyond_the_range_too():
    x = torch.tensor([-9.0, 0.3, 99.0], requires_grad=True)
    out = quantizer(0.0)(x)
    assert out.tolist() == [0.0, 0.0, 15.0]
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 3.0]
