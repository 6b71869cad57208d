import numpy as np
import pytest
import torch
from torch import nn

from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.scores import sensitivity, weight_noise
from ompq.scores.catalogue import score_table
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.weight_noise import noise_ratios, quickly_rounded, rounded_weights
from ompq.weight_ranges import row_stacks
from tables import CHOICES, score_inputs


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


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def test_noise_is_of_the_folded_weight(graph):
    """Scaling a norm's channel scales that channel's share of the noise."""
    network = seeded(TinyResNet())
    before = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    with torch.no_grad():
        network.norm.weight.mul_(3.0)  # all channels alike: the ratio stays
    same = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    np.testing.assert_allclose(same, before, rtol=1e-4)
    with torch.no_grad():
        network.norm.weight[1:] = 0.0  # one channel is left
    other = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    assert not np.allclose(other[0], before[0], rtol=1e-2)
    np.testing.assert_allclose(other[1:], before[1:])


def test_activation_noise_counts_only_when_activations_are_chosen(network, graph):
    chosen = (Choice(4, 4), Choice(4, 8), Choice(8, 4), Choice(8, 8))
    table = score_table(
        "weight_noise", score_inputs(graph, network, images(), chosen)
    ).damage
    fixed = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    assert (table[:, 0] > table[:, 1]).all()
    # Weight and activation noise add up.
    np.testing.assert_allclose(table[:, 0] + table[:, 3], table[:, 1] + table[:, 2])
    assert (table[:, 1] > fixed[:, 1]).all()


def test_weights_that_are_zero_are_scored_without_a_warning(recwarn):
    network = seeded(Chain())
    graph = trace(network, images())
    nn.init.zeros_(network.get_parameter(graph.units[0].parameter))
    damage = Sensitivity()(score_inputs(graph, network, images(), CHOICES)).damage
    assert np.isfinite(damage).all()
    assert not damage[0].any()
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


class Mixed(nn.Module):
    """Linear maps of all kinds, and layers that are none."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2, groups=2)
        self.up_norm = nn.BatchNorm2d(6)
        self.recurrent = nn.GRU(6, 7, batch_first=True)
        self.words = nn.Embedding(5, 7)
        self.line = nn.Conv1d(7, 9, 3)
        self.head = nn.Linear(9, 5)

    def forward(self, x):  # (N, 3, 8, 8)
        x = self.stem(x).relu_()
        x = self.norm(self.grouped(x)).relu()
        x = self.up_norm(self.up(x)).flatten(2).mT[:, :20]  # (N, 20, 6)
        x = self.recurrent(x)[0]
        x = x + self.words(torch.arange(20).expand(len(x), 20) % 5)
        return self.head(self.line(x.mT).mean(2))


def trained(network):
    """Give batch norms statistics of their own."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return network


@pytest.mark.parametrize("kind", [Mixed, TinyMobileNet, TinyResNet])
def test_errors_are_the_same_one_by_one_and_in_stacks(kind, monkeypatch):
    network, inputs = trained(seeded(kind())), images(6)
    graph = trace(network, inputs)
    given = score_inputs(graph, network, inputs, CHOICES)
    alone = Sensitivity()(given).damage
    if kind is Mixed:
        assert {unit.kind for unit in graph.units} >= {"transposed", "grouped"}
        assert {unit.kind for unit in graph.units} >= {"recurrent", "embedding"}
    cuda = torch.device("cuda")  # as on a GPU, but for the device
    monkeypatch.setattr(weight_noise, "row_stacks", lambda s, _: row_stacks(s, cuda))
    monkeypatch.setitem(sensitivity._AT_ONCE, "cpu", 1 << 20)
    np.testing.assert_allclose(Sensitivity()(given).damage, alone, rtol=1e-4)
    monkeypatch.setattr(sensitivity, "_KEPT", 0)  # as of a large network
    np.testing.assert_allclose(Sensitivity()(given).damage, alone, rtol=1e-4)
