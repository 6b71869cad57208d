"""The exception tree: what a caller may want to handle.

OmpqError
├── SampleError             samples that cannot be used: empty, not finite, too few
├── TraceError              a network that cannot be observed
├── PatternError            a pattern that matches no unit
├── ScoreError              a score that is not a finite table of units × choices
├── BudgetError             a budget that cannot be read
├── InfeasibleBudgetError   a budget no allocation meets; says what is reachable
├── GoalError               a goal that no network keeps to, or that is not measured
├── TargetError             a target profile that is broken, or leaves no choice
├── PlanError               a plan file that is broken or of another network
├── DeviceMemoryError       weights that take more than a device may hold
├── ModelError              a network or weights that cannot be loaded
├── DataError               images or batches that cannot be read
├── QuantizationError       a network that cannot be quantized as planned
├── TrainingError           a training that cannot go on: its loss is not finite
├── CheckpointError         a checkpoint that cannot be resumed
├── ProcessError            work that failed in another process
├── FileError               a file that cannot be written: the disk is full, say
├── PackedFileError         a packed file that is broken or of another network
├── ExportError             a file that would not compute what the network does
└── MissingExtraError       an optional dependency that is not installed

Wrong arguments raise ``ValueError`` or ``TypeError``, as usual in Python.
"""

import difflib
from collections.abc import Iterable, Sequence


class OmpqError(Exception):
    """Base of every error a caller may want to handle."""


class SampleError(OmpqError):
    """The samples cannot be used."""


class TraceError(OmpqError):
    """The network cannot be observed."""


class PatternError(OmpqError):
    """A pattern matches no unit."""


class ScoreError(OmpqError):
    """A score is not a finite table of units × choices."""


class BudgetError(OmpqError):
    """A budget cannot be read."""


class InfeasibleBudgetError(OmpqError):
    """No allocation meets the budget.

    Attributes:
        cost: The cost that cannot be met, for example ``"bytes"``.
        limit: What the budget allows.
        smallest: The least that any allocation costs.
        largest: The most that any allocation costs.
        units: Names of the units that stand in the way, most expensive first.
    """

    def __init__(
        self,
        message: str,
        *,
        cost: str,
        limit: float,
        smallest: float,
        largest: float,
        units: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.cost = cost
        self.limit = limit
        self.smallest = smallest
        self.largest = largest
        self.units = tuple(units)


class GoalError(OmpqError):
    """No network keeps to a goal, or it cannot be measured."""


class TargetError(OmpqError):
    """A target profile is broken, or leaves a unit no choice."""


class PlanError(OmpqError):
    """A plan cannot be read or belongs to another network."""


class ModelError(OmpqError):
    """A network or its weights cannot be loaded."""


class DataError(OmpqError):
    """Images or batches cannot be read."""


class QuantizationError(OmpqError):
    """A network cannot be quantized as planned."""


class TrainingError(OmpqError):
    """A training cannot go on."""


class CheckpointError(OmpqError):
    """A checkpoint cannot be resumed."""


class ProcessError(OmpqError):
    """A share of the work failed in another process."""


class FileError(OmpqError):
    """A file cannot be written."""


class PackedFileError(OmpqError):
    """A packed file cannot be read or belongs to another network."""


class ExportError(OmpqError):
    """An exported file would not compute what the network computes."""


class DeviceMemoryError(OmpqError):
    """Weights that are needed at once take more than a device may hold."""


class MissingExtraError(OmpqError):
    """An optional dependency is not installed: ``pip install 'ompq[extra]'``."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed. Run: pip install 'ompq[{extra}]'"
        )
        self.extra = extra


def shortened(names: Sequence[str], limit: int = 5) -> str:
    """Return names joined by commas, cut at ``limit`` with a count of the rest."""
    listed = ", ".join(names[:limit])
    rest = len(names) - limit
    return f"{listed} and {rest} more" if rest > 0 else listed


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with up to three similar names, or nothing.

    What stands before a colon, the library of ``library:network``, is not compared, and
    neither is case.
    """
    full = {one.rpartition(":")[2].lower(): one for one in known}
    close = difflib.get_close_matches(name.rpartition(":")[2].lower(), full, n=3)
    return f" (did you mean {', '.join(full[one] for one in close)}?)" if close else ""


def check_counts(**counts: int) -> None:
    """Raise a ValueError that names the first count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")


def check_known(name: str, value: object, known: Iterable[str], more: str = "") -> None:
    """Raise a ValueError unless the value is one of the names; ``more`` is used too.

    Example:
        >>> check_known("loss", "square", ("squared", "fisher"))
        Traceback (most recent call last):
        ValueError: loss='square' is unknown (did you mean squared?); use squared or \
fisher
    """
    names = list(known)
    if value not in names:
        *others, last = (*names, more) if more else names
        meant = suggestion(str(value), names)
        used = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name}={value!r} is unknown{meant}; use {used}")
