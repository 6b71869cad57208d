"""audit(): measure how well scores choose bits for a network, compared with chance."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau, spearmanr
from torch import Tensor, nn

from ompq.allocation.program import Allocation
from ompq.costs import Budget, digits
from ompq.evaluation import evaluate
from ompq.files import json_list, json_object
from ompq.measurement import Checkpoint, Meter
from ompq.planner import PlanConfig, plan as make_plan
from ompq.plans import Plan
from ompq.recording import copied
from ompq.samples import Batch, Samples, SamplesLike
from ompq.scores import Score, measure_orm, score_name
from ompq.scores.rounding_errors import rounded_weights
from ompq.scores.table import Random
from ompq.stages import Progress, no_progress
from ompq.units import Choice, by_bits

Floats = NDArray[np.float64]
FORMAT = "ompq-audit/1"
RANDOM = "random allocation "  # prefix of the names of random allocations


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """How allocations are sampled and measured.

    Attributes:
        allocations: Number of random allocations that meet the budget.
        null_scores: Number of random scores, which show the correlation by chance.
        resamples: Bootstrap resamples for each 95 % interval.
        iterations: Reconstruction steps per block for each allocation; 0 rounds to
            nearest, which is quick.
        orm_samples: Samples for the orthogonality of quantized networks; 0 skips it.
        scores: The scores to audit, or their names. By default those that are quick
            and can also choose the bits of activations.
        plan: Choices, pins and so on; its own score is not used.
        seed: Seed for allocations, null scores and resamples.
    """

    allocations: int = 60
    null_scores: int = 20
    resamples: int = 1000
    iterations: int = 0
    orm_samples: int = 64
    scores: tuple[Score | str, ...] = (
        *("sensitivity", "blend", "output_divergence", "weight_noise"),
        *("orm", "smallest_first"),
    )
    plan: PlanConfig = PlanConfig()
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """One allocation and its measured damage."""

    name: str  # ``random allocation 7``, the score that chose it, or the caller's name
    bits: tuple[tuple[float, ...], ...]  # choice of each unit, in the graph's order
    size_bytes: float  # size as the plan counts it
    divergence: float  # mean KL from the float network, in nats, on held-out samples
    top1: float | None = None  # accuracy, if there are labelled batches
    orthogonality: float | None = None  # mean ORM between the quantized layers


class Correlation(NamedTuple):
    """A rank correlation with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


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
        seconds: Time taken to plan with the score.
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
        orthogonality: A test of the paper's claim: Spearman correlation of a quantized
            network's mean ORM and divergence. Positive if less orthogonal networks are
            worse.
    """

    budget: str
    units: tuple[str, ...]
    measured: tuple[Measured, ...]
    scores: tuple[ScoreAudit, ...]
    null_spearman: tuple[float, ...]
    orthogonality: Correlation | None = None

    def __repr__(self) -> str:
        return (
            f"Audit({self.budget}: {len(self.measured)} allocations, "
            f"{len(self.scores)} scores; least divergence {self.best.divergence:.4g})"
        )

    @property
    def best(self) -> Measured:
        """The allocation with the smallest divergence."""
        return min(self.measured, key=lambda one: one.divergence)

    @property
    def random(self) -> tuple[Measured, ...]:
        """The random allocations, from which correlations are computed."""
        return tuple(one for one in self.measured if one.name.startswith(RANDOM))

    def allocation(self, measured: Measured) -> Allocation:
        """Return a measured allocation in the form that ``quantize`` takes."""
        pairs = zip(self.units, measured.bits, strict=True)
        return Allocation({unit: Choice.from_json([*b], unit) for unit, b in pairs})

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def __str__(self) -> str:
        null = np.array(self.null_spearman)
        rows = [f"{'score':<18} spearman         divergence  regret  seconds"]
        for one in self.scores:
            rho = one.spearman
            shown = f"{rho.value:.2f} ({rho.low:.2f}-{rho.high:.2f})" if rho else "-"
            rows.append(
                f"{one.name:<18} {shown:<16} "
                f"{digits(one.divergence):>10} {one.regret:>7.1%} {one.seconds:>8.1f}"
            )
        if len(null):
            spread = f"{null.std():.2f} (standard deviation)"
            rows.append(f"{'chance':<18} {null.mean():.2f} ± {spread}")
        return "\n".join(rows)


def audit(  # noqa: PLR0913 - the last four are optional
    model: nn.Module,
    samples: SamplesLike,
    budget: Budget | str,
    held_out: SamplesLike,
    config: AuditConfig = AuditConfig(),
    *,
    others: Mapping[str, Allocation] | None = None,
    batches: Sequence[tuple[Batch, Tensor]] = (),
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Measure how well scores choose bits for a network at one budget.

    Random allocations at the budget, every score's own allocation, uniform bits and
    ``others`` are quantized and compared with the float network on held-out samples.
    In a distributed run the processes share the allocations.

    Args:
        samples: Calibration samples; scores use the first 64.
        held_out: Samples used by neither scores nor calibration.
        others: Further allocations by name, such as published ones.
        batches: Labelled batches, to measure top-1 as well.
        checkpoint: A JSON file that keeps the measurements; a run with the same
            arguments resumes from it.

    Raises:
        CheckpointError: The checkpoint belongs to another audit.
        InfeasibleBudgetError: No allocation meets the budget.
    """
    calibration = Samples.of(samples)
    report = progress or no_progress
    plans, seconds = {}, {}
    for done, score in enumerate(config.scores):
        name = score_name(score)
        report(done, len(config.scores), f"planning by {name}")
        start = time.perf_counter()
        settings = replace(config.plan, score=score)
        plans[name] = make_plan(model, calibration.first(64), budget, settings)
        seconds[name] = time.perf_counter() - start
    first = next(iter(plans.values()))
    rng = np.random.default_rng(config.seed)
    candidates = {
        **{name: one.allocation for name, one in plans.items()},
        **{
            f"{RANDOM}{i}": random_allocation(first, rng)
            for i in range(config.allocations)
        },
        **_uniform(first),
        **(others or {}),
    }
    meter = Meter(
        model,
        calibration,
        Samples.of(held_out),
        iterations=config.iterations,
        seed=config.seed,
        group_size=first.graph.group_size,
    )
    listed = {name: one.to_json() for name, one in candidates.items()}
    identity = json.dumps([first.graph.to_json(), listed, meter.judge], sort_keys=True)
    saved = Checkpoint(checkpoint, "audit", identity, _read)

    def measure(name: str) -> Measured:
        bits = candidates[name]
        network = meter.quantized(bits)
        return Measured(
            name=name,
            bits=tuple(tuple(choice.to_json()) for choice in bits.values()),
            size_bytes=replace(first, allocation=bits).totals["bytes"],
            divergence=meter.divergence(network),
            top1=evaluate(network, batches).top1 if batches else None,
            orthogonality=_orthogonality(meter, first, bits, config.orm_samples),
        )

    measured: list[Measured] = []
    for result in saved.get_all([*candidates], measure):
        measured.append(result)
        best = min(one.divergence for one in measured)
        message = f"measuring allocations: best divergence {digits(best)}"
        report(len(measured), len(candidates), message)
    return _summary(plans, seconds, measured, config)


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
    network = copied(meter.model)
    with torch.no_grad():
        for unit in plan.graph.units:
            [rounded] = rounded_weights(meter.model, unit, [bits[unit.name]])
            network.get_parameter(unit.parameter).copy_(rounded)
    orm = measure_orm(plan.graph, network, meter.samples.first(count))
    return float(np.mean(orm.matrix))


