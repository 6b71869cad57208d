"""The demonstration: the whole path on a small network that ships with ompq."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ompq.allocation import Allocation
from ompq.costs import Budget, in_bytes, percent
from ompq.errors import InfeasibleBudgetError, OmpqError
from ompq.models.networks import DemoData, DemoNetwork, demo_data, demo_network
from ompq.onnx.export import ExportResult, export_onnx
from ompq.packing import Account, inspect_file, load, save
from ompq.planner import PlanConfig
from ompq.plans import Plan
from ompq.reconstruction import ReconstructConfig
from ompq.reconstruction.rounding import RoundingConfig
from ompq.report.sections import Accuracy, Agreement, Remark, Section
from ompq.results import Evaluation, wilson_interval
from ompq.samples import evaluating
from ompq.stages import ONNX, PACKED, PLAN, REPORT, RESULT, Bar, Stages, silent
from ompq.workflow import Outcome, Workflow, whole_folder, write_result

# Name of a test → its images (N, C, H, W) and targets (N,), in batches.
Tests: TypeAlias = Mapping[str, list[tuple[Tensor, Tensor]]]
Measured: TypeAlias = Mapping[str, Evaluation]

NETWORK, MIXED, CODED = "ompq:demo", "mixed", "coded"
DIGITS, NOISY = "digits", "noisy"  # the two tests
NOISE = 0.2  # standard deviation; pixels are from 0 to 1
COPIES = 4  # noisy copies of each digit
# Parts of a network's size at which coded weights are tried, the smallest first.
_CODED_PARTS = (0.75, 0.85)
_BATCH = 150

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What is demonstrated.

    Attributes:
        budget: The limit; the default is two and a half bits per weight.
        samples: How many unlabelled digits calibrate.
        iterations: Learning steps per block.
        seed: Seed of the order of samples, and of the noise.
    """

    budget: Budget | str = "37KiB"
    samples: int = 512
    iterations: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Contender:
    """One of the networks that are compared."""

    name: str  # "mixed", or for example "uniform 2 bits"
    plan: Plan
    within: bool  # whether it keeps to the budget; a uniform one need not
    network: nn.Module  # quantized, reconstructed and finalized
    rounded: Measured  # with weights rounded to nearest, by test
    final: Measured  # after reconstruction, by test

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "name": self.name,
            "within": self.within,
            **self.plan.totals,
            "allocation": self.plan.allocation.to_json(),
            "rounded": _plain(self.rounded),
            "final": _plain(self.final),
        }


def coded_rival(
    work: Workflow, other: Contender, tests: Tests, config: ReconstructConfig
) -> Contender | None:
    """Return a smaller network with coded weights that keeps as many answers.

    The first of a few sizes that does; None if none does.
    """
    size = other.plan.totals["bytes"]
    plan = work.plan(f"{size}B", PlanConfig(storage="coded"))
    for part in _CODED_PARTS:
        try:
            smaller = plan.with_budget(f"{part * size:.0f}B")
        except InfeasibleBudgetError:
            continue
        found = contender(work, CODED, smaller, tests, config)
        if agreement(found.final) >= agreement(other.final):
            return found
    return None


def contender(
    work: Workflow, name: str, plan: Plan, tests: Tests, config: ReconstructConfig
) -> Contender:
    """Quantize, reconstruct and measure a network."""
    rounded = work.quantize(plan)
    learned = work.reconstruct(rounded, config)
    # What is measured is what its files compute.
    nearest, final = (work.finalize(made)[0] for made in (rounded, learned))
    return Contender(
        name=name,
        plan=plan,
        within=plan.meets_budget(),
        network=final,
        rounded=measured(work, nearest, tests),
        final=measured(work, final, tests),
    )


def measured(work: Workflow, network: nn.Module, tests: Tests) -> Measured:
    """Return how a network does, beside the float one."""
    return {name: work.evaluate(network, batches) for name, batches in tests.items()}


