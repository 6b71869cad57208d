"""The whole path: plan, quantize, reconstruct, finalize, evaluate, write the files."""

import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ompq.allocation.problem import Allocation
from ompq.bit_widths import FLOAT_BITS
from ompq.budgets import Budget
from ompq.configs import (
    RECONSTRUCT_PROTOCOLS,
    ExportConfig,
    Goal,
    Pin,
    PlanConfig,
    QuantizeConfig,
    ReconstructConfig,
    RefineConfig,
    RoundingConfig,
    SmallestConfig,
)
from ompq.errors import ExportError, FileError, PackedFileError
from ompq.evaluation import Metric, evaluate
from ompq.evaluation_result import Evaluation, wilson_interval
from ompq.files import (
    CONFIG,
    GGUF,
    ONNX,
    PACKED,
    PLAN,
    REPORT,
    RESULT,
    UNFINISHED,
    library_version,
    unfinished_folder,
    write_text,
)
from ompq.integer.finalization import finalize_if_possible
from ompq.measurement import Meter
from ompq.network.units import Choice, Skipped
from ompq.packed.packed_files import add_onnx, save
from ompq.parallel import from_main, wait_for_all
from ompq.planning import plan as make_plan
from ompq.plans import Plan
from ompq.progress import Progress, Stages
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import BlockError, quantization_of
from ompq.reconstruction.block_loop import reconstruct
from ompq.refinement import refine
from ompq.report.histograms import layer_histograms
from ompq.report.page import write_report
from ompq.report_sections import (
    Accuracy,
    BlockErrorSection as BlockSection,
    Histogram,
    LayerEffect,
    Remark,
    Section,
    StageTime,
    Versions,
    sections_from_json,
    sections_to_json,
)
from ompq.runtimes.exporter import export
from ompq.runtimes.gguf.gguf_files import write_gguf
from ompq.samples import Samples, SamplesLike
from ompq.smallest_network import Smallest, find_smallest
from ompq.untrusted_json import convert_json, read_json

PLAN_SAMPLES, CALIBRATION_SAMPLES = 64, 1024  # as in the paper and in BRECQ
ANYTHING = "32bits"  # a budget that every allocation meets


