import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision import models

from nets import Chain, TinyResNet, images, seeded
from ompq.costs import cost_tables, load_latency, unit_bytes
from ompq.errors import BudgetError
from ompq.graph import Choice, trace

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def graph():
    return trace(seeded(Chain()), images())


@pytest.fixture(scope="module")
def published():
    return json.loads((FIXTURES / "published_bit_configs.json").read_text())


@pytest.fixture(scope="module")
def networks():
    found = {}
    for name, key in [
        ("resnet18",) * 2,
        ("resnet50",) * 2,
        ("mobilenet_v2", "mobilenetv2"),
    ]:
        with torch.device("meta"):
            network = models.get_model(name, weights=None)
        network = network.to_empty(device="cpu")
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data.zero_()
        found[key] = trace(network, torch.zeros(1, 3, 224, 224))
    return found


def test_bytes_item_by_item(graph):
    conv = graph["conv"]  # 6 × 3 × 3 × 3 weights
    items = unit_bytes(conv, Choice(3, 8))
    assert items.weights == math.ceil(162 * 3 / 8) == 61
    assert (items.scales, items.zero_points, items.biases) == (24, 6, 24)
    assert items.activations == 8
    assert items.total == 61 + 24 + 6 + 24 + 8
    assert unit_bytes(conv, Choice(32, 8)).total == 4 * (162 + 6)


def test_tables_by_hand(graph):
    choices = [Choice(2, 8), Choice(4, 6)]
    costs = cost_tables(graph, choices)
    assert costs["bit_ops"].table[0].tolist() == [5832 * 16.0, 5832 * 24.0]
    assert costs["weight_bits"].table[1].tolist() == [24 * 2.0, 24 * 4.0]
    assert costs["weight_bits"].reference == 162 + 24
    assert costs["bytes"].reference == 4 * (162 + 6 + 24 + 4)
    assert costs["bytes"].constant == 0


def test_what_stays_float_is_a_constant():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    costs = cost_tables(trace(seeded(network), torch.ones(2, 4)), [Choice(4, 8)])
    assert costs["bytes"].constant == 4 * 8


def test_published_sizes_and_bops(published, networks):
    """Every published scheme, recomputed with the released conventions."""
    checked = 0
    for scheme in published:
        graph = networks.get(scheme["model"])
        bits = dict(zip(scheme["layers"], scheme["weight_bits"], strict=True))
        inputs = dict(zip(scheme["layers"], scheme["act_in_bits"], strict=True))
        if graph is None or not set(graph.names) <= set(bits):
            continue
        size = ops = 0.0
        for unit in graph.units:
            choice = Choice(bits[unit.name], inputs[unit.name])
            alone = type(graph)((unit,))
            costs = cost_tables(alone, [choice], accounting="paper")
            size += costs["bytes"].table.item()
            ops += costs["bit_ops"].table.item()
        wanted = scheme["computed"]
        assert size / 2**20 == pytest.approx(
            wanted["weights_bn_bias_at_layer_bits_MiB"], abs=1e-4
        )
        assert ops / 1e9 == pytest.approx(wanted["bops_G"], abs=1e-3)
        checked += 1
    assert checked >= 30


def test_unknown_accounting_is_refused(graph):
    with pytest.raises(ValueError, match="accounting='odd' is unknown; use packed or"):
        cost_tables(graph, [Choice(4, 8)], accounting="odd")


def test_latency_table_round_trip(graph, tmp_path):
    table = {"conv": {"W4A8": 0.5, "W8A8": 0.6}, "head": {"W4A8": 0.1, "W8A8": 0.1}}
    path = tmp_path / "latency.json"
    path.write_text(json.dumps(table))
    costs = cost_tables(graph, [Choice(4, 8), Choice(8, 8)], latency=load_latency(path))
    np.testing.assert_array_equal(costs["milliseconds"].table, [[0.5, 0.6], [0.1, 0.1]])


def test_incomplete_latency_table_says_what_is_missing(graph):
    with pytest.raises(
        BudgetError, match="the latency table lacks conv W2A8, head W2A8"
    ):
        cost_tables(graph, [Choice(2, 8)], latency={"conv": {"W4A8": 1.0}})


@pytest.mark.parametrize("text", ["[1]", "{", '{"conv": 3}'])
def test_broken_latency_file_is_refused(tmp_path, text):
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(BudgetError, match="is no latency table: .* Write JSON such as"):
        load_latency(path)


def test_tied_units_are_counted_each():
    graph = trace(seeded(TinyResNet()), images())
    costs = cost_tables(graph, [Choice(4, 8)])
    assert costs["bytes"].table.shape == (len(graph), 1)
