"""The demonstration: the whole path on a small network that ships with ompq."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.text import Text
from torch import Tensor, nn

from ompq.allocation.problem import Allocation
from ompq.amounts import in_bytes, percent
from ompq.cli.console import Column, Console, Shown, View, facts
from ompq.cli.option_groups import DemoOptions
from ompq.cli.options import apply_options, check_writable
from ompq.cli.views import time_line
from ompq.configs import (
    DemoConfig,
    ExportConfig,
    PlanConfig,
    ReconstructConfig,
    RoundingConfig,
)
from ompq.errors import InfeasibleBudgetError, OmpqError
from ompq.evaluation_result import Evaluation, wilson_interval
from ompq.files import ONNX, PACKED, PLAN, REPORT, RESULT
from ompq.models.builtin_networks import DemoData, DemoNetwork, demo_data
from ompq.models.named_models import load_model
from ompq.packed.account import Account, inspect_file
from ompq.packed.packed_files import load, save
from ompq.plans import Plan, unit_rows
from ompq.progress import Bar, Stages, silent
from ompq.report_sections import Accuracy, AgreementSection, Remark, Section
from ompq.runtimes.export_result import ExportResult
from ompq.runtimes.exporter import export
from ompq.samples import evaluating
from ompq.workflow import Outcome, Workflow, whole_folder, write_result

# Test set → batches of images (N, C, H, W) and targets (N,).
Tests: TypeAlias = Mapping[str, list[tuple[Tensor, Tensor]]]
Measured: TypeAlias = Mapping[str, Evaluation]

NETWORK, MIXED, CODED = "ompq:demo", "mixed", "coded"
DIGITS, NOISY = "digits", "noisy"  # the two test sets
NOISE = 0.2  # standard deviation; pixels range from 0 to 1
COPIES = 4  # noisy copies of each digit
# Sizes at which coded weights are tried, as fractions of the size to beat.
_CODED_FRACTIONS = (0.75, 0.85)
_BATCH = 150  # a third of the 450 test images

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contender:
    """One of the networks compared."""

    name: str  # "mixed", or for example "uniform 2 bits"
    plan: Plan
    within: bool  # whether it meets the budget; the larger uniform network does not
    network: nn.Module  # quantized, reconstructed and finalized
    rounded: Measured  # with rounded weights, on each test set
    final: Measured  # after reconstruction, on each test set

    @property
    def kept(self) -> str:
        """The percentage of noisy digits that are answered as by the float network."""
        return percent(agreement(self.final))

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
    """Return a smaller network with coded weights that agrees with float as often.

    A few sizes are tried, the smallest first. None if no size is good enough.
    """
    size = other.plan.totals["bytes"]
    plan = work.plan(f"{size}B", PlanConfig(storage="coded"))
    for fraction in _CODED_FRACTIONS:
        try:
            smaller = plan.with_budget(f"{fraction * size:.0f}B")
        except InfeasibleBudgetError:
            continue
        coded = contender(work, CODED, smaller, tests, config)
        if agreement(coded.final) >= agreement(other.final):
            return coded
    return None


def contender(
    work: Workflow, name: str, plan: Plan, tests: Tests, config: ReconstructConfig
) -> Contender:
    """Quantize, reconstruct and measure a network."""
    rounded = work.quantize(plan)
    learned = work.reconstruct(rounded, config)
    # Finalized networks compute exactly what their files compute.
    nearest, final = (work.finalize(one)[0] for one in (rounded, learned))
    return Contender(
        name=name,
        plan=plan,
        within=plan.meets_budget(),
        network=final,
        rounded=measure_network(work, nearest, tests),
        final=measure_network(work, final, tests),
    )


def measure_network(work: Workflow, network: nn.Module, tests: Tests) -> Measured:
    """Evaluate a network on each test set, with the float network as reference."""
    return {name: work.evaluate(network, batches) for name, batches in tests.items()}


def line_up(plan: Plan) -> dict[str, Plan]:
    """Return the contenders' plans: the given one, and two uniform ones around it.

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
    # Choices ascend: the last that meets the budget is the best, and the next is the
    # first that is too large. At least one meets it, because the plan does.
    within = [name for name, one in uniform.items() if one.meets_budget()]
    larger = [name for name in uniform if name not in within]
    plans = {within[-1]: uniform[within[-1]], MIXED: plan}
    return plans | {name: uniform[name] for name in larger[:1]}