def line_up(plan: Plan) -> dict[str, Plan]:
    """Return the contenders' bits by name: a uniform one, the plan, a larger uniform.

    Example:
        At 2.5 bits per weight: ``uniform 2 bits``, ``mixed``, ``uniform 3 bits``.
    """
    names = plan.graph.names
    uniform = {
        f"uniform {choice.weight_text} bits": replace(
            plan, allocation=Allocation(dict.fromkeys(names, choice))
        )
        for choice in plan.choices
    }
    # Choices rise, so the last within the budget is the best, and the next the first
    # that is too large. The smallest choice for all is within any budget that is met.
    within = [name for name, one in uniform.items() if one.meets_budget()]
    larger = [name for name in uniform if name not in within]
    found = {within[-1]: uniform[within[-1]], MIXED: plan}
    return found | {name: uniform[name] for name in larger[:1]}


@dataclass(frozen=True)
class Demo:
    """The results of a demonstration."""

    config: DemoConfig
    outcome: Outcome  # the planned network
    reference: Measured  # how the float network does, by test
    contenders: tuple[Contender, ...]  # from small to large
    account: Account  # what the packed file takes
    same_logits: bool  # whether the packed file, read back, gives the same logits
    exported: ExportResult | None  # the verified ONNX file
    no_export: str = ""  # why there is none
    # With coded weights, and smaller than the last, that keeps as many answers.
    coded: Contender | None = None

    @property
    def plan(self) -> Plan:
        """The planned bits."""
        return self.outcome.plan

    @property
    def mixed(self) -> Contender:
        """The planned network among the others."""
        return next(one for one in self.contenders if one.name == MIXED)

    @property
    def uniform(self) -> Contender:
        """The best within the budget of those whose layers all have the same bits."""
        return self.contenders[0]

    @property
    def coded_text(self) -> str:
        """What coded weights save, or that they save nothing here."""
        other = self.contenders[-1]
        size, kept = other.plan.totals["bytes"], agreement(other.final)
        if self.coded is None:
            return f"no smaller file keeps {percent(kept)} of the answers here"
        smaller = self.coded.plan.totals["bytes"]
        return (
            f"{in_bytes(size)} ({other.name}) → {in_bytes(smaller)}, with "
            f"{percent(agreement(self.coded.final))} of the answers kept instead of "
            f"{percent(kept)}"
        )

    @property
    def verdict(self) -> str:
        """The outcome of the comparison in a sentence."""
        mixed, uniform = self.mixed, self.uniform
        if mixed.plan.allocation == uniform.plan.allocation:
            return f"At {self.budget} every layer gets the same: {uniform.name}."
        text = (
            f"Within {self.budget}, mixed bits keep {percent(agreement(mixed.final))} "
            f"of the float network's answers to noisy digits; {uniform.name} keep "
            f"{percent(agreement(uniform.final))}"
        )
        low, high = advantage(mixed.final, uniform.final)
        if low <= 0:
            digits = self.reference[DIGITS].count
            return f"{text}. {digits} digits cannot show a difference that small."
        text = f"{text}: {percent(low)} to {percent(high)} more (95 % interval)."
        for larger in self.contenders:
            if not larger.within and advantage(mixed.final, larger.final)[0] > 0:
                size = in_bytes(larger.plan.totals["bytes"])
                share = percent(agreement(larger.final))
                return f"{text} Even {larger.name} ({size}) keep only {share}."
        return text

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
        exported = None
        if self.exported is not None:
            exported = asdict(self.exported) | {"path": self.exported.path.name}
        return {
            **self.outcome.to_json(),
            "budget": self.budget,
            "float": {"bytes": self.float_bytes, **_plain(self.reference)},
            "contenders": [one.to_json() for one in self.contenders],
            "coded": None if self.coded is None else self.coded.to_json(),
            "packed": {
                "bytes": self.account.file_bytes,
                "planned_bytes": self.account.planned_bytes,
                "same_logits": self.same_logits,
            },
            "onnx": exported,
            "no_onnx": self.no_export,
        }

    def reported(self) -> "Demo":
        """Return the demonstration with what its report shows besides the plan."""
        outcome = replace(
            self.outcome,
            accuracies=_accuracies(self),
            remarks=[*_agreements(self), *_remarks(self)],
        )
        return replace(self, outcome=outcome)