@dataclass(frozen=True, eq=False)
class Workflow:
    """A float network, the samples it is quantized with, and the stages of the work."""

    model: nn.Module
    given: SamplesLike  # unlabelled inputs
    stages: Stages = field(default_factory=Stages)
    cache: Path | None = None  # folder in which score tables are kept

    @cached_property
    def samples(self) -> Samples:
        """The inputs, read once and kept."""
        return Samples.of(self.given)

    def plan(
        self,
        source: Plan | Allocation | Budget | str,
        config: PlanConfig = PlanConfig(),
        *,
        count: int = PLAN_SAMPLES,
        refinement: RefineConfig | None = None,
        checkpoint: Path | None = None,
    ) -> Plan:
        """Plan for a budget or a given allocation; a plan is returned unchanged.

        Args:
            count: Number of samples used for planning; a refinement uses all of them.
            checkpoint: File from which an interrupted refinement resumes.

        Raises:
            PlanError: The allocation does not name every unit.
        """
        if isinstance(source, Plan):
            return source
        budget: Any = source
        if isinstance(source, Allocation):
            pins: dict[str, Pin] = dict(source.items())
            budget, config = ANYTHING, replace(config, pinned=pins)
        with self.stages.named_by_messages("planning") as progress:
            samples = self.samples[:count]
            plan = make_plan(
                self.model,
                samples,
                budget,
                config,
                cache=self.cache,
                progress=progress,
            )
        if isinstance(source, Allocation):
            source.check_units(plan.graph.names)
        if refinement is None:
            return plan
        with self.stages.stage("refining") as progress:
            return refine(
                plan,
                self.model,
                self.samples,
                refinement,
                checkpoint=checkpoint,
                cache=self.cache,
                progress=progress,
            )

    def quantize(
        self, plan: Plan, config: QuantizeConfig = QuantizeConfig()
    ) -> nn.Module:
        """Return the network rounded and calibrated."""
        with self.stages.named_by_messages("quantizing") as progress:
            return quantize(self.model, plan, self.samples, config, progress=progress)

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

    def smallest(
        self,
        base: Plan,
        goal: Goal,
        learning: ReconstructConfig | None,
        *,
        batches: Iterable[Any] | None,
        folder: Path,
    ) -> Smallest:
        """Search for the smallest network that meets a goal."""
        config = SmallestConfig(reconstruct=learning)
        with self.stages.stage("searching") as progress:
            return find_smallest(
                base,
                self.model,
                self.samples,
                goal,
                config,
                batches=batches,
                folder=folder,
                progress=progress,
            )

    def finalize(self, network: nn.Module) -> tuple[nn.Module, str]:
        """Return the network as its files will compute it, and its arithmetic."""
        with self.stages.stage("finalizing integers"):
            return finalize_if_possible(network, self.samples)

    def evaluate(
        self,
        network: nn.Module,
        batches: Iterable[Any],
        metrics: Mapping[str, Metric] | None = None,
    ) -> Evaluation:
        """Measure a network against the float one."""
        with self.stages.stage("evaluating") as progress:
            return evaluate(
                network,
                batches,
                reference=self.model,
                metrics=metrics,
                progress=progress,
            )

    def layer_effects(self, plan: Plan, count: int) -> list[LayerEffect]:
        """Measure the worst layers, each alone and with its weights left in float."""
        samples, chosen = self.samples.first(PLAN_SAMPLES), plan.allocation
        damage = plan.scores.damage[range(len(plan.graph)), plan.columns]
        worst = [plan.graph.names[at] for at in damage.argsort()[::-1][:count]]
        floats = dict.fromkeys(plan.graph.names, Choice(FLOAT_BITS, FLOAT_BITS))
        with self.stages.stage("measuring layers") as progress:
            meter = Meter(
                self.model,
                samples,
                samples,
                config=QuantizeConfig(**plan.quantize_settings),
            )

            def divergence(choices: Mapping[str, Choice]) -> float:
                return meter.divergence(meter.quantized(Allocation(choices)))

            whole, effects = divergence(chosen), []
            for done, name in enumerate(worst, 1):
                own = chosen[name]
                alone = divergence({**floats, name: own})
                float_weight = Choice(FLOAT_BITS, own.activation)
                without = divergence({**chosen, name: float_weight})
                effects.append(LayerEffect(name, str(own), alone, without, whole))
                progress(done, len(worst), f"measured {name}")
        return effects

    def outcome(
        self,
        network: nn.Module,
        plan: Plan,
        batches: Iterable[Any] | None,
        about: Mapping[str, Any],
        metrics: Mapping[str, Metric] | None = None,
    ) -> "Outcome":
        """Finalize a network and, if there are labelled batches, evaluate it."""
        final, arithmetic = self.finalize(network)
        result = None if batches is None else self.evaluate(final, batches, metrics)
        about = {**about, "arithmetic": arithmetic}
        return self.outcome_of(final, plan, result, about)

    def outcome_of(
        self,
        final: nn.Module,
        plan: Plan,
        evaluation: Evaluation | None,
        about: Mapping[str, Any],
    ) -> "Outcome":
        """Return the outcome for a network already finalized and evaluated."""
        return Outcome(
            about=about,
            plan=plan,
            network=final,
            evaluation=evaluation,
            seconds=self.stages.seconds,
            accuracies=() if evaluation is None else _accuracies(evaluation, plan),
            histograms=layer_histograms(final, self.model, plan, self.samples),
            samples=self.samples.first(PLAN_SAMPLES),
        )


def paper_samples(network: str) -> int:
    """Return how many samples the paper plans with: 64, but 32 for MobileNetV2."""
    return 32 if "mobilenetv2" in network.replace("_", "") else PLAN_SAMPLES


def learning_config(
    protocol: str | None,
    network: str,
    *,
    base: ReconstructConfig = ReconstructConfig(),
    iterations: int | None = None,
    seed: int = 0,
) -> ReconstructConfig:
    """Return a protocol's settings for reconstruction, by default the given ones.

    Args:
        network: Name of the network, for which a method may have settings of its own.
        base: Settings that a protocol with a method of its own replaces.
        iterations: Replaces the number of steps for each block.
    """
    if protocol not in (None, "ours"):
        base = RECONSTRUCT_PROTOCOLS.get(protocol, base)
    rounding: Any = base.rounding
    if not isinstance(rounding, RoundingConfig):
        rounding = rounding.adapted(network, iterations)
    elif iterations is not None:
        rounding = replace(rounding, iterations=iterations)
    return replace(base, rounding=rounding, seed=seed)


