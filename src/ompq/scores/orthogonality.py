"""ORM, the paper's metric between layers: its equations and the scores made of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn import functional as F

from ompq.configs import Decreasing, Granularity, OrmSettings
from ompq.errors import SampleError, TraceError, check_known, shorten
from ompq.network.observation import Watch, tensors_in
from ompq.network.units import LayerGraph, Table, Unit, select
from ompq.progress import Progress
from ompq.samples import (
    Samples,
    SamplesLike,
    arguments,
    batch_length,
    evaluating,
    model_device,
    to_device,
)
from ompq.score_tables import ScoreTable
from ompq.scores.computation import Needs, ScoreInputs
from ompq.scores.weight_noise import noise_table

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


def normalise_products(products: Tensor) -> Tensor:
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


_OTHER_PATH = (
    "the network took a different path than when it was traced with one sample; ORM "
    "needs the same path for every batch. A network that takes images one by one, as "
    "detectors do, is planned by the part that takes a batch: its backbone and head, "
    "see Detectors in docs/guide.md"
)
ORM_BATCH = 256  # samples per batch: each layer has a 256 × 256 Gram matrix


@dataclass(frozen=True)
class OrmResult:
    """ORM of a network's functions and what follows for its units.

    Attributes:
        matrix: ORM between functions, (L, L).
        labels: For each function, the name of the last unit that it represents.
        gamma: Sum of ORM with all other functions, (units,); 0 for excluded units.
        importance: Objective coefficient, (units,), at least 0: where a decreasing
            function gives negative ones, all are raised until the least is 0. 0 for
            excluded units.
    """

    matrix: Table
    labels: tuple[str, ...]
    gamma: Table
    importance: Table

    def table(self, damage: Table) -> ScoreTable:
        """Return a score table that carries this ORM."""
        return ScoreTable(
            damage,
            orm=self.matrix,
            orm_labels=self.labels,
            gamma=self.gamma,
            importance=self.importance,
        )


def measure_orm(
    graph: LayerGraph,
    model: nn.Module,
    samples: SamplesLike,
    settings: OrmSettings | None = None,
    *,
    progress: Progress | None = None,
) -> OrmResult:
    """Measure ORM in one forward pass, keeping Gram matrices and no activation.

    Args:
        samples: Inputs; with one batch (up to 256 samples) ORM is exact, with more
            it is an unbiased estimate from the pairs within batches.
        settings: The paper's by default.
        progress: Called after each function of a batch.

    Raises:
        SampleError: Fewer than 2 samples.
        TraceError: An activation is NaN or infinite, or the network took another
            path than when it was traced.
    """
    settings = settings or OrmSettings()
    given, device = Samples.of(samples), model_device(model)
    if len(given) < 2:
        raise SampleError("layers are compared over samples: give at least 2, not 1")
    # A stream has no mean at hand to centre by: there the estimate is debiased.
    debiased = settings.centred and given.batch_count(ORM_BATCH) > 1
    wanted = replace(settings, centred=settings.centred and not debiased)
    total: Any = None
    for batch in given.batches(ORM_BATCH):
        grams = Grams(graph, model, wanted, batch_length(batch), progress)
        args, kwargs = arguments(to_device(batch, device))
        with evaluating(model), grams:
            model(*args, **kwargs)
        total = _add(total, grams.matrices(), debiased=debiased)
    products = total if debiased else total.products
    return orm_result(graph, settings, products)


def orm_result(graph: LayerGraph, settings: OrmSettings, products: Tensor) -> OrmResult:
    """Return ORM and the units' importance from the products <K_i, K_j>, (L, L).

    Raises:
        TraceError: An activation is NaN or infinite.
    """
    units = _taking_part(graph, settings)
    function_of = _functions(units, settings.granularity)
    functions = sorted({*function_of.values()})
    names = {unit.feature: unit.name for unit in units}
    finite = products.diagonal().isfinite().tolist()
    pairs = zip(functions, finite, strict=True)
    if broken := [names[at] for at, good in pairs if not good]:
        raise TraceError(f"activations are NaN or infinite at {shorten(broken)}")
    place = {unit.name: functions.index(function_of[unit.feature]) for unit in units}
    places = [place.get(name, -1) for name in graph.names]
    matrix = normalise_products(products)
    gamma = layer_gamma(matrix)
    others = max(len(gamma) - 1, 1) if settings.per_function else 1
    theta = importance(
        gamma / others, beta=settings.beta, decreasing=settings.decreasing
    )
    worth = objective_coefficients(theta)
    # All functions but exp(-x) are negative, so the paper's program would choose the
    # fewest bits everywhere. Raised to 0 or more, they make bits worth spending.
    worth = worth - worth.min().clamp(max=0)
    return OrmResult(
        matrix=matrix.numpy(),
        labels=tuple(names[at] for at in functions),
        gamma=_per_unit(gamma, places),
        importance=_per_unit(worth, places),
    )


def function_units(graph: LayerGraph, settings: OrmSettings) -> list[list[str]]:
    """Return the names of the units of each function coarser than a layer."""
    if settings.granularity == "layer":
        return []
    units = _taking_part(graph, settings)
    function_of = _functions(units, settings.granularity)
    found: dict[int, list[str]] = {}
    for unit in units:
        found.setdefault(function_of[unit.feature], []).append(unit.name)
    return list(found.values())


def _taking_part(graph: LayerGraph, settings: OrmSettings) -> list[Unit]:
    """Return the units that are not excluded."""
    left_out = {n for p in settings.exclude for n in select(graph.names, p)}
    return [unit for unit in graph.units if unit.name not in left_out]


def _functions(units: Sequence[Unit], granularity: Granularity) -> dict[int, int]:
    """Return, for each layer's feature, the feature of the function it is part of."""
    keys: Mapping[str, Callable[[Unit], object]] = {
        "layer": lambda u: u.feature,
        "block": lambda u: u.block,
        "stage": lambda u: u.stage,
        "net": lambda _: None,
    }
    check_known("granularity", granularity, keys)
    key = keys[granularity]
    last: dict[object, int] = {}
    for unit in units:
        last[key(unit)] = max(last.get(key(unit), 0), unit.feature)
    return {unit.feature: last[key(unit)] for unit in units}


