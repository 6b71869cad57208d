"""Divergence as a score equals that of a copy with one rounded layer."""

import copy

import pytest
import torch
from torch.nn import functional as F

from nets import TinyResNet, images, seeded
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.scores.output_divergence import OutputDivergence
from ompq.weight_ranges import search_weight
from tables import score_inputs


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def test_divergence_equals_a_copy_with_one_rounded_weight(network, graph):
    choices = (Choice(3, 8), Choice(32, 8))
    table = OutputDivergence()(score_inputs(graph, network, images(), choices)).damage
    row = graph.names.index("block1.conv2")
    other = copy.deepcopy(network)
    weight = other.block1.conv2.weight
    with torch.no_grad():
        weight.copy_(search_weight(weight, 3).fake(weight))
        p = F.softmax(network(images()), 1)
        q = F.softmax(other(images()), 1)
        wanted = F.kl_div(q.log(), p, reduction="batchmean")
    assert table[row, 0] == pytest.approx(wanted.item(), rel=1e-3)
    assert (table[:, 1] == 0).all()


def test_divergence_of_activations(network, graph):
    choices = (Choice(8, 2), Choice(8, 8))
    table = OutputDivergence()(score_inputs(graph, network, images(), choices)).damage
    assert (table[:, 0] > table[:, 1]).all()


def test_divergence_reports_progress_and_touches_nothing(network, graph):
    before = {k: v.clone() for k, v in network.state_dict().items()}
    seen = []
    choices = (Choice(4, 4), Choice(4, 8))
    told = score_inputs(
        graph,
        network,
        {"x": images()},
        choices,
        progress=lambda *step: seen.append(step),
    )
    OutputDivergence()(told)
    assert seen[-1] == (len(graph), len(graph), "divergence head")
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert not any(m._forward_pre_hooks for m in network.modules())
