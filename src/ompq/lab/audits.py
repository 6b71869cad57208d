"""Audits: how well scores choose bits for a network, compared with chance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import nn

from ompq.allocation.problem import Allocation
from ompq.amounts import digits
from ompq.budgets import Budget
from ompq.checkpoints import Measurements, Store
from ompq.configs import QuantizeConfig
from ompq.errors import PlanError
from ompq.evaluation import evaluate
from ompq.lab.audit_settings import AuditConfig
from ompq.measurement import Meter
from ompq.network.observation import copy_network
from ompq.network.units import Choice, by_bits
from ompq.planning import plan as make_plan
from ompq.plans import Plan
from ompq.progress import Progress, ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.report_sections import AuditedRanks
from ompq.samples import Batch, Samples, SamplesLike
from ompq.scores.baselines import Random
from ompq.scores.catalogue import score_name
from ompq.scores.orthogonality import measure_orm
from ompq.scores.weight_noise import rounded_weights

Floats = NDArray[np.float64]
FORMAT = "ompq-audit/1"
_PAIRS = 1 << 21  # of values that are compared at a time, which bounds the memory
RANDOM = "random allocation "  # prefix of the names of random allocations


@dataclass(frozen=True)
class Measured:
    """One allocation and its measured damage."""

    name: str  # ``random allocation 7``, the score that chose it, or the caller's name
    bits: tuple[
        tuple[int | float, ...], ...
    ]  # choice of each unit, in the graph's order
    size_bytes: float  # size as the plan counts it
    divergence: float  # mean KL from the float network, in nats, on held-out samples
    top1: float | None = None  # accuracy, if there are labelled batches
    orthogonality: float | None = None  # mean ORM between the quantized layers
    metrics: Mapping[str, float] = field(default_factory=dict)  # on labelled batches
    fits: bool = True  # whether it meets the budget

    @property
    def quality(self) -> dict[str, float]:
        """Divergence and, if there are labelled batches, top-1 and metrics by name."""
        top1 = {} if self.top1 is None else {"top-1": self.top1}
        return {"divergence": self.divergence, **top1, **self.metrics}


class Correlation(NamedTuple):
    """A rank correlation with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:z.2f} ({self.low:z.2f} to {self.high:z.2f})"


@dataclass(frozen=True)
class Correlations:
    """Spearman's rank correlation and Kendall's tau-b.

    None if there are fewer than three pairs, or if one of the two is always the same.
    """

    spearman: Correlation | None
    kendall: Correlation | None

    def __str__(self) -> str:
        return f"Spearman {self.spearman}, Kendall {self.kendall}"


@dataclass(frozen=True)
class ScoreAudit:
    """How well a score predicts, and how well it chooses.

    Attributes:
        spearman: Rank correlation of predicted damage and measured divergence over the
            random allocations; None if there are fewer than three, or if the score
            predicts the same for all of them.
        kendall: Likewise, Kendall's tau-b.
        divergence: Measured divergence of the allocation that the score chooses.
        regret: Its relative excess over the smallest divergence measured.
        seconds: Time that the score took; from a cache, when it was computed.
        predicted: Predicted damage of each random allocation, in order of measurement.
    """

    name: str
    spearman: Correlation | None
    kendall: Correlation | None
    divergence: float
    regret: float
    seconds: float
    predicted: tuple[float, ...] = ()


