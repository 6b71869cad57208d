"""The errors that a caller may want to handle.

OmpqError
├── SampleError             samples that are empty, not finite or too few
├── TraceError              a network whose forward pass cannot be traced
├── PatternError            a pattern that matches no unit
├── ScoreError              a score that is not a finite table of units × choices
├── BudgetError             a budget that cannot be parsed
├── InfeasibleBudgetError   a budget that no allocation meets; says what is reachable
├── GoalError               a goal that no network meets or that cannot be measured
├── TargetError             a target profile that is invalid or leaves no choice
├── PlanError               a plan file that is invalid or for another network
├── DeviceMemoryError       weights that need more memory than the device has
├── HostMemoryError         a run that needs more memory than the machine has
├── ModelError              a network or weights that cannot be loaded
├── DataError               images or batches that cannot be read
├── QuantizationError       a network that cannot be quantized as planned
├── TrainingError           training that cannot continue, e.g. after a NaN loss
├── CheckpointError         a checkpoint that cannot be resumed
├── ProcessError            work that failed in another process
├── FileError               a file that cannot be written, e.g. on a full disk
├── PackedFileError         a packed file that is invalid or for another network
├── ExportError             a file that would not compute what the network does
└── MissingExtraError       an optional dependency that is not installed

Wrong arguments raise ``ValueError`` or ``TypeError``, as usual in Python.
"""

import difflib
from collections.abc import Iterable, Sequence


class OmpqError(Exception):
    """Base class of all errors that ompq raises on purpose."""


class SampleError(OmpqError):
    """The samples cannot be used."""


class TraceError(OmpqError):
    """The network's forward pass cannot be traced."""


class PatternError(OmpqError):
    """A pattern matches no unit."""


class ScoreError(OmpqError):
    """A score is not a finite table of units × choices."""


class BudgetError(OmpqError):
    """A budget cannot be parsed."""


class InfeasibleBudgetError(OmpqError):
    """No allocation meets the budget.

    Attributes:
        cost: The cost that cannot be met, for example ``"bytes"``.
        limit: The limit that the budget sets.
        smallest: Cost of the cheapest allocation.
        largest: Cost of the most expensive allocation.
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
    """No network meets a goal, or the goal cannot be measured."""


class TargetError(OmpqError):
    """A target profile is invalid or leaves a unit without a choice."""


class PlanError(OmpqError):
    """A plan cannot be read or belongs to another network."""


class HostMemoryError(OmpqError):
    """A run needs more memory than it may use, or than the machine has."""


class ModelError(OmpqError):
    """A network or its weights cannot be loaded."""


class DataError(OmpqError):
    """Images or batches cannot be read."""


class QuantizationError(OmpqError):
    """A network cannot be quantized as planned."""


class TrainingError(OmpqError):
    """Training cannot continue."""


class CheckpointError(OmpqError):
    """A checkpoint cannot be resumed."""


class ProcessError(OmpqError):
    """Work failed in another process."""


class ExtensionError(OmpqError):
    """An extension offers something that cannot be imported."""


class FileError(OmpqError):
    """A file cannot be written."""


class PackedFileError(OmpqError):
    """A packed file cannot be read or belongs to another network."""


class ExportError(OmpqError):
    """An exported file would not compute what the network computes."""


class DeviceMemoryError(OmpqError):
    """Weights that are needed at once exceed the device's memory."""


class MissingExtraError(OmpqError):
    """An optional dependency is not installed: ``pip install 'ompq[extra]'``.

    ``install`` says what pip should install instead of the extra.
    """

    def __init__(self, package: str, extra: str, install: str = "") -> None:
        what = install or f"'ompq[{extra}]'"
        super().__init__(f"{package} is not installed. Run: pip install {what}")
        self.extra = extra


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """Return names joined by commas, cut at ``limit`` with a count of the rest."""
    listed = ", ".join(names[:limit])
    rest = len(names) - limit
    return f"{listed} and {rest} more" if rest > 0 else listed


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with up to three similar names, or "".

    Case is ignored, and so is the library in ``library:network``.
    """
    full = {one.rpartition(":")[2].lower(): one for one in known}
    close = difflib.get_close_matches(name.rpartition(":")[2].lower(), full, n=3)
    return f" (did you mean {', '.join(full[one] for one in close)}?)" if close else ""


def check_counts(**counts: int) -> None:
    """Raise a ValueError that names the first count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")


def check_type(name: str, value: object, kind: type) -> None:
    """Raise a TypeError unless a value is of this type."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} is of type {type(value).__name__}; it must be a {kind.__name__}"
        )


def check_known(name: str, value: object, known: Iterable[str], more: str = "") -> None:
    """Raise a ValueError unless a value is one of the known names.

    ``more`` is listed in the message after the names, if it is given.

    Example:
        >>> check_known("loss", "square", ("squared", "fisher"))
        Traceback (most recent call last):
        ValueError: loss='square' is unknown (did you mean squared?); use squared or \
fisher
    """
    names = list(known)
    if value not in names:
        *others, last = (*names, more) if more else names
        similar = suggestion(str(value), names)
        usable = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name}={value!r} is unknown{similar}; use {usable}")
