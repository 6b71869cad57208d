import math

import pytest
import torch
from torch import nn

from ompq.quantization.layers import quantized_layer
from ompq.quantizers.grids import Grid
from ompq.reconstruction.soft_rounding import SoftRounding


def soft_rounding(weight, scale, zero, bits):
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = nn.Parameter(weight)
    channels = (weight.shape[0], 1)
    grid = Grid(torch.full(channels, scale), torch.full(channels, zero), bits)
    return SoftRounding(quantized_layer(layer, grid)), grid


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_soft_weight_starts_at_the_weight():
    weight = values(8, 50) * 0.2
    soft, _ = soft_rounding(weight, 0.1, 7.5, 4)
    torch.testing.assert_close(soft(), weight.clamp(-0.75, 0.75), atol=1e-6, rtol=0)
    assert (weight.abs() > 0.75).any()


def test_untouched_logits_round_to_nearest():
    weight = values(4, 100) * 0.2
    soft, grid = soft_rounding(weight, 0.1, 2.0, 3)
    torch.testing.assert_close(soft.hardened(), grid.fake(weight))


def test_the_gradient_is_that_of_adaround():
    soft, _ = soft_rounding(values(2, 20) * 0.2, 0.1, 8.0, 4)
    with torch.no_grad():
        soft.up.copy_(values(2, 20, seed=1))
    soft().sum().backward()
    pairs = zip(
        soft.up.flatten().tolist(), soft.up.grad.flatten().tolist(), strict=True
    )
    for logit, slope in pairs:
        s = 1 / (1 + math.exp(-logit))
        cut = not 0 < 1.2 * s - 0.1 < 1
        assert slope == pytest.approx(0 if cut else 0.12 * s * (1 - s), abs=1e-6)


def test_indecision_vanishes_when_all_have_decided():
    soft, _ = soft_rounding(values(1, 5) * 0.2, 0.1, 8.0, 4)
    with torch.no_grad():
        soft.up.copy_(torch.tensor([[0.0, 0.5, -1.0, 9.0, -9.0]]))
    for beta in (20.0, 2.0, 7.3):
        soft()
        wanted = sum(1 - abs(2 * h - 1) ** beta for h in soft.share.flatten().tolist())
        assert soft.indecision(torch.tensor(beta)).item() == pytest.approx(wanted)
    with torch.no_grad():
        soft.up.fill_(9.0)
    soft()
    assert soft.indecision(torch.tensor(2.0)).item() == 0


def test_the_scale_can_stretch():
    soft, grid = soft_rounding(values(3, 10) * 0.2, 0.1, 8.0, 4)
    before = soft.hardened()
    with torch.no_grad():
        soft.stretch.fill_(math.log(2.0))
    torch.testing.assert_close(soft.hardened(), 2 * before)
    torch.testing.assert_close(soft.learned_scale(), 2 * grid.scale)
