import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.errors import SampleError, ScoreError, TraceError
from ompq.graph import Choice, trace
from ompq.orthogonality import debiased_products, gram_matrix, normalised
from ompq.recording import watch
from ompq.scores import (
    SCORES,
    Orm,
    OrmDistortion,
    OrmSettings,
    OutputDivergence,
    Random,
    ScoreTable,
    WeightNoise,
    measure_orm,
    score_name,
    score_table,
)

CHOICES = (Choice(2, 8), Choice(4, 8), Choice(8, 8))


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


@pytest.mark.parametrize("centred", [False, True])
def test_streamed_orm_equals_orm_of_kept_features(network, graph, centred):
    result = measure_orm(graph, network, images(16), OrmSettings(centred=centred))
    features = kept_features(network, graph, images(16))
    wanted = orm_matrix([features[name] for name in result.labels], centred=centred)
    np.testing.assert_allclose(result.matrix, wanted, atol=1e-5)
    # The downsample shares its block's output, so it adds no function.
    assert len(result.labels) == len(graph) - 1


def test_gamma_and_importance_by_hand(network, graph):
    result = measure_orm(graph, network, images(), OrmSettings(beta=0.5))
    gamma = result.matrix.sum(1) - 1
    theta = np.exp(-0.5 * gamma)
    theta /= theta.max()
    length = len(gamma)
    coefficients = [theta[i:].sum() / (length - i) for i in range(length)]
    order = [result.labels.index(n) for n in graph.names if n in result.labels]
    by_name = dict(zip(result.labels, coefficients, strict=True))
    assert order == sorted(order)
    for unit, worth, own in zip(
        graph.units, result.importance, result.gamma, strict=True
    ):
        twin = next(n for n in result.labels if graph[n].feature == unit.feature)
        assert worth == pytest.approx(by_name[twin])
        assert own == pytest.approx(gamma[result.labels.index(twin)])


def test_paper_score_is_linear_in_bits_and_counts_tied_units_once(network, graph):
    table = Orm()(graph, network, images(), CHOICES)
    worth = measure_orm(graph, network, images()).importance
    per_bit = (table.damage[:, 1] - table.damage[:, 0]) / 2
    np.testing.assert_allclose(table.damage[:, 2], table.damage[:, 0] + 6 * per_bit)
    for row, unit in enumerate(graph.units):
        share = 2 if len(graph.groups[unit.group]) == 2 else 1
        assert per_bit[row] == pytest.approx(-worth[row] / share)


@pytest.mark.parametrize(
    ("granularity", "functions"),
    [("layer", 11), ("block", 5), ("stage", 3), ("net", 1)],
)
def test_granularity_decides_what_a_function_is(granularity, functions):
    network = seeded(TinyMobileNet())
    graph = trace(network, images())
    settings = OrmSettings(granularity=granularity)
    result = measure_orm(graph, network, images(), settings)
    assert result.matrix.shape == (functions, functions)
    keys = {"layer": "name", "block": "block", "stage": "stage"}
    if granularity == "net":
        assert len(set(result.importance)) == 1
    else:
        seen = {}
        for unit, gamma in zip(graph.units, result.gamma, strict=True):
            key = getattr(unit, keys[granularity])
            assert seen.setdefault(key, gamma) == gamma


def test_unknown_granularity_is_refused(network, graph):
    with pytest.raises(ValueError, match="granularity='pixel' is unknown; use layer"):
        measure_orm(graph, network, images(), OrmSettings(granularity="pixel"))


def test_excluded_units_take_no_part(network, graph):
    settings = OrmSettings(exclude=("@first", "@last"))
    result = measure_orm(graph, network, images(), settings)
    assert "stem" not in result.labels
    assert "head" not in result.labels
    assert result.importance[0] == result.importance[-1] == 0


@pytest.mark.parametrize("centred", [False, True])
def test_many_batches_estimate_what_one_batch_measures(network, graph, centred):
    samples = images(512)
    settings = OrmSettings(centred=centred)
    if centred:  # a stream is debiased, so compare with the debiased whole
        features = kept_features(network, graph, samples)
        labels = measure_orm(graph, network, images(4)).labels
        grams = [gram_matrix(features[name]) for name in labels]
        whole = normalised(debiased_products(grams)).numpy()
    else:
        whole = measure_orm(graph, network, samples, settings).matrix
    parts = list(samples.split(32))
    streamed = measure_orm(graph, network, parts, settings).matrix
    assert np.abs(streamed - whole).max() < 0.03


