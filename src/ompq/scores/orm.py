"""ORM of a network, and the scores built on it: the paper's and two of ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from ompq.errors import SampleError, TraceError, check_known, shortened
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
from ompq.recording import Watch, copied, tensors_in
from ompq.results import Progress
from ompq.samples import (
    Samples,
    SamplesLike,
    arguments,
    batch_length,
    evaluating,
    model_device,
    to_device,
)
from ompq.scores.rounding_errors import check_weights_only, noise_table, weight_table
from ompq.scores.table import Needs, ScoreInputs
from ompq.units import LayerGraph, ScoreTable, Table, Unit, select

Granularity = Literal["layer", "block", "stage", "net"]
_OTHER_PATH = (
    "the network took a different path than when it was traced with one sample; ORM "
    "needs the same path for every batch. A network that takes images one by one, as "
    "detectors do, is planned by the part that takes a batch: its backbone and head, "
    "see Detectors in docs/guide.md"
)
ORM_BATCH = 256  # samples per batch: each layer has a 256 × 256 Gram matrix


@dataclass(frozen=True)
class OrmSettings:
    """How ORM is measured and turned into importance.

    Attributes:
        beta: How much layers differ: theta = exp(−beta · gamma).
        centred: False is the paper's metric, True that of its released code.
        decreasing: Function from gamma to theta.
        granularity: What counts as one function f_i. With ``block``, ``stage`` and
            ``net``, a plan gives one width to each of them, as the authors do.
        exclude: Patterns of units to leave out, such as pinned ones.
        per_function: Whether gamma is divided by the number of other functions, so
            that beta means the same at any depth.
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
        total = _added(total, grams.matrices(), debiased=debiased)
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
        raise TraceError(f"activations are NaN or infinite at {shortened(broken)}")
    place = {unit.name: functions.index(function_of[unit.feature]) for unit in units}
    places = [place.get(name, -1) for name in graph.names]
    matrix = normalised(products)
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


def _added(total: Any, grams: Sequence[Tensor], *, debiased: bool) -> Any:
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
        orm = _measured(given, self.settings)
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
        orm = _measured(given, self.settings)
        return orm.table(orm.importance[:, None] * noise_table(given))


def _measured(given: ScoreInputs, settings: OrmSettings) -> OrmResult:
    network = given.graph, given.model, given.samples
    return measure_orm(*network, settings, progress=given.progress)


@dataclass(frozen=True)
class OrmShift:
    """|sum of ORM with one unit rounded − sum of ORM|, uncentred.

    Takes the paper at its word: a network must keep the orthogonality of its layers, so
    a unit needs the bits without which it would be lost.

    Attributes:
        samples: How many inputs are used, at most.
    """

    samples: int = 32

    summary: ClassVar[str] = "change of the sum of ORM when one unit is rounded"
    needs: ClassVar[Needs] = Needs("one for each unit and width", seconds=56.0)

    def __call__(self, given: ScoreInputs) -> ScoreTable:
        """Return absolute changes of the sum of ORM, (units, choices)."""
        check_weights_only(given.choices, "orm_shift")
        few = given.samples.first(self.samples)
        other = copied(given.model)
        before = measure_orm(given.graph, other, few).matrix.sum()
        done = 0

        def shift(unit: Unit, rounded: Tensor) -> float:
            nonlocal done
            weight = other.get_parameter(unit.parameter)
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.copy_(rounded)
                after = measure_orm(given.graph, other, few).matrix.sum()
                weight.copy_(kept)
            done += 1
            given.progress(done, None, f"ORM without {unit.name}")
            return float(abs(after - before))

        return ScoreTable(weight_table(given, shift))
