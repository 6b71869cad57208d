"""Phases: names of their groups, and activations that stay float for a while."""

import torch
from torch import nn

from nets import Chain, images, seeded
from ompq.layers import activation_quantizers
from ompq.reconstruction.phases import Phase, float_activations
from quantized import quantized


def phase(**given):
    groups = [("stem",), ("a", "b")]
    return Phase(groups, 3, lambda *_given: (0.0, 0.0), None, **given)


def test_groups_are_reported_under_the_names_of_their_blocks():
    found = phase(suffix=" (activations)").named
    assert found == {
        "stem (activations)": ("stem",),
        "a+b (activations)": ("a", "b"),
    }


def test_a_network_is_prepared_once_and_not_after_a_stop():
    begun = []
    one, network = phase(begin=begun.append), nn.Linear(1, 1)
    one.prepare(network, {})
    one.prepare(network, {"other block": 1})
    assert begun == [network, network]
    one.prepare(network, {"a+b": 1})
    assert len(begun) == 2


def test_activations_stay_float_within_the_context_alone():
    network = quantized(seeded(Chain()), images(), activation=2)
    coarse = network(images())
    switches = activation_quantizers(network).values()
    for switch in switches:
        switch.enabled = False
    free = network(images())
    for switch in switches:
        switch.enabled = True
    with float_activations(network, wanted=True):
        assert torch.equal(network(images()), free)
    with float_activations(network, wanted=False):
        assert torch.equal(network(images()), coarse)
    assert torch.equal(network(images()), coarse) and not torch.equal(free, coarse)
