from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.configs import OrmSettings
from ompq.errors import SampleError, TraceError
from ompq.network.graph import trace
from ompq.network.observation import watch
from ompq.scores.orthogonality import (
    BatchProducts,
    Orm,
    debiased_products,
    gram_matrix,
    importance,
    layer_gamma,
    measure_orm,
    normalise_products,
    objective_coefficients,
    sample_rows,
)
from ompq.scores.sensitivity import Sensitivity
from tables import CHOICES, score_inputs

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def reference():
    with np.load(FIXTURES / "orm_features.npz") as data:
        return {key: torch.from_numpy(data[key]) for key in data}


def orm_matrix(features, *, centred=False):
    """ORM by N × N Gram matrices, as it is measured."""
    grams = [gram_matrix(f, centred=centred) for f in features]
    return normalise_products(BatchProducts.of(grams).products)


def features(reference, dtype):
    return [reference[f"feature_{i}"].to(dtype) for i in range(6)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-10), ("float32", 2e-6)]
)
@pytest.mark.parametrize("centred", [False, True])
def test_orm_equals_the_reference(reference, dtype, tolerance, centred):
    key = "orm_centred_from_float64" if centred else "orm_uncentred_float64"
    orm = orm_matrix(features(reference, getattr(torch, dtype)), centred=centred)
    assert (orm - reference[key]).abs().max() < tolerance


@pytest.mark.parametrize("centred", [False, True])
def test_grams_equal_the_reference(reference, centred):
    key = "gram_centred_float64" if centred else "gram_float64"
    for feature, wanted in zip(
        features(reference, torch.float64), reference[key], strict=True
    ):
        torch.testing.assert_close(gram_matrix(feature, centred=centred), wanted)


def test_debiased_orm_equals_the_reference(reference):
    grams = [gram_matrix(f) for f in features(reference, torch.float64)]
    products = debiased_products(grams)
    norms = products.diagonal().sqrt()
    orm = products / torch.outer(norms, norms)
    assert (orm - reference["orm_debiased_float64"]).abs().max() < 1e-10


def test_debiased_orm_needs_four_samples():
    with pytest.raises(ValueError, match="batches of 4 samples or more, got 3"):
        debiased_products([torch.eye(3)])


@pytest.mark.parametrize("offset", range(5))
def test_large_means_do_not_cost_digits(offset):
    with np.load(FIXTURES / "orm_offset.npz") as data:
        a, b = (
            torch.from_numpy(data[f"a_{offset}"]),
            torch.from_numpy(data[f"b_{offset}"]),
        )
        wanted = float(data["orm_centred_float64"][offset])
    # The float32 inputs themselves carry 1e-7 of a mean of 1000 standard deviations.
    assert orm_matrix([a, b], centred=True)[0, 1].item() == pytest.approx(
        wanted, abs=1e-4
    )


@pytest.mark.parametrize("kind", ["centred", "uncentred"])
def test_importance_and_coefficients_equal_the_reference(reference, kind):
    gamma = reference[f"gamma_{kind}"]
    key = "orm_centred_from_float64" if kind == "centred" else "orm_uncentred_float64"
    torch.testing.assert_close(layer_gamma(reference[key]), gamma)
    for row, beta in enumerate(reference["betas"].tolist()):
        theta = importance(gamma, beta=beta)
        wanted = reference[f"theta_{kind}"][row]
        torch.testing.assert_close(theta, wanted / wanted.max())
        coefficients = objective_coefficients(theta)
        wanted = reference[f"lp_coef_{kind}"][row]
        torch.testing.assert_close(
            coefficients / coefficients.max(), wanted / wanted.max()
        )


def test_large_beta_does_not_underflow():
    theta = importance(torch.tensor([40.0, 41.0]), beta=100.0)
    assert theta[0] == 1
    assert theta[1].item() == pytest.approx(np.exp(-100.0), rel=1e-9)


