"""The smallest network that keeps an accuracy."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from ompq.allocation.infeasibility import reachable
from ompq.amounts import digits, in_bytes, percent
from ompq.budgets import Budget
from ompq.checkpoints import Measurements, Store
from ompq.configs import Goal, SmallestConfig
from ompq.errors import GoalError, check_type
from ompq.evaluation import evaluate
from ompq.evaluation_result import Evaluation
from ompq.integer.finalization import finalize_if_possible
from ompq.measurement import split
from ompq.network.graph import trace
from ompq.plans import Plan, check_plan
from ompq.progress import Progress, ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.quantization.pipeline import quantize
from ompq.reconstruction.block_loop import reconstruct
from ompq.refinement import rows
from ompq.samples import Samples, SamplesLike

_NEEDS = {
    "max_drop": "give batches with class labels or a metric of your own, or use "
    "min_agreement or max_divergence",
    "min_agreement": "the network returns no logits of several classes; use "
    "max_divergence or a metric of your own",
    "max_divergence": "there is no float network to compare with",
}


def meets_goal(result: Evaluation, goal: Goal) -> bool:
    """Return whether an evaluated network meets a goal.

    Raises:
        GoalError: Something that the goal limits was not measured.
    """
    measured = {
        "max_drop": _drop(result),
        "min_agreement": result.agreement,
        "max_divergence": result.divergence,
    }
    for name, limit in goal.limits.items():
        value = measured[name]
        if value is None:
            raise GoalError(f"{name}={limit:g} cannot be measured: {_NEEDS[name]}")
        if value < limit if name == "min_agreement" else value > limit:
            return False
    return True


def _drop(result: Evaluation) -> float | None:
    """Return the loss of the user's metric, or else of top-1 in points."""
    for name, value in result.metrics.items():
        return result.reference_metrics[name] - value
    return None if result.drop is None else 100 * result.drop


@dataclass(frozen=True)
class Trial:
    """One network that was measured."""

    size_bytes: int
    reconstructed: bool  # whether its rounding was learned
    kept: bool  # whether it meets the goal
    evaluation: Evaluation

    def __str__(self) -> str:
        result, drop = self.evaluation, _drop(self.evaluation)
        texts = [] if drop is None else [f"drop {drop:.2f}"]
        if result.output != "classes":
            texts.append(result.likeness)
        elif result.agreement is not None and result.divergence is not None:
            texts.append(f"{percent(result.agreement)} as float")
            texts.append(f"divergence {digits(result.divergence)}")
        way = "reconstructed" if self.reconstructed else "rounded"
        verdict = "meets the goal" if self.kept else "too much lost"
        return f"{in_bytes(self.size_bytes)} {way}: {', '.join(texts)}, {verdict}"


@dataclass(frozen=True, eq=False)
class Smallest:
    """The smallest network found that meets a goal."""

    plan: Plan
    network: nn.Module
    goal: Goal
    trials: tuple[Trial, ...]  # in the order in which they were tried

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        trials = [
            {
                "bytes": one.size_bytes,
                "reconstructed": one.reconstructed,
                "kept": one.kept,
                "drop": _drop(one.evaluation),
                "agreement": one.evaluation.agreement,
                "divergence": one.evaluation.divergence,
            }
            for one in self.trials
        ]
        tried = [str(one) for one in self.trials]
        return {"goal": str(self.goal), "tried": tried, "trials": trials}


@shows_progress("searching")
def find_smallest(  # noqa: PLR0913 - the last four are optional
    plan: Plan,
    model: nn.Module,
    samples: SamplesLike,
    goal: Goal,
    config: SmallestConfig = SmallestConfig(),
    *,
    batches: Iterable[Any] | None = None,
    folder: str | Path | None = None,
    progress: ProgressLike = None,
) -> Smallest:
    """Return the smallest network found that meets a goal.

    Networks are measured in the form in which their files compute them.

    Args:
        plan: Choices, pins and score; its budget does not matter.
        samples: Unlabelled inputs for calibration; without batches, networks are
            measured on the last part of them.
        batches: Inputs to measure on, in any form that :func:`ompq.evaluate` takes;
            they are read once for each network tried.
        folder: Keeps the networks tried; the same call resumes from it.
        progress: Called while networks are made and measured; True shows a bar.

    Raises:
        GoalError: Not even the largest network meets the goal, or the goal cannot be
            measured.
        PlanError: The plan was made for another network.
        CheckpointError: The folder belongs to another search.
    """
    check_type("goal", goal, Goal)
    check_type("config", config, SmallestConfig)
    calibration = Samples.of(samples)
    check_plan(plan)
    plan.check_network(trace(model, calibration))
    held_out: Any = batches
    if batches is None:
        calibration, held_out = split(calibration, config.held_back)
    elif not isinstance(batches, Samples) and iter(batches) is batches:
        held_out = list(batches)  # an iterator can be read only once
    path = None if folder is None else Path(folder)
    report = callback(progress)
    return _Search(plan, model, calibration, held_out, goal, config, path, report).run()


