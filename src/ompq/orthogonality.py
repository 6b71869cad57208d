"""The paper's mathematics: Gram matrices, ORM, importance. Pure tensors.

ORM(X, f_i, f_j) = ||f_j(X)^T f_i(X)||_F^2 / (||f_i^T f_i||_F ||f_j^T f_j||_F), where
f_i(X) is the (N, D_i) matrix of a layer's outputs for N samples. With the N × N Gram
matrices K_i = f_i f_i^T the numerator is <vec K_i, vec K_j>, so L Grams and one matrix
product give all L^2 values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Decreasing = Literal["exp(-x)", "-log(x)", "-x", "-x^3", "-exp(x)"]
Form = Literal["gram", "feature", "cheapest"]

_CHUNK = 1 << 22  # elements of a feature that are centred at a time


def gram_matrix(features: Tensor, *, centred: bool = False) -> Tensor:
    """Return the Gram matrix of one layer's outputs.

    Args:
        features: Outputs of a layer, (N, ...); floating point.
        centred: Whether to subtract each feature's mean over the samples. It is
            subtracted from the features, before the product: afterwards the digits
            of mean-dominated features would be lost.

    Returns:
        The matrix, (N, N), in the features' dtype.
    """
    flat = features.reshape(features.shape[0], -1)  # (N, D)
    if not centred:
        return flat @ flat.T
    width = max(1, _CHUNK // flat.shape[0])
    total = flat.new_zeros(flat.shape[0], flat.shape[0])
    rounding = flat.new_zeros(())  # what rounding alone leaves of a constant feature
    for part in torch.split(flat, width, dim=1):
        mean = part.mean(0, keepdim=True)
        part = part - mean
        total.addmm_(part, part.T)
        rounding += mean.square().sum() * len(flat) * torch.finfo(flat.dtype).eps ** 2
    return torch.where(total.trace() > 4 * rounding, total, 0)


def orm_matrix(
    features: Sequence[Tensor], *, centred: bool = False, form: Form = "cheapest"
) -> Tensor:
    """Return ORM between all layers.

    Args:
        features: Outputs of L layers for the same N samples, each (N, ...).
        centred: False is the paper's metric, True that of its released code.
        form: ``gram`` works on N × N matrices, ``feature`` on D_i × D_j ones; the
            results are equal and ``cheapest`` counts which takes less arithmetic.

    Returns:
        ORM, (L, L), float64: symmetric, ones on the diagonal, values in [0, 1].

    Example:
        >>> a = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> orm_matrix([a, a[:, :1]])  # 1 / (sqrt(2) * 1)
        tensor([[1.0000, 0.7071],
                [0.7071, 1.0000]], dtype=torch.float64)
    """
    flat = [f.reshape(f.shape[0], -1) for f in features]
    if form == "cheapest":
        form = cheapest_form(flat[0].shape[0], [f.shape[1] for f in flat])
    if form == "feature":
        return normalised(_feature_products(flat, centred=centred))
    grams = [gram_matrix(f, centred=centred) for f in flat]
    return normalised(BatchProducts.of(grams).products)


def cheapest_form(samples: int, widths: Sequence[int]) -> Literal["gram", "feature"]:
    """Return the form of ORM that needs fewer multiplications.

    Args:
        samples: N.
        widths: D_i of each layer.
    """
    layers = len(widths)
    gram = samples**2 * (sum(widths) + layers**2)
    # All pairs i <= j of D_i * D_j, from the square of the sum.
    pairs = (sum(widths) ** 2 + sum(width**2 for width in widths)) // 2
    return "gram" if gram <= samples * pairs else "feature"


def _feature_products(flat: Sequence[Tensor], *, centred: bool) -> Tensor:
    if centred:
        flat = [f - f.mean(0, keepdim=True) for f in flat]
    products = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for i, first in enumerate(flat):
        for j, second in enumerate(flat[: i + 1]):
            cross = first.T @ second  # (D_i, D_j)
            products[i, j] = products[j, i] = cross.double().square().sum()
    return products


@dataclass(frozen=True)
class BatchProducts:
    """Sums of products of Gram entries over one batch, or over many.

    Grams of tens of thousands of samples do not fit in memory, and their entries
    between two batches are never seen together. But ORM needs only the sum of
    products over the N diagonal entries and over the N(N-1) others, and the pairs
    within batches are a fair draw of those: so the sums are kept apart, added up
    batch by batch, and scaled to N. With one batch the result is exact.

    Attributes:
        diagonal: Sum of K_i[a, a] K_j[a, a], (L, L) float64.
        others: Sum of K_i[a, b] K_j[a, b] over a != b, (L, L) float64.
        samples: Number of samples seen.
        pairs: Number of ordered pairs a != b seen.
    """

    diagonal: Tensor
    others: Tensor
    samples: int
    pairs: int

    @classmethod
    def of(cls, grams: Sequence[Tensor]) -> "BatchProducts":
        """Take the products of one batch's Gram matrices, L of (n, n)."""
        count = grams[0].shape[0]
        stacked = torch.stack([g.reshape(-1) for g in grams])  # (L, n*n)
        # Scaled so that neither a tiny nor a huge layer leaves float32's range.
        scale = stacked.abs().amax(1, keepdim=True).clamp_min(_tiny(stacked))
        stacked = (stacked / scale).double()
        size = scale.double().cpu()
        on_diagonal = stacked[:, :: count + 1]  # (L, n)
        diagonal = (on_diagonal @ on_diagonal.T).cpu() * size * size.T
        total = (stacked @ stacked.T).cpu() * size * size.T
        return cls(diagonal, total - diagonal, count, count * (count - 1))

    def __add__(self, other: "BatchProducts") -> "BatchProducts":
        return BatchProducts(
            self.diagonal + other.diagonal,
            self.others + other.others,
            self.samples + other.samples,
            self.pairs + other.pairs,
        )

    @property
    def products(self) -> Tensor:
        """The (L, L) products <K_i, K_j> of the whole N × N Grams."""
        wanted = self.samples * (self.samples - 1)
        return self.diagonal + self.others * (wanted / max(self.pairs, 1))


