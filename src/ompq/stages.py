"""Stages of a job: their progress, their times, and the files it leaves."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

# Called as progress(done, total, message); total is None where it is not known.
Progress: TypeAlias = Callable[[int, int | None, str], None]

PLAN, PACKED, ONNX = "plan.json", "network.ompq.safetensors", "network.onnx"
REPORT, RESULT, CONFIG = "report.html", "result.json", "config.toml"

# Called with a stage's name; gives what the stage reports its progress to.
Bar: TypeAlias = Callable[[str], AbstractContextManager[Progress]]


def no_progress(_done: int, _total: int | None, _message: str) -> None:
    """Ignore the progress."""


@contextmanager
def silent(_name: str) -> Iterator[Progress]:
    """Show no progress."""
    yield no_progress


@dataclass(frozen=True)
class Stages:
    """What the stages of one job share."""

    bar: Bar = silent  # opened around each stage to show its progress
    # Stage → seconds it took; stages of the same name add up.
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Show the progress of a stage and keep its time."""
        start = perf_counter()
        with self.bar(name) as progress:
            yield progress
        self._add(name, start)

    @contextmanager
    def named_by_messages(self, name: str) -> Iterator[Progress]:
        """Like :meth:`stage`, for a function whose messages are its stages.

        A message that is repeated reports how far its stage is.
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
                # Stages differ too much for their number to predict the time left.
                if done == total:
                    current = ""
                else:
                    bar(0, None, message)

            yield progress
        if current:
            self._add(current, start)

    def _add(self, name: str, start: float) -> None:
        taken = perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + taken