@pytest.mark.parametrize(
    ("decreasing", "wanted"),
    [
        ("-log(x)", lambda x: -np.log(x)),
        ("-x", lambda x: -x),
        ("-x^3", lambda x: -(x**3)),
        ("-exp(x)", lambda x: -np.exp(x - x.max())),
        ("exp(-x)", lambda x: np.exp(x.min() - x)),
    ],
)
def test_decreasing_functions(decreasing, wanted):
    gamma = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    theta = importance(gamma, beta=2.0, decreasing=decreasing)
    np.testing.assert_allclose(theta, wanted(2 * gamma.numpy()))
    assert (theta.diff() < 0).all()


def test_unknown_decreasing_function_is_refused():
    with pytest.raises(
        ValueError, match=r"decreasing='x' is unknown .*; use exp\(-x\)"
    ):
        importance(torch.ones(2), decreasing="x")


def test_coefficients_are_means_of_what_follows():
    theta = torch.tensor([4.0, 2.0, 9.0], dtype=torch.float64)
    assert objective_coefficients(theta).tolist() == [5.0, 5.5, 9.0]


def test_constant_layer_is_orthogonal_to_all():
    varying = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    orm = orm_matrix([varying, torch.full((6, 300), 0.1)], centred=True)
    assert orm.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_one_batch_is_exact_and_many_are_unbiased():
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(20, 40, generator=generator)
    a = torch.randn(4096, 20, generator=generator) + 0.3
    b = torch.tanh(a @ mixing)
    exact = orm_matrix([a, b])
    batches = zip(a.split(64), b.split(64), strict=True)
    parts = [BatchProducts.of([gram_matrix(x), gram_matrix(y)]) for x, y in batches]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert (normalise_products(total.products) - exact).abs().max() < 0.01
    # Centring each batch alone, or leaving its diagonal unweighted, misses by more.
    naive = torch.stack(
        [orm_matrix([x, y]) for x, y in zip(a.split(64), b.split(64), strict=True)]
    )
    assert (naive.mean(0) - exact).abs().max() > 0.02


def test_tiny_and_huge_features_do_not_overflow():
    base = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    wanted = orm_matrix([base, base[:, :3]])
    scaled = orm_matrix([base * 1e-15, base[:, :3] * 1e15])
    torch.testing.assert_close(scaled, wanted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("centred", [False, True])
def test_cuda_equals_cpu(reference, centred):
    cpu = orm_matrix(features(reference, torch.float32), centred=centred)
    cuda = orm_matrix(
        [f.cuda() for f in features(reference, torch.float32)], centred=centred
    )
    torch.testing.assert_close(cuda, cpu, atol=2e-6, rtol=0)


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def graph(network):
    return trace(network, images())


def orm_by_pairs(features, *, centred=False):
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
    wanted = orm_by_pairs([features[name] for name in result.labels], centred=centred)
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
    np.testing.assert_allclose(result.matrix, orm_by_pairs([first, second]), atol=1e-6)


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
        wanted = orm_by_pairs([network.qkv(samples), network(samples)])
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


@pytest.mark.parametrize(("most", "sizes"), [(8, [8]), (3, [3, 3, 2])])
def test_sensitivity_takes_orm_in_its_own_pass_from_pairs_within_batches(
    network, graph, monkeypatch, most, sizes
):
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_BATCH", most)
    monkeypatch.setattr("ompq.scores.sensitivity._CPU_MACS", 0)
    inputs, seen = images(8), []
    with network.register_forward_pre_hook(lambda _, args: seen.append(len(args[0]))):
        found = Sensitivity()(score_inputs(graph, network, inputs, CHOICES))
    # First, what it returns is recognised, and how much that is.
    assert seen[2:] == sizes
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


def test_what_is_the_same_for_all_samples_is_a_constant_row():
    places = torch.arange(24.0).reshape(1, 2, 3, 4)  # of an attention, without samples
    rows = sample_rows(places, 5)
    assert torch.equal(rows, torch.arange(24.0).repeat(5, 1))
    with pytest.raises(TraceError, match="no dimension of 5 samples"):
        sample_rows(torch.ones(2, 3), 5)