@dataclass(frozen=True)
class Demo:
    """The results of a demonstration."""

    config: DemoConfig
    outcome: Outcome  # of the mixed network
    reference: Measured  # the float network on each test set
    contenders: tuple[Contender, ...]  # from small to large
    account: Account  # the packed file's size, itemised
    same_logits: bool  # whether the packed file, loaded again, gives the same logits
    exported: ExportResult | None  # the verified ONNX file
    no_export: str = ""  # why there is no ONNX file
    # Smaller than the last contender, with coded weights, and no less accurate.
    coded: Contender | None = None

    @property
    def plan(self) -> Plan:
        """The plan for the budget."""
        return self.outcome.plan

    @property
    def mixed(self) -> Contender:
        """The contender that follows the plan."""
        return next(one for one in self.contenders if one.name == MIXED)

    @property
    def uniform(self) -> Contender:
        """The largest uniform contender that meets the budget."""
        return self.contenders[0]

    @property
    def coded_text(self) -> str:
        """A phrase on what coded weights save, if anything."""
        other = self.contenders[-1]
        if self.coded is None:
            return f"no smaller file keeps {other.kept} of the answers here"
        before, after = (in_bytes(o.plan.totals["bytes"]) for o in (other, self.coded))
        return (
            f"{before} ({other.name}) → {after}, with {self.coded.kept} of the answers "
            f"kept instead of {other.kept}"
        )

    @property
    def verdict(self) -> str:
        """A sentence on how mixed and uniform bits compare."""
        mixed, uniform = self.mixed, self.uniform
        if mixed.plan.allocation == uniform.plan.allocation:
            return f"At {self.config.budget} every layer gets the same: {uniform.name}."
        text = (
            f"Within {self.config.budget}, mixed bits keep {mixed.kept} of the float "
            f"network's answers to noisy digits; {uniform.name} keep {uniform.kept}"
        )
        low, high = advantage(mixed.final, uniform.final)
        if low <= 0:
            digits = self.reference[DIGITS].count
            return f"{text}. {digits} digits cannot show a difference that small."
        text = f"{text}: {percent(low)} to {percent(high)} more (95 % interval)."
        for larger in self.contenders:
            if not larger.within and advantage(mixed.final, larger.final)[0] > 0:
                size = in_bytes(larger.plan.totals["bytes"])
                return f"{text} Even {larger.name} ({size}) keep only {larger.kept}."
        return text

    @property
    def float_bytes(self) -> float:
        """Size of the float network."""
        return self.plan.problem.costs["bytes"].reference

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files written, the result last."""
        return (PLAN, PACKED, *([ONNX] if self.exported else []), REPORT, RESULT)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        exported = None
        if self.exported is not None:
            exported = asdict(self.exported) | {"path": self.exported.path.name}
        return {
            **self.outcome.to_json(),
            "budget": str(self.config.budget),
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
        """Return the demonstration with the sections of its report filled in."""
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
        folder: Where plan, networks, report and result appear at the end.
        bar: Opened around each stage, for progress bars.
        planned: Called with the plan and the float network's results before the long
            stages begin.

    Raises:
        InfeasibleBudgetError: The budget cannot be met.
        MissingExtraError: scikit-learn, which provides the digits, is not installed.
    """
    folder = Path(folder)
    model, data = load_model(NETWORK).module, demo_data()
    samples = data.train_images[: config.samples]
    work = Workflow(model, samples, Stages(bar))
    with whole_folder(folder) as unfinished:
        plan = work.plan(config.budget)
        tests = _tests(data, model, config.seed)
        reference = measure_network(work, model, tests)
        if planned is not None:
            planned(plan, reference)
        rounding = RoundingConfig(iterations=config.iterations)
        learning = ReconstructConfig(rounding=rounding, seed=config.seed)
        contenders = tuple(
            contender(work, name, one, tests, learning)
            for name, one in line_up(plan).items()
        )
        demo = _write_files(unfinished, config, work, contenders, reference)
        coded = coded_rival(work, demo.contenders[-1], tests, learning)
        demo = replace(demo, coded=coded).reported()
        with work.stages.stage("writing the report") as progress:
            plan.save(unfinished / PLAN)
            title = f"Handwritten digits in {config.budget}"
            demo.outcome.write_report(unfinished / REPORT, title, progress)
        write_result(unfinished / RESULT, demo.to_json())
    # The files have been moved to their final place.
    exported = demo.exported and replace(demo.exported, path=folder / ONNX)
    account = replace(demo.account, path=folder / PACKED)
    return replace(demo, account=account, exported=exported)