class Grams(Watch):
    """Takes the Gram matrix of each function's output while a batch runs."""

    def __init__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        settings: OrmSettings,
        count: int,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.graph, self.settings = graph, settings
        self.count, self.progress = count, progress
        units = _taking_part(graph, settings)
        last = {unit.feature: unit for unit in units}
        functions = {*_functions(units, settings.granularity).values()}
        # Positions of the outputs, each with the last unit behind it.
        self.units = {at: last[at] for at in sorted(functions)}
        # The identity of that unit's weight.
        self.weights = {
            at: id(model.get_parameter(unit.parameter))
            for at, unit in self.units.items()
        }
        self.unread = {*self.weights.values()}
        self.found: dict[int, Tensor] = {}  # (n, n) each

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        at = self.position
        output = super().__torch_function__(func, types, args, kwargs)
        if at == self.position:
            return output
        self.unread.difference_update(map(id, tensors_in((args, kwargs))))
        if at in self.units:
            if self.weights[at] in self.unread:
                raise TraceError(_OTHER_PATH)
            with DisableTorchFunction():  # other modes need not see this
                rows = sample_rows(next(tensors_in(output)).detach(), self.count)
                self.found[at] = gram_matrix(rows, centred=self.settings.centred)
            if self.progress:
                done, total = len(self.found), len(self.units)
                self.progress(done, total, "measuring orthogonality")
        return output

    def matrices(self) -> list[Tensor]:
        """Return the matrices in the order of the functions."""
        if len(self.found) < len(self.units):
            raise TraceError(_OTHER_PATH)
        return [self.found[at] for at in self.units]

    def result(self) -> OrmResult:
        """Return ORM, if this batch was all there is."""
        products = BatchProducts.of(self.matrices()).products
        return orm_result(self.graph, self.settings, products)


