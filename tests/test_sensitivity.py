import numpy as np
import pytest
from torch import nn

from catalogue_cases import CHOICES
from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.network.graph import trace
from ompq.scores import sensitivity
from ompq.scores.sensitivity import Sensitivity
from tables import score_inputs


def test_sensitivity_does_not_depend_on_batches(monkeypatch):
    network, inputs = seeded(TinyMobileNet()), images(8)
    graph = trace(network, inputs)
    whole = Sensitivity()(score_inputs(graph, network, inputs, CHOICES)).damage
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_BATCH", 4)
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_MACS", 0)
    parts = Sensitivity()(score_inputs(graph, network, inputs, CHOICES)).damage
    # But for the means, which are those of a batch.
    assert parts == pytest.approx(whole, rel=0.5)


class Mixed(nn.Module):
    """Convolutions of several kinds, then a linear layer over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=(2, 1), dilation=(2, 1), groups=4)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.along = nn.Conv1d(8, 12, 3, padding=1)
        self.linear = nn.Linear(12, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.depthwise(self.grouped(self.stem(x)).relu()).relu()
        x = self.along(x.flatten(2)).relu()
        return self.head(self.linear(x.transpose(1, 2)).relu().mean(1))


@pytest.mark.parametrize("make", [Mixed, TinyMobileNet, TinyResNet])
def test_gradients_by_sample_give_what_outputs_of_errors_give(monkeypatch, make):
    network, inputs = seeded(make()), images(6, size=16)
    graph = trace(network, inputs)
    used, found = [], {}
    of = sensitivity._SampleGradients.of

    def recorded(*args):
        used.append(of(*args))
        return used[-1]

    for fewest in (1, 10**9):
        monkeypatch.setattr(sensitivity, "_FEWEST_POSITIONS", fewest)
        monkeypatch.setattr(sensitivity._SampleGradients, "of", recorded)
        given = score_inputs(graph, network, inputs, CHOICES)
        found[fewest] = Sensitivity()(given).damage
    both = len(used) // 2
    assert sum(one is not None for one in used[:both]) >= len(graph) - 1
    assert used[both:] == [None] * both
    np.testing.assert_allclose(found[1], found[10**9], rtol=1e-4)


def test_an_input_that_is_changed_later_leaves_the_noise_to_decide(monkeypatch, caplog):
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            x = self.first(x).relu()
            y = self.second(x)
            x.mul_(2)
            return self.head((x + y).mean((2, 3)))

    monkeypatch.setattr(sensitivity, "_FEWEST_POSITIONS", 1)
    network, inputs = seeded(Changed()), images(4)
    graph = trace(network, inputs)
    damage = Sensitivity()(score_inputs(graph, network, inputs, CHOICES)).damage
    assert np.isfinite(damage).all()
    assert "what a layer reads is changed in place later" in caplog.text
