from pathlib import Path

import numpy as np
import pytest
import torch

from ompq.scores.orthogonality import (
    BatchProducts,
    debiased_products,
    gram_matrix,
    importance,
    layer_gamma,
    normalise_products,
    objective_coefficients,
)

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
