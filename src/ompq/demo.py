"""The demonstration: the whole path on a small network that ships with ompq."""

import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ompq.allocation.solver import Allocation, Budget
from ompq.costs import in_bytes, percent
from ompq.errors import OmpqError
from ompq.evaluation import Evaluation, evaluate, wilson_interval
from ompq.files import write_text
from ompq.graph import Choice
from ompq.integer.finalization import finalize
from ompq.models.demo_network import DemoData, DemoNetwork, demo_data, demo_network
from ompq.onnx.export import ExportResult, export_onnx
from ompq.packing import Account, inspect_file, load, save
from ompq.plans import Plan, plan
from ompq.quantization import quantization_of, quantize
from ompq.reconstruction import ReconstructConfig, reconstruct
from ompq.reconstruction.rounding import RoundingConfig
from ompq.report import (
    Accuracy,
    Agreement,
    BlockError,
    Histogram,
    Remark,
    Section,
    StageTime,
    Versions,
    sections_to_json,
    worst_histograms,
    write_report,
)
from ompq.samples import Progress, evaluating

# Called with a stage's name; gives what the stage tells its progress to.
Stage: TypeAlias = Callable[[str], AbstractContextManager[Progress]]
# Name of a test → its images (N, C, H, W) and targets (N,), in batches.
Tests: TypeAlias = Mapping[str, list[tuple[Tensor, Tensor]]]
Measured: TypeAlias = Mapping[str, Evaluation]

MIXED = "mixed"


@dataclass(frozen=True)
class Contender:
    """One of the networks that are compared.

    Attributes:
        name: ``mixed``, or for example ``uniform 2 bits``.
        plan: Its bits; those of a uniform one may exceed the budget.
        within: Whether it keeps to the budget.
        network: The quantized network, reconstructed and settled.
        rounded: How it did when its weights were rounded to nearest, by test.
        final: How it does after reconstruction, by test.
    """

    name: str
    plan: Plan
    within: bool
    network: nn.Module
    rounded: Measured
    final: Measured


@dataclass(frozen=True)
class Contest:
    """What all contenders share.

    Attributes:
        model: The float network.
        samples: Unlabelled inputs that calibrate, (N, C, H, W).
        tests: What they are measured by.
        config: How they are reconstructed.
    """

    model: nn.Module
    samples: Tensor
    tests: Tests
    config: ReconstructConfig

    def measured(self, network: nn.Module) -> Measured:
        """Return how a network does, beside the float one."""
        return {
            name: evaluate(network, batches, reference=self.model)
            for name, batches in self.tests.items()
        }


def contend(contest: Contest, plan: Plan, stage: Stage) -> tuple[Contender, ...]:
    """Quantize, reconstruct and measure the planned network and its uniform rivals.

    Args:
        contest: What all contenders share.
        plan: The plan.
        stage: Opened around each stage.

    Returns:
        The largest uniform width within the budget, the plan, and the next uniform
        width, which exceeds the budget, where there is one.
    """
    plans = line_up(plan)
    with stage("quantizing") as progress:
        rounded = {}
        for number, (name, one) in enumerate(plans.items()):
            progress(number, len(plans), f"quantizing: {name}")
            rounded[name] = quantize(contest.model, one, contest.samples)
    with stage("reconstructing") as progress:
        final = {
            name: reconstruct(
                network,
                contest.model,
                contest.samples,
                contest.config,
                progress=_part(progress, number, len(plans), name),
            )
            for number, (name, network) in enumerate(rounded.items())
        }
    with stage("evaluating") as progress:
        contenders = []
        for number, (name, one) in enumerate(plans.items()):
            progress(number, len(plans), f"evaluating: {name}")
            # What is measured is what its files compute.
            network = finalize(final[name], contest.samples)
            nearest = finalize(rounded[name], contest.samples)
            contenders.append(
                Contender(
                    name=name,
                    plan=one,
                    within=keeps(one),
                    network=network,
                    rounded=contest.measured(nearest),
                    final=contest.measured(network),
                )
            )
    return tuple(contenders)


def line_up(plan: Plan) -> dict[str, Plan]:
    """Return the contenders' bits by name: a uniform one, the plan, a larger uniform.

    Example:
        At 2.5 bits a weight: ``uniform 2 bits``, ``mixed``, ``uniform 3 bits``.
    """
    uniform = [_uniform(plan, choice) for choice in plan.choices]
    within = [one for one in uniform if keeps(one)]
    # Choices rise, so the last within the budget is the best, and the next the first
    # that is too large. The smallest choice for all is within any budget that is met.
    named = [within[-1], plan, *uniform[len(within) :][:1]]
    return {_name(one, plan): one for one in named}


