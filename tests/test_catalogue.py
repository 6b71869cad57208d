import copy

import numpy as np
import pytest
import torch
from torch import nn

from nets import Chain, TinyResNet, images, seeded
from ompq.configs import OrmSettings
from ompq.errors import ScoreError
from ompq.lab.more_scores.block_loss import BlockLoss, ReconstructionScore
from ompq.network.graph import trace
from ompq.network.units import Choice
from ompq.scores.catalogue import SCORES, score_name, score_table
from ompq.scores.orthogonality import (
    Orm,
    OrmDistortion,
)
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.weight_noise import WeightNoise
from tables import CHOICES, score_inputs

# Those that learn, with fewer steps than users get: what is tested does not need more.
QUICK = {
    **SCORES,
    "reconstruction": ReconstructionScore(iterations=3),
    "block_loss": BlockLoss(iterations=3),
}


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def test_distortion_is_worth_times_noise(network, graph):
    table = OrmDistortion()(score_inputs(graph, network, images(), CHOICES))
    noise = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    np.testing.assert_allclose(table.damage, table.importance[:, None] * noise)
    ratios = noise[:, 0] / noise[:, 1]
    assert (ratios > 4).all()  # two bits: about sixteenfold
    assert (table.importance > 0).all()


@pytest.mark.parametrize("name", sorted(SCORES))
def test_named_scores_fall_with_bits(network, graph, name):
    given = score_inputs(graph, network, images(), CHOICES)
    table = score_table(QUICK[name], given).damage
    assert table.shape == (len(graph), 3)
    falls = table[:, 0] > table[:, 2]
    # To first order, more bits may seem to be worse for a unit.
    assert falls.sum() >= 4 if name == "gradient" else falls.all()


@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_repeat_themselves_and_leave_the_network_alone(name):
    network = seeded(TinyResNet()).train()
    network.stem.weight.requires_grad_(False)
    graph, before = trace(network, images()), copy.deepcopy(network.state_dict())
    state = torch.get_rng_state()
    tables = [
        score_table(QUICK[name], score_inputs(graph, network, images(), CHOICES[:1]))
        for _ in range(2)
    ]
    np.testing.assert_array_equal(tables[0].damage, tables[1].damage)
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(module.training for module in network.modules())
    assert all(p.grad is None for p in network.parameters())
    assert [p.requires_grad for p in network.parameters()].count(False) == 1


@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_say_what_they_are_and_need(name):
    score = SCORES[name]
    assert 10 < len(score.summary) < 60
    assert score.needs.passes
    assert score.needs.labels == hasattr(score, "batches")
    without = ("orm", "weight_noise", "output_divergence", "blend", "random", "small")
    assert score.needs.gradients != name.startswith(without)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_on_cuda_are_those_on_the_cpu(network, graph, name):
    there = copy.deepcopy(network).cuda()
    for samples in (images(), images().cuda()):
        found = score_table(name, score_inputs(graph, there, samples, CHOICES)).damage
        expected = score_table(
            name, score_inputs(graph, network, images(), CHOICES)
        ).damage
        # Learned rounding may decide otherwise where sums differ in the last digit.
        rtol, atol = (0.5, 1e-3) if name == "reconstruction" else (0.1, 1e-4)
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def test_own_function_is_a_score(network, graph):
    def score(given):
        return [[-float(c.weight) for c in given.choices] for _ in given.graph.units]

    table = score_table(score, score_inputs(graph, network, images(), CHOICES))
    assert table.damage[0].tolist() == [-2.0, -4.0, -8.0]
    assert table.orm is None


def test_bad_scores_are_refused(graph, network):
    def run(result):
        return score_table(
            lambda *_: result, score_inputs(graph, network, images(), CHOICES)
        )

    with pytest.raises(ScoreError, match=r"returned shape \(2,\); 7 units × 3 choices"):
        run([1.0, 2.0])
    with pytest.raises(ScoreError, match="returned NoneType, not a table|shape"):
        run(None)
    with pytest.raises(ScoreError, match="returned dict, not a table of units"):
        run({"conv": 1})
    broken = np.zeros((len(graph), 3))
    broken[1, 2] = np.nan
    with pytest.raises(ScoreError, match="NaN or infinite for block1.conv1"):
        run(broken)
    with pytest.raises(ValueError, match="score='best' is unknown; use orm, orm_dist"):
        score_table("best", score_inputs(graph, network, images(), CHOICES))


