"""The whole path: plan, quantize, reconstruct, finalize, evaluate, write the files."""

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ompq.allocation.solver import Allocation, Budget
from ompq.costs import paper_bytes, unit_bytes
from ompq.errors import PlanError, QuantizationError, shortened
from ompq.evaluation import Evaluation, evaluate, wilson_interval
from ompq.files import library_version, read_json, write_text
from ompq.integer.finalization import finalize
from ompq.packing import save
from ompq.plans import Pin, Plan, PlanConfig, plan
from ompq.quantization import BlockError, quantization_of, quantize
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.refinement import RefineConfig, refine
from ompq.report import (
    Accuracy,
    Histogram,
    Section,
    StageTime,
    Versions,
    sections_to_json,
    worst_histograms,
    write_report,
)
from ompq.report import BlockError as BlockSection
from ompq.samples import Progress
from ompq.scores import named_score, score_name

PLAN, PACKED, ONNX = "plan.json", "network.ompq.safetensors", "network.onnx"
REPORT, RESULT = "report.html", "result.json"
PLAN_SAMPLES = 64
INTEGERS = "integers; the integer engine and ONNX compute the same"
_SCORING = "scoring the choices"  # as plan() calls this stage
_ANYTHING = "32bits"  # a budget that bits fixed beforehand always meet

# Called with a stage's name; gives what the stage reports its progress to.
Bar: TypeAlias = Callable[[str], AbstractContextManager[Progress]]


@contextmanager
def silent(_name: str) -> Iterator[Progress]:
    """Show no progress."""
    yield lambda _done, _total, _message: None


