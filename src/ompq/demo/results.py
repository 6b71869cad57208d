"""What comes of the demonstration: a value, its JSON, and what its report shows."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ompq.allocation.solving import Budget
from ompq.demo.contest import MIXED, Contender, Measured
from ompq.evaluation import Evaluation, wilson_interval
from ompq.export.exporting import ExportResult
from ompq.packing.accounts import Account
from ompq.plans import Plan
from ompq.quantization.quantizing import quantization_of
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
)
from ompq.report.numbers import in_bytes, percent

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