@dataclass(frozen=True)
class Audit:
    """The result of :func:`audit`.

    Attributes:
        budget: The budget, as text.
        units: Names of the units, in the order of ``Measured.bits``.
        measured: Every allocation with its measured damage.
        scores: One entry per score, smallest divergence first.
        null_spearman: Spearman correlation of each random score. Its mean is not zero:
            any score that decreases with bits correlates with damage.
        orthogonality: A test of the paper's claim: how a quantized network's mean ORM
            ranks with ``divergence``, ``top-1`` and each metric. If less orthogonal
            networks are worse, the first is positive, and those of accuracies negative.
    """

    budget: str
    units: tuple[str, ...]
    measured: tuple[Measured, ...]
    scores: tuple[ScoreAudit, ...]
    null_spearman: tuple[float, ...]
    orthogonality: Mapping[str, Correlations] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"Audit({self.budget}: {len(self.measured)} allocations, "
            f"{len(self.scores)} scores; least divergence {self.best.divergence:.4g})"
        )

    @property
    def best(self) -> Measured:
        """The allocation within the budget with the smallest divergence."""
        fitting = (one for one in self.measured if one.fits)
        return min(fitting, key=lambda one: one.divergence)

    @property
    def random(self) -> tuple[Measured, ...]:
        """The random allocations, from which correlations are computed."""
        return tuple(one for one in self.measured if one.name.startswith(RANDOM))

    @property
    def named(self) -> tuple[tuple[Measured, ScoreAudit | None], ...]:
        """All other allocations, the best first, with the score that chose them."""
        scores = {one.name: one for one in self.scores}
        others = [one for one in self.measured if not one.name.startswith(RANDOM)]
        others.sort(key=lambda one: one.divergence)
        return tuple((one, scores.get(one.name)) for one in others)

    def regret(self, measured: Measured) -> float:
        """Return the relative excess over the smallest divergence measured."""
        return measured.divergence / self.best.divergence - 1

    def allocation(self, measured: Measured) -> Allocation:
        """Return a measured allocation in the form that ``quantize`` takes."""
        pairs = zip(self.units, measured.bits, strict=True)
        return Allocation({unit: Choice.from_json([*b], unit) for unit, b in pairs})

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def __str__(self) -> str:
        rows = [["bits by", "Spearman", "Kendall", "divergence", "regret", "seconds"]]
        for one, score in self.named:
            ranks = (score.spearman, score.kendall) if score else (None, None)
            rows.append(
                [
                    one.name,
                    *(str(rank or "-") for rank in ranks),
                    digits(one.divergence),
                    f"{self.regret(one):.1%}",
                    f"{score.seconds:.1f}" if score else "-",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])])
            for name, *cells in rows
        ]
        return "\n".join([*lines, *(f"{c.name}: {c.text}" for c in self.comparisons)])

    @property
    def comparisons(self) -> tuple[AuditedRanks, ...]:
        """What random scores and orthogonality reach, to compare the scores with."""
        found = []
        if self.null_spearman:
            null = np.array(self.null_spearman)
            spread = f"{null.std():.2f} (standard deviation) by random scores"
            text = f"Spearman {null.mean():.2f} ± {spread}"
            found.append(AuditedRanks("chance", text))
        for name, ranks in self.orthogonality.items():
            points = [
                (one.orthogonality or 0.0, one.quality[name]) for one in self.random
            ]
            text = f"mean ORM of the quantized network: {ranks}"
            found.append(AuditedRanks(f"{name} by orthogonality", text, tuple(points)))
        return tuple(found)


@shows_progress("auditing")
def audit(  # noqa: PLR0913 - the last five are optional
    model: nn.Module,
    samples: SamplesLike,
    budget: Budget | str,
    held_out: SamplesLike,
    config: AuditConfig = AuditConfig(),
    *,
    others: Mapping[str, Allocation] | None = None,
    batches: Sequence[tuple[Batch, Any]] = (),
    checkpoint: str | Path | None = None,
    cache: str | Path | None = None,
    progress: ProgressLike = None,
) -> Audit:
    """Measure how well scores choose bits for a network at one budget.

    Random allocations at the budget, every score's own allocation, uniform bits and
    ``others`` are quantized and compared with the float network on held-out samples.
    In a distributed run the processes share the allocations.

    Args:
        samples: Calibration samples; scores use the first 64.
        held_out: Samples used by neither scores nor calibration.
        others: Further allocations by name, such as published ones.
        batches: Labelled batches, to measure top-1 and metrics as well.
        checkpoint: A JSON file that keeps the measurements; a run with the same
            arguments resumes from it.
        cache: A folder for the tables of the scores, as for ``plan``. With it, a run
            that resumes does not compute them again.

    Raises:
        CheckpointError: The checkpoint belongs to another audit.
        InfeasibleBudgetError: No allocation meets the budget.
        PlanError: The bits of ``others`` are not those of this network, or not among
            the choices.
    """
    calibration = Samples.of(samples)
    report = callback(progress)
    make = partial(make_plan, model, calibration.first(64), budget, cache=cache)
    # Units are tied as the settings ask, and not as the granularity of a score.
    neutral = make(replace(config.plan, score="smallest_first"))
    candidates = _check_allocations(neutral, others or {}, config)
    plans = {}
    for score in config.scores:
        name = score_name(score)
        settings = replace(config.plan, score=score)
        plans[name] = make(settings, progress=_with_prefix(report, name))
    candidates = {
        **{name: one.allocation for name, one in plans.items()},
        **_sample_allocations(neutral, config),
        **_uniform(neutral),
        **candidates,
    }
    meter = Meter(
        model,
        calibration,
        Samples.of(held_out),
        iterations=config.iterations,
        seed=config.seed,
        config=QuantizeConfig(
            group_size=neutral.graph.group_size or None, output=neutral.output
        ),
    )
    listed = {name: one.to_json() for name, one in candidates.items()}
    targets = [targets for _, targets in batches]
    about = neutral.graph.to_json(), dict(sorted(listed.items())), meter.judge
    also = config.orm_samples, dict(config.metrics), targets
    saved: Measurements[Measured] = Measurements(
        Store.of(checkpoint, "audit", *about, *also), Measured
    )

    def measure(name: str) -> Measured:
        bits = candidates[name]
        network = meter.quantized(bits)
        result = evaluate(network, batches, metrics=config.metrics) if batches else None
        return Measured(
            name=name,
            bits=tuple(tuple(bits[unit].to_json()) for unit in neutral.graph.names),
            size_bytes=replace(neutral, allocation=bits).totals["bytes"],
            divergence=meter.divergence(network),
            top1=result.top1 if result else None,
            metrics=dict(result.metrics) if result else {},
            orthogonality=_orthogonality(meter, neutral, bits, config.orm_samples),
            fits=neutral.meets_budget(bits),
        )

    measured: list[Measured] = []
    for found in saved.get_all([*candidates], measure):
        measured.append(found)
        best = min(one.divergence for one in measured)
        message = f"measuring allocations: best divergence {digits(best)}"
        report(len(measured), len(candidates), message)
    return _summary(neutral, plans, measured, config)