def _add(total: Any, grams: Sequence[Tensor], *, debiased: bool) -> Any:
    """Add the products <K_i, K_j> of one batch, (L, L)."""
    if debiased and total is not None and len(grams[0]) < 4:
        return total  # the last batch is too short for an estimate
    found = debiased_products(grams) if debiased else BatchProducts.of(grams)
    return found if total is None else total + found


def sample_rows(feature: Tensor, count: int) -> Tensor:
    """Return a layer's output with one row per sample, (count, D), at least float32."""
    feature = feature.float() if feature.element_size() < 4 else feature
    # Windows have several rows per sample; samples may follow the sequence dimension,
    # and in attentions the stacked projections.
    places = [i for i, size in enumerate(feature.shape) if size and size % count == 0]
    if not places and feature.dim() and len(feature) == 1:
        # The same for all samples, as the positions of an attention are.
        return feature.reshape(1, -1).expand(count, -1)
    if not places:
        raise TraceError(
            f"a layer's output of shape {tuple(feature.shape)} has no dimension of "
            f"{count} samples; ORM needs one"
        )
    exact = [i for i in places if feature.shape[i] == count]
    axis = 0 if places[0] == 0 else (exact or places)[0]
    return (feature.movedim(axis, 0) if axis else feature).reshape(count, -1)


def _per_unit(values: Tensor, places: Sequence[int]) -> Table:
    """Spread the functions' values over the units; excluded units get 0."""
    padded = torch.cat([values.double(), torch.zeros(1, dtype=torch.float64)])
    return padded[list(places)].numpy()


@dataclass(frozen=True)
class Orm:
    """The paper's score: −bits × coefficient, linear in bits.

    Attributes:
        settings: How ORM is measured; the paper's settings by default.
    """

    settings: OrmSettings = OrmSettings()

    summary: ClassVar[str] = "the paper's: orthogonality of layers, linear in bits"
    needs: ClassVar[Needs] = Needs("one", seconds=1.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return −bits × coefficient, (units, choices)."""
        graph, choices = given.graph, given.choices
        orm = _measure(given, self.settings)
        # In the paper, units of one function that share their bits are one decision,
        # which counts once.
        function_of = _functions(graph.units, self.settings.granularity)
        of = [function_of[unit.feature] for unit in graph.units]
        sharing = [
            sum(of[j] == own for j in graph.groups[unit.group])
            for own, unit in zip(of, graph.units, strict=True)
        ]
        # Activation bits count only where they are chosen.
        chosen = len({choice.activation for choice in choices}) > 1
        bits = np.array([c.bits + chosen * c.activation for c in choices], float)
        return orm.table(-np.outer(orm.importance / np.array(sharing), bits))


@dataclass(frozen=True)
class OrmDistortion:
    """ORM coefficient × noise-to-signal ratio of the rounded weights (and inputs).

    Distortion falls about fourfold per bit, as in rate-distortion theory; ORM says how
    much each layer's distortion matters.

    Attributes:
        settings: How ORM is measured; gamma is taken per function by default.
    """

    settings: OrmSettings = OrmSettings(per_function=True)

    summary: ClassVar[str] = "orthogonality of layers × weight_noise"
    needs: ClassVar[Needs] = Needs("one", seconds=1.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return coefficient × noise-to-signal, (units, choices)."""
        orm = _measure(given, self.settings)
        return orm.table(orm.importance[:, None] * noise_table(given))


def _measure(given: ScoreInputs, settings: OrmSettings) -> OrmResult:
    network = given.graph, given.model, given.samples
    return measure_orm(*network, settings, progress=given.progress)
