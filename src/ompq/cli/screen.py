"""Where a command writes: results to stdout; progress and warnings to stderr."""

import ctypes
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TextIO

from rich import progress as bars
from rich.console import Console, RenderableType
from rich.table import Column

from ompq.cli.options import OutputOptions
from ompq.costs import seconds
from ompq.samples import Progress

_LINE_SECONDS = 30.0  # how often progress is told where there is no terminal
_UNBOUNDED = 10_000  # columns of a pipe: whoever reads it cuts lines, or does not


@dataclass(frozen=True)
class Screen:
    """The two streams of a command, and the time its stages took.

    Attributes:
        out: Standard output, for results.
        err: Standard error, for everything else.
        json: Whether results are printed as JSON.
        quiet: Whether progress is left out, and results are one line.
        seconds: Stage → seconds it took.
    """

    out: Console
    err: Console
    json: bool = False
    quiet: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def show(self, *items: RenderableType) -> None:
        """Print results."""
        for item in items:
            with self.out.capture() as captured:
                self.out.print(item)
            # Tables are padded to their width, which is of no use to a reader.
            text = "\n".join(line.rstrip() for line in captured.get().split("\n"))
            self.out.file.write(text)

    def show_json(self, data: Any) -> None:
        """Print results as JSON, bare of any markup."""
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        self.out.file.write(f"{text}\n")

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Show the progress of a stage and keep its time."""
        start = perf_counter()
        with self._bar(name) as progress:
            yield progress
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    @contextmanager
    def stages(self, name: str) -> Iterator[tuple[Progress, Progress]]:
        """As :meth:`stage`, for a verb whose messages name its stages.

        Yields two: what the verb calls as its stages go by, and what may be called
        within a stage. A message that comes again tells how far its stage is.
        """
        current, start = name, perf_counter()

        with self._bar(name) as bar:

            def progress(done: int, total: int | None, message: str) -> None:
                nonlocal current, start
                if message == current:  # the stage proceeds
                    bar(done, total, message)
                    return
                now = perf_counter()
                if current != name:
                    self.seconds[current] = now - start
                current, start = message, now
                # Stages differ too much for their number to tell the time left.
                if done != total:
                    bar(0, None, message)

            def within(done: int, total: int | None, _message: str) -> None:
                bar(done, total, current)

            yield progress, within

    def _bar(self, name: str) -> Any:
        if self.quiet:
            return _silent()
        return _bar(self.err, name) if self.err.is_terminal else _lines(self.err, name)


@contextmanager
def opened(options: OutputOptions) -> Iterator[Screen]:
    """Yield the screen of a command; the library's warnings go there meanwhile."""
    with _results_alone() as results:
        # A pipe has no width to keep to, so nothing is left out or cut there.
        piped = not results.isatty() and "COLUMNS" not in os.environ
        screen = Screen(
            out=Console(
                file=results, highlight=False, width=_UNBOUNDED if piped else None
            ),
            err=Console(stderr=True, highlight=False),
            json=options.json,
            quiet=options.quiet,
        )
        with _logging(screen, debug=options.debug):
            yield screen


@contextmanager
def _results_alone() -> Iterator[TextIO]:
    """Yield stdout for the results; what others print meanwhile goes to stderr.

    A solver in C and a user's own file print when they like; results are parsed.
    """
    stdout = sys.stdout
    try:
        number = stdout.fileno()
    except OSError:  # no real file, as in tests
        with redirect_stdout(sys.stderr):
            yield stdout
        return
    stdout.flush()
    copy = os.dup(number)
    with os.fdopen(copy, "w", encoding=stdout.encoding, errors="replace") as results:
        os.dup2(sys.stderr.fileno(), number)
        try:
            yield results
        finally:
            stdout.flush()
            with suppress(OSError, TypeError, AttributeError):
                ctypes.CDLL(None).fflush(None)  # what C holds back
            results.flush()
            os.dup2(results.fileno(), number)


@contextmanager
def _logging(screen: Screen, *, debug: bool) -> Iterator[None]:
    handler = logging.Handler(logging.INFO if debug else logging.WARNING)
    handler.emit = lambda record: _log(screen.err, record)  # type: ignore[method-assign]
    logger = logging.getLogger("ompq")
    level = logger.level
    logger.addHandler(handler)
    if debug:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _log(console: Console, record: logging.LogRecord) -> None:
    warning = record.levelno >= logging.WARNING
    say(
        console,
        f"{'warning' if warning else 'info'}: {record.getMessage()}",
        "yellow" if warning else "dim",
    )


def say(console: Console, text: str, style: str = "") -> None:
    """Print one line of text, wrapped between words only on a terminal."""
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


@contextmanager
def muted() -> Iterator[None]:
    """Keep the library's warnings back."""
    logger = logging.getLogger("ompq")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _silent() -> Iterator[Progress]:
    yield lambda _done, _total, _message: None


@contextmanager
def _bar(console: Console, name: str) -> Iterator[Progress]:
    columns = (
        bars.TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        bars.BarColumn(bar_width=20),
        bars.TextColumn("{task.fields[count]}", style="dim"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[left]}", style="dim"),
    )
    with bars.Progress(
        *columns,
        console=console,
        transient=True,
        expand=True,
    ) as shown:
        task = shown.add_task(name, total=None, count="", left="")
        told = _estimating()

        def progress(done: int, total: int | None, message: str) -> None:
            count = f"{done}/{total}" if total else ""
            left = told(done, total)
            shown.update(task, completed=done, description=message, count=count)
            shown.update(task, total=total, left=left)

        yield progress


@contextmanager
def _lines(console: Console, name: str) -> Iterator[Progress]:
    """Tell progress in lines, for logs: one every half minute."""
    last = perf_counter()
    told = _estimating()

    def progress(done: int, total: int | None, message: str) -> None:
        nonlocal last
        left = told(done, total)
        now = perf_counter()
        if now - last < _LINE_SECONDS or done == total:
            return
        last = now
        parts = [message, f"{done}/{total}" if total else "", left]
        text = ", ".join(part for part in parts if part)
        say(console, f"{name}: {text}")

    yield progress


def _estimating() -> Callable[[int, int | None], str]:
    """Return a function that tells the time left from the progress so far."""
    begun, first, last = perf_counter(), -1, 0

    def left(done: int, total: int | None) -> str:
        nonlocal begun, first, last
        now = perf_counter()
        if first < 0 or not total or done < last:  # a stage begins, or is resumed
            begun, first = now, done
        last = done
        if not total or done <= first:
            return ""
        rest = (now - begun) * (total - done) / (done - first)
        return f"{seconds(rest)} left" if rest >= 1 else ""

    return left