def run_demo(
    folder: str | Path,
    config: DemoConfig = DemoConfig(),
    *,
    bar: Bar = silent,
    planned: Callable[[Plan, Measured], None] | None = None,
) -> Demo:
    """Plan, quantize, reconstruct, evaluate, pack, export and report.

    Args:
        folder: Where plan, networks, report and result go; they appear at the end.
        config: Budget, iterations and so on.
        bar: Opened around each stage, for progress bars.
        planned: Called with the plan, and with how the float network does, before the
            long stages begin.

    Raises:
        InfeasibleBudgetError: The budget cannot be met.
        MissingExtraError: scikit-learn, which has the digits, is not installed.
    """
    folder = Path(folder)
    model, data = demo_network(), demo_data()
    samples = data.train_images[: config.samples]
    work = Workflow(model, samples, Stages(bar))
    with whole_folder(folder) as unfinished:
        plan = work.plan(config.budget)
        tests = _tests(data, model, config.seed)
        reference = measured(work, model, tests)
        if planned is not None:
            planned(plan, reference)
        rounding = RoundingConfig(iterations=config.iterations)
        learning = ReconstructConfig(rounding=rounding, seed=config.seed)
        contenders = tuple(
            contender(work, name, one, tests, learning)
            for name, one in line_up(plan).items()
        )
        demo = _packed(unfinished, config, work, contenders, reference)
        coded = coded_rival(work, demo.contenders[-1], tests, learning)
        demo = replace(demo, coded=coded).reported()
        with work.stages.stage("writing the report") as progress:
            plan.save(unfinished / PLAN)
            title = f"Handwritten digits in {demo.budget}"
            demo.outcome.write_report(unfinished / REPORT, title, progress)
        write_result(unfinished / RESULT, demo.to_json())
    # Where its files are in the end.
    exported = demo.exported and replace(demo.exported, path=folder / ONNX)
    account = replace(demo.account, path=folder / PACKED)
    return replace(demo, account=account, exported=exported)


def _packed(
    folder: Path,
    config: DemoConfig,
    work: Workflow,
    contenders: tuple[Contender, ...],
    reference: Measured,
) -> Demo:
    """Write the planned network's files, read them back, and compare."""
    mixed = next(one for one in contenders if one.name == MIXED)
    images = demo_data().test_images
    with work.stages.stage("packing"):
        save(mixed.network, folder / PACKED, plan=mixed.plan, network=NETWORK)
        unpacked = load(folder / PACKED, DemoNetwork)
        with evaluating(mixed.network), evaluating(unpacked):
            same = torch.equal(mixed.network(images), unpacked(images))
    with work.stages.stage("exporting to ONNX"):
        exported, why = _exported(mixed.network, folder / ONNX, images)
    asked = {"network": NETWORK, **asdict(config), "budget": str(config.budget)}
    about = {**asked, "threads": torch.get_num_threads()}
    outcome = work.outcome_of(mixed.network, mixed.plan, mixed.final[DIGITS], about)
    account = inspect_file(folder / PACKED)
    return Demo(config, outcome, reference, contenders, account, same, exported, why)


