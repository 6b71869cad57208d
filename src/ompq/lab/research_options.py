"""The options of audit, reproduce and zoo; nothing here imports PyTorch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ompq.cli.option_groups import CALIBRATION_SAMPLES, DEVICES, metric_option
from ompq.cli.options import (
    argument,
    check_needed,
    check_resumed,
    flag,
    kebab,
    number,
    one_of,
    option,
    output_path,
)
from ompq.lab.audit_settings import AuditConfig

_QUICK = [kebab(str(name)) for name in AuditConfig.scores]
REPRODUCED = Path("reproduced")  # the folder of results


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options for what is measured and where the files go."""

    samples: int = number("Inputs for scoring and calibration.", default=256, least=2)
    held_out: int = number(
        "Held-out inputs, to measure divergence on.", default=256, least=2
    )
    eval_data: str | None = option(
        "SOURCE", "Labelled images, to measure top-1 as well."
    )
    limit: int | None = number("Use only this many labelled images.", shown="all")
    metric: str | None = metric_option(" of --eval-data")
    allocations: int = number(
        "Random allocations to measure.", default=AuditConfig.allocations, least=3
    )
    scores: str = option(
        "NAMES",
        f"Scores to audit, joined by commas, or all. Default: {', '.join(_QUICK)}.",
        default=",".join(_QUICK),
    )
    plans: list[Path] | None = option(
        "FILE",
        "Measure these bits, too: a plan, or bits copied from a report, or published "
        'ones: {"conv1": {"weight": 8, "activation": 8}, ...}. Repeatable.',
        "--plan",
    )
    reconstruct: int = option(
        "STEPS",
        "Reconstruct each allocation with this many steps per block. Default: 0.",
        default=0,
        min=0,
    )
    folder: Path | None = output_path("Write audit.json and report.html there.", "DIR")
    resume: bool = flag("Continue an audit that was stopped; needs -o.")

    def unfinished(self) -> Path | None:
        """Return the folder that keeps tables and measurements until the audit ends."""
        given = {"limit": self.limit, "metric": self.metric}
        check_needed("--eval-data", self.eval_data, **given)
        path = None if self.folder is None else self.folder / "unfinished"
        left = path if path is not None and path.exists() else None
        check_resumed(self.folder, left, "audit", resume=self.resume)
        return path


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options for what is reproduced, from which network and data."""

    name: Annotated[str | None, argument("NAME", "A table or figure, from --list.")] = (
        None
    )
    listed: bool = flag("List every table, figure and row.", "--list")
    data: str | None = option(
        "SOURCE", "Labelled images to train with and to take samples from."
    )
    eval_data: str | None = option(
        "SOURCE", "Labelled images to measure accuracy on. Default: --data."
    )
    network: str | None = option(
        "NETWORK", "A network other than the paper's, as for ompq plan."
    )
    weights: str | None = option("FILE", "As for ompq plan.")
    device: str = one_of(DEVICES, "where to run.", default="auto")
    rows: str = option("PATTERN", "Rows to run: ompq-*. Default: all.", default="*")
    folder: Path = output_path(
        f"Folder for the results. Default: {REPRODUCED}/.", "DIR", REPRODUCED
    )
    samples: int | None = number(
        "Images to calibrate with.", shown=f"{CALIBRATION_SAMPLES}, or all", least=8
    )
    limit: int | None = number("Measure on this many images only.", shown="all")
    seed: int = number(
        "Seed for the choice of images and the order.", default=0, least=None
    )
    quick: bool = flag(
        "Scale every row down, to try it in minutes. The results are not meaningful."
    )
    strict: bool = flag("Fail if a row cannot be run.")


ZooNetwork = Annotated[
    str | None, argument("NETWORK", "Only plans of this network: resnet18.")
]