class Wide(nn.Module):
    """Large enough for every sum over its features to be split among threads."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 48, 3), nn.Flatten()
        )
        self.head = nn.Linear(48 * 28 * 28, 5)

    def forward(self, x):
        return self.head(self.layers(x))


def test_tables_hardly_depend_on_the_number_of_threads():
    network, samples = seeded(Wide()), images(24, size=32)
    graph = trace(network, samples)
    choices = [Choice(w, a) for w in (2, 8) for a in (4, 8)]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(
                [
                    score_table(name, score_inputs(graph, network, samples, choices))
                    for name in ("orm_distortion", "output_divergence")
                ]
            )
    finally:
        torch.set_num_threads(threads)
    # Threads sum in another order, and on some processors convolve in another way.
    for one, other in zip(*found, strict=True):
        largest = one.damage.max()
        np.testing.assert_allclose(one.damage, other.damage, atol=1e-5 * largest)
    for name in ("orm", "gamma", "importance"):
        values = [getattr(tables[0], name) for tables in found]
        np.testing.assert_allclose(*values, rtol=1e-5)


def test_chain_has_a_score():
    network = seeded(Chain())
    graph = trace(network, images())
    assert score_table(
        "orm", score_inputs(graph, network, images(), CHOICES)
    ).orm.shape == (2, 2)


def test_a_known_score_goes_by_its_name_however_it_is_given():
    assert score_name("orm") == "orm"
    assert score_name(OrmDistortion()) == "orm_distortion"
    assert score_name(WeightNoise()) == "weight_noise"

    def mine(*_args):
        return None

    assert score_name(mine).endswith("mine")
    assert score_name(Orm()) == "orm"
    changed = Orm(OrmSettings(beta=7.0, decreasing="-x"))
    assert score_name(changed) == "orm(beta=7.0, decreasing='-x')"


@pytest.mark.parametrize(("width", "count"), [(7, 60), (16, 64)])
def test_positions_that_all_samples_share_are_scored(width, count, caplog):
    class Placed(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared
            self.words, self.places = nn.Embedding(11, width), nn.Embedding(5, width)
            self.head = nn.Linear(width, 11)

        def forward(self, tokens):  # (N, 5)
            at = torch.arange(5)
            at = at if self.shared else at.expand(len(tokens), 5)
            return self.head((self.words(tokens) + self.places(at)).mean(1))

    tokens = torch.arange(count * 5).reshape(count, 5) * 7 % 11
    damage = []
    for shared in (True, False):
        network = seeded(Placed(shared))
        graph = trace(network, tokens)
        given = score_inputs(graph, network, tokens, CHOICES)
        table = Sensitivity()(given).damage
        damage.append(dict(zip(graph.names, table, strict=True))["places"])
    assert not caplog.text
    np.testing.assert_allclose(damage[0], damage[1], rtol=0.6)


def test_outputs_may_be_changed_in_place_but_inputs_may_not(caplog):
    class Activated(nn.Module):
        def __init__(self, mode):
            super().__init__()
            self.mode = mode
            self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)

        def forward(self, x):
            x = self.first(x)
            x = x.relu_() if self.mode == "output" else x.relu()
            y = self.second(x)
            if self.mode == "input":
                x.zero_()
            return y.mean((2, 3))

    damage = {}
    for mode in ("none", "output"):
        network = seeded(Activated(mode))
        given = score_inputs(trace(network, images()), network, images(), CHOICES)
        damage[mode] = Sensitivity()(given).damage
    assert np.array_equal(damage["none"], damage["output"])
    assert not caplog.text
    network = seeded(Activated("input"))
    given = score_inputs(trace(network, images()), network, images(), CHOICES)
    Sensitivity()(given)
    assert "what conv2d reads is changed in place later" in caplog.text
    assert all(weight.requires_grad for weight in network.parameters())