def keeps(plan: Plan) -> bool:
    """Return whether a plan's bits keep to its budget."""
    limits = plan.budget.limits(plan.problem.costs)
    return all(plan.totals[cost] <= limit for cost, limit in limits.items())


def _uniform(plan: Plan, choice: Choice) -> Plan:
    return replace(plan, allocation=Allocation(dict.fromkeys(plan.graph.names, choice)))


def _name(one: Plan, plan: Plan) -> str:
    if one is plan:
        return MIXED
    return f"uniform {next(iter(one.allocation.values())).weight} bits"


def _part(progress: Progress, number: int, parts: int, name: str) -> Progress:
    """Return the progress of one part of several that take about as long."""

    def report(done: int, total: int | None, _message: str) -> None:
        whole = total or 1
        progress(number * whole + done, parts * whole, f"reconstructing {name}")

    return report


NETWORK = "ompq:demo"
DIGITS, NOISY = "digits", "noisy"  # the two tests
NOISE = 0.2  # standard deviation; pixels are from 0 to 1
COPIES = 4  # noisy copies of each digit
PLAN, PACKED, ONNX = "plan.json", "network.ompq.safetensors", "network.onnx"
REPORT, RESULT = "report.html", "result.json"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What is demonstrated.

    Attributes:
        budget: What the network may take; the default is two and a half bits a weight.
        samples: How many unlabelled digits calibrate.
        iterations: Steps that each block learns.
        seed: Seed of the order of samples, and of the noise.
    """

    budget: Budget | str = "34KiB"
    samples: int = 512
    iterations: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Demo:
    """What came of a demonstration.

    Attributes:
        config: What was asked for.
        plan: The decision.
        reference: How the float network does, by test.
        contenders: The networks, from small to large.
        account: What the packed file takes.
        same_logits: Whether the packed file, read back, gives the very same logits.
        exported: The verified ONNX file; None where there is none.
        no_export: Why there is none.
        histograms: Weights and inputs of the worst layers of the planned network.
        seconds: Stage → seconds it took.
    """

    config: DemoConfig
    plan: Plan
    reference: Measured
    contenders: tuple[Contender, ...]
    account: Account
    same_logits: bool
    exported: ExportResult | None
    no_export: str = ""
    histograms: tuple[Histogram, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def mixed(self) -> Contender:
        """The planned network."""
        return next(one for one in self.contenders if one.name == MIXED)

    @property
    def uniform(self) -> Contender:
        """The best within the budget of those whose layers all have the same bits."""
        return self.contenders[0]

    @property
    def budget(self) -> str:
        """The budget as it was given."""
        return str(self.config.budget)

    @property
    def float_bytes(self) -> float:
        """Size of the float network."""
        return self.plan.problem.costs["bytes"].reference

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that it left, the result last."""
        return (PLAN, PACKED, *([ONNX] if self.exported else []), REPORT, RESULT)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "network": NETWORK,
            **asdict(self.config),
            "budget": self.budget,
            "plan": self.plan.hash,
            "float": {"bytes": self.float_bytes, **_plain(self.reference)},
            "evaluation": self.mixed.final[DIGITS].to_json(),
            "contenders": [_contender_json(one) for one in self.contenders],
            "packed": {
                "bytes": self.account.file_bytes,
                "planned_bytes": self.account.planned_bytes,
                "promised_bytes": self.account.promised_bytes,
                "same_logits": self.same_logits,
            },
            "onnx": _export_json(self.exported),
            "no_onnx": self.no_export,
            "seconds": dict(self.seconds),
            "sections": sections_to_json(demo_sections(self)),
        }


def demo_sections(demo: Demo) -> list[Section]:
    """Return what the report shows besides the plan."""
    return [
        *_accuracies(demo),
        *(
            BlockError(one.block, one.before, one.after, kept=one.improved)
            for one in quantization_of(demo.mixed.network).errors
        ),
        *demo.histograms,
        *(StageTime(name, value) for name, value in demo.seconds.items()),
        *_agreements(demo),
        *_remarks(demo),
        Versions(_versions(demo)),
    ]


