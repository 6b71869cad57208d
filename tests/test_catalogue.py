import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from catalogue_cases import CHOICES
from nets import Chain, TinyMobileNet, TinyResNet, images, seeded
from ompq.configs import OrmSettings
from ompq.errors import SampleError, ScoreError, TraceError
from ompq.lab.more_scores.block_loss import BlockLoss, ReconstructionScore
from ompq.network.graph import trace
from ompq.network.observation import watch
from ompq.network.units import Choice
from ompq.outputs import drawn_classes
from ompq.score_tables import ScoreTable
from ompq.scores import sensitivity, weight_noise
from ompq.scores.baselines import Random
from ompq.scores.catalogue import SCORES, score_name, score_table
from ompq.scores.orthogonality import (
    Orm,
    OrmDistortion,
    debiased_products,
    gram_matrix,
    measure_orm,
    normalise_products,
)
from ompq.scores.output_divergence import OutputDivergence
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.weight_noise import WeightNoise, noise_ratios, quickly_rounded
from ompq.weight_ranges import row_stacks, search_weight
from tables import score_inputs

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
    table = Orm()(score_inputs(graph, network, images(), CHOICES))
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
    with pytest.raises(
        ValueError, match="'granularity' of OrmSettings must be one of 'layer', 'block'"
    ):
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
        whole = normalise_products(debiased_products(grams)).numpy()
    else:
        whole = measure_orm(graph, network, samples, settings).matrix
    parts = list(samples.split(32))
    streamed = measure_orm(graph, network, parts, settings).matrix
    assert np.abs(streamed - whole).max() < 0.03


def test_one_sample_is_too_few(network, graph):
    with pytest.raises(
        SampleError, match="compared over samples: give at least 2, not 1"
    ):
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
    with pytest.raises(
        TraceError, match="took a different path than when it was traced"
    ):
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
    table = OrmDistortion()(score_inputs(graph, network, images(), CHOICES))
    noise = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    np.testing.assert_allclose(table.damage, table.importance[:, None] * noise)
    ratios = noise[:, 0] / noise[:, 1]
    assert (ratios > 4).all()  # two bits: about sixteenfold
    assert (table.importance > 0).all()


def test_noise_is_of_the_folded_weight(graph):
    """Scaling a norm's channel scales that channel's share of the noise."""
    network = seeded(TinyResNet())
    before = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    with torch.no_grad():
        network.norm.weight.mul_(3.0)  # all channels alike: the ratio stays
    same = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    np.testing.assert_allclose(same, before, rtol=1e-4)
    with torch.no_grad():
        network.norm.weight[1:] = 0.0  # one channel is left
    other = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    assert not np.allclose(other[0], before[0], rtol=1e-2)
    np.testing.assert_allclose(other[1:], before[1:])


def test_activation_noise_counts_only_when_activations_are_chosen(network, graph):
    chosen = (Choice(4, 4), Choice(4, 8), Choice(8, 4), Choice(8, 8))
    table = score_table(
        "weight_noise", score_inputs(graph, network, images(), chosen)
    ).damage
    fixed = score_table(
        "weight_noise", score_inputs(graph, network, images(), CHOICES)
    ).damage
    assert (table[:, 0] > table[:, 1]).all()
    # Weight and activation noise add up.
    np.testing.assert_allclose(table[:, 0] + table[:, 3], table[:, 1] + table[:, 2])
    assert (table[:, 1] > fixed[:, 1]).all()


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


def test_tables_keep_nine_digits(network, graph):
    def score(given):
        rows = [[1 / 3, -2e30 / 3, 0.0]] * len(given.graph)
        return ScoreTable(np.array(rows), gamma=np.full(len(graph), 2e-9 / 3))

    table = score_table(score, score_inputs(graph, network, images(), CHOICES))
    assert table.damage[0].tolist() == [0.333333333, -6.66666667e29, 0.0]
    assert table.gamma[0] == 6.66666667e-10


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


def rounded(network, name, bits):
    weight = network.get_parameter(f"{name}.weight").detach()
    return weight if bits == 32 else search_weight(weight, bits).fake(weight)


