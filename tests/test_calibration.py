"""Calibration sees at each site what its layer reads."""

import pytest
import torch

from nets import Chain, images, seeded
from ompq.network.graph import trace
from ompq.network.observation import record
from ompq.network.units import Choice
from ompq.outputs import Outputs
from ompq.progress import no_progress
from ompq.quantization.activation_sites import find_sites
from ompq.quantization.calibration import read_ranges, weigh_ranges
from ompq.samples import Samples

MODEL, SAMPLES = seeded(Chain()).eval(), Samples.of(images())


@pytest.fixture(scope="module")
def sites():
    graph = trace(MODEL, images())
    bits = dict.fromkeys(graph.names, Choice(8, 8))
    return find_sites(MODEL, record(MODEL, images()), graph, bits)[0]


@pytest.mark.parametrize("batch_size", [3, 8])
def test_ranges_are_those_of_the_layers_inputs(sites, batch_size):
    seen = read_ranges(MODEL, SAMPLES, sites, batch_size=batch_size, report=no_progress)
    with torch.no_grad():
        hidden = MODEL.conv(images()).relu()
    inputs = (images(), hidden, hidden.mean((2, 3)))  # of conv, the mean and head
    assert len(seen) == len(sites) == len(inputs)
    for one, x in zip(seen, inputs, strict=True):
        ends = float(x.min()), float(x.max())
        assert (float(one.low), float(one.high)) == pytest.approx(ends)
        assert int(one.counts.sum()) == x.numel()


def test_importance_is_added_where_values_are(sites):
    options = {"batch_size": 8, "report": no_progress}
    seen = read_ranges(MODEL, SAMPLES, sites, **options)
    outputs = Outputs.of(MODEL, SAMPLES)
    found = weigh_ranges(MODEL, SAMPLES, sites, seen, outputs, **options)
    assert all(one.importance is None for one in seen)
    for before, after in zip(seen, found, strict=True):
        assert torch.equal(before.counts, after.counts)
        # What no value fell into has no gradient.
        assert after.importance is not None and float(after.importance.sum()) > 0
        assert float(after.importance[before.counts == 0].abs().sum()) == 0
    assert all(parameter.requires_grad for parameter in MODEL.parameters())
