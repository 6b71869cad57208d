"""The scores that others are compared with."""

import numpy as np
import pytest

from nets import TinyResNet, images, seeded
from ompq.network.graph import trace
from ompq.scores.baselines import Random
from ompq.scores.catalogue import score_table
from tables import CHOICES, score_inputs


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def test_random_is_seeded(network, graph):
    tables = [
        Random(seed)(score_inputs(graph, network, images(), CHOICES)).damage
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert not np.allclose(tables[0], tables[2])


def test_smallest_first_values_every_bit_alike(network, graph):
    table = score_table(
        "smallest_first", score_inputs(graph, network, images(), CHOICES)
    ).damage
    assert (table == table[0]).all()
    assert table[0, 0] - table[0, 2] == 6
