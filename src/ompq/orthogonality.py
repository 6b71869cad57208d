"""The paper's mathematics on plain tensors: Gram matrices, ORM, importance.

ORM(X, f_i, f_j) = ||f_j(X)^T f_i(X)||_F^2 / (||f_i^T f_i||_F ||f_j^T f_j||_F), where
f_i(X) is the (N, D_i) matrix of a layer's outputs for N samples. With the N × N Gram
matrices K_i = f_i f_i^T the numerator is <vec K_i, vec K_j>, so L Grams and one matrix
product give all L^2 values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.errors import check_known

Decreasing = Literal["exp(-x)", "-log(x)", "-x", "-x^3", "-exp(x)"]

_CHUNK = 1 << 22  # elements of a feature that a CPU works on at a time
_GPU_CHUNK = 1 << 26  # the same on a GPU: 256 MiB of float32
_COLUMNS = 2048  # columns that one thread multiplies at a time


def gram_matrix(features: Tensor, *, centred: bool = False) -> Tensor:
    """Return the Gram matrix of one layer's outputs (N, ...): (N, N), float64.

    ``centred`` subtracts each feature's mean over the samples before the product:
    subtracting afterwards would cancel the digits of features with a large mean.
    """
    flat = features.reshape(features.shape[0], -1)  # (N, D)
    count = len(flat)
    chunk = _GPU_CHUNK if flat.is_cuda else _CHUNK
    width = max(1, chunk // (count * _COLUMNS)) * _COLUMNS
    parts = torch.split(flat, width, dim=1) if flat.shape[1] > width else (flat,)
    if not centred:
        first, *others = parts
        return sum((_product(part) for part in others), _product(first))
    total = flat.new_zeros(count, count, dtype=torch.float64)
    rounding = total.new_zeros(())  # what rounding alone leaves of a constant feature
    for part in parts:
        mean = part.mean(0, keepdim=True)
        total += _product(part - mean)
        rounding += mean.square().sum() * count * torch.finfo(flat.dtype).eps ** 2
    return torch.where(total.trace() > 4 * rounding, total, 0)


def _product(part: Tensor) -> Tensor:
    """Return part @ part.T, (N, N) float64, the same for any number of threads.

    How threads share one large product changes its last digits; small products are
    computed by one thread each.
    """
    count, width = part.shape
    columns = min(_COLUMNS, max(1, width // 8))  # eight products or more
    if part.is_cuda and width % columns:
        # On a GPU one copy costs less than the calls for the rest.
        part = F.pad(part, (0, -width % columns))
        width = part.shape[1]
    whole = width // columns * columns  # at least one
    most = part[:, :whole] if whole < width else part
    parts = most.reshape(count, -1, columns).transpose(0, 1)
    total = torch.bmm(parts, parts.mT).sum(0, dtype=torch.float64)
    if whole < width:
        rest = part.new_zeros(2, count, columns)
        rest[0, :, : width - whole] = part[:, whole:]
        total += torch.bmm(rest, rest.mT).sum(0, dtype=torch.float64)
    return total


@dataclass(frozen=True)
class BatchProducts:
    """Sums of products of Gram entries over one batch, or over many.

    Gram matrices of tens of thousands of samples do not fit in memory, and no pass sees
    samples of two batches together. But ORM needs only the sum of products over the N
    diagonal entries and the sum over the N(N-1) others, and the pairs within batches
    are a fair sample of the latter. So the two sums are kept apart, added up batch by
    batch, and scaled to N. With one batch the result is exact.
    """

    diagonal: Tensor  # sum of K_i[a, a] K_j[a, a], (L, L) float64
    others: Tensor  # sum of K_i[a, b] K_j[a, b] over a != b, (L, L) float64
    samples: int  # number of samples seen
    pairs: int  # number of ordered pairs a != b seen

    @classmethod
    def of(cls, grams: Sequence[Tensor]) -> "BatchProducts":
        """Take the products of one batch's Gram matrices, L of (n, n)."""
        count = grams[0].shape[0]
        stacked = torch.stack([*grams]).flatten(1)  # (L, n*n)
        # Scaled so that products of tiny or huge values neither vanish nor overflow.
        scale = stacked.abs().amax(1, keepdim=True).clamp_min(_tiny(stacked))
        stacked = (stacked / scale).double()
        # Gram matrices are symmetric, so one half is enough.
        row, column = torch.triu_indices(count, count, 1, device=stacked.device)
        others = stacked.index_select(1, row * count + column)
        diagonal = stacked[:, :: count + 1]
        parts = [diagonal @ diagonal.T, others @ others.T, scale.double()]
        # One transfer: each makes the host wait for a GPU.
        found = torch.cat(parts, 1).cpu()
        own, other, size = torch.split(found, [len(grams), len(grams), 1], 1)
        return cls(
            diagonal=own * size * size.T,
            others=2 * (other * size * size.T),
            samples=count,
            pairs=count * (count - 1),
        )

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

    Averaged over batches, they estimate the value for the whole data set; products of
    centred batches do not, as a batch's mean is not that of the data. The Gram matrices
    are uncentred, (n, n) with n > 3.
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
    """Return theta_i of sums of ORM (L,), up to one common positive factor; float64.

    ``beta`` (Eq. 9) sets how much layers differ; ``decreasing`` is the function from
    the ablation, applied to beta * gamma. exp(-x) is scaled so that the largest is 1:
    only ratios matter to the linear program, and exp(-beta * gamma) itself underflows.
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
    check_known("decreasing", decreasing, get_args(Decreasing))
    return -torch.exp(x - x.max())


def objective_coefficients(theta: Tensor) -> Tensor:
    """Return (1 / (L−i+1)) * sum_{j>=i} theta_j: what a bit of layer i is worth. (L,).

    The paper's objective (Eq. 10) gives layer i the mean importance of itself and all
    layers after it.
    """
    sums = theta.flip(0).cumsum(0).flip(0)
    return sums / torch.arange(len(theta), 0, -1, dtype=theta.dtype)


def _tiny(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).tiny)
