"""Progress: what long work reports, stage by stage, and how much longer it takes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

# Called as progress(done, total, message); total is None if it is not known.
Progress: TypeAlias = Callable[[int, int | None, str], None]
# What verbs take: a callback, True for a bar, or None for nothing.
ProgressLike: TypeAlias = Progress | bool | None

# Called with a stage's name; yields the callback for the stage's progress.
Bar: TypeAlias = Callable[[str], AbstractContextManager[Progress]]

_KNOWN = 0.05  # part of a forecast that must be over before it is corrected
_WRONG = 3.0  # a forecast is corrected by this factor at most


def no_progress(_done: int, _total: int | None, _message: str) -> None:
    """Ignore progress."""


def callback(progress: ProgressLike) -> Progress:
    """Return what to call; ``True`` was replaced by what shows a bar."""
    return progress if callable(progress) else no_progress


@contextmanager
def silent(_name: str) -> Iterator[Progress]:
    """Open a stage without showing its progress."""
    yield no_progress


class TimeLeft:
    """Predicts how much longer a run takes.

    Within a stage it goes by what is done. Later stages are expected to take what was
    forecast for them, times how far the forecast was off so far.
    """

    def __init__(self) -> None:
        self._forecast: dict[str, float] = {}  # of stages that are not over, in seconds
        self._foreseen, self._taken = 0.0, 0.0  # by stages that are over
        self._start = self._begun = perf_counter()
        self._sweep, self._first, self._last = self._begun, -1, 0
        self._stage = ""

    def expect(self, forecast: Mapping[str, float]) -> None:
        """Take the forecast of the stages to come: name → seconds."""
        self._forecast = dict(forecast)
        self._foreseen = self._taken = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return perf_counter() - self._start

    def begin(self, stage: str) -> None:
        """Note that a stage begins, and that the one before it is over."""
        if (foreseen := self._forecast.pop(self._stage, None)) is not None:
            self._foreseen += foreseen
            self._taken += perf_counter() - self._begun
        self._stage, self._begun, self._first = stage, perf_counter(), -1

    def predict(self, done: int, total: int | None) -> float | None:
        """Return the seconds left, None if they are not known."""
        now = perf_counter()
        # A stage may go through its work several times, and begin in the middle.
        if self._first < 0 or not total or done < self._last:
            self._sweep, self._first = now, done
        self._last = done
        known = total and done > self._first
        rest = 0.0
        if known and total:
            rest = (now - self._sweep) * (total - done) / (done - self._first)
        if not self._forecast:
            return rest if known else None
        later = dict(self._forecast)
        pace = self._pace(sum(later.values()))
        own = pace * later.pop(self._stage, 0.0) - (now - self._begun)
        return max(rest, own) + pace * sum(later.values())

    def _pace(self, to_come: float) -> float:
        """Return by which factor the forecast was too short so far."""
        if self._foreseen < _KNOWN * (self._foreseen + to_come):
            return 1.0
        return min(max(self._taken / self._foreseen, 1 / _WRONG), _WRONG)


@dataclass(frozen=True)
class Stages:
    """The stages of one job and the time each took."""

    bar: Bar = silent  # opened around each stage to show its progress
    # Stage → seconds; stages of the same name add up.
    seconds: dict[str, float] = field(default_factory=dict)
    left: TimeLeft = field(default_factory=TimeLeft)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Show the progress of a stage and record its time."""
        start = perf_counter()
        self.left.begin(name)
        with self.bar(name) as progress:
            yield progress
        self._add(name, start)

    @contextmanager
    def named_by_messages(self, name: str) -> Iterator[Progress]:
        """Like :meth:`stage`, for a function whose progress messages name its stages.

        Calls that repeat a message report progress within that stage.
        """
        current, start = "", perf_counter()
        with self.bar(name) as bar:

            def progress(done: int, total: int | None, message: str) -> None:
                nonlocal current, start
                if message == current:
                    bar(done, total, message)
                    return
                if current:
                    self._add(current, start)
                current, start = message, perf_counter()
                # Stages differ too much in length for their count to predict the rest.
                if done == total:
                    current = ""
                else:
                    self.left.begin(message)
                    bar(0, None, message)

            yield progress
        if current:
            self._add(current, start)

    def _add(self, name: str, start: float) -> None:
        self.left.begin("")
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start