def _read(entry: Any) -> Measured:
    data = json_object(entry, "measured")
    choices = json_list(data.get("bits"), "bits")
    bits = tuple(tuple(json_list(choice, "bits")) for choice in choices)
    return Measured(**{**data, "bits": bits})


def _summary(
    plans: Mapping[str, Plan],
    seconds: Mapping[str, float],
    measured: Sequence[Measured],
    config: AuditConfig,
) -> Audit:
    """Return the audit: how well each score predicts and chooses."""
    first = next(iter(plans.values()))
    found = Audit(str(first.budget), first.graph.names, tuple(measured), (), ())
    random, best = found.random, found.best.divergence
    truth = np.array([one.divergence for one in random])
    rng = np.random.default_rng(config.seed)
    columns = np.array([first.problem.columns(found.allocation(one)) for one in random])

    def predicted(damage: Floats) -> Floats:
        totals: Floats = damage[np.arange(len(damage)), columns].sum(1)
        return totals

    own = {one.name: one.divergence for one in measured}
    entries = [
        ScoreAudit(
            name=name,
            spearman=_correlation(spearmanr, damages, truth, config, rng),
            kendall=_correlation(kendalltau, damages, truth, config, rng),
            divergence=own[name],
            regret=own[name] / best - 1,
            seconds=seconds[name],
            predicted=tuple(damages.tolist()),
        )
        for name, one in plans.items()
        for damages in [predicted(one.scores.damage)]
    ]
    null = []
    if len(random) > 2:
        for seed in range(config.null_scores):
            chance = Random(seed).worth(first.graph, first.choices)
            null.append(float(spearmanr(predicted(chance), truth)[0]))
    orthogonal = [one.orthogonality for one in random if one.orthogonality is not None]
    claim = None
    if len(orthogonal) == len(random) > 2:
        claim = _correlation(spearmanr, np.array(orthogonal), truth, config, rng)
    return replace(
        found,
        scores=tuple(sorted(entries, key=lambda one: one.divergence)),
        null_spearman=tuple(null),
        orthogonality=claim,
    )


def _correlation(
    statistic: Callable[[Floats, Floats], Any],
    predicted: Floats,
    truth: Floats,
    config: AuditConfig,
    rng: np.random.Generator,
) -> Correlation | None:
    """Return a rank correlation and its bootstrap percentiles."""
    if len(truth) < 3 or np.ptp(predicted) == 0 or np.ptp(truth) == 0:
        return None
    values = []
    for _ in range(config.resamples):
        rows = rng.integers(len(truth), size=len(truth))
        if np.ptp(predicted[rows]) and np.ptp(truth[rows]):
            values.append(float(statistic(predicted[rows], truth[rows])[0]))
    value = float(statistic(predicted, truth)[0])
    low, high = np.percentile(values or [value], [2.5, 97.5])
    return Correlation(value, float(low), float(high))
