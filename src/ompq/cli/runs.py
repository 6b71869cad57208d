"""A run that makes a network: its folder, and what a stopped one continues from."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ompq.cli.evaluating import LimitOption
from ompq.cli.options import option
from ompq.cli.screen import Screen, say
from ompq.datasets.sources import Data
from ompq.errors import CheckpointError
from ompq.reconstruction.rounding import RoundingConfig

CALIBRATION = 1024


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is done, and where it goes."""

    folder: Annotated[
        Path,
        option(
            "--output",
            "-o",
            metavar="DIR",
            text="Where plan, network, result and report go.",
        ),
    ]
    budget: Annotated[
        str | None,
        option(metavar="BUDGET", text="As for ompq plan; not needed with --plan."),
    ] = None
    plan: Annotated[
        Path | None,
        option(
            metavar="FILE",
            text="Take this plan, or these bits copied from a report, instead of "
            "making a plan.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        option(
            min=2,
            metavar="NUMBER",
            text=f"How many inputs calibrate. Default: {CALIBRATION}, or all.",
        ),
    ] = None
    views: Annotated[
        int,
        option(
            min=1,
            metavar="NUMBER",
            text="How many of each image to learn from: itself and copies, mirrored "
            "and shifted. 8 to 16 help where there are fewer than 200. Default: 1.",
        ),
    ] = 1
    iterations: Annotated[
        int,
        option(
            min=1,
            metavar="NUMBER",
            text=f"Steps a block learns. Default: {RoundingConfig.iterations}.",
        ),
    ] = RoundingConfig.iterations
    no_reconstruct: Annotated[
        bool, option("--no-reconstruct", text="Round to nearest and learn nothing.")
    ] = False
    eval_data: Annotated[
        str | None,
        option(
            metavar="SOURCE",
            text="Labelled images to measure accuracy on, as for ompq evaluate.",
        ),
    ] = None
    limit: LimitOption = None
    resume: Annotated[
        bool, option("--resume", text="Continue a run that was stopped.")
    ] = False

    @property
    def checkpoint(self) -> Path:
        """Where a stopped reconstruction continues from."""
        return self.folder / "checkpoint.safetensors"

    @property
    def training(self) -> Path:
        """Where a stopped training continues from: a folder."""
        return self.folder / "training"

    @property
    def start(self) -> Path:
        """The packed network that a training starts from."""
        return self.folder / "start.ompq.safetensors"

    @property
    def started(self) -> Path | None:
        """What is there of a run that was stopped."""
        kept = (self.training, self.start, self.checkpoint)
        found = [path for path in kept if path.exists()]
        return found[0] if found else None


@contextmanager
def run_folder(run: RunOptions, screen: Screen) -> Iterator[None]:
    """Make the folder at once; leave none behind if nothing was written to it."""
    new = not run.folder.exists()
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except KeyboardInterrupt:
        if run.started is None:
            raise
        if os.environ.get("RANK", "0") == "0":  # of many processes one says it
            say(screen.err, f"stopped; what is done is kept in {run.started}")
            say(screen.err, f"continue with: {_again()}")
        raise typer.Exit(130) from None
    finally:
        if new:
            with suppress(OSError):  # it holds something
                run.folder.rmdir()


def _again() -> str:
    """Return the command that continues this one."""
    if "RANK" in os.environ:  # this process does not know what started it
        return "the command that started all processes, and --resume"
    typed = [word for word in sys.argv[1:] if word != "--resume"]
    return shlex.join(["ompq", *typed, "--resume"])


def calibration_count(run: RunOptions, inputs: Data) -> int:
    """Return how many inputs calibrate."""
    return run.samples or min(CALIBRATION, len(inputs))


def check_unfinished(run: RunOptions) -> None:
    """Make sure that a run that was stopped is continued only where one wants it.

    Raises:
        CheckpointError: There is one, and the options do not say to continue; or they
            do, and there is none.
    """
    if run.resume and not run.started:
        raise CheckpointError(
            f"{run.folder} holds no run that was stopped; leave --resume away to begin"
        )
    if run.started and not run.resume:
        raise CheckpointError(
            f"{run.started} is there from an earlier run; "
            "add --resume to continue it, or remove it to begin anew"
        )
