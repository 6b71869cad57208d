"""RVQuant's outliers against a sorted list, their size, and the recipe end to end."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import ompq
from nets import values
from ompq.errors import QuantizationError
from ompq.grids import Grid
from ompq.lab.weight_rules.outliers import OutlierRule, Outliers, with_outliers
from ompq.layers import ActivationQuantizer, activation_quantizers, quantized_layers
from training_script import toy


def test_the_largest_keep_sixteen_bits_and_the_rest_is_uniform():
    rows = values(4, 50).double() ** 3
    found = with_outliers(rows, 3, 0.03)
    largest = sorted(rows.abs().flatten().tolist())[-6:]  # 3 % of 200
    for row, rounded in zip(rows.tolist(), found.tolist(), strict=True):
        rest = [w for w in row if abs(w) < largest[0]]
        scale = max(map(abs, rest)) / 3  # -3 to 3
        for weight, value in zip(row, rounded, strict=True):
            if abs(weight) >= largest[0]:
                assert value == torch.tensor(weight).half().item()
            else:
                assert value == pytest.approx(round(weight / scale) * scale, abs=1e-9)


def test_gradients_pass_straight():
    rows = values(4, 50).double().requires_grad_()
    weighting = values(4, 50, seed=1).double()
    (with_outliers(rows, 3, 0.03) * weighting).sum().backward()
    assert torch.allclose(rows.grad, weighting)


def test_activations_beyond_the_range_keep_sixteen_bits():
    grid = Grid(torch.tensor(1.0), torch.tensor(0.0), 2)
    part = torch.nn.Sequential(ActivationQuantizer(grid))
    OutlierRule(part, fraction=0.02, momentum=0.9)
    x = values(1000).abs().requires_grad_()
    found = part.train()(x)
    end = sorted(x.tolist())[int(0.98 * 999)]  # of the rest, at code 3
    for value, rounded in zip(x.tolist(), found.tolist(), strict=True):
        if value > end * 3.5 / 3 + 1e-6:
            assert rounded == torch.tensor(value).half().item()
        else:
            assert rounded == pytest.approx(min(round(3 * value / end), 3) * end / 3)
    found.sum().backward()
    assert torch.equal(x.grad, torch.ones(1000))


def test_rvquant_learns_and_counts_its_outliers(tmp_path):
    model, network, data = toy(bits=3, activation=8)
    recipe = ompq.TrainConfig.from_protocol("rvquant")
    config = replace(recipe, epochs=4, batch_size=8, learning_rate=0.05, report_steps=1)
    config = replace(config, weights=Outliers(fraction=0.02))
    trained = ompq.train(network, data, config, teacher=model)
    with torch.no_grad():
        before = F.cross_entropy(network(data.inputs), data.targets)
        after = F.cross_entropy(trained(data.inputs), data.targets)
    assert after < before
    for layer in quantized_layers(trained).values():
        count, channels = layer.weight.numel(), len(layer.weight)
        few = round(0.02 * count)
        assert layer.rounding.bytes == -(-3 * count // 8) + 4 * few + 8 * channels
        assert len(layer.weight[0].unique()) <= 7 + few
    assert all(
        one.rounding is not None for one in activation_quantizers(trained).values()
    )
    with pytest.raises(QuantizationError, match="RVQuant leaves weights on no uniform"):
        ompq.save(trained.float(), tmp_path / "net.ompq.safetensors")


def test_settings_outside_their_range_are_refused():
    with pytest.raises(ValueError, match="fraction=1 must be from 0 to below 1"):
        Outliers(fraction=1)