def _write_files(
    folder: Path,
    config: DemoConfig,
    work: Workflow,
    contenders: tuple[Contender, ...],
    reference: Measured,
) -> Demo:
    """Write the mixed network's files and compare them with the network."""
    mixed = next(one for one in contenders if one.name == MIXED)
    images = demo_data().test_images
    with work.stages.stage("packing"):
        save(mixed.network, folder / PACKED, plan=mixed.plan, network=NETWORK)
        unpacked = load(folder / PACKED, DemoNetwork)
        with evaluating(mixed.network), evaluating(unpacked):
            same = torch.equal(mixed.network(images), unpacked(images))
    with work.stages.stage("exporting to ONNX"):
        exported, why = _export(mixed.network, folder / ONNX, images)
    about = {
        "network": NETWORK,
        **asdict(config),
        "budget": str(config.budget),
        "threads": torch.get_num_threads(),
    }
    outcome = work.outcome_of(mixed.network, mixed.plan, mixed.final[DIGITS], about)
    account = inspect_file(folder / PACKED)
    return Demo(config, outcome, reference, contenders, account, same, exported, why)


def _tests(data: DemoData, model: nn.Module, seed: int) -> Tests:
    """Return the held-out digits and noisy copies of them, in batches.

    The targets of the noisy digits are the float network's answers.
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
        name: list(zip(*(torch.split(one, _BATCH) for one in test), strict=True))
        for name, test in tests.items()
    }


def _export(
    network: nn.Module, path: Path, images: Tensor
) -> tuple[ExportResult | None, str]:
    try:
        return export(network, path, images, ExportConfig(network=NETWORK)), ""
    except OmpqError as error:  # the other files are useful without this one
        logger.warning("no ONNX file: %s", error)
        return None, str(error)


def _plain(results: Measured) -> dict[str, Any]:
    return {name: one.to_json() for name, one in results.items()}


def agreement(results: Measured) -> float:
    """Return the fraction of noisy digits answered as the float network does."""
    fraction = results[NOISY].agreement
    assert fraction is not None  # evaluated with the float network as reference
    return fraction


def advantage(one: Measured, other: Measured) -> tuple[float, float]:
    """Return the 95 % interval of the difference between two networks' agreement.

    Copies of a digit are not independent, so they are averaged before the standard
    error is computed.
    """
    mine, theirs = (
        each[NOISY].correctness().reshape(COPIES, -1).mean(0) for each in (one, other)
    )
    difference = mine - theirs
    half = 1.96 * difference.std() / len(difference) ** 0.5
    return float(difference.mean() - half), float(difference.mean() + half)


def _accuracies(demo: Demo) -> list[Section]:
    """Return each network's accuracy on the digits and agreement on the noisy ones."""
    note, size = "correct digits", demo.float_bytes
    accuracies = [Accuracy.of("float", demo.reference[DIGITS], size, note)]
    agreements = []
    for one in demo.contenders:
        # The chart draws one line per text before the comma: one for all uniform plans.
        name = one.name.replace("uniform ", "uniform, ")
        size = one.plan.totals["bytes"]
        note = "correct digits" if one.within else "too large for the budget"
        accuracies.append(Accuracy.of(name, one.final[DIGITS], size, note))
        same, count = agreement(one.final), one.final[NOISY].count
        # Copies of a digit are not independent: the interval counts each digit once.
        digits = count // COPIES
        interval = wilson_interval(round(same * digits), digits)
        name, note = f"noisy: {name}", "same answer as float"
        noisy = Accuracy(name, same, *interval, count, size, note, answers=True)
        agreements.append(noisy)
    return [*accuracies, *agreements]


