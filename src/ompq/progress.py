"""Progress: what long work reports, stage by stage."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

# Called as progress(done, total, message); total is None if it is not known.
Progress: TypeAlias = Callable[[int, int | None, str], None]

# Called with a stage's name; yields the callback for the stage's progress.
Bar: TypeAlias = Callable[[str], AbstractContextManager[Progress]]


def no_progress(_done: int, _total: int | None, _message: str) -> None:
    """Ignore progress."""


@contextmanager
def silent(_name: str) -> Iterator[Progress]:
    """Open a stage without showing its progress."""
    yield no_progress


@dataclass(frozen=True)
class Stages:
    """The stages of one job and the time each took."""

    bar: Bar = silent  # opened around each stage to show its progress
    # Stage → seconds; stages of the same name add up.
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Show the progress of a stage and record its time."""
        start = perf_counter()
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
                    bar(0, None, message)

            yield progress
        if current:
            self._add(current, start)

    def _add(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start