def expected_divergence(network, unit, rounded, inputs, labels, counts):
    """Half the mean square of d log p, one channel's centred error at a time.

    Of the classifier's error, the geometric mean of that and of all channels at once.
    """
    twin = copy.deepcopy(network).double()
    module = twin.get_submodule(unit.name)
    kept = {}
    with module.register_forward_hook(lambda _m, args, out: kept.update(x=args, y=out)):
        twin(inputs)
    plain = copy.deepcopy(module)
    plain.weight.copy_(rounded)
    error = plain(*kept["x"]) - kept["y"]
    axes = [axis for axis in range(error.dim()) if axis != 1]
    error = error - error.mean(axes, keepdim=True)

    def squares(part):
        moved, ends = torch.zeros_like(error), []
        moved[:, part] = error[:, part]
        for step in (1e-4, -1e-4):
            with module.register_forward_hook(lambda _m, _a, y, d=step: y + d * moved):
                log_p = twin(inputs).log_softmax(1)
            ends.append(log_p.gather(1, labels[:, None])[:, 0])
        return float((((ends[0] - ends[1]) / 2e-4).square() * counts).sum())

    total = sum(squares(slice(c, c + 1)) for c in range(error.shape[1]))
    if error.dim() == 2:
        total = (total * squares(slice(None))) ** 0.5
    return total / 2 / len(inputs)


def test_sensitivity_is_noise_times_what_of_it_finite_differences_expect():
    network, inputs = seeded(TinyMobileNet()), images(6)
    graph = trace(network, inputs)
    choices = [Choice(bits, 32) for bits in (2, 4, 8)]
    found = Sensitivity(spatial=0.25)(score_inputs(graph, network, inputs, choices))
    noise, expected = np.zeros((len(graph), 3)), np.zeros((len(graph), 2))
    with torch.no_grad():
        log_p = network(inputs).log_softmax(1)
        drawn = drawn_classes(log_p, torch.Generator().manual_seed(0), 6)
        for row, unit in enumerate(graph.units):
            [rounding] = quickly_rounded(network, [unit], choices)
            noise[row] = noise_ratios([rounding], choices)[0]
            weight = network.get_parameter(unit.parameter)
            expected[row] = [
                expected_divergence(network, unit, rounded, inputs.double(), *drawn)
                for rounded in weight + rounding.errors(tuple(choices[:2]))
            ]
    means = expected**0.7 * noise[:, :2] ** 0.3
    shapes = [unit.weight_shape for unit in graph.units]  # (out, in, height, width)
    spatial = [len(s) == 4 and s[1] > 1 and s[2] > 1 for s in shapes]
    assert 0 < sum(spatial) < len(spatial)
    means[spatial] /= 4
    ratio = found.damage[:, :2] / means
    assert ratio == pytest.approx(np.full_like(ratio, ratio[0, 0]), rel=2e-3)
    # Above 4 bits the divergence is taken to follow the noise.
    by_noise = found.damage[:, 1] * noise[:, 2] / noise[:, 1]
    assert found.damage[:, 2] == pytest.approx(by_noise)
    assert found.orm is not None


@pytest.mark.parametrize(("most", "sizes"), [(8, [8]), (3, [3, 3, 2])])
def test_sensitivity_takes_orm_in_its_own_pass_from_pairs_within_batches(
    network, graph, monkeypatch, most, sizes
):
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_BATCH", most)
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_MACS", 0)
    inputs, seen = images(8), []
    with network.register_forward_pre_hook(lambda _, args: seen.append(len(args[0]))):
        found = Sensitivity()(score_inputs(graph, network, inputs, CHOICES))
    assert seen[1:] == sizes  # first, what it returns is recognised
    features = kept_features(network, graph, inputs)
    batch_of = np.repeat(np.arange(len(sizes)), sizes)
    together = batch_of[:, None] == batch_of
    diagonal = np.eye(8, dtype=bool)
    # Pairs of samples of two batches are never seen, and the others stand for them.
    weight = np.where(together, 56 / (together.sum() - 8), 0.0)
    weight[diagonal] = 1.0
    flat = [features[name].flatten(1).double().numpy() for name in found.orm_labels]
    grams = [one @ one.T for one in flat]
    products = np.array([[(weight * a * b).sum() for a in grams] for b in grams])
    norms = np.sqrt(products.diagonal())
    expected = products / norms[:, None] / norms
    assert found.orm == pytest.approx(expected.clip(0, 1), abs=1e-5)
    assert len(found.orm_labels) == len(graph) - 1  # one sum has two units