def _agreements(demo: Demo) -> list[Section]:
    count = demo.reference[DIGITS].count
    packed = f"{in_bytes(demo.account.file_bytes)}, loaded again"
    same = (
        "the same logits"
        if demo.same_logits
        else "DIFFERENT logits: please report this"
    )
    agreements: list[Section] = [
        AgreementSection(
            PACKED, float(demo.same_logits), count, note=f"{packed}: {same}"
        )
    ]
    if demo.exported is None or demo.exported.engine is None:
        return agreements
    size, runtime = in_bytes(demo.exported.bytes), demo.exported.runtime
    for against, one in (
        ("the quantized network", demo.exported.simulated),
        ("the integer engine", demo.exported.engine),
    ):
        equal = one.codes_equal if one.codes else None
        furthest = one.codes_furthest if one.codes else None
        note = f"{size}, {runtime} against {against}"
        agreements.append(
            AgreementSection(ONNX, one.top1, one.images, equal, furthest, note)
        )
    return agreements


def _remarks(demo: Demo) -> list[Section]:
    account = demo.account
    rounded = [f"{c.name} {percent(agreement(c.rounded))}" for c in demo.contenders]
    remarks: list[Section] = [
        Remark(
            "noisy digits",
            f"{COPIES} copies of each test digit with noise of standard deviation "
            f"{NOISE}. The clean digits are so easy that hardly any network errs; "
            "noise shows how closely a small network follows the float one. "
            f"Rounded: {', '.join(rounded)}.",
        ),
        Remark(
            "packed file",
            f"{account.file_bytes:,} bytes on disk, headers included; the plan allows "
            f"{account.planned_bytes:,}.",
        ),
    ]
    if demo.coded is not None:
        remarks.append(Remark("coded weights", demo.coded_text))
    if demo.exported is None:
        remarks.append(Remark("ONNX file", f"not written: {demo.no_export}"))
    return remarks


def show_demo(options: DemoOptions, console: Console) -> View:
    """Try everything on a small network, and return what came of it."""
    folder, config = options.folder, apply_options(DemoConfig(), options)
    check_writable(folder, folder=True)

    def planned(plan: Plan, reference: Measured) -> None:
        if not console.json and not console.quiet:
            console.show(*beginning(plan, config.budget, reference))

    # The network is too small for several threads: synchronization would take most of
    # the time, and ten times as long on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = run_demo(folder, config, bar=console.stages.bar, planned=planned)
    finally:
        torch.set_num_threads(threads)
    data = {**result.to_json(), "folder": str(folder), "files": list(result.files)}
    line = f"{folder / REPORT}: {result.verdict}"
    noisy = result.reference[NOISY].count
    body: list[Shown] = [
        "Uniform networks have the same bits in every layer. The last two columns show "
        f"how often a network gives the float network's answer to {noisy:,} noisy "
        "digits: rounded, then reconstructed.",
        "",
        _contest(result),
        "",
        Text(result.verdict, style="bold"),
        "",
        facts(closing(result, folder)),
    ]
    return View(data, line, body)