@dataclass(frozen=True)
class Stages:
    """What the stages of one job share."""

    bar: Bar = silent  # opened around each stage to show its progress
    # Stage → seconds it took; stages of the same name add up.
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Show the progress of a stage and keep its time."""
        start = perf_counter()
        with self.bar(name) as progress:
            yield progress
        self._add(name, start)

    @contextmanager
    def named_by_messages(self, name: str) -> Iterator[Progress]:
        """Like :meth:`stage`, for a function whose messages are its stages.

        A message that is repeated reports how far its stage is.
        """
        current, start = "", perf_counter()
        with self.bar(name) as bar:

            def progress(done: int, total: int | None, message: str) -> None:
                nonlocal current, start
                if message == current:
                    bar(done, total, message)
                    return
                if current:
                    self._add(current, start)
                current, start = message, perf_counter()
                # Stages differ too much for their number to predict the time left.
                if done == total:
                    current = ""
                else:
                    bar(0, None, message)

            yield progress
        if current:
            self._add(current, start)

    def _add(self, name: str, start: float) -> None:
        taken = perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + taken


@dataclass(frozen=True, eq=False)
class Workflow:
    """A float network, the samples it is quantized with, and the stages of the work."""

    model: nn.Module
    samples: Tensor  # unlabelled inputs, (N, ...)
    stages: Stages = field(default_factory=Stages)

    def plan(
        self,
        source: Plan | Allocation | Budget | str,
        config: PlanConfig = PlanConfig(),
        *,
        count: int = PLAN_SAMPLES,
        refinement: RefineConfig | None = None,
        checkpoint: Path | None = None,
        cache: Path | None = None,
    ) -> Plan:
        """Return a plan for a budget or for given bits; a plan is returned as it is.

        Args:
            count: How many of the samples are used; a refinement uses all.
            checkpoint: Where a stopped refinement continues from.
            cache: A folder that keeps score tables.

        Raises:
            PlanError: The bits do not name every unit.
        """
        if isinstance(source, Plan):
            return source
        budget: Any = source
        if isinstance(source, Allocation):
            pins: dict[str, Pin] = {
                name: (bits.weight, bits.activation) for name, bits in source.items()
            }
            budget, config = _ANYTHING, replace(config, pinned=pins)
        with self.stages.named_by_messages("planning") as progress:
            told = replace(config, score=_reporting(config.score, progress))
            samples = self.samples[:count]
            made = plan(
                self.model, samples, budget, told, cache=cache, progress=progress
            )
        if isinstance(source, Allocation):
            _check_complete(source, made)
        made = replace(made, score_name=score_name(config.score))
        if refinement is None:
            return made
        with self.stages.stage("refining") as progress:
            return refine(
                made,
                self.model,
                self.samples,
                refinement,
                checkpoint=checkpoint,
                progress=progress,
            )

    def quantize(self, bits: Plan) -> nn.Module:
        """Return the network rounded to nearest and calibrated."""
        with self.stages.named_by_messages("quantizing") as progress:
            return quantize(self.model, bits, self.samples, progress=progress)

    def reconstruct(
        self,
        quantized: nn.Module,
        config: ReconstructConfig,
        *,
        checkpoint: Path | None = None,
    ) -> nn.Module:
        """Return the network with its rounding learned, block by block."""
        with self.stages.stage("reconstructing") as progress:
            return reconstruct(
                quantized,
                self.model,
                self.samples,
                config,
                checkpoint=checkpoint,
                progress=progress,
            )

    def finalize(self, network: nn.Module) -> tuple[nn.Module, str]:
        """Return the network as its files compute it, and what it computes with.

        A network in which something has no integer form is returned as it is, with a
        text such as ``float: hardswish in features.0.2 has no integer form``.
        """
        with self.stages.stage("finalizing integers"):
            try:
                return finalize(network, self.samples), INTEGERS
            except QuantizationError as error:
                return network, f"float: {error}"

    def evaluate(self, network: nn.Module, batches: Iterable[Any]) -> Evaluation:
        """Measure a network against the float one."""
        with self.stages.stage("evaluating") as progress:
            return evaluate(network, batches, reference=self.model, progress=progress)

    def outcome(
        self,
        network: nn.Module,
        bits: Plan,
        batches: Iterable[Any] | None,
        about: Mapping[str, Any],
    ) -> "Outcome":
        """Finalize a network and, if there are labelled batches, evaluate it."""
        final, arithmetic = self.finalize(network)
        found = None if batches is None else self.evaluate(final, batches)
        return Outcome(
            about={**about, "arithmetic": arithmetic},
            plan=bits,
            network=final,
            evaluation=found,
            seconds=self.stages.seconds,
            accuracies=() if found is None else _accuracies(found, bits),
            histograms=worst_histograms(final, self.model, bits, self.samples),
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """A quantized network and how it came about."""

    about: Mapping[str, Any]  # network, weights, data and so on, by name
    plan: Plan
    network: nn.Module
    evaluation: Evaluation | None  # beside the float network; None if not measured
    seconds: Mapping[str, float]  # of each stage
    accuracies: Sequence[Section] = ()  # what the report compares it with
    histograms: Sequence[Histogram] = ()  # weights and inputs of its worst layers
    remarks: Sequence[Section] = ()  # what else the report says

    @property
    def errors(self) -> tuple[BlockError, ...]:
        """What reconstruction did, block by block."""
        return quantization_of(self.network).errors

    @property
    def sections(self) -> list[Section]:
        """What the report shows besides the plan."""
        versions = {
            "ompq": library_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: str(value) for name, value in self.about.items()},
        }
        errors = [
            BlockSection(one.block, one.before, one.after, kept=one.improved)
            for one in self.errors
        ]
        return [
            *self.accuracies,
            *errors,
            *self.histograms,
            *(StageTime(name, value) for name, value in self.seconds.items()),
            *self.remarks,
            Versions(versions),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        found = self.evaluation
        return {
            **self.about,
            "evaluation": None if found is None else found.to_json(),
            "seconds": dict(self.seconds),
            "sections": sections_to_json(self.sections),
            "plan": plan_summary(self.plan),
        }

    def write(self, folder: Path, progress: Progress | None = None) -> list[str]:
        """Write plan, network, report and result, all of them or none."""
        with whole_folder(folder) as work:
            self.plan.save(work / PLAN)
            name = self.about["network"]
            save(self.network, work / PACKED, plan=self.plan, network=name)
            self.write_report(work / REPORT, name, progress)
            write_result(work / RESULT, self.to_json())
        return [PLAN, PACKED, REPORT, RESULT]

    def write_report(
        self, path: Path, title: str, progress: Progress | None = None
    ) -> None:
        """Write the page that shows plan and results."""
        sections = self.sections
        write_report(path, self.plan, results=sections, title=title, progress=progress)


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return budget, totals, bits and what stays float."""
    return {
        "hash": plan.hash,
        "budget": str(plan.budget),
        "limits": dict(plan.budget.limits(plan.problem.costs)),
        "totals": plan.totals,
        "bytes_by_item": plan.bytes_by_item,
        "float_bytes": plan.problem.costs["bytes"].reference,
        "damage": plan.damage,
        "gap": plan.gap,
        "score": plan.score_name,
        "method": plan.method,
        "accounting": plan.accounting,
        "allocation": plan.allocation.to_json(),
        "measured": [
            {"name": one.name, "divergence": one.divergence} for one in plan.measured
        ],
        "units": unit_rows(plan),
        "target": None if plan.target is None else plan.target.name,
        "no_speed_up": [asdict(one) for one in plan.no_speed_up],
        "skipped": [asdict(one) for one in plan.graph.skipped],
    }


