import json
import re

import pytest
import torch
from torch import nn

from nets import TinyMobileNet, images, seeded
from ompq.allocation.solver import Allocation
from ompq.graph import Choice, trace
from ompq.onnx.policies import modelopt_policy, plain_policy, torchao_policy


def decided(network, *choices):
    graph = trace(network, images(2))
    bits = {n: choices[i % len(choices)] for i, n in enumerate(graph.names)}
    return graph, Allocation(bits)


def test_plain_policy_says_it_all():
    graph, bits = decided(seeded(TinyMobileNet()), Choice(3, 8), Choice(8, 4))
    policy = plain_policy(bits, "net.py:make")
    data = json.loads(json.dumps(policy.config))
    assert data["network"] == "net.py:make"
    assert {n: (b["weight"], b["activation"]) for n, b in data["bits"].items()} == {
        n: tuple(bits[n]) for n in graph.names
    }
    assert policy.lost == ()


def rows():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4))


def test_torchao_gets_linear_layers_as_its_own_encoder_writes_them():
    graph, bits = decided(seeded(rows()), Choice(4, 32), Choice(3, 4))
    layers = torchao_policy(graph, bits).config["_data"]["fqn_to_config"]
    assert list(layers) == ["1", "3"]
    assert layers["1"]["_type"] == "IntxWeightOnlyConfig"
    assert layers["1"]["_data"] == {
        "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
        "granularity": {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}},
    }
    assert layers["3"]["_type"] == "Int8DynamicActivationIntxWeightConfig"
    assert getattr(torch, layers["3"]["_data"]["weight_dtype"]["_data"]) is torch.int3
    lost = " ".join(torchao_policy(graph, bits).lost)
    assert "activations below 8 bits: 3" in lost
    assert "fixed ranges of activations" in lost


def test_torchao_config_can_be_read_by_torchao():
    config = pytest.importorskip("torchao.core.config")
    graph, bits = decided(seeded(rows()), Choice(4, 32), Choice(3, 8))
    found = config.config_from_dict(dict(torchao_policy(graph, bits).config))
    assert set(found.fqn_to_config) == {"1", "3"}


def test_what_torchao_cannot_say_is_returned():
    graph, bits = decided(seeded(TinyMobileNet()), Choice(4, 8))
    policy = torchao_policy(graph, bits)
    count = sum(unit.kind != "linear" for unit in graph.units)
    assert re.search(rf"{count} layers that are not linear: stem", policy.lost[2])


def test_modelopt_turns_everything_off_and_names_each_quantizer():
    graph, bits = decided(seeded(TinyMobileNet()), Choice(3, 8), Choice(32, 32))
    first, *entries = modelopt_policy(graph, bits).config["quant_cfg"]
    assert first == {"quantizer_name": "*", "enable": False}
    quantized = [n for n in graph.names if bits[n].weight == 3]
    assert [one["quantizer_name"] for one in entries] == [
        f"{name}.{end}"
        for name in quantized
        for end in ("weight_quantizer", "input_quantizer")
    ]
    assert entries[0]["cfg"] == {"num_bits": 3, "axis": 0}
    assert entries[1]["cfg"] == {"num_bits": 8, "axis": None}


def test_projections_without_a_module_are_lost_to_modelopt():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    graph = trace(Attention(), torch.randn(2, 5, 8))
    bits = Allocation(dict.fromkeys(graph.names, Choice(8, 32)))
    assert "projections without a module" in modelopt_policy(graph, bits).lost[-1]
