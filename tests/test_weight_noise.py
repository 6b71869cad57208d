import numpy as np
import pytest
import torch
from torch import nn

from nets import TinyMobileNet, images, seeded
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.weight_noise import noise_ratios, quickly_rounded, rounded_weights
from tables import score_inputs


def test_quickly_rounded_weights_have_their_noise_once_norms_are_folded():
    network = seeded(TinyMobileNet())
    graph = trace(network, images())
    choices = [Choice(3, 32), Choice(4, 32), Choice(8, 32, rate=2.5)]
    for unit in graph.units:
        [rounding] = quickly_rounded(network, [unit], choices)
        noise = noise_ratios([rounding], choices)[0]
        best = rounded_weights(network, unit, choices)
        weight = network.get_parameter(unit.parameter).detach()
        several = weight + rounding.errors(tuple(choices))
        scale = torch.ones(len(weight))
        if unit.norm:
            norm = network.get_submodule(unit.norm)
            scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        scale = scale.detach().view(-1, *[1] * (weight.dim() - 1))
        signal = (weight * scale).square().sum()
        for rounded, thorough, own in zip(several[:2], best, noise, strict=False):
            found = ((rounded - weight) * scale).square().sum() / signal
            assert float(own) == pytest.approx(float(found), rel=1e-4)
            least = ((thorough - weight) * scale).square().sum() / signal
            assert 0.95 * least < found < 1.6 * least
        coded = list(rounded_weights(network, unit, choices))[2]
        torch.testing.assert_close(several[2], coded, rtol=1e-4, atol=1e-6)


def test_sensitivity_of_a_network_without_gradients_is_its_noise(caplog):
    class Stepped(nn.Sequential):
        def forward(self, x):
            with torch.no_grad():
                return super().forward(x)

    network = seeded(
        Stepped(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 5))
    )
    graph = trace(network, images())
    choices = [Choice(bits, 8) for bits in (2, 4)]
    damage = Sensitivity()(score_inputs(graph, network, images(), choices)).damage
    few = [Choice(bits, 32) for bits in (2, 4)]
    found = quickly_rounded(network, graph.units, few)
    noise = noise_ratios(found, few)
    assert damage == pytest.approx(noise)
    assert "only the noise decides" in caplog.text


@pytest.mark.parametrize("factor", [0.0, 1e-20], ids=["everywhere", "in the stem"])
def test_noise_decides_where_gradients_vanish(factor):
    class Faded(nn.Sequential):
        def forward(self, x):
            x = x.flatten(1)
            return self[2](x[:, :8] + factor * self[1](self[0](x))) * (factor > 0)

    network = seeded(Faded(nn.Linear(192, 8), nn.Linear(8, 8), nn.Linear(8, 5)))
    graph = trace(network, images())
    choices = [Choice(bits, 32) for bits in (2, 4)]
    damage = Sensitivity()(score_inputs(graph, network, images(), choices)).damage
    found = quickly_rounded(network, graph.units, choices)
    noise = noise_ratios(found, choices)
    faded = slice(None, 2 if factor else None)
    ratio = damage[faded] / noise[faded]
    assert (ratio > 0).all()
    assert ratio == pytest.approx(np.full_like(ratio, ratio[0, 0]), rel=1e-5)
