"""What a quantized network leaves behind: files, and a summary of them."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ompq.cli.screen import Screen
from ompq.cli.shown import (
    MEANS_NOTHING,
    accuracy_text,
    meaningless,
    plan_json,
    time_line,
    totals,
    used,
    warning_text,
)
from ompq.cli.tables import facts
from ompq.costs import digits
from ompq.evaluation import Evaluation, wilson_interval
from ompq.files import library_version, write_text
from ompq.packing import save as save_packed
from ompq.plans import Plan
from ompq.quantization import BlockError, quantization_of
from ompq.report import (
    Accuracy,
    Histogram,
    Section,
    StageTime,
    Versions,
    sections_to_json,
    write_report,
)
from ompq.report import BlockError as BlockSection
from ompq.samples import Progress


@dataclass(frozen=True)
class Outcome:
    """A quantized network and how it came about.

    Attributes:
        about: Network, weights, data and so on, by name.
        plan: Its bits.
        network: The quantized network.
        evaluation: How it does, beside the float network; None if not measured.
        seconds: Stage → seconds it took.
        histograms: Weights and inputs of its worst layers.
    """

    about: dict[str, Any]
    plan: Plan
    network: nn.Module
    evaluation: Evaluation | None
    seconds: dict[str, float]
    histograms: Sequence[Histogram] = ()

    @property
    def errors(self) -> tuple[BlockError, ...]:
        """What reconstruction did, block by block."""
        return quantization_of(self.network).errors

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        found = self.evaluation
        return {
            **self.about,
            "evaluation": None if found is None else found.to_json(),
            "seconds": self.seconds,
            "sections": sections_to_json(sections(self)),
            "plan": plan_json(self.plan),
        }


def write_files(
    folder: Path, outcome: Outcome, progress: Progress | None = None
) -> list[str]:
    """Write everything, each file whole or not at all; the result comes last."""
    written = ["plan.json"]
    outcome.plan.save(folder / "plan.json")
    written.append("network.ompq.safetensors")
    save_packed(
        outcome.network,
        folder / written[-1],
        plan=outcome.plan,
        network=outcome.about["network"],
    )
    written.append("report.html")
    write_report(
        folder / written[-1],
        outcome.plan,
        results=sections(outcome),
        title=outcome.about["network"],
        progress=progress,
    )
    written.append("result.json")
    text = json.dumps(outcome.to_json(), indent=1, ensure_ascii=False)
    write_text(folder / written[-1], f"{text}\n")
    return written


def sections(outcome: Outcome) -> list[Section]:
    """Return what the report shows besides the plan."""
    versions = {
        "ompq": library_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: str(value) for name, value in outcome.about.items()},
    }
    return [
        *_accuracies(outcome),
        *(
            BlockSection(one.block, one.before, one.after, kept=one.improved)
            for one in outcome.errors
        ),
        *outcome.histograms,
        *(StageTime(name, value) for name, value in outcome.seconds.items()),
        Versions(versions),
    ]


def _accuracies(outcome: Outcome) -> list[Section]:
    found = outcome.evaluation
    if found is None or found.drop is None:
        return []
    right = round((found.top1 + found.drop) * found.count)
    size = outcome.plan.problem.costs["bytes"].reference
    return [
        Accuracy(
            "float",
            right / found.count,
            *wilson_interval(right, found.count),
            found.count,
            size,
        ),
        Accuracy(
            f"quantized, {outcome.plan.budget}",
            found.top1,
            *found.interval,
            found.count,
            outcome.plan.totals["bytes"],
        ),
    ]


def show_outcome(
    outcome: Outcome, screen: Screen, folder: Path, written: list[str]
) -> None:
    """Print what came of it, as the options want it."""
    if screen.json:
        screen.show_json({**outcome.to_json(), "folder": str(folder), "files": written})
        return
    found = outcome.evaluation
    if screen.quiet:
        accuracy = "" if found is None else f", top-1 {accuracy_text(found)}"
        screen.show(f"{folder}: {'; '.join(used(outcome.plan))}{accuracy}")
        return
    rows = totals(outcome.plan)
    if outcome.errors:
        rows += _error_rows(outcome.errors)
    if found is not None:
        rows += _accuracy_rows(found)
    rows += [
        ("arithmetic", outcome.about["arithmetic"]),
        ("time", time_line(outcome.seconds)),
        ("files", ", ".join(str(folder / name) for name in written)),
    ]
    screen.show(facts(rows))
    nothing = meaningless(outcome.about)
    if nothing:
        screen.show(warning_text(f"{nothing}: the results {MEANS_NOTHING}"))


def _error_rows(errors: tuple[BlockError, ...]) -> list[tuple[str, str]]:
    kept = [error.block for error in errors if not error.improved]
    worst = sorted(errors, key=lambda error: -error.after)[:3]
    texts = [f"{e.block} {digits(e.before)} → {digits(e.after)}" for e in worst]
    better = f"{len(errors) - len(kept)} of {len(errors)} improved"
    return [
        ("blocks", f"{better}; the others keep their rounding" if kept else better),
        ("worst", f"{', '.join(texts)} (relative squared error)"),
    ]


def _accuracy_rows(found: Evaluation) -> list[tuple[str, str]]:
    assert found.drop is not None and found.drop_error is not None
    assert found.agreement is not None
    return [
        ("float", f"top-1 {100 * (found.top1 + found.drop):.2f} %"),
        ("quantized", f"top-1 {accuracy_text(found)}"),
        (
            "drop",
            f"{100 * found.drop:.2f} ± {100 * found.drop_error:.2f} points; "
            f"the same answer on {100 * found.agreement:.1f} % of the images",
        ),
    ]