def unit_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return what there is to know about each unit and its bits."""
    gamma, importance = plan.scores.gamma, plan.scores.importance
    widths = {choice.weight for choice in plan.choices}
    paper = plan.accounting == "paper"
    rows = []
    for i, unit in enumerate(plan.graph.units):
        bits = plan.allocation[unit.name]
        allowed = zip(plan.choices, plan.allowed[i], strict=True)
        free = {choice.weight for choice, may in allowed if may}
        row = {
            "name": unit.name,
            "kind": unit.kind,
            "shape": list(unit.weight_shape),
            "parameters": unit.weights,
            "macs": unit.macs,
            "block": unit.block,
            "group": unit.group,
            "gamma": None if gamma is None else float(gamma[i]),
            "importance": None if importance is None else float(importance[i]),
            "damage": float(plan.scores.damage[i, plan.columns[i]]),
            "weight_bits": bits.weight,
            "activation_bits": bits.activation,
            # Its weight bits were fixed while those of others were chosen.
            "pinned": len(free) == 1 and len(widths) > 1,
            "bytes": paper_bytes(unit, bits) if paper else unit_bytes(unit, bits).total,
        }
        rows.append(row)
    return rows


def write_result(path: Path, data: Mapping[str, Any]) -> None:
    """Write everything measured, for other programs."""
    write_text(path, f"{json.dumps(data, indent=1, ensure_ascii=False)}\n")


def read_bits(path: Path) -> Plan | Allocation:
    """Read a plan, or an allocation alone: unit → bits.

    Raises:
        PlanError: The file is neither.
    """
    try:
        data = read_json(path)
        if isinstance(data, dict) and "format" not in data:
            return Allocation.from_json(data)
    except (ValueError, TypeError, AttributeError, PlanError) as error:
        raise PlanError(
            f"{path} is neither a plan nor an allocation: {error}. Give a file that "
            "ompq plan wrote, or bits copied from a report"
        ) from error
    return Plan.load(path)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files are moved to ``folder`` if the block succeeds."""
    with (
        made_folder(folder),
        TemporaryDirectory(dir=folder, prefix=".unfinished.") as work,
    ):
        yield Path(work)
        # The result is the last to appear: where it is, all the others are.
        for path in sorted(Path(work).iterdir(), key=lambda one: one.name == RESULT):
            path.replace(folder / path.name)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder; remove it afterwards if it is new and nothing was written."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if new:
            with suppress(OSError):  # it holds something
                folder.rmdir()


def _reporting(score: Any, progress: Progress) -> Any:
    """Return a score that reports its progress, if it is one that can."""

    def within(done: int, total: int | None, _message: str) -> None:
        progress(done, total, _SCORING)

    known = named_score(score) if isinstance(score, str) else score
    if not is_dataclass(known) or "progress" not in {f.name for f in fields(known)}:
        return score
    return replace(known, progress=within)  # type: ignore[type-var]


def _check_complete(bits: Allocation, made: Plan) -> None:
    missing = [name for name in made.graph.names if name not in bits]
    if missing:
        raise PlanError(
            f"the allocation gives bits to {len(bits)} of {len(made.graph)} layers; "
            f"add bits for {shortened(missing)}"
        )


def _accuracies(found: Evaluation, bits: Plan) -> list[Section]:
    """Return the float network and the quantized one, on the same images."""
    if found.drop is None:
        return []
    count, size = found.count, bits.problem.costs["bytes"].reference
    right = round((found.top1 + found.drop) * count)
    interval = wilson_interval(right, count)
    name, quantized = f"quantized, {bits.budget}", bits.totals["bytes"]
    return [
        Accuracy("float", right / count, *interval, count, size),
        Accuracy(name, found.top1, *found.interval, count, quantized),
    ]