class FileSize(NamedTuple):
    """The size of a written file."""

    bytes: int
    planned: float | None  # upper bound by the plan; None if the plan has none


@dataclass(frozen=True, eq=False)
class Outcome:
    """A quantized network, how it was made, and what was measured."""

    about: Mapping[str, Any]  # settings by name: network, weights, data and so on
    plan: Plan
    network: nn.Module
    evaluation: Evaluation | None  # against the float network; None if not measured
    seconds: Mapping[str, float]  # time taken by each stage
    accuracies: Sequence[Section] = ()  # the networks that the report compares
    histograms: Sequence[Histogram] = ()  # weights and inputs of the worst layers
    remarks: Sequence[Section] = ()  # further sections of the report
    samples: Samples | None = None  # used to verify files for runtimes

    @property
    def errors(self) -> tuple[BlockError, ...]:
        """The error of each block before and after reconstruction."""
        return quantization_of(self.network).errors

    @property
    def tuned(self) -> str:
        """What tuning the whole network gained; empty if it was not tuned."""
        tuned = quantization_of(self.network).tuned
        if tuned is None:
            return ""
        before = f"divergence on the samples {tuned.before:.3g}"
        if not tuned.improved:
            return f"{before}; it did not fall, so nothing was changed"
        return f"{before} → {tuned.after:.3g}"

    @property
    def _unplaced(self) -> list[Skipped]:
        """What quantization left in float, apart from what the plan names."""
        planned = {one.name for one in self.plan.graph.skipped}
        skipped = quantization_of(self.network).skipped
        return [one for one in skipped if one.name not in planned]

    @property
    def _likeness(self) -> str:
        """How close an output that is not classes is to the float one, in words."""
        result = self.evaluation
        return "" if result is None or result.output == "classes" else result.likeness

    @property
    def sections(self) -> list[Section]:
        """The sections that the report shows besides the plan."""
        versions = {
            "ompq": library_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{
                name.replace("_", " "): str(value)
                for name, value in self.about.items()
                if value is not None and not isinstance(value, dict)
            },
        }
        errors = [
            BlockSection(one.block, one.before, one.after, kept=one.improved)
            for one in self.errors
        ]
        return [
            *self.accuracies,
            *errors,
            *([Remark("tuned as a whole", self.tuned)] if self.tuned else []),
            *([Remark("output", self._likeness)] if self._likeness else []),
            *(Remark(one.name, one.reason) for one in self._unplaced),
            *self.histograms,
            *(StageTime(name, value) for name, value in self.seconds.items()),
            *self.remarks,
            Versions(versions),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        evaluation = self.evaluation
        return {
            **self.about,
            "evaluation": None if evaluation is None else evaluation.to_json(),
            "seconds": dict(self.seconds),
            "sections": sections_to_json(self.sections),
            "plan": self.plan.to_dict(),
        }

    def write(
        self, folder: Path, progress: Progress | None = None, config: str = ""
    ) -> dict[str, FileSize]:
        """Write plan, network, report and result: all of them or none.

        A budget for an ONNX file has that file written too, and the target ``gguf`` a
        GGUF file; a budget for the packed file with its graph has the graph packed.
        ``config`` is the text of a configuration file that repeats the run.

        Returns:
            File name → size.

        Raises:
            ExportError: The ONNX or GGUF file exceeds the budget, or its runtime
                computes something else. The other files are written.
        """
        return from_main(lambda: self._write(folder, progress, config))

    def _write(
        self, folder: Path, progress: Progress | None, config: str
    ) -> dict[str, FileSize]:
        failure = None
        with whole_folder(folder) as work:
            self.plan.save(work / PLAN)
            name = self.about["network"]
            save(self.network, work / PACKED, plan=self.plan, network=name)
            try:
                self._write_onnx(work)
                self._write_gguf(work)
            except (ExportError, PackedFileError) as error:
                failure = error
            self.write_report(work / REPORT, name, progress)
            if config:
                write_text(work / CONFIG, config)
            names = (PLAN, PACKED, ONNX, GGUF, REPORT, CONFIG)
            sizes = {n: self._size(work / n) for n in names if (work / n).exists()}
            listed = {name: one._asdict() for name, one in sizes.items()}
            write_result(work / RESULT, {**self.to_json(), "sizes": listed})
            sizes[RESULT] = self._size(work / RESULT)
        if failure is not None:
            raise type(failure)(_without_temporary(str(failure))) from failure
        return sizes

    def _write_onnx(self, folder: Path) -> None:
        """Write the ONNX file or the packed graph, whichever the budget limits."""
        budget, file = self.plan.budget, folder / ONNX
        if self.samples is None or not (budget.onnx_mib or budget.graph_mib):
            return
        config = ExportConfig(network=self.about["network"], budget=budget)
        export(self.network, file, self.samples, config)
        if budget.graph_mib:
            add_onnx(folder / PACKED, file, folder / PACKED)
        if not budget.onnx_mib:
            file.unlink()

    def _write_gguf(self, folder: Path) -> None:
        """Write the file for llama.cpp, if that is the target."""
        target, budget = self.plan.target, self.plan.budget
        planned = target is not None and target.file == "gguf"
        if self.samples is not None and (planned or budget.gguf_mib):
            write_gguf(self.network, folder / GGUF, self.samples, budget=budget)

    def _size(self, path: Path) -> FileSize:
        plan, packed = self.plan, None
        # What a GGUF file holds takes other bytes in a packed file than plans assume.
        if plan.target is None or not plan.target.file:
            packed = plan.totals.get("graph_bytes", sum(plan.bytes_by_item.values()))
        planned = {
            PACKED: packed,
            ONNX: plan.totals.get("onnx_bytes"),
            GGUF: plan.totals.get("gguf_bytes"),
        }
        return FileSize(path.stat().st_size, planned.get(path.name))

    def write_report(
        self, path: Path, title: str, progress: Progress | None = None
    ) -> None:
        """Write the HTML page that shows plan and results."""
        sections = self.sections
        write_report(path, self.plan, results=sections, title=title, progress=progress)


def add_sections(folder: Path, new: Sequence[Section]) -> bool:
    """Add what was measured of exported files to a run's result and report.

    It replaces what was measured of a file of this name before. Returns whether the
    folder holds a whole run.
    """
    result, report = folder / RESULT, folder / REPORT
    if not (result.exists() and report.exists() and (folder / PLAN).exists()):
        return False
    data = convert_json(read_json(result), dict[str, Any], "a result")
    replaced = {(type(one), getattr(one, "name", "")) for one in new}
    kept = [
        one
        for one in sections_from_json(data["sections"])
        if (type(one), getattr(one, "name", "")) not in replaced
    ]
    sections = [*kept, *new]
    write_result(result, {**data, "sections": sections_to_json(sections)})
    plan, title = Plan.load(folder / PLAN), str(data.get("network", ""))
    write_report(report, plan, results=sections, title=title)
    return True


def write_result(path: Path, data: Mapping[str, Any]) -> None:
    """Write the results as JSON."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    write_text(path, f"{text}\n", check=read_json)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; move its files to ``folder`` if the block succeeds.

    Errors name files in ``folder``: the temporary ones are hidden and soon gone.
    """
    try:
        with made_folder(folder), unfinished_folder(folder) as work:
            yield work
            # The result is moved last: if it is there, so are all the others.
            paths = sorted(work.iterdir(), key=lambda one: one.name == RESULT)
            for path in paths:
                path.replace(folder / path.name)
            wait_for_all()
    except FileError as error:
        raise FileError(_without_temporary(str(error))) from error
    except OSError as error:
        if error.filename is not None:
            error.filename = _without_temporary(str(error.filename))
        raise


def _without_temporary(text: str) -> str:
    return re.sub(rf"{re.escape(UNFINISHED)}\w+[/\\]?", "", text)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Create a folder; remove it afterwards if it is new and still empty."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _accuracies(evaluation: Evaluation, plan: Plan) -> list[Section]:
    """Return the accuracy of the float and the quantized network on the same images."""
    if evaluation.top1 is None or evaluation.drop is None:
        return []
    count, float_size = evaluation.count, plan.problem.costs["bytes"].reference
    correct = round((evaluation.top1 + evaluation.drop) * count)
    interval = wilson_interval(correct, count)
    low, high = (100 * limit for limit in evaluation.drop_interval)
    drop = f"drop {100 * evaluation.drop:.2f} points"
    note = f"{drop} ({low:.2f} to {high:.2f}, paired, 95 %)"
    name, size = f"quantized, {plan.budget}", plan.totals["bytes"]
    return [
        Accuracy("float", correct / count, *interval, count, float_size),
        Accuracy.of(name, evaluation, size, note),
    ]
