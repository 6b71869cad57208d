"""Which activations are alive at once, and budgets for them."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from nets import Chain, TinyResNet, images, seeded
from ompq.errors import BudgetError, InfeasibleBudgetError
from ompq.graph import Choice, find_units, live_tensors, observe
from ompq.memory import Memory, memory_from_json, memory_to_json


def memory_of(model, samples, *bits):
    recording = observe(model, samples)
    graph = find_units(model, recording)
    tensors = live_tensors(recording, graph, samples[0].numel())
    choices = tuple(Choice(4, one) for one in bits)
    return Memory(tensors, choices, len(graph)), graph


def test_a_chain_holds_what_a_layer_reads_and_makes():
    memory, _ = memory_of(seeded(Chain()), images(), 8)
    # Image 3 × 8 × 8, convolution 6 × 6 × 6 with ReLU in place, means, float logits.
    expected = [3 * 64 + 6 * 36, 6 * 36 + 6, 6 + 4 * 4]
    assert memory.peak(np.zeros(2, int))[0] == max(expected)
    alive = memory.alive(np.zeros(2, int))
    assert set(expected) <= set(alive.tolist())


def test_a_shortcut_stays_alive_until_it_is_added():
    class Shortcut(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 128), nn.Linear(128, 8)

        def forward(self, x):
            return x + self.two(torch.relu(self.one(x)))

    memory, graph = memory_of(seeded(Shortcut()), torch.randn(4, 8), 4, 8)
    assert graph.names == ("one", "two")
    # While `two` runs: the input (with the bits of `one`), 128 hidden values, and 8
    # that only the sum reads, in 8 bits.
    for one, two in product((0, 1), repeat=2):
        bits = np.array([4, 8])
        sizes = 8 * bits[one] / 8, 128 * bits[two] / 8, 8
        assert memory.peak(np.array([one, two]))[0] == sum(sizes)


def test_rows_of_a_moment_are_never_below_the_truth():
    memory, graph = memory_of(seeded(TinyResNet()), images(), 4, 8)
    rng = np.random.default_rng(0)
    for _ in range(20):
        columns = rng.integers(2, size=len(graph))
        alive = memory.alive(columns)
        for moment, truth in enumerate(alive[:-1]):
            table, constant = memory.moment(moment)
            assert constant + table[np.arange(len(graph)), columns].sum() >= truth
    rows = memory_to_json(memory.tensors)
    assert memory_from_json(rows, len(graph)) == memory.tensors


CONFIG = ompq.PlanConfig(
    choices=(2, 4), activation_choices=(4, 8), score="weight_noise", tie=False
)


def best_by_hand(plan, fits):
    """The least damage among all allocations that fit, or None."""
    problem, found = plan.problem, None
    for columns in product(range(len(plan.choices)), repeat=len(plan.graph)):
        damage = plan.scores.damage[np.arange(len(columns)), columns].sum()
        if fits(problem.costs, np.array(columns)) and (found is None or damage < found):
            found = damage
    return found


@pytest.mark.parametrize(
    "budget", ["activations:340B", "total:1900B", "4bits, activations:0.33KiB"]
)
def test_a_budget_of_memory_is_kept_and_the_bits_are_the_best(budget):
    model = seeded(Chain())

    # A score that asks for wide activations, or nothing would limit them.
    def score(given):
        worth = np.array([4.0**-c.weight + 4.0**-c.activation for c in given.choices])
        return np.array([[1.0], [3.0]]) * worth

    config = ompq.PlanConfig(choices=(2, 4), activation_choices=(4, 8), score=score)
    plan = ompq.plan(model, images(), budget, config)
    limits = plan.budget.limits(plan.problem.costs)
    assert all(plan.totals[name] <= limit for name, limit in limits.items())
    expected = best_by_hand(
        plan, lambda costs, c: all(costs[n].total(c) <= m for n, m in limits.items())
    )
    assert plan.damage == pytest.approx(expected)


def test_budgets_of_memory_survive_a_file_and_are_solved_again(tmp_path):
    plan = ompq.plan(seeded(TinyResNet()), images(), "activations:2KiB", CONFIG)
    plan.save(tmp_path / "plan.json")
    again = ompq.Plan.load(tmp_path / "plan.json")
    assert again.hash == plan.hash and str(again.budget) == "activations:2KiB"
    smaller = again.with_budget("activations:1.2KiB,total:4.8KB")
    assert smaller.totals["activation_bytes"] <= 1.2 * 1024
    assert smaller.totals["total_bytes"] <= 4800
    # No layer takes such memory alone, so that none is named.
    words = (
        r"100\.00 B for activations cannot be met: allocations take from [^.]+\.\d+ B "
        r"to [^.]+\.\d+ B\. Raise it to"
    )
    with pytest.raises(InfeasibleBudgetError, match=words):
        again.with_budget("activations:100B")


def test_budgets_of_memory_that_cannot_be_read_or_known():
    with pytest.raises(BudgetError, match="total, onnx, graph may stand before a size"):
        ompq.Budget.parse("activations:3bits")
    with pytest.raises(BudgetError, match="may stand before a size"):
        ompq.Budget.parse("weights:3KiB")
    plan = ompq.plan(seeded(Chain()), images(), "4bits", CONFIG)
    with pytest.raises(BudgetError, match="plan again with such a budget"):
        plan.with_budget("activations:1KiB")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1, 2, 3]], "five entries"),
        ([[8, 5, 4, [], 0]], "in order of the calls"),
        ([[8, 0, 4, [7], 0]], "readers must be a whole number from 0 to 1"),
    ],
)
def test_damaged_activations_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        memory_from_json(rows, 2)
