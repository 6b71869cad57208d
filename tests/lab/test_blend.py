"""The blend of two scores."""

import numpy as np
import pytest

from nets import TinyResNet, images, seeded
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.scores.catalogue import score_table
from tables import score_inputs

CHOICES = (Choice(2, 8), Choice(4, 8), Choice(8, 8))


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def test_blend_is_the_geometric_mean_of_two_scaled_tables(network, graph):
    for choices, at in (((*CHOICES, Choice(3, 8)), 3), (CHOICES, 1)):
        blend, one, other = (
            score_table(name, score_inputs(graph, network, images(), choices)).damage
            for name in ("blend", "output_divergence", "weight_noise")
        )
        wanted = np.sqrt(one / one[:, at].mean() * other / other[:, at].mean())
        np.testing.assert_allclose(blend, wanted, rtol=1e-6)


def test_blend_with_nothing_to_lose_is_nothing(network, graph):
    table = score_table(
        "blend", score_inputs(graph, network, images(), [Choice(32, 8)])
    ).damage
    assert (table == 0).all()
