import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

import ompq
from nets import Chain, TinyResNet, images, seeded, tokens
from ompq.budgets import Budget
from ompq.cost_tables import ActivationMemory
from ompq.costs import cost_tables, load_latency, overhead_bytes, unit_bytes
from ompq.errors import BudgetError, InfeasibleBudgetError
from ompq.network.graph import find_units, live_tensors, observe, trace
from ompq.network.units import Choice, live_tensors_from_json
from tables import COSTS

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def graph():
    return trace(seeded(Chain()), images())


@pytest.fixture(scope="module")
def published():
    return json.loads((FIXTURES / "published_bit_configs.json").read_text())


@pytest.fixture(scope="module")
def networks():
    found = {}
    for name, key in [
        ("resnet18",) * 2,
        ("resnet50",) * 2,
        ("mobilenet_v2", "mobilenetv2"),
    ]:
        with torch.device("meta"):
            network = models.get_model(name, weights=None)
        network = network.to_empty(device="cpu")
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data.zero_()
        found[key] = trace(network, torch.zeros(1, 3, 224, 224))
    return found


def test_bytes_item_by_item(graph):
    conv = graph["conv"]  # 6 × 3 × 3 × 3 weights
    items = unit_bytes(conv, Choice(3, 8))
    assert items.weights == math.ceil(162 * 3 / 8) == 61
    assert (items.scales, items.zero_points, items.biases) == (24, 6, 24)
    assert items.activations == 8
    assert items.total == 61 + 24 + 6 + 24 + 8
    assert unit_bytes(conv, Choice(3, 32)).activations == 0
    assert unit_bytes(conv, Choice(32, 32)).total == 4 * (162 + 6)


def test_coded_bytes_are_what_the_rate_promises(graph):
    conv = graph["conv"]  # 6 × 3 × 3 × 3 weights
    items = unit_bytes(conv, Choice(8, 8, rate=2.25))
    assert items.weights == math.ceil(162 * 2.25 / 8) == 46
    assert (items.scales, items.zero_points, items.biases) == (10, 0, 12)
    latency = {name: {"W8A8": 0.5} for name in graph.names}
    costs = cost_tables(graph, [Choice(8, 8, 2.25)], latency=latency)
    assert costs["weight_bits"].table[0].tolist() == [162 * 2.25]
    assert costs["bit_ops"].table[0].tolist() == [5832 * 64.0]
    assert costs["milliseconds"].table[0].tolist() == [0.5]


def test_tables_by_hand(graph):
    choices = [Choice(2, 8), Choice(4, 6)]
    costs = cost_tables(graph, choices)
    assert costs["bit_ops"].table[0].tolist() == [5832 * 16.0, 5832 * 24.0]
    assert costs["weight_bits"].table[1].tolist() == [24 * 2.0, 24 * 4.0]
    assert costs["weight_bits"].reference == 162 + 24
    assert costs["bytes"].reference == 4 * (162 + 6 + 24 + 4)
    assert costs["bytes"].constant == overhead_bytes(graph, choices)


def test_what_stays_float_is_a_constant():
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    graph = trace(seeded(network), torch.ones(2, 4))
    costs = cost_tables(graph, [Choice(4, 8)])
    assert costs["bytes"].constant == 4 * 8 + overhead_bytes(graph, [Choice(4, 8)])


def test_published_sizes_and_bops(published, networks):
    """Every published scheme, recomputed with the released conventions."""
    checked = 0
    for scheme in published:
        graph = networks.get(scheme["model"])
        bits = dict(zip(scheme["layers"], scheme["weight_bits"], strict=True))
        inputs = dict(zip(scheme["layers"], scheme["act_in_bits"], strict=True))
        if graph is None or not set(graph.names) <= set(bits):
            continue
        size = ops = 0.0
        for unit in graph.units:
            choice = Choice(bits[unit.name], inputs[unit.name])
            alone = type(graph)((unit,))
            costs = cost_tables(alone, [choice], accounting="paper")
            size += costs["bytes"].table.item()
            ops += costs["bit_ops"].table.item()
        wanted = scheme["computed"]
        assert size / 2**20 == pytest.approx(
            wanted["weights_bn_bias_at_layer_bits_MiB"], abs=1e-4
        )
        assert ops / 1e9 == pytest.approx(wanted["bops_G"], abs=1e-3)
        checked += 1
    assert checked >= 30


def test_unknown_accounting_is_refused(graph):
    with pytest.raises(ValueError, match="accounting='odd' is unknown; use packed or"):
        cost_tables(graph, [Choice(4, 8)], accounting="odd")


def test_latency_table_round_trip(graph, tmp_path):
    table = {"conv": {"W4A8": 0.5, "W8A8": 0.6}, "head": {"W4A8": 0.1, "W8A8": 0.1}}
    path = tmp_path / "latency.json"
    path.write_text(json.dumps(table))
    costs = cost_tables(graph, [Choice(4, 8), Choice(8, 8)], latency=load_latency(path))
    np.testing.assert_array_equal(costs["milliseconds"].table, [[0.5, 0.6], [0.1, 0.1]])


def test_incomplete_latency_table_says_what_is_missing(graph):
    with pytest.raises(
        BudgetError, match="the latency table lacks conv W2A8, head W2A8"
    ):
        cost_tables(graph, [Choice(2, 8)], latency={"conv": {"W4A8": 1.0}})


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"conv": 3}',
        '{"conv": {"W8A8": "0.1"}}',
        '{"conv": {"W8A8": NaN}}',
        '{"conv": {"W8A8": -0.5}}',
        '{"conv": {"W8A8": ' + "9" * 400 + "}}",
        "[" * 100_000,
    ],
)
def test_broken_latency_file_is_refused(tmp_path, text):
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(
        BudgetError, match="is not a latency table: .* Write JSON such as"
    ):
        load_latency(path)


