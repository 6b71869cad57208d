"""Scores from derivatives against exact ones."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nets import TinyResNet, images, seeded
from ompq.errors import SampleError
from ompq.lab.more_scores.blend import Blend
from ompq.lab.more_scores.loss_gradients import Fisher, Gradient, Hessian
from ompq.lab.more_scores.orm_shift import OrmShift
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.scores.catalogue import score_table
from ompq.weight_ranges import search_weight
from tables import score_inputs


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


class Pair(nn.Module):
    """Small enough for its whole Hessian to be computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


NARROW = (Choice(2, 8), Choice(3, 8), Choice(32, 8))


@pytest.fixture(scope="module")
def pair():
    network = seeded(Pair())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(6, 3, generator=generator)
    labels = torch.randint(3, (6,), generator=generator)
    return network, trace(network, inputs), inputs, labels


def outputs(network, inputs, name, weight):
    return torch.func.functional_call(network, {f"{name}.weight": weight}, inputs)


def rounded(network, name, bits):
    weight = network.get_parameter(f"{name}.weight").detach()
    return weight if bits == 32 else search_weight(weight, bits).fake(weight)


@pytest.mark.parametrize("labelled", [False, True])
def test_hessian_is_the_mean_of_the_exact_diagonal_times_the_error(pair, labelled):
    network, graph, inputs, labels = pair
    answers = network(inputs).softmax(1).detach()
    target = labels if labelled else answers
    batches = [(inputs[:4], labels[:4]), (inputs[4:], labels[4:])] if labelled else None
    table = score_table(
        Hessian(probes=2000, batches=batches),
        score_inputs(graph, network, inputs, NARROW),
    )
    for row, name in enumerate(graph.names):
        weight = network.get_parameter(f"{name}.weight").detach()
        exact = torch.autograd.functional.hessian(
            lambda w, name=name: F.cross_entropy(
                outputs(network, inputs, name, w), target
            ),
            weight,
        ).reshape(12, 12)
        for column, bits in enumerate((2, 3)):
            error = (weight - rounded(network, name, bits)).square().sum()
            wanted = exact.trace() / 12 * error
            assert table.damage[row, column] == pytest.approx(wanted.item(), rel=0.06)
    assert (table.damage[:, 2] == 0).all()


def per_sample_squares(network, inputs, labels, name):
    """Squared gradients of each sample's loss, (N, weights), without a loop."""

    def loss(weight, x, y):
        return F.cross_entropy(outputs(network, x[None], name, weight), y[None])

    weight = network.get_parameter(f"{name}.weight").detach()
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    return gradients(weight, inputs, labels).square()


def test_fisher_is_squared_gradients_times_squared_errors(pair):
    network, graph, inputs, labels = pair
    batches = [(inputs, labels)]
    table = score_table(
        Fisher(batches=batches), score_inputs(graph, network, inputs, NARROW)
    )
    for row, name in enumerate(graph.names):
        squares = per_sample_squares(network, inputs, labels, name).mean(0)
        weight = network.get_parameter(f"{name}.weight").detach()
        for column, bits in enumerate((2, 3, 32)):
            error = (weight - rounded(network, name, bits)).square()
            wanted = (squares * error).sum().item()
            assert table.damage[row, column] == pytest.approx(wanted, rel=1e-4)


def test_fisher_without_labels_draws_them_from_the_answers(pair):
    network, graph, inputs, _ = pair
    tables = [
        Fisher(seed=100 * seed)(score_inputs(graph, network, inputs, NARROW)).damage
        for seed in range(60)
    ]
    answers = network(inputs).softmax(1).detach()
    for row, name in enumerate(graph.names):
        weight = network.get_parameter(f"{name}.weight").detach()
        error = (weight - rounded(network, name, 2)).square()
        expected = 0.0
        for label in range(3):
            every = torch.full((6,), label)
            squares = per_sample_squares(network, inputs, every, name)
            expected += ((squares * error).sum((1, 2)) * answers[:, label]).mean()
        found = np.mean([table[row, 0] for table in tables])
        assert found == pytest.approx(expected.item(), rel=0.25)


@pytest.mark.parametrize("labelled", [False, True])
def test_gradient_is_the_slope_from_the_low_bit_network(pair, labelled):
    network, graph, inputs, labels = pair
    batches = [(inputs, labels)] if labelled else None
    table = score_table(
        Gradient(batches=batches), score_inputs(graph, network, inputs, NARROW)
    )
    answers = network(inputs).softmax(1).detach().double()
    low = copy.deepcopy(network)
    for name in graph.names:
        low.get_submodule(name).weight.data = rounded(network, name, 2)
    low, inputs = low.double(), inputs.double()

    def loss(name, weight):
        logits = outputs(low, inputs, name, weight)
        if labelled:
            return F.cross_entropy(logits, labels)
        return F.kl_div(logits.log_softmax(1), answers, reduction="batchmean")

    for row, name in enumerate(graph.names):
        start = low.get_parameter(f"{name}.weight").detach()
        for column, bits in enumerate((2, 3, 32)):
            step = 1e-4 * (rounded(network, name, bits).double() - start)
            slope = (loss(name, start + step) - loss(name, start - step)) / 2e-4
            found = table.damage[row, column]
            assert found == pytest.approx(slope.item(), rel=1e-3, abs=1e-7)


def test_labels_must_be_as_many_as_inputs(pair):
    network, graph, inputs, labels = pair
    batches = [(inputs, labels[:2])]
    with pytest.raises(SampleError, match="has 6 inputs and 2 labels: give one class"):
        score_table(
            Fisher(batches=batches), score_inputs(graph, network, inputs, NARROW)
        )


def test_labels_are_read_no_further_than_needed(pair):
    network, graph, inputs, labels = pair

    def endless():
        while True:
            yield inputs, labels

    few = Fisher(samples=8, batches=endless())(
        score_inputs(graph, network, inputs, NARROW)
    )
    twice = torch.cat([inputs, inputs[:2]]), torch.cat([labels, labels[:2]])
    same = Fisher(batches=[twice])(score_inputs(graph, network, inputs, NARROW))
    np.testing.assert_allclose(few.damage, same.damage)


def test_slow_scores_tell_their_progress(pair):
    network, graph, inputs, _ = pair
    for kind, steps in ((Hessian, 16), (Fisher, 6), (OrmShift, 4), (Blend, 2)):
        told = []
        kind()(
            score_inputs(
                graph,
                network,
                inputs,
                NARROW,
                progress=lambda *step, told=told: told.append(step),
            )
        )
        assert [step[0] for step in told] == list(range(1, steps + 1))
        assert told[0][2]


def test_attention_can_be_differentiated_twice():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.take, self.give = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x):  # (N, T, 4)
            q, k, v = self.take(x).chunk(3, dim=2)
            return self.give(F.scaled_dot_product_attention(q, k, v).mean(1))

    network = seeded(Attends())
    samples = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))
    graph = trace(network, samples)
    assert (
        Hessian()(score_inputs(graph, network, samples, NARROW)).damage[:, 0] > 0
    ).all()
    assert Gradient()(score_inputs(graph, network, samples, NARROW)).damage.shape == (
        2,
        3,
    )