def _with_prefix(report: Progress, name: str) -> Progress:
    """Return a callback whose messages begin with a name."""
    return lambda done, total, message: report(done, total, f"{name}: {message}")


def _check_allocations(
    plan: Plan, others: Mapping[str, Allocation], config: AuditConfig
) -> dict[str, Allocation]:
    """Return the caller's allocations, if they can be measured and told apart."""
    taken = {*map(score_name, config.scores), *_uniform(plan)}
    for name, bits in others.items():
        if name in taken or name.startswith(RANDOM):
            raise ValueError(f"others[{name!r}] has the name of another row; rename it")
        try:
            bits.check_units(plan.graph.names)
            plan.problem.columns(bits)
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from error
    return dict(others)


def _sample_allocations(plan: Plan, config: AuditConfig) -> dict[str, Allocation]:
    """Return random allocations by name."""
    rng = np.random.default_rng(config.seed)
    count = range(config.allocations)
    return {f"{RANDOM}{number}": random_allocation(plan, rng) for number in count}


def random_allocation(plan: Plan, rng: np.random.Generator) -> Allocation:
    """Return a random allocation that meets the plan's budget and uses it up.

    Groups share their bits, and pins hold. From a random start, random groups go down a
    step until every limit is met; then random groups go up a step while all still are.
    """
    costs = plan.problem.costs
    limits = plan.budget.limits(costs)
    groups = [list(rows) for rows in plan.graph.groups.values()]
    allowed = [np.flatnonzero(plan.allowed[rows].all(0)) for rows in groups]
    steps = [int(rng.integers(len(options))) for options in allowed]

    def columns() -> NDArray[np.int64]:
        chosen = np.zeros(len(plan.graph), np.int64)
        for rows, options, step in zip(groups, allowed, steps, strict=True):
            chosen[rows] = options[step]
        return chosen

    def fits() -> bool:
        chosen = columns()
        return all(costs[n].total(chosen) <= limit for n, limit in limits.items())

    # This ends: the smallest allocation meets the budget, or there would be no plan.
    while not fits():
        group = int(rng.choice([g for g, step in enumerate(steps) if step > 0]))
        steps[group] -= 1
    growing = list(range(len(groups)))
    while growing:
        group = int(rng.choice(growing))
        steps[group] += 1
        if steps[group] == len(allowed[group]) or not fits():
            steps[group] -= 1
            growing.remove(group)
    return plan.problem.unit_allocation(columns())


def _uniform(plan: Plan) -> dict[str, Allocation]:
    """Return the largest uniform allocation that meets the budget, if there is one."""
    for choice in reversed(by_bits(plan.choices)):
        column = plan.choices.index(choice)
        uniform = plan.problem.unit_allocation(np.full(len(plan.graph), column))
        if plan.allowed[:, column].all() and plan.meets_budget(uniform):
            return {f"uniform {choice}": uniform}
    return {}


