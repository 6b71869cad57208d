"""Links: layers in integers."""

import torch

from lowering_cases import finalized
from nets import (
    images,
)
from ompq.integer import links
from ompq.layers import quantized_layers


def test_weights_are_quantized_once_until_they_change(monkeypatch):
    network = finalized(weight=8)
    calls = []
    original = links.layer_weight
    monkeypatch.setattr(
        links, "layer_weight", lambda *a: calls.append(a) or original(*a)
    )
    with torch.no_grad():
        first = network(images(4))
        assert torch.equal(network(images(4)), first)
        assert len(calls) == len(quantized_layers(network))
        network.head.bias += 1.0
        torch.testing.assert_close(network(images(4)), first + 1.0, rtol=0, atol=1e-4)
        assert len(calls) == len(quantized_layers(network)) + 1
        network.block1.conv1.weight_scale.mul_(1.1)
        assert not torch.equal(network(images(4)), first + 1.0)
        assert len(calls) == len(quantized_layers(network)) + 2