def test_one_sample_is_too_few(network, graph):
    with pytest.raises(SampleError, match="give at least 2, got 1"):
        measure_orm(graph, network, images(1))


def test_broken_activations_are_named():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.bad(self.good(x)) * float("inf")

    network = seeded(Breaks())
    graph = trace(network, torch.ones(2, 3))
    with pytest.raises(TraceError, match="activations are NaN or infinite at bad"):
        measure_orm(graph, network, torch.ones(2, 3))


def test_changing_path_is_noticed():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(self.a(x)) if len(x) == 1 else self.a(x)

    network = seeded(Moody())
    graph = trace(network, torch.ones(2, 3))
    with pytest.raises(TraceError, match="took another path than when it was traced"):
        measure_orm(graph, network, torch.ones(2, 3))


def test_windows_and_sequence_first_features_are_sorted_by_sample():
    class Layouts(nn.Module):
        def __init__(self):
            super().__init__()
            self.windows, self.sequence = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):  # (N, 6, 4)
            x = self.windows(x.reshape(-1, 2, 4))  # (3N, 2, 3)
            x = x.reshape(-1, 6, 3).transpose(0, 1)  # (6, N, 3)
            return self.sequence(x).mean(0)

    network = seeded(Layouts())
    samples = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    graph = trace(network, samples)
    result = measure_orm(graph, network, samples)
    with torch.no_grad():
        first = network.windows(samples)
        second = network.sequence(first)
    np.testing.assert_allclose(result.matrix, orm_matrix([first, second]), atol=1e-6)


def test_stacked_projections_in_windows_are_sorted_by_sample():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = nn.Linear(4, 6), nn.Linear(2, 3)

        def forward(self, x):  # (N, 6, 4)
            x = self.qkv(x.reshape(-1, 3, 4))  # two windows: (2N, 3, 6)
            x = x.reshape(-1, 3, 3, 2).permute(2, 0, 1, 3)  # (3, 2N, 3, 2)
            return self.head(x.sum((0, 2)).reshape(-1, 2, 2).sum(1))

    network = seeded(Stacked())
    samples = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    result = measure_orm(trace(network, samples), network, samples)
    with torch.no_grad():
        wanted = orm_matrix([network.qkv(samples), network(samples)])
    np.testing.assert_allclose(result.matrix, wanted, atol=1e-6)


def test_feature_without_samples_is_refused():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 7)

        def forward(self, x):
            return self.linear(x.mean(0))

    network = seeded(Pooled())
    samples = torch.ones(5, 3)
    graph = trace(network, samples)
    with pytest.raises(TraceError, match=r"shape \(7,\) has no dimension of 5 samples"):
        measure_orm(graph, network, samples)


def test_distortion_is_worth_times_noise(network, graph):
    table = OrmDistortion()(graph, network, images(), CHOICES)
    noise = score_table("weight_noise", graph, network, images(), CHOICES).damage
    np.testing.assert_allclose(table.damage, table.importance[:, None] * noise)
    ratios = noise[:, 0] / noise[:, 1]
    assert (ratios > 4).all()  # two bits: about sixteenfold
    assert (table.importance > 0).all()


def test_noise_is_of_the_folded_weight(graph):
    """Scaling a norm's channel scales that channel's share of the noise."""
    network = seeded(TinyResNet())
    before = score_table("weight_noise", graph, network, images(), CHOICES).damage
    with torch.no_grad():
        network.norm.weight.mul_(3.0)  # all channels alike: the ratio stays
    same = score_table("weight_noise", graph, network, images(), CHOICES).damage
    np.testing.assert_allclose(same, before, rtol=1e-4)
    with torch.no_grad():
        network.norm.weight[1:] = 0.0  # one channel is left
    other = score_table("weight_noise", graph, network, images(), CHOICES).damage
    assert not np.allclose(other[0], before[0], rtol=1e-2)
    np.testing.assert_allclose(other[1:], before[1:])


