"""ORM of a network, and the paper's score, which is linear in bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ompq.errors import SampleError, TraceError, shortened
from ompq.graph import Choice, LayerGraph, Unit, select
from ompq.orthogonality import (
    BatchProducts,
    Decreasing,
    debiased_products,
    gram_matrix,
    importance,
    layer_gamma,
    normalised,
    objective_coefficients,
)
from ompq.recording import tensors_in, watch
from ompq.samples import (
    Batch,
    Progress,
    Samples,
    SamplesLike,
    batch_length,
    model_device,
    to_device,
)
from ompq.scores.table import Needs, ScoreTable, Table

Granularity = Literal["layer", "block", "stage", "net"]
_BATCH = 256  # samples whose Gram matrices, 256 × 256 a layer, are held at a time


@dataclass(frozen=True)
class OrmSettings:
    """How ORM is measured and turned into importance.

    Attributes:
        beta: How much layers differ: theta = exp(−beta · gamma).
        centred: False is the paper's metric, True that of its released code.
        decreasing: Function from gamma to theta.
        granularity: What counts as one function f_i.
        exclude: Patterns of units that take no part, such as pinned ones.
        per_function: Whether gamma is divided by the number of other functions, so
            that beta means the same for a network of any depth.
    """

    beta: float = 1.0
    centred: bool = False
    decreasing: Decreasing = "exp(-x)"
    granularity: Granularity = "layer"
    exclude: tuple[str, ...] = ()
    per_function: bool = False


@dataclass(frozen=True)
class OrmResult:
    """ORM of a network's functions and what follows for its units.

    Attributes:
        matrix: ORM between functions, (L, L).
        labels: For each function, the name of the last unit that it represents.
        gamma: Sum of ORM with all other functions, (units,); 0 for excluded units.
        importance: Objective coefficient, (units,); 0 for excluded units.
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
        graph: The network's units.
        model: The network.
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
    left_out = {n for p in settings.exclude for n in select(graph.names, p)}
    units = [u for u in graph.units if u.name not in left_out]
    function_of = _functions(units, settings.granularity)
    functions = sorted(set(function_of.values()))
    names = {u.feature: u.name for u in units}
    labels = tuple(names[at] for at in functions)

    report = progress or (lambda _done, _total, _message: None)

    def grams(batch: Batch, *, centred: bool) -> list[Tensor]:
        found = _grams(model, batch, functions, report, centred=centred)
        _check_finite(found, labels)
        return found

    products = _products(grams, Samples.of(samples), centred=settings.centred)
    matrix = normalised(products)
    gamma = layer_gamma(matrix)
    layers = sorted(function_of)  # each layer's feature, in order of execution
    layer_function = [functions.index(function_of[at]) for at in layers]
    layer_of = [
        -1 if u.name in left_out else layers.index(u.feature) for u in graph.units
    ]
    return OrmResult(
        matrix=matrix.numpy(),
        labels=labels,
        gamma=_per_unit(gamma[layer_function], layer_of),
        importance=_per_unit(
            objective_coefficients(_theta(gamma, settings)[layer_function]), layer_of
        ),
    )


def _theta(gamma: Tensor, settings: OrmSettings) -> Tensor:
    others = max(len(gamma) - 1, 1) if settings.per_function else 1
    return importance(
        gamma / others, beta=settings.beta, decreasing=settings.decreasing
    )


def _functions(units: Sequence[Unit], granularity: Granularity) -> dict[int, int]:
    """Return, for each layer's feature, the feature of the function it is part of."""
    keys: Mapping[str, Callable[[Unit], object]] = {
        "layer": lambda u: u.feature,
        "block": lambda u: u.block,
        "stage": lambda u: u.stage,
        "net": lambda _: None,
    }
    if granularity not in keys:
        raise ValueError(
            f"granularity={granularity!r} is unknown; use layer, block, stage or net"
        )
    key = keys[granularity]
    last: dict[object, int] = {}
    for unit in units:
        last[key(unit)] = max(last.get(key(unit), 0), unit.feature)
    return {unit.feature: last[key(unit)] for unit in units}