@dataclass(eq=False)
class _Search:
    plan: Plan
    model: nn.Module
    samples: Samples
    held_out: Any
    goal: Goal
    config: SmallestConfig
    folder: Path | None
    progress: Progress
    trials: list[Trial] = field(default_factory=list)
    best: tuple[Trial, Plan, nn.Module] | None = None

    def __post_init__(self) -> None:
        store = Store(None, "search", "")
        if self.folder is not None:
            # Without the goal's limits: measurements are valid for any limit.
            store = Store.of(
                self.folder / "measured.json",
                "search",
                self.plan.hash,
                self.config.reconstruct,
                self.samples.runs,
                self.goal.metric,
                _content(self.held_out),
            )
        self.known: Measurements[Evaluation] = Measurements(store, Evaluation)

    def run(self) -> Smallest:
        """Search among rounded networks, then among reconstructed ones."""
        low, high = reachable(self.plan.problem, "bytes")
        if self.attempt(int(high), learned=False):
            self.halve(low, self.config.rounded - 1, learned=False)
        if self.config.reconstruct is not None:
            start = high if self.best is None else self.best[0].size_bytes
            if self.attempt(int(start), learned=True):
                self.halve(low, self.config.reconstructed - 1, learned=True)
        if self.best is None:
            raise GoalError(
                f"no network meets the goal ({self.goal}): the largest gives "
                f"{self.trials[-1]}. Allow more bits or a larger loss"
            )
        _, plan, network = self.best
        return Smallest(plan, network, self.goal, tuple(self.trials))

    def halve(self, low: float, count: int, *, learned: bool) -> None:
        """Try the middle between the lower end and the best size, repeatedly."""
        assert self.best is not None
        for _ in range(count):
            high = self.best[0].size_bytes
            if high - low <= self.config.tolerance * high:
                return
            middle = int((low + high) / 2)
            if not self.attempt(middle, learned=learned):
                low = middle

    def attempt(self, limit: int, *, learned: bool) -> bool:
        """Quantize within a size and measure; return whether the goal is met."""
        plan = self.plan.with_budget(Budget.parse(f"{limit}B"))
        size = int(plan.totals["bytes"])
        way = "reconstructing" if learned else "rounding"
        self.progress(0, None, f"{way} to {in_bytes(size)}")
        network = self.network(plan, size, learned=learned)
        metric = self.goal.metric
        evaluation = self.known.get(
            f"{way} {size}",
            lambda: evaluate(
                network,
                self.held_out,
                reference=self.model,
                metrics={} if metric is None else {"metric": metric},
                progress=self.progress,
            ),
        )
        trial = Trial(size, learned, meets_goal(evaluation, self.goal), evaluation)
        self.trials.append(trial)
        self.progress(0, None, str(trial))
        if trial.kept:
            self.best = trial, plan, network
        return trial.kept

    def network(self, plan: Plan, size: int, *, learned: bool) -> nn.Module:
        """Return the quantized network as its files will compute it."""
        network = quantize(self.model, plan, self.samples)
        if learned and self.config.reconstruct is not None:
            name = f"reconstructing to {in_bytes(size)}"
            network = reconstruct(
                network,
                self.model,
                self.samples,
                self.config.reconstruct,
                checkpoint=self.folder
                and self.folder / f"reconstructed-{size}.safetensors",
                progress=lambda done, total, message: self.progress(
                    done, total, f"{name}: {message}"
                ),
            )
        return finalize_if_possible(network, self.samples)[0]


def _content(held_out: Any) -> list[str]:
    """Return identities of the inputs with their targets, in whatever order."""
    batches = held_out.batches(64) if isinstance(held_out, Samples) else held_out
    return sorted(chain.from_iterable(map(rows, batches)))
