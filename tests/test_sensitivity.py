import pytest

from catalogue_cases import CHOICES
from nets import TinyMobileNet, images, seeded
from ompq.network.graph import trace
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