@pytest.mark.parametrize("certain", [0.0, 6.0])
def test_drawn_classes_average_squared_gradients_over_the_answers(certain):
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 0] += certain
    log_p = logits.log_softmax(1)
    generator = torch.Generator().manual_seed(1)
    direction = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0])
    p = log_p.exp()
    # The gradient of class k's log probability is onehot(k) - p.
    along = direction - (p * direction).sum(1, keepdim=True)  # (3, 5)
    exact = (p * along.square()).sum(1)
    labels, counts = drawn_classes(log_p.repeat(4000, 1), generator, 12000)
    squares = along.repeat(4000, 1).gather(1, labels[:, None])[:, 0].square()
    found = (squares * counts).reshape(4000, 3).mean(0)
    assert found.tolist() == pytest.approx(exact.tolist(), rel=0.1)


def test_sensitivity_sees_weights_inside_attention_and_tied_ones(caplog):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens):  # (N, T)
            x = self.words(tokens)
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(x.mean(1))

    network = seeded(Attending())
    tokens = torch.arange(24).reshape(6, 4) % 11
    graph = trace(network, tokens)
    damage = Sensitivity()(score_inputs(graph, network, tokens, CHOICES)).damage
    assert "attention.in_proj" in graph.names
    assert not caplog.text
    assert (np.diff(damage, axis=1) < 0).all()


def test_sensitivity_chooses_activation_bits_too():
    network, inputs = seeded(TinyMobileNet()), images(6)
    graph = trace(network, inputs)
    choices = [Choice(4, 4), Choice(4, 8), Choice(8, 8), Choice(32, 32)]
    damage = Sensitivity()(score_inputs(graph, network, inputs, choices)).damage
    assert (np.diff(damage, axis=1) < 0).all()
    assert (damage[:, 3] == 0).all()


def test_weights_that_are_zero_are_scored_without_a_warning(recwarn):
    network = seeded(Chain())
    graph = trace(network, images())
    nn.init.zeros_(network.get_parameter(graph.units[0].parameter))
    damage = Sensitivity()(score_inputs(graph, network, images(), CHOICES)).damage
    assert np.isfinite(damage).all()
    assert not damage[0].any()
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize(("width", "count"), [(7, 6), (16, 8)])
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


class Mixed(nn.Module):
    """Linear maps of all kinds, and layers that are none."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2, groups=2)
        self.up_norm = nn.BatchNorm2d(6)
        self.recurrent = nn.GRU(6, 7, batch_first=True)
        self.words = nn.Embedding(5, 7)
        self.line = nn.Conv1d(7, 9, 3)
        self.head = nn.Linear(9, 5)

    def forward(self, x):  # (N, 3, 8, 8)
        x = self.stem(x).relu_()
        x = self.norm(self.grouped(x)).relu()
        x = self.up_norm(self.up(x)).flatten(2).mT[:, :20]  # (N, 20, 6)
        x = self.recurrent(x)[0]
        x = x + self.words(torch.arange(20).expand(len(x), 20) % 5)
        return self.head(self.line(x.mT).mean(2))


def trained(network):
    """Give batch norms statistics of their own."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return network


@pytest.mark.parametrize("kind", [Mixed, TinyMobileNet, TinyResNet])
def test_errors_are_the_same_one_by_one_and_in_stacks(kind, monkeypatch):
    network, inputs = trained(seeded(kind())), images(6)
    graph = trace(network, inputs)
    given = score_inputs(graph, network, inputs, CHOICES)
    alone = Sensitivity()(given).damage
    if kind is Mixed:
        assert {unit.kind for unit in graph.units} >= {"transposed", "grouped"}
        assert {unit.kind for unit in graph.units} >= {"recurrent", "embedding"}
    cuda = torch.device("cuda")  # as on a GPU, but for the device
    monkeypatch.setattr(weight_noise, "row_stacks", lambda s, _: row_stacks(s, cuda))
    monkeypatch.setitem(sensitivity._AT_ONCE, "cpu", 1 << 20)
    np.testing.assert_allclose(Sensitivity()(given).damage, alone, rtol=1e-4)
    monkeypatch.setattr(sensitivity, "_KEPT", 0)  # as of a large network
    np.testing.assert_allclose(Sensitivity()(given).damage, alone, rtol=1e-4)


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