def beginning(plan: Plan, budget: str, reference: Measured) -> list[Shown]:
    """Return what is printed before the long stages: the task and the plan."""
    weights = sum(unit.weights for unit in plan.graph.units)
    size = in_bytes(plan.problem.costs["bytes"].reference)
    return [
        f"A network that reads handwritten digits: {len(plan.graph)} layers, "
        f"{weights:,} weights, {size} in float. It reads "
        f"{_correct(reference[DIGITS])} held-out digits correctly.",
        f"It has to fit into {budget}. Each bit goes where it prevents the most damage "
        "per byte. Damage is the rounding noise of a layer, weighted by how much of it "
        "is expected to reach the answers:",
        "",
        _bits(plan),
        *ties(plan),
        "",
    ]


def _bits(plan: Plan) -> list[Column]:
    """Return each layer's bits, with the damage and size that decide them."""
    units, bits = plan.graph.units, plan.allocation.values()
    least = f"damage at {plan.choices[0].bits:g} bits"
    return [
        Column("layer", [unit.name for unit in units], "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=3),
        Column("weights", [f"{unit.weights:,}" for unit in units], rank=1),
        Column(least, [f"{row[0]:.3f}" for row in plan.scores.damage]),
        Column("bits", [choice.weight_text for choice in bits]),
        Column("bytes", [in_bytes(row["bytes"]) for row in unit_rows(plan)]),
        Column("", ["▬" * round(choice.bits) for choice in bits], "left", rank=2),
    ]


def ties(plan: Plan) -> list[str]:
    """Return a blank line and one for each group of layers that share their bits."""
    names = plan.graph.names
    lines = [
        f"{' and '.join(names[i] for i in group)} share their bits: "
        "their outputs are added."
        for group in plan.graph.groups.values()
        if len(group) > 1
    ]
    return ["", *lines] if lines else []


def _contest(result: Demo) -> list[Column]:
    """Return the networks side by side."""
    rivals = result.contenders
    sizes = [result.float_bytes, *(one.plan.totals["bytes"] for one in rivals)]
    bits = [f"{one.plan.totals['average_bits']:.2f}" for one in rivals]
    digits = [result.reference, *(one.final for one in rivals)]
    rounded = [percent(agreement(one.rounded)) for one in rivals]

    remarks = ["" if one.within else "too large" for one in rivals]
    return [
        Column("network", ["float", *(one.name for one in rivals)], "left"),
        Column("bits", ["32", *bits]),
        Column("size", [in_bytes(size) for size in sizes]),
        Column("correct digits", [_correct(one[DIGITS]) for one in digits], rank=1),
        Column("rounded", ["", *rounded]),
        Column("reconstructed", ["", *(one.kept for one in rivals)]),
        Column("", ["", *remarks], "left", rank=2),
    ]


def closing(result: Demo, folder: Path) -> list[tuple[str, str]]:
    """Return the files, and what to do next."""
    account, exported, bits = result.account, result.exported, result.plan.allocation
    same = (
        "the same logits" if result.same_logits else "DIFFERENT logits: please report"
    )
    onnx = f"not written: {result.no_export}"
    if exported is not None:
        answers = exported.simulated
        equal = round(answers.top1 * answers.images)
        onnx = (
            f"{exported.path}: {in_bytes(exported.bytes)} with its graph; "
            f"{exported.runtime} gives the quantized network's answer to {equal} "
            f"of {answers.images} digits"
        )
    most = max(bits, key=lambda name: bits[name].bits)
    size, planned = in_bytes(account.file_bytes), in_bytes(account.planned_bytes)
    packed = f"{size}, within the {planned} of the plan; loaded again it gives {same}"
    return [
        ("packed", f"{account.path}: {packed}"),
        ("coded", result.coded_text),
        ("ONNX", onnx),
        ("report", f"{folder / REPORT}: open it in a browser"),
        ("next", f"ompq explain {folder / PLAN} {most}"),
        ("", "ompq demo --budget 32KiB, or your own network: ompq quantize --help"),
        ("time", time_line(result.outcome.seconds)),
    ]


def _correct(result: Evaluation) -> str:
    assert result.top1 is not None  # the digits have labels
    return f"{round(result.top1 * result.count)} of {result.count}"
