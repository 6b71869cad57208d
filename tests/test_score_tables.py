"""Tables of scores."""

import numpy as np
import pytest

from nets import TinyResNet, images, seeded
from ompq.network.graph import trace
from ompq.score_tables import ScoreTable
from ompq.scores.catalogue import score_table
from tables import CHOICES, score_inputs


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def test_tables_keep_nine_digits(network, graph):
    def score(given):
        rows = [[1 / 3, -2e30 / 3, 0.0]] * len(given.graph)
        return ScoreTable(np.array(rows), gamma=np.full(len(graph), 2e-9 / 3))

    table = score_table(score, score_inputs(graph, network, images(), CHOICES))
    assert table.damage[0].tolist() == [0.333333333, -6.66666667e29, 0.0]
    assert table.gamma[0] == 6.66666667e-10
