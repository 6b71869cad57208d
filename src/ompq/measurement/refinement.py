"""refine(): improve a plan by measuring whole allocations on the network itself.

No score is best for every network. So the optima of several scores are quantized and
compared with the float network on held-out samples. Then the best score is corrected by
one factor per group of units to fit the measurements, and solved again, until the count
is used up. All measurements are kept in the plan.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ompq.allocation import Allocation, allocate
from ompq.costs import digits
from ompq.errors import check_known
from ompq.files import json_number
from ompq.graph import trace
from ompq.measurement import Checkpoint, Meter, split
from ompq.plans import Measurement, Plan
from ompq.samples import Samples, SamplesLike
from ompq.scores import Score, ScoreInputs, score_name, score_table
from ompq.stages import Progress

Floats = NDArray[np.float64]
logger = logging.getLogger(__name__)
_TRIES = 24  # perturbations to try before giving up


@dataclass(frozen=True, kw_only=True)
class RefineConfig:
    """How allocations are chosen and measured.

    Attributes:
        count: Largest number of allocations to measure.
        seconds: Time limit for starting another measurement; None for no limit.
        patience: Number of measurements without improvement before it stops.
        by: ``round`` measures allocations rounded to nearest; ``reconstruct`` measures
            them after a short reconstruction, which is slower and closer to the final
            network of PTQ.
        iterations: Steps per block of that reconstruction.
        trusted: Divergence, in nats, up to which rounding to nearest is taken to
            predict the reconstructed network. If every start diverges more, the plan
            keeps its bits. Use infinity if the network will not be reconstructed.
        scores: Scores whose optima are measured first, besides the plan's own.
        held_back: Fraction of the samples, taken from the end, that are only measured
            on. With too few of them (64, say), the best of many allocations is best by
            chance.
        noise: Expected relative error of a measurement. Together with ``spread`` it
            decides how closely the factors follow the measurements.
        spread: Expected deviation of a factor from 1.
        seed: Seed for the random perturbations used when the optimum was already
            measured.
    """

    count: int = 20
    seconds: float | None = None
    patience: int = 12
    by: Literal["round", "reconstruct"] = "round"
    iterations: int = 250
    trusted: float = 0.5
    scores: tuple[Score | str, ...] = ("weight_noise", "output_divergence", "blend")
    held_back: float = 0.5
    noise: float = 0.03
    spread: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        check_known("by", self.by, ("round", "reconstruct"))
        if self.count < 1:
            raise ValueError(f"count={self.count} measures nothing; use 1 or more")
        for name in ("noise", "spread", "held_back"):
            value, limit = getattr(self, name), 1 if name == "held_back" else np.inf
            if not 0 < value < limit:
                raise ValueError(f"{name}={value} must be above 0 and below {limit}")
        if not self.trusted > 0:
            raise ValueError(f"trusted={self.trusted} must be above 0")


def refine(
    plan: Plan,
    model: nn.Module,
    samples: SamplesLike,
    config: RefineConfig = RefineConfig(),
    *,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Return a plan with the best of many measured allocations.

    On the held-out samples it is never worse than the best allocation it starts from,
    unless rounding is not trusted and the plan keeps its bits. Its damage becomes the
    corrected score, which improves ``with_budget`` too. The measurements of an earlier
    refinement are reused. The same count gives the same plan.

    Args:
        plan: Budget, choices and pins, and the first allocation.
        samples: Unlabelled inputs, preferably 512 or more; networks are measured on the
            last part of them.
        checkpoint: A JSON file that keeps the measurements; a run with the same
            arguments resumes from it.
        progress: Called after each measurement.

    Raises:
        PlanError: The plan was made for another network.
        SampleError: There are too few samples to hold some back.
        CheckpointError: The checkpoint belongs to another run.
    """
    samples = Samples.of(samples)
    plan.check_network(trace(model, samples))
    calibration, held_out = split(samples, config.held_back)
    meter = Meter(
        model,
        calibration,
        held_out,
        iterations=config.iterations if config.by == "reconstruct" else 0,
        seed=config.seed,
        group_size=plan.graph.group_size,
    )
    known = [one for one in plan.measured if one.judge == meter.judge]
    # A resumed run may have other limits. Scores are compared by name, since the repr
    # of a function changes from run to run.
    names = tuple(map(score_name, config.scores))
    fixed = replace(config, count=1, seconds=None, patience=1, scores=names)
    identity = f"{plan.hash} {meter.judge} {fixed}"
    read = partial(json_number, what="divergence")
    saved = Checkpoint(checkpoint, "refinement", identity, read)
    chooser = _Chooser(plan, config, _tables(plan, model, calibration, config))
    measured: list[Measurement] = []
    started = time.monotonic()
    while (candidate := chooser.next([*known, *measured])) is not None:
        name, bits = candidate
        divergence = saved.get(str(bits.to_json()), partial(_measure, meter, bits))
        measured.append(Measurement(name, bits, divergence, meter.judge))
        if progress is not None:
            best = digits(min(one.divergence for one in measured))
            total = config.count if config.seconds is None else None
            text = f"measuring allocations: best divergence {best}"
            progress(len(measured), total, text)
        if _ended(measured, config, time.monotonic() - started):
            break
        if chooser.started(measured) and not _trusted(measured, config):
            return replace(plan, measured=(*plan.measured, *measured))
    return _refined(plan, chooser, [*known, *measured], measured)