def _orthogonality(
    meter: Meter, plan: Plan, bits: Allocation, count: int
) -> float | None:
    """Return the mean ORM of the network with weights rounded to nearest.

    As in the paper's experiment, nothing else is changed: batch norms are not folded,
    moments are not restored, and activations stay float.
    """
    if not count:
        return None
    network = copy_network(meter.model)
    with torch.no_grad():
        for unit in plan.graph.units:
            [rounded] = rounded_weights(meter.model, unit, [bits[unit.name]])
            network.get_parameter(unit.parameter).copy_(rounded)
    orm = measure_orm(plan.graph, network, meter.samples.first(count))
    return float(np.mean(orm.matrix))


def _summary(
    neutral: Plan,
    plans: Mapping[str, Plan],
    measured: Sequence[Measured],
    config: AuditConfig,
) -> Audit:
    """Return the audit: how well each score predicts and chooses."""
    graph, choices = neutral.graph, neutral.choices
    found = Audit(str(neutral.budget), graph.names, tuple(measured), (), ())
    random = found.random
    truth = np.array([one.divergence for one in random])
    rng = np.random.default_rng(config.seed)
    problem = neutral.problem
    columns = np.array([problem.columns(found.allocation(one)) for one in random])

    def predicted(damage: Floats) -> Floats:
        totals: Floats = damage[np.arange(len(damage)), columns].sum(1)
        return totals

    own = {one.name: one for one in measured}
    entries = []
    for name, one in plans.items():
        damages = predicted(one.scores.damage)
        ranks = _correlations(damages, truth, config, rng)
        entries.append(
            ScoreAudit(
                name=name,
                spearman=ranks.spearman,
                kendall=ranks.kendall,
                divergence=own[name].divergence,
                regret=found.regret(own[name]),
                seconds=one.scores.seconds or 0.0,
                predicted=tuple(damages.tolist()),
            )
        )
    null = []
    if len(random) > 2:
        for seed in range(config.null_scores):
            chance = Random(seed).worth(graph, choices)
            null.append(float(spearman(predicted(chance)[None], truth[None])[0]))
    return replace(
        found,
        scores=tuple(sorted(entries, key=lambda one: one.divergence)),
        null_spearman=tuple(null),
        orthogonality=_claims(random, config, rng),
    )


def _claims(
    random: Sequence[Measured], config: AuditConfig, rng: np.random.Generator
) -> dict[str, Correlations]:
    """Return how mean ORM ranks with each measure of a network's quality."""
    orthogonal = [one.orthogonality for one in random if one.orthogonality is not None]
    if len(orthogonal) < len(random):
        return {}
    found = {}
    for name in random[0].quality if random else ():
        values = np.array([one.quality[name] for one in random])
        ranks = _correlations(np.array(orthogonal), values, config, rng)
        if ranks.spearman is not None:
            found[name] = ranks
    return found


def _correlations(
    predicted: Floats, truth: Floats, config: AuditConfig, rng: np.random.Generator
) -> Correlations:
    given = predicted, truth, config, rng
    return Correlations(_correlation(spearman, *given), _correlation(kendall, *given))


def _correlation(
    statistic: Callable[[Floats, Floats], Floats],
    predicted: Floats,
    truth: Floats,
    config: AuditConfig,
    rng: np.random.Generator,
) -> Correlation | None:
    """Return a rank correlation and its bootstrap percentiles."""
    count = len(truth)
    if count < 3 or np.ptp(predicted) == 0 or np.ptp(truth) == 0:
        return None
    rows = rng.integers(count, size=(config.resamples, count))
    pairs = predicted[rows], truth[rows]
    vary = np.ptp(pairs[0], 1).astype(bool) & np.ptp(pairs[1], 1).astype(bool)
    value = float(statistic(predicted[None], truth[None])[0])
    values = statistic(pairs[0][vary], pairs[1][vary])
    low, high = np.percentile(values if len(values) else [value], [2.5, 97.5])
    return Correlation(value, float(low), float(high))


def spearman(one: Floats, other: Floats) -> Floats:
    """Return Spearman's correlation of rows (R, n), none of them constant, (R,)."""
    a, b = (rankdata(x, axis=1) - (x.shape[1] + 1) / 2 for x in (one, other))
    found: Floats = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return found


def kendall(one: Floats, other: Floats) -> Floats:
    """Return Kendall's tau-b of rows (R, n), none of them constant, (R,)."""
    first, second = np.triu_indices(one.shape[1], 1)
    most = max(1, _PAIRS // len(first))  # rows at a time
    found = []
    for at in range(0, len(one), most):
        rows = (x[at : at + most] for x in (one, other))
        a, b = (np.sign(x[:, first] - x[:, second]) for x in rows)
        found.append((a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1)))
    return np.concatenate(found) if found else np.zeros(0)