def debiased_products(grams: Sequence[Tensor]) -> Tensor:
    """Return unbiased estimates of the centred products (HSIC_1 of Song et al.).

    Averages of them over batches estimate the value for the whole data set, which
    those of centred batches do not: a batch's own mean is not the data's.

    Args:
        grams: Uncentred Gram matrices of one batch, L of (n, n) with n > 3.
    """
    count = grams[0].shape[0]
    if count < 4:
        raise ValueError(
            f"debiased ORM needs batches of 4 samples or more, got {count}"
        )
    stacked = torch.stack([g.double() for g in grams]).clone()  # (L, n, n)
    stacked.diagonal(dim1=1, dim2=2).zero_()
    flat = stacked.flatten(1)
    rows = stacked.sum(2)  # (L, n)
    sums = rows.sum(1)  # (L,)
    products = flat @ flat.T
    products = products + torch.outer(sums, sums) / ((count - 1) * (count - 2))
    products = products - 2 / (count - 2) * (rows @ rows.T)
    return (products / (count * (count - 3))).cpu()


def normalised(products: Tensor) -> Tensor:
    """Turn products <K_i, K_j> into ORM, (L, L).

    A layer whose output is constant (zero variance when centred) has no direction: its
    ORM with every other layer is 0, and 1 with itself.
    """
    norms = products.diagonal().clamp_min(0).sqrt()
    floor = _tiny(products)
    orm = products / torch.outer(norms, norms).clamp_min(floor)
    dead = norms == 0
    orm[dead] = 0
    orm[:, dead] = 0
    orm = orm.clamp(0, 1)
    orm.fill_diagonal_(1)
    return orm


def layer_gamma(orm: Tensor) -> Tensor:
    """Return gamma_i = sum_j k_ij − 1 (Eq. 8): small means independent. (L,)."""
    return orm.sum(1) - 1


def importance(
    gamma: Tensor, *, beta: float = 1.0, decreasing: Decreasing = "exp(-x)"
) -> Tensor:
    """Return theta_i, the importance factors, up to one common positive factor.

    Args:
        gamma: Sums of ORM, (L,).
        beta: How much layers differ (Eq. 9).
        decreasing: The decreasing function of the ablation, applied to beta * gamma.

    Returns:
        theta, (L,) float64. exp(-x) is shifted so that the largest is 1: only ratios
        matter to the linear program, and exp(-beta * gamma) itself underflows.
    """
    x = beta * gamma.double()
    if decreasing == "exp(-x)":
        return torch.exp(x.min() - x)
    if decreasing == "-log(x)":
        return -torch.log(x.clamp_min(1e-12))
    if decreasing == "-x":
        return -x
    if decreasing == "-x^3":
        return -(x**3)
    if decreasing == "-exp(x)":
        return -torch.exp(x - x.max())
    raise ValueError(
        f"decreasing={decreasing!r} is unknown; "
        "use exp(-x), -log(x), -x, -x^3 or -exp(x)"
    )


def objective_coefficients(theta: Tensor) -> Tensor:
    """Return (1 / (L−i+1)) * sum_{j>=i} theta_j: what a bit of layer i is worth. (L,).

    The paper's objective (Eq. 10) gives layer i the mean importance of itself and all
    layers after it.
    """
    sums = theta.flip(0).cumsum(0).flip(0)
    return sums / torch.arange(len(theta), 0, -1, dtype=theta.dtype)


def _tiny(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).tiny)