def test_tied_units_are_counted_each():
    graph = trace(seeded(TinyResNet()), images())
    costs = cost_tables(graph, [Choice(4, 8)])
    assert costs["bytes"].table.shape == (len(graph), 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a budget"),
        ("1.5", "'1.5' has no unit"),
        ("1,5MiB", "'1' in '1,5MiB' has no unit"),
        ("1.5Mb", "'Mb' in '1.5Mb' may be bits or bytes: use MiB or MB"),
        ("1.5kb", "use KiB or KB"),
        ("8b", "may be bits or bytes: use B"),
        ("three bits", "'three bits' is not a budget"),
        ("1.5.2MiB", "is not a budget"),
        ("nanMiB", "is not a budget"),
        ("3furlongs", "'furlongs' in '3furlongs' is not a unit; write"),
        ("3GBOP", "'GBOP' in '3GBOP' is not a unit (did you mean GBOPs"),
        ("1MiB,,2ms", "is not a budget"),
        ("1MiB, 2MiB", "gives size_mib twice"),
        ("-1MiB", "'-1MiB' is not positive"),
        ("0ms", "'0ms' is not positive"),
        ("1e999MB", "size_mb=inf is too large; write"),
        ("1e9999MB", "is not a budget"),
    ],
)
def test_malformed_text_is_refused_with_examples(text, words):
    with pytest.raises(BudgetError) as error:
        Budget.parse(text)
    assert words in str(error.value)
    assert '"1.5MiB", "1.6MB", "3.2bits", "75GBOPs", "12.5%" or "5ms"' in str(
        error.value
    )


@pytest.mark.parametrize(
    "value", [-1, 0, float("nan"), float("inf"), 10**400, "1", True]
)
def test_numbers_must_be_positive_and_finite(value):
    words = "is too large" if value in (float("inf"), 10**400) else "is not positive"
    with pytest.raises(BudgetError, match=f"size_mib=.* {words}; write"):
        Budget(size_mib=value)


def test_a_budget_needs_a_limit():
    with pytest.raises(BudgetError, match="the budget is empty; write for example"):
        Budget()


def test_a_budget_is_text_or_budget():
    with pytest.raises(BudgetError, match=r"1\.5 is not a budget; write for example"):
        Budget.of(1.5)
    # Samples in its place are not printed in full.
    with pytest.raises(BudgetError, match=r"^tensor\(.{0,40} is not a budget; write"):
        Budget.of(torch.zeros(64, 3, 8, 8))


def test_a_limit_on_an_unknown_cost_says_what_to_do():
    known = {name: COSTS[name] for name in ("bytes", "bit_ops")}
    with pytest.raises(
        BudgetError,
        match="latency_ms=5: this plan has no cost 'milliseconds'; "
        "give a latency table",
    ):
        Budget(latency_ms=5).limits(known)
    with pytest.raises(
        BudgetError, match="average_bits=3: .* use one of bytes, bit_ops"
    ):
        Budget(average_bits=3).limits(known)


def test_every_group_has_a_scale_and_a_zero_point():
    graph = trace(tokens(), images(2)).grouped(32)
    up, down, head = (graph[name] for name in ("up", "down", "head"))
    items = unit_bytes(down, Choice(3, 8))  # 40 × 72: groups of 32, 32 and 8
    assert (items.scales, items.zero_points) == (40 * 3 + 4, 40 * 3)
    assert items.weights == 40 * 72 * 3 / 8
    assert unit_bytes(up, Choice(4, 32)).scales == 72 * 2 + 4
    assert unit_bytes(down, Choice(8, 8, rate=2.0)).scales == 40 + 4  # one step
    assert unit_bytes(head, Choice(4, 8)).scales == 4 * 5  # 24 inputs
    assert unit_bytes(graph["embed"], Choice(4, 8)).scales == 4 * 40
    assert unit_bytes(down, Choice(32, 32)).total == 4 * 40 * 72


def test_a_file_says_what_equalization_did_only_with_rounded_activations():
    network = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 4))
    graph = trace(seeded(network), torch.ones(2, 64))
    assert graph.movable_channels == 64
    plain, rounded = (overhead_bytes(graph, [Choice(4, a)]) for a in (32, 8))
    assert rounded - plain == 1.5 * 64


def memory_of(model, samples, *bits):
    recording = observe(model, samples)
    graph = find_units(model, recording)
    tensors = live_tensors(recording, graph, samples[0].numel())
    choices = tuple(Choice(4, one) for one in bits)
    return ActivationMemory(tensors, choices, len(graph)), graph


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
    rows = [one.to_json() for one in memory.tensors]
    assert live_tensors_from_json(rows, len(graph)) == memory.tensors


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
    with pytest.raises(BudgetError, match="sizes may follow activations, total, onnx"):
        ompq.Budget.parse("activations:3bits")
    with pytest.raises(BudgetError, match="only sizes may follow"):
        ompq.Budget.parse("weights:3KiB")
    plan = ompq.plan(seeded(Chain()), images(), "4bits", CONFIG)
    with pytest.raises(BudgetError, match="plan again with such a budget"):
        plan.with_budget("activations:1KiB")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1, 2, 3]], r"activations\[0\] must be a list of length 5, not a list of 3"),
        ([[8, 5, 4, [], 0]], "in order of the calls"),
        ([[8, 0, 4, [7], 0]], r"activations\[0\]\[3\]\[0\] must be a whole"),
    ],
)
def test_damaged_activations_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        live_tensors_from_json(rows, 2)
