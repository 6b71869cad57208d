"""The change of ORM against a copy with a rounded weight."""

import copy

import numpy as np
import pytest

from nets import TinyResNet, images, seeded
from ompq.errors import ScoreError
from ompq.network.graph import trace
from ompq.network.observation import watch
from ompq.network.units import Choice
from ompq.scores.catalogue import score_table
from ompq.scores.orthogonality import measure_orm
from ompq.weight_ranges import search_weight
from tables import score_inputs


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def orm_matrix(features, *, centred=False):
    """ORM in feature space, pair by pair, as the paper writes it."""
    flat = [f.flatten(1).double() for f in features]
    if centred:
        flat = [f - f.mean(0) for f in flat]

    def orm(a, b):
        return (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())

    return np.array([[float(orm(a, b)) for b in flat] for a in flat])


def kept_features(network, graph, batch):
    """All features of all units at once, which the streaming pass never holds."""
    found = {}

    def visit(position, function, args, kwargs, output):
        found[position] = output.clone()

    watch(network, batch, visit)
    return {unit.name: found[unit.feature] for unit in graph.units}


NARROW = (Choice(2, 8), Choice(3, 8), Choice(32, 8))


def test_orm_shift_is_that_of_a_copy_with_one_rounded_weight(network, graph):
    table = score_table(
        "orm_shift", score_inputs(graph, network, images(), NARROW)
    ).damage
    labels = measure_orm(graph, network, images()).labels

    def orm_sum(network):
        features = kept_features(network, graph, images())
        return orm_matrix([features[name] for name in labels]).sum()

    for name in ("stem", "block2.conv1"):
        other = copy.deepcopy(network)
        weight = other.get_submodule(name).weight
        weight.data = search_weight(weight, 2).fake(weight).detach()
        wanted = abs(orm_sum(other) - orm_sum(network))
        row = graph.names.index(name)
        assert table[row, 0] == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert (table[:, 2] == 0).all()


@pytest.mark.parametrize("name", ["fisher", "gradient", "hessian", "orm_shift"])
def test_scores_of_weights_refuse_a_choice_of_activations(network, graph, name):
    choices = (Choice(4, 4), Choice(4, 8))
    with pytest.raises(
        ScoreError, match=rf"{name} judges only weights.* \[4, 8\] bits"
    ):
        score_table(name, score_inputs(graph, network, images(), choices))