def _trusted(measured: list[Measurement], config: RefineConfig) -> bool:
    """Return whether the measurements predict the quality of the final network."""
    best = min(one.divergence for one in measured)
    if config.by == "reconstruct" or best <= config.trusted:
        return True
    logger.warning(
        "the bits stay as planned: rounded to nearest, the best allocation diverges by "
        "%s nats; above %s that says little about the reconstructed network. "
        "Refine by reconstruction instead (--refine-by reconstruct)",
        digits(best),
        digits(config.trusted),
    )
    return False


def _measure(meter: Meter, bits: Allocation) -> float:
    return meter.divergence(meter.quantized(bits))


def _ended(measured: list[Measurement], config: RefineConfig, seconds: float) -> bool:
    values = [one.divergence for one in measured]
    stale = len(values) - 1 - values.index(min(values)) >= config.patience
    late = config.seconds is not None and seconds > config.seconds
    return late or stale or len(values) == config.count


def _tables(
    plan: Plan, model: nn.Module, samples: Samples, config: RefineConfig
) -> dict[str, Floats]:
    """Return the damage of every choice by each score, the plan's own first."""
    tables = {plan.score_name: plan.scores.damage}
    for score in config.scores:
        name = score_name(score)
        if name not in tables:
            inputs = ScoreInputs(plan.graph, model, samples.first(64), plan.choices)
            tables[name] = score_table(score, inputs).damage
    return tables


class _Chooser:
    """Chooses the next allocation to measure, and corrects a score."""

    def __init__(
        self, plan: Plan, config: RefineConfig, tables: Mapping[str, Floats]
    ) -> None:
        self.problem, self.budget, self.config = plan.problem, plan.budget, config
        self.tables = tables
        self.starts = [(plan.score_name, plan.allocation)]
        self.starts += [
            (name, self._best(table))
            for name, table in tables.items()
            if name != plan.score_name
        ]

    def started(self, measured: list[Measurement]) -> bool:
        """Return whether every start was measured."""
        return {bits for _, bits in self.starts} <= {m.allocation for m in measured}

    def next(self, measured: list[Measurement]) -> tuple[str, Allocation] | None:
        """Return an allocation not measured yet, or None if none can be found."""
        seen = {one.allocation for one in measured}
        for start in self.starts:
            if start[1] not in seen:
                return start
        table = self.corrected(measured)
        generator = np.random.default_rng([self.config.seed, len(measured)])
        # First the optimum; if that was measured, growing perturbations of the table.
        for width in (0.0, *self.config.spread * np.geomspace(0.1, 30.0, _TRIES)):
            noise = generator.standard_normal(len(self.problem.members))
            bits = self._best(
                table * np.exp(width * noise)[self.problem.group_of, None]
            )
            if bits not in seen:
                return f"refit {len(measured)}", bits
        return None

    def corrected(self, measured: list[Measurement]) -> Floats:
        """Return the best start's score, times a factor per group fitted to all data.

        The fit is a ridge regression towards factors of 1 that minimises relative
        errors, with no factor below 0.
        """
        from scipy.optimize import nnls

        table = self._positive(measured)
        groups = self.problem.by_group(table)
        firsts = [units[0] for units in self.problem.members]
        rows = np.arange(len(groups))
        features = np.array(
            [groups[rows, self.problem.columns(m.allocation)[firsts]] for m in measured]
        )
        truth = np.array([max(one.divergence, 1e-12) for one in measured])
        features = features / truth[:, None]
        scale = 1 / max(float(np.exp(np.log(features.sum(1)).mean())), 1e-300)
        ridge = self.config.noise / self.config.spread
        system = np.concatenate([features * scale, ridge * np.eye(len(groups))])
        target = np.concatenate([np.ones(len(truth)), np.full(len(groups), ridge)])
        factors, _ = nnls(system, target)
        corrected: Floats = table * (scale * factors)[self.problem.group_of, None]
        return corrected

    def _positive(self, measured: list[Measurement]) -> Floats:
        """Return the table whose optimum measured best, shifted so that all are > 0.

        Each unit's row is raised by its most negative entry, and all by a tiny amount.
        """
        known = {one.allocation: one.divergence for one in reversed(measured)}
        ranked = [(known[bits], name) for name, bits in self.starts if bits in known]
        table = self.tables[min(ranked)[1]]
        table = table - np.minimum(table.min(1, keepdims=True), 0.0)
        positive: Floats = table + 1e-9 * max(float(table.max()), 1e-300)
        return positive

    def _best(self, table: Floats) -> Allocation:
        return allocate(replace(self.problem, damage=table), self.budget)


def _refined(
    plan: Plan, chooser: _Chooser, known: list[Measurement], new: list[Measurement]
) -> Plan:
    fitting = [one for one in known if plan.meets_budget(one.allocation)]
    best = min(fitting, key=lambda one: one.divergence).allocation
    table = chooser.corrected(known)
    corrected = replace(plan.problem, damage=table)
    optimum = allocate(corrected, plan.budget)
    bound = corrected.damage_of(optimum) - optimum.gap
    return replace(
        plan,
        allocation=replace(best, gap=max(corrected.damage_of(best) - bound, 0.0)),
        scores=replace(plan.scores, damage=table),
        score_name=plan.score_name.removesuffix(", refined") + ", refined",
        measured=(*plan.measured, *new),
    )