def _products(
    grams: Callable[..., list[Tensor]], samples: Samples, *, centred: bool
) -> Tensor:
    """Return <K_i, K_j> of the functions whose Gram matrices are taken, (L, L)."""
    batches = samples.batches(_BATCH)
    first = next(batches)
    second = next(batches, None)
    alone = second is None
    if batch_length(first) < 2:
        raise SampleError("ORM needs at least 2 samples, got 1")
    # A stream has no mean at hand to centre by: there the estimate is debiased.
    found = grams(first, centred=centred and alone)
    if alone:
        return BatchProducts.of(found).products
    total: Any = debiased_products(found) if centred else BatchProducts.of(found)
    batch: Batch | None = second
    while batch is not None:
        found = grams(batch, centred=False)
        if not centred:
            total = total + BatchProducts.of(found)
        elif batch_length(batch) >= 4:  # a short last batch tells too little
            total = total + debiased_products(found)
        batch = next(batches, None)
    return total if centred else total.products  # type: ignore[no-any-return]


def _grams(
    model: nn.Module,
    batch: Batch,
    positions: Sequence[int],
    progress: Progress,
    *,
    centred: bool,
) -> list[Tensor]:
    """Run one batch and return the Gram matrix of each wanted output, L of (n, n)."""
    wanted = set(positions)
    found: dict[int, Tensor] = {}
    count = batch_length(batch)

    def visit(
        position: int, _function: Any, _args: Any, _kwargs: Any, out: Any
    ) -> None:
        if position in wanted:
            rows = _rows(next(tensors_in(out)), count)
            found[position] = gram_matrix(rows, centred=centred)
            progress(len(found), len(wanted), "measuring orthogonality")

    watch(model, to_device(batch, model_device(model)), visit)
    if len(found) < len(wanted):
        raise TraceError(
            "the network took a different path than when it was traced; "
            "ORM needs the same path for every batch"
        )
    return [found[position] for position in positions]


def _rows(feature: Tensor, count: int) -> Tensor:
    """Return the feature with one row a sample, (count, D), at least float32."""
    feature = feature.float() if feature.element_size() < 4 else feature
    # Windows have several rows a sample; sequences come first; attentions stack their
    # projections before either.
    places = [i for i, size in enumerate(feature.shape) if size and size % count == 0]
    if not places:
        raise TraceError(
            f"a layer's output of shape {tuple(feature.shape)} has no dimension of "
            f"{count} samples; ORM needs one"
        )
    exact = [i for i in places if feature.shape[i] == count]
    axis = 0 if places[0] == 0 else (exact or places)[0]
    return feature.movedim(axis, 0).reshape(count, -1)


def _check_finite(grams: Sequence[Tensor], labels: Sequence[str]) -> None:
    finite = torch.stack([torch.isfinite(g.sum()) for g in grams]).tolist()
    broken = [name for name, good in zip(labels, finite, strict=True) if not good]
    if broken:
        raise TraceError(f"activations are NaN or infinite at {shortened(broken)}")


def _per_unit(values: Tensor, layer_of: Sequence[int]) -> Table:
    """Spread the layers' values over the units; excluded units get 0."""
    padded = torch.cat([values.double(), torch.zeros(1, dtype=torch.float64)])
    return padded[list(layer_of)].numpy()


@dataclass(frozen=True)
class Orm:
    """The paper's score: −bits × coefficient, linear in bits.

    Attributes:
        settings: How ORM is measured; the paper's settings by default.
        progress: Called after each function.
    """

    settings: OrmSettings = OrmSettings()
    progress: Progress | None = field(default=None, repr=False, compare=False)

    summary: ClassVar[str] = "the paper's: orthogonality of layers, linear in bits"
    needs: ClassVar[Needs] = Needs("one")

    def __call__(
        self,
        graph: LayerGraph,
        model: nn.Module,
        samples: SamplesLike,
        choices: Sequence[Choice],
    ) -> ScoreTable:
        """Return −bits × coefficient, (units, choices)."""
        orm = measure_orm(graph, model, samples, self.settings, progress=self.progress)
        # Units tied by a residual sum are one decision of the paper's, and count once.
        sharing = [
            sum(graph.units[j].feature == u.feature for j in graph.groups[u.group])
            for u in graph.units
        ]
        # Activation bits count only where they are chosen.
        chosen = len({choice.activation for choice in choices}) > 1
        bits = np.array([c.weight + chosen * c.activation for c in choices], float)
        return orm.table(-np.outer(orm.importance / np.array(sharing), bits))