def test_activation_noise_counts_only_when_activations_are_chosen(network, graph):
    chosen = (Choice(4, 4), Choice(4, 8), Choice(8, 4), Choice(8, 8))
    table = score_table("weight_noise", graph, network, images(), chosen).damage
    fixed = score_table("weight_noise", graph, network, images(), CHOICES).damage
    assert (table[:, 0] > table[:, 1]).all()
    # Weight and activation noise add up.
    np.testing.assert_allclose(table[:, 0] + table[:, 3], table[:, 1] + table[:, 2])
    assert (table[:, 1] > fixed[:, 1]).all()


def test_divergence_equals_a_copy_with_one_rounded_weight(network, graph):
    import copy

    from ompq.ranges import search_weight

    choices = (Choice(3, 8), Choice(32, 8))
    table = OutputDivergence()(graph, network, images(), choices).damage
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
    table = OutputDivergence()(graph, network, images(), choices).damage
    assert (table[:, 0] > table[:, 1]).all()


def test_divergence_reports_progress_and_touches_nothing(network, graph):
    before = {k: v.clone() for k, v in network.state_dict().items()}
    seen = []
    score = OutputDivergence(progress=lambda *step: seen.append(step))
    score(graph, network, {"x": images()}, (Choice(4, 4), Choice(4, 8)))
    assert seen[-1] == (len(graph), len(graph), "divergence head")
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert not any(m._forward_pre_hooks for m in network.modules())


def test_random_is_seeded(network, graph):
    tables = [
        Random(seed)(graph, network, images(), CHOICES).damage for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert not np.allclose(tables[0], tables[2])


def test_smallest_first_values_every_bit_alike(network, graph):
    table = score_table("smallest_first", graph, network, images(), CHOICES).damage
    assert (table == table[0]).all()
    assert table[0, 0] - table[0, 2] == 6


@pytest.mark.parametrize("name", sorted(SCORES))
def test_named_scores_fall_with_bits(network, graph, name):
    table = score_table(name, graph, network, images(), CHOICES).damage
    assert table.shape == (len(graph), 3)
    assert (table[:, 0] > table[:, 2]).all()


def test_own_function_is_a_score(network, graph):
    def score(graph, model, samples, choices):
        return [[-float(c.weight) for c in choices] for _ in graph.units]

    table = score_table(score, graph, network, images(), CHOICES)
    assert table.damage[0].tolist() == [-2.0, -4.0, -8.0]
    assert table.orm is None


def test_bad_scores_are_refused(graph, network):
    def run(result):
        return score_table(lambda *_: result, graph, network, images(), CHOICES)

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
        score_table("best", graph, network, images(), CHOICES)


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


def test_tables_are_the_same_for_any_number_of_threads():
    network, samples = seeded(Wide()), images(24, size=32)
    graph = trace(network, samples)
    choices = [Choice(w, a) for w in (2, 8) for a in (4, 8)]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(
                [
                    score_table(name, graph, network, samples, choices)
                    for name in ("orm_distortion", "output_divergence")
                ]
            )
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert one.damage.tolist() == other.damage.tolist()
    for name in ("orm", "gamma", "importance"):
        values = [getattr(tables[0], name).tolist() for tables in found]
        assert values[0] == values[1]


def test_tables_keep_nine_digits(network, graph):
    def score(graph, model, samples, choices):
        rows = [[1 / 3, -2e30 / 3, 0.0]] * len(graph.units)
        return ScoreTable(np.array(rows), gamma=np.full(len(graph), 2e-9 / 3))

    table = score_table(score, graph, network, images(), CHOICES)
    assert table.damage[0].tolist() == [0.333333333, -6.66666667e29, 0.0]
    assert table.gamma[0] == 6.66666667e-10


def test_chain_has_a_score():
    network = seeded(Chain())
    graph = trace(network, images())
    assert score_table("orm", graph, network, images(), CHOICES).orm.shape == (2, 2)


def test_a_known_score_goes_by_its_name_however_it_is_given():
    assert score_name("orm") == "orm"
    assert score_name(OrmDistortion()) == "orm_distortion"
    assert score_name(WeightNoise()) == "weight_noise"

    def mine(*_args):
        return None

    assert score_name(mine).endswith("mine")
    assert "beta=7.0" in score_name(Orm(OrmSettings(beta=7.0)))