def _tests(data: DemoData, model: nn.Module, seed: int) -> Tests:
    """Return digits that the network has never seen, and noisy copies of them.

    The targets of the noisy ones are the float network's answers.
    """
    generator = torch.Generator().manual_seed(seed)
    images, targets = data.test_images, data.test_targets
    copies = images.repeat(COPIES, 1, 1, 1)
    noise = NOISE * torch.randn(copies.shape, generator=generator)
    noisy = (copies + noise).clamp(0, 1)
    with evaluating(model):
        answers = model(noisy).argmax(1)
    tests = {DIGITS: (images, targets), NOISY: (noisy, answers)}
    return {
        name: [
            (x[at : at + _BATCH], y[at : at + _BATCH])
            for at in range(0, len(x), _BATCH)
        ]
        for name, (x, y) in tests.items()
    }


def _exported(
    network: nn.Module, path: Path, images: Tensor
) -> tuple[ExportResult | None, str]:
    try:
        return export_onnx(network, path, images, network=NETWORK), ""
    except OmpqError as error:  # the other files are useful without it
        logger.warning("no ONNX file: %s", error)
        return None, str(error)


def _plain(found: Measured) -> dict[str, Any]:
    return {name: one.to_json() for name, one in found.items()}


def agreement(found: Measured) -> float:
    """Return the share of noisy digits that are read as the float network does."""
    share = found[NOISY].agreement
    assert share is not None  # it was measured beside the float network
    return share


def advantage(one: Measured, other: Measured) -> tuple[float, float]:
    """Return the 95 % interval of how many more answers of float one network gives.

    It is a share of the noisy digits. Copies of one digit are not independent, so
    digits are what is counted.
    """
    mine, theirs = (
        each[NOISY].correctness().reshape(COPIES, -1).mean(0) for each in (one, other)
    )
    difference = mine - theirs
    half = 1.96 * difference.std() / len(difference) ** 0.5
    return float(difference.mean() - half), float(difference.mean() + half)


def _accuracies(demo: Demo) -> list[Section]:
    """Return how many digits each network reads, and how many as float does."""
    right = [_read("float", demo.reference, demo.float_bytes)]
    kept = []
    for one in demo.contenders:
        # What stands before the comma is one line of the figure: all uniform widths.
        name = one.name.replace("uniform ", "uniform, ")
        size = one.plan.totals["bytes"]
        right.append(_read(name, one.final, size, within=one.within))
        share, count = agreement(one.final), one.final[NOISY].count
        # Copies of one digit are not independent: the interval is that of the digits.
        digits = count // COPIES
        interval = wilson_interval(round(share * digits), digits)
        name, note = f"noisy: {name}", "same answer as float"
        kept.append(Accuracy(name, share, *interval, count, size, note, answers=True))
    return [*right, *kept]


def _read(name: str, tests: Measured, size: float, *, within: bool = True) -> Accuracy:
    found, note = tests[DIGITS], "correct digits"
    note = note if within else "too large for the budget"
    return Accuracy.of(name, found, size, note)


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
        equal = one.codes_equal if one.codes else None
        furthest = one.codes_furthest if one.codes else None
        note = f"{size}, {runtime} against {against}"
        found.append(Agreement(ONNX, one.top1, one.images, equal, furthest, note))
    return found


def _remarks(demo: Demo) -> list[Section]:
    account = demo.account
    rounded = [f"{c.name} {percent(agreement(c.rounded))}" for c in demo.contenders]
    remarks: list[Section] = [
        Remark(
            "noisy digits",
            f"{COPIES} copies of each test digit with noise of standard deviation "
            f"{NOISE}. The digits themselves are so easy that hardly any network errs; "
            "noise shows how closely a small network follows the float one. "
            f"Rounded to nearest: {', '.join(rounded)}.",
        ),
        Remark(
            "packed file",
            f"{account.file_bytes:,} bytes on disk, names and all; the plan allows "
            f"{account.planned_bytes:,}.",
        ),
    ]
    if demo.coded is not None:
        remarks.append(Remark("coded weights", demo.coded_text))
    if demo.exported is None:
        remarks.append(Remark("ONNX file", f"not written: {demo.no_export}"))
    return remarks
