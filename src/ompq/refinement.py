"""Find better bits by measuring networks: for a budget, or for a goal.

:func:`refine` keeps to a plan's budget. No score is best for every network, so the
optima of several scores are quantized and compared with the float network on held-out
samples. Then the best score is corrected by one factor per group of units to fit the
measurements, and solved again, until the count is used up. Other bits replace the
plan's only if they are better beyond chance. All measurements are kept in the plan.

:func:`smallest` looks for the smallest network that meets a goal. Damage is only a
prediction, so networks of several sizes are measured in a binary search: first with
rounded weights, which takes seconds, then reconstructed, downwards from the
smallest size that met the goal with rounding alone.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ompq.allocation.allocator import allocate
from ompq.allocation.problem import Allocation
from ompq.amounts import digits
from ompq.checkpoints import Measurements, Store
from ompq.configs import QuantizeConfig, RefineConfig
from ompq.content_identity import identity
from ompq.errors import check_type
from ompq.measurement import Meter, split
from ompq.network.graph import trace
from ompq.plans import Measurement, Plan, check_plan
from ompq.progress import ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.samples import Samples, SamplesLike
from ompq.scores.catalogue import score_name, score_table
from ompq.scores.computation import ScoreInputs
from ompq.untrusted_json import Number

Floats = NDArray[np.float64]
logger = logging.getLogger(__name__)
_TRIES = 24  # perturbations to try before giving up


@shows_progress("refining")
def refine(  # noqa: PLR0913 - the last three are optional
    plan: Plan,
    model: nn.Module,
    samples: SamplesLike,
    config: RefineConfig = RefineConfig(),
    *,
    checkpoint: str | Path | None = None,
    cache: str | Path | None = None,
    progress: ProgressLike = None,
) -> Plan:
    """Return a plan with the best of many measured allocations.

    The plan keeps its bits unless others have a lower divergence on the held-out
    samples by more than chance explains (``margin``). Its damage becomes the corrected
    score, which improves ``with_budget`` too. The measurements of an earlier refinement
    are reused. The same count gives the same plan.

    Args:
        plan: Budget, choices and pins, and the first allocation.
        samples: Unlabelled inputs, preferably 1,000 or more; networks are measured on
            the last part of them.
        checkpoint: A JSON file that keeps the measurements; a run with the same
            arguments resumes from it.
        cache: A folder for the tables of the scores, as for ``plan``.
        progress: Called after each measurement; True shows a bar.

    Raises:
        PlanError: The plan was made for another network.
        SampleError: There are too few samples to hold some back.
        CheckpointError: The checkpoint belongs to another run.
    """
    check_type("config", config, RefineConfig)
    samples = Samples.of(samples)
    check_plan(plan)
    plan.check_network(trace(model, samples))
    calibration, held_out = split(samples, config.held_back)
    meter = _meter(plan, model, calibration, held_out, config)
    known = [one for one in plan.measured if one.judge == meter.judge]
    # A resumed run may have other limits. Scores are compared by name, since the repr
    # of a function changes from run to run.
    names = tuple(map(score_name, config.scores))
    fixed = replace(config, count=1, seconds=None, patience=1, scores=())
    store = Store.of(checkpoint, "refinement", plan.hash, meter.judge, names, fixed)
    measure = partial(_measure, meter, Measurements(store, list[Number]))
    chooser = _Chooser(plan, config, _tables(plan, model, calibration, config, cache))
    measured: list[Measurement] = []
    started = time.monotonic()
    own = measure(plan.allocation)
    while (candidate := chooser.next([*known, *measured])) is not None:
        name, bits = candidate
        values = measure(bits)
        error = _standard_error(values - own)
        mean = float(values.mean())
        measured.append(Measurement(name, bits, mean, meter.judge, error))
        if progress is not None:
            best = digits(min(one.divergence for one in measured))
            total = config.count if config.seconds is None else None
            text = f"measuring allocations: best divergence {best}"
            callback(progress)(len(measured), total, text)
        if _end(measured, config, time.monotonic() - started):
            break
        if chooser.started(measured) and not _is_trusted(measured, config):
            return replace(plan, measured=(*plan.measured, *measured))
    return _refit_plan(plan, chooser, float(own.mean()), [*known, *measured], measured)


def _meter(
    plan: Plan,
    model: nn.Module,
    calibration: Samples,
    held_out: Samples,
    config: RefineConfig,
) -> Meter:
    return Meter(
        model,
        calibration,
        held_out,
        iterations=config.iterations if config.by == "reconstruct" else 0,
        seed=config.seed,
        config=QuantizeConfig(**plan.quantize_settings),
    )


def _measure(
    meter: Meter, saved: Measurements[list[float]], bits: Allocation
) -> Floats:
    """Return the divergence at each held-out sample, measured now or before."""

    def new() -> list[float]:
        values: list[float] = meter.divergences(meter.quantized(bits)).tolist()
        return values

    return np.array(saved.get(str(bits.to_json()), new))


def _standard_error(values: Floats) -> float:
    """Return the standard error of a mean; of one value, its size."""
    if len(values) == 1:
        return float(abs(values[0]))
    return float(values.std(ddof=1) / len(values) ** 0.5)


def _is_trusted(measured: list[Measurement], config: RefineConfig) -> bool:
    """Return whether the measurements predict the quality of the final network."""
    best = min(one.divergence for one in measured)
    if config.by == "reconstruct" or best <= config.trusted:
        return True
    logger.warning(
        "the bits stay as planned: before reconstruction, the best allocation diverges "
        "by %s nats; above %s that says little about the network after it. Refine by "
        "reconstruction instead (by='reconstruct')",
        digits(best),
        digits(config.trusted),
    )
    return False


def _end(measured: list[Measurement], config: RefineConfig, seconds: float) -> bool:
    values = [one.divergence for one in measured]
    stale = len(values) - 1 - values.index(min(values)) >= config.patience
    late = config.seconds is not None and seconds > config.seconds
    return late or stale or len(values) == config.count


def _tables(
    plan: Plan,
    model: nn.Module,
    samples: Samples,
    config: RefineConfig,
    cache: str | Path | None,
) -> dict[str, Floats]:
    """Return the damage of every choice by each score, the plan's own first."""
    tables = {plan.score_name: plan.scores.damage}
    for score in config.scores:
        name = score_name(score)
        if name not in tables:
            inputs = ScoreInputs(
                plan.graph, model, samples.first(64), plan.choices, output=plan.output
            )
            tables[name] = score_table(score, inputs, cache).damage
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
        errors = np.array([one.error for one in measured]) / truth
        weight = 1 / np.maximum(errors, self.config.noise)
        ridge = 1 / self.config.spread
        fitted = weight[:, None] * features * scale
        system = np.concatenate([fitted, ridge * np.eye(len(groups))])
        target = np.concatenate([weight, np.full(len(groups), ridge)])
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


def _refit_plan(
    plan: Plan,
    chooser: _Chooser,
    own: float,
    known: list[Measurement],
    new: list[Measurement],
) -> Plan:
    margin = chooser.config.margin
    better = [one for one in new if one.divergence < own - margin * one.error]
    best = plan.allocation
    if better:
        best = min(better, key=lambda one: one.divergence).allocation
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


def rows(batch: Any) -> Iterator[str]:
    """Yield an identity of each input of a batch with its target."""
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    tensors = [isinstance(part, Tensor) and part.dim() > 0 for part in parts]
    if all(tensors) and len({len(part) for part in parts}) == 1:
        yield from map(identity, *parts)
    else:
        yield identity(batch)