def _accuracies(demo: Demo) -> list[Section]:
    found: list[Section] = [
        _right("float", demo.reference[DIGITS], demo.float_bytes, "digits read right")
    ]
    for one in demo.contenders:
        note = "digits read right" if one.within else "too large for the budget"
        size = one.plan.totals["bytes"]
        found.append(_right(_series(one), one.final[DIGITS], size, note))
    for one in demo.contenders:
        noisy = one.final[NOISY]
        assert noisy.agreement is not None
        # Copies of one digit are not independent: the interval is that of the digits.
        digits = noisy.count // COPIES
        interval = wilson_interval(round(noisy.agreement * digits), digits)
        found.append(
            Accuracy(
                f"noisy: {_series(one)}",
                noisy.agreement,
                *interval,
                noisy.count,
                one.plan.totals["bytes"],
                "the same answer as float",
            )
        )
    return found


def _series(one: Contender) -> str:
    # What stands before the comma is a line of the figure: all uniform widths are one.
    return one.name.replace("uniform ", "uniform, ")


def _right(name: str, found: Evaluation, size: float, note: str) -> Accuracy:
    return Accuracy(name, found.top1, *found.interval, found.count, size, note)


def _agreements(demo: Demo) -> list[Section]:
    count = demo.reference[DIGITS].count
    packed = f"{in_bytes(demo.account.file_bytes)}, read back"
    same = "the same logits" if demo.same_logits else "OTHER logits: please report this"
    found: list[Section] = [
        Agreement(PACKED, float(demo.same_logits), count, note=f"{packed}: {same}")
    ]
    if demo.exported is None or demo.exported.engine is None:
        return found
    size, runtime = in_bytes(demo.exported.bytes), demo.exported.runtime
    for against, one in (
        ("the quantized network", demo.exported.simulated),
        ("the integer engine", demo.exported.engine),
    ):
        compared = one.codes > 0
        found.append(
            Agreement(
                ONNX,
                one.top1,
                one.images,
                one.codes_equal if compared else None,
                one.codes_furthest if compared else None,
                f"{size}, {runtime} against {against}",
            )
        )
    return found


def _remarks(demo: Demo) -> list[Section]:
    account = demo.account
    more = account.file_bytes - account.planned_bytes
    remarks: list[Section] = [
        Remark(
            "noisy digits",
            f"{COPIES} copies of each test digit with noise of standard deviation "
            f"{NOISE}. The digits themselves are so easy that hardly any network errs; "
            "noise shows how nearly a small network does what the float one does. "
            "Rounded to nearest: "
            + ", ".join(
                f"{one.name} {_as_float(one.rounded)}" for one in demo.contenders
            )
            + ".",
        ),
        Remark(
            "packed file",
            f"{account.file_bytes:,} bytes on disk: {account.planned_bytes:,} as "
            f"planned, and {more:,} of names and metadata.",
        ),
    ]
    if demo.exported is None:
        remarks.append(Remark("ONNX file", f"not written: {demo.no_export}"))
    return remarks


def _as_float(found: Measured) -> str:
    agreement = found[NOISY].agreement
    assert agreement is not None
    return percent(agreement)


def _versions(demo: Demo) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "network": NETWORK,
        "samples": str(demo.config.samples),
        "iterations": str(demo.config.iterations),
        "seed": str(demo.config.seed),
        "threads": str(torch.get_num_threads()),
    }


def _contender_json(one: Contender) -> dict[str, Any]:
    return {
        "name": one.name,
        "within": one.within,
        **one.plan.totals,
        "allocation": one.plan.allocation.to_json(),
        "rounded": _plain(one.rounded),
        "final": _plain(one.final),
    }


def _plain(found: Measured) -> dict[str, Any]:
    return {name: one.to_json() for name, one in found.items()}


def _export_json(found: ExportResult | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "bytes": found.bytes,
        "opset": found.opset,
        "runtime": found.runtime,
        "given": asdict(found.given),
        "simulated": asdict(found.simulated),
        "engine": None if found.engine is None else asdict(found.engine),
    }


_PLAN_SAMPLES = 64
_BATCH = 150

logger = logging.getLogger(__name__)


