"""DoReFa weights against their formula, and PACT's recipe end to end."""

import math
from dataclasses import replace

import pytest
import torch

import ompq
from nets import TinyResNet, scenes, seeded, values
from ompq.integer.engine import IntegerNetwork
from ompq.lab.weight_rules.dorefa import DoReFaWeights, dorefa, dorefa_levels
from ompq.layers import quantized_layers
from quantized import quantized
from training_script import loss, toy

RECIPE = replace(
    ompq.TrainConfig.from_protocol("pact"),
    epochs=4,
    batch_size=8,
    learning_rate=0.05,
    report_steps=1,
)


def published(weights, bits):
    """Round as DoReFa-Net writes it, with Python's own numbers."""
    bent = [math.tanh(w) for w in weights]
    largest, steps = max(map(abs, bent)), 2**bits - 1
    rounded = [round(steps * (b / (2 * largest) + 0.5)) / steps for b in bent]
    return [2 * r - 1 for r in rounded]


@pytest.mark.parametrize("bits", [2, 3, 6])
def test_the_formula(bits):
    weight = values(40).double()
    found = dorefa(weight, dorefa_levels(torch.tensor(float(bits))))
    assert found.tolist() == pytest.approx(published(weight.tolist(), bits))


def test_gradients_pass_straight_through_the_rounding():
    weight = values(9).double().requires_grad_()
    dorefa(weight, torch.tensor(7.0)).square().sum().backward()
    smooth = weight.detach().clone().requires_grad_()
    bent = torch.tanh(smooth) / torch.tanh(smooth).abs().max()
    (bent * 2 * dorefa(smooth, torch.tensor(7.0)).detach()).sum().backward()
    assert torch.allclose(weight.grad, smooth.grad)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_one_number_a_layer_fits_the_values_to_the_weights(bits):
    network = quantized(seeded(TinyResNet()), scenes(16), weight=bits).double()
    before = [x.weight.detach().clone() for x in quantized_layers(network).values()]
    DoReFaWeights(network)
    for layer, weight in zip(quantized_layers(network).values(), before, strict=True):
        rounded = layer.rounded_weight().detach()
        unit = dorefa(weight, dorefa_levels(torch.tensor(float(bits))))
        size = float(rounded.abs().max() / unit.abs().max())
        assert torch.allclose(rounded, size * unit)
        assert (rounded - weight).norm() <= (1.01 * size * unit - weight).norm()
        assert (rounded - weight).norm() <= (0.99 * size * unit - weight).norm()


def test_eight_bits_have_a_code_for_zero():
    assert dorefa_levels(torch.tensor([6.0, 7.0, 8.0])).tolist() == [63, 126, 254]


def test_pact_learns_and_ends_in_integers():
    model, network, data = toy(bits=4, activation=4)
    with torch.no_grad():
        model.block1.bn1.weight.mul_(-1)  # a channel may be multiplied by less than 0
    trained = ompq.train(network, data, RECIPE, teacher=model)
    assert trained.state_dict().keys() == network.state_dict().keys()
    assert loss(trained, data) < loss(network, data)
    for layer in quantized_layers(trained).values():
        assert torch.allclose(layer.rounded_weight(), layer.weight, rtol=1e-9)
        assert set(layer.weight_zero_point.tolist()) == {7.5}
    small, inputs = trained.float(), data.inputs.float()
    final = ompq.finalize(small, inputs[:8])
    engine = IntegerNetwork.from_quantized(final, inputs[:8])
    with torch.no_grad():
        assert torch.allclose(engine(inputs), final(inputs), atol=1e-5)