def run_demo(
    folder: str | Path,
    config: DemoConfig = DemoConfig(),
    *,
    stage: Stage | None = None,
    planned: Callable[[Plan, Measured], None] | None = None,
) -> Demo:
    """Plan, quantize, reconstruct, evaluate, pack, export and report.

    Args:
        folder: Where plan, networks, report and result go; they appear at the end.
        config: Budget, iterations and so on.
        stage: Opened around each stage, for progress bars.
        planned: Called with the plan, and with how the float network does, before the
            long stages begin.

    Raises:
        InfeasibleBudgetError: The budget cannot be met.
        MissingExtraError: scikit-learn, which has the digits, is not installed.
    """
    seconds: dict[str, float] = {}
    timed = partial(_timed, stage or _silent, seconds)
    with _complete_folder(Path(folder)) as work:
        demo = _computed(work, config, timed, planned, seconds)
        with timed("writing the report") as progress:
            demo.plan.save(work / PLAN)
            title = f"Handwritten digits in {demo.budget}"
            sections = demo_sections(demo)
            write_report(
                work / REPORT,
                demo.plan,
                results=sections,
                title=title,
                progress=progress,
            )
        text = json.dumps(demo.to_json(), indent=1, ensure_ascii=False)
        write_text(work / RESULT, f"{text}\n")
    return _moved(demo, Path(folder))


def _computed(
    work: Path,
    config: DemoConfig,
    stage: Stage,
    planned: Callable[[Plan, Measured], None] | None,
    seconds: Mapping[str, float],
) -> Demo:
    model, data = demo_network(), demo_data()
    contest = Contest(
        model,
        data.train_images[: config.samples],
        _tests(data, config.seed),
        ReconstructConfig(
            rounding=RoundingConfig(iterations=config.iterations), seed=config.seed
        ),
    )
    with stage("planning") as progress:
        few = data.train_images[:_PLAN_SAMPLES]
        made = plan(model, few, config.budget, progress=progress)
    reference = contest.measured(model)
    if planned is not None:
        planned(made, reference)
    contenders = contend(contest, made, stage)
    mixed = next(one.network for one in contenders if one.plan is made)
    with stage("packing"):
        save(mixed, work / PACKED, plan=made, network=NETWORK)
        unpacked = load(work / PACKED, DemoNetwork)
        same = torch.equal(*(_logits(n, data.test_images) for n in (mixed, unpacked)))
    with stage("exporting to ONNX"):
        exported, why = _exported(mixed, work / ONNX, data.test_images)
    histograms = worst_histograms(mixed, model, made, contest.samples)
    return Demo(
        config=config,
        plan=made,
        reference=reference,
        contenders=contenders,
        account=inspect_file(work / PACKED),
        same_logits=same,
        exported=exported,
        no_export=why,
        histograms=tuple(histograms),
        seconds=seconds,
    )


def _tests(data: DemoData, seed: int) -> Tests:
    """Return the digits that the network has never seen, and noisy copies of them."""
    generator = torch.Generator().manual_seed(seed)
    images, targets = data.test_images, data.test_targets
    copies = images.repeat(COPIES, 1, 1, 1)
    noise = NOISE * torch.randn(copies.shape, generator=generator)
    noisy = (copies + noise).clamp(0, 1)
    return {
        DIGITS: _batches(images, targets),
        NOISY: _batches(noisy, targets.repeat(COPIES)),
    }


def _batches(images: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    starts = range(0, len(images), _BATCH)
    return [(images[at : at + _BATCH], targets[at : at + _BATCH]) for at in starts]


def _logits(network: nn.Module, images: Tensor) -> Tensor:
    with evaluating(network):
        return network(images)  # type: ignore[no-any-return]


def _exported(
    network: nn.Module, path: Path, images: Tensor
) -> tuple[ExportResult | None, str]:
    try:
        return export_onnx(network, path, images), ""
    except OmpqError as error:  # the rest is worth having without it
        logger.warning("no ONNX file: %s", error)
        return None, str(error)


def _moved(demo: Demo, folder: Path) -> Demo:
    """Return the demonstration with the paths where its files are in the end."""
    exported = demo.exported and replace(demo.exported, path=folder / ONNX)
    account = replace(demo.account, path=folder / PACKED)
    return replace(demo, account=account, exported=exported)


@contextmanager
def _timed(stage: Stage, seconds: dict[str, float], name: str) -> Iterator[Progress]:
    start = perf_counter()
    with stage(name) as progress:
        yield progress
    seconds[name] = perf_counter() - start


@contextmanager
def _silent(_name: str) -> Iterator[Progress]:
    yield lambda _done, _total, _message: None


@contextmanager
def _complete_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files are moved to ``folder`` if the block succeeds."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=folder, prefix=".unfinished.") as work:
            yield Path(work)
            for path in Path(work).iterdir():
                path.replace(folder / path.name)
    finally:
        if new:
            with suppress(OSError):  # it holds something
                folder.rmdir()
