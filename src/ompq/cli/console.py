"""What a command prints: results on stdout, progress and warnings on stderr."""

import ctypes
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import StringIO
from typing import Any, Literal, TextIO, TypeAlias

from rich import box
from rich.console import Console as RichConsole, RenderableType
from rich.table import Table
from rich.text import Text

from ompq.progress import Progress, Stages, silent
from ompq.progress_bar import plain as plain, say as say, shown_stages

_LOGGER = logging.getLogger("ompq")
_UNBOUNDED = 10_000  # width of a pipe, so that nothing is cut
_GAP = 2  # spaces between columns: one of padding, one of the box
_MIN_NAME = 24  # columns are dropped before names are cut to fewer characters


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "right"
    rank: int = 0  # the highest is dropped first; 0 is never dropped
    shorten: bool = False  # whether cells, such as names, may be cut in the middle

    @property
    def width(self) -> int:
        """Width of the widest cell."""
        return max(len(self.title), *(len(plain(cell)) for cell in self.cells), 0)

    @property
    def least(self) -> int:
        """Width to which the column can be cut."""
        return min(self.width, _MIN_NAME) if self.shorten else self.width


def fit_table(columns: Iterable[Column], width: int) -> Table:
    """Return a table that fits the width: columns are dropped, then names are cut."""
    kept = list(columns)
    while (spare := width + _GAP - sum(c.least + _GAP for c in kept)) < 0 and any(
        c.rank for c in kept
    ):
        kept.remove(max(kept, key=lambda column: column.rank))
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
        show_edge=False,
    )
    rows = []
    for column in kept:
        table.add_column(Text(column.title), justify=column.justify, no_wrap=True)
        room = column.least + max(spare, 0) if column.shorten else column.width
        rows.append([middle_cut(plain(cell), room) for cell in column.cells])
    for row in zip(*rows, strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def middle_cut(text: str, width: int) -> str:
    """Return the text, cut in the middle if it is longer than the width.

    Example:
        >>> middle_cut("features.12.block.3.1", 12)
        'featur…k.3.1'
    """
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def facts(rows: Iterable[tuple[str, str | Sequence[str]]]) -> Table:
    """Return a table of names and texts; several texts take a line each."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")  # long paths can be copied
    for name, texts in rows:
        for place, text in enumerate([texts] if isinstance(texts, str) else texts):
            table.add_row(Text("" if place else plain(name)), Text(plain(text)))
    return table


Shown: TypeAlias = RenderableType | list[Column]


@dataclass(frozen=True)
class View:
    """A result that can be shown in three ways."""

    data: Any  # what --json prints
    line: str  # what --quiet prints
    # Text and tables, which are fitted to the terminal; if empty, the line is printed.
    body: Sequence[Shown] = ()


@dataclass(frozen=True)
class Console:
    """The two output streams of a command: results, and everything else."""

    out: RichConsole
    err: RichConsole
    json: bool = False
    quiet: bool = False
    until_done: ExitStack = field(default_factory=ExitStack)  # closed after the command

    @cached_property
    def stages(self) -> Stages:
        """The stages of the command, shown on stderr and timed."""
        if self.quiet:
            return Stages(silent)
        return shown_stages(self.err)

    def stage(self, name: str) -> AbstractContextManager[Progress]:
        """Show the progress of a stage and record its time."""
        return self.stages.stage(name)

    def show(self, *items: Shown) -> None:
        """Print results; strings are not parsed for markup, and wrap unless quiet."""
        for item in items:
            with self.out.capture() as captured:
                text: Any = Text(plain(item)) if isinstance(item, str) else item
                if isinstance(item, list):
                    text = fit_table(item, self.out.width)
                self.out.print(text, soft_wrap=self.quiet)
            # Rich pads tables with spaces up to their width.
            lines = [line.rstrip() for line in captured.get().split("\n")]
            self.out.file.write("\n".join(lines))

    def show_json(self, data: Any) -> None:
        """Print results as JSON, without any markup."""
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        # json does not escape these control characters, which some terminals obey.
        text = re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text)
        self.out.file.write(f"{text}\n")


def render(view: View, console: Console) -> None:
    """Print a result as the options ask: as JSON, as one line, or as tables."""
    if console.json:
        console.show_json(view.data)
    else:
        console.show(*((not console.quiet and view.body) or [view.line]))


@contextmanager
def opened(
    *, json: bool = False, quiet: bool = False, debug: bool = False
) -> Iterator[Console]:
    """Yield the console of a command, which also prints the library's warnings."""
    with _results_alone() as results:
        # A pipe has no width to fit, so nothing is dropped or cut there.
        piped = not results.isatty() and "COLUMNS" not in os.environ
        width = _UNBOUNDED if piped else None
        console = Console(
            out=RichConsole(file=results, highlight=False, width=width),
            err=RichConsole(stderr=True, highlight=False),
            json=json,
            quiet=quiet,
        )
        if not in_first_process():  # only the first process reports
            console = replace(console, out=RichConsole(file=StringIO()), quiet=True)
        with _logging(console, debug=debug), console.until_done:
            yield console


def starting() -> AbstractContextManager[Any]:
    """Show activity while slow modules such as PyTorch are imported."""
    return RichConsole(stderr=True).status("starting", spinner="line")


def in_first_process() -> bool:
    """Return whether this is the first of the processes that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _results_alone() -> Iterator[TextIO]:
    """Yield stdout for the results; redirect everything else printed there to stderr.

    Solvers written in C and the user's own code may print, but stdout must be parsable.
    """
    stdout = sys.stdout
    try:
        number = stdout.fileno()
    except OSError:  # not a real file, as in tests
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
                ctypes.CDLL(None).fflush(None)  # output buffered by C code
            results.flush()
            os.dup2(results.fileno(), number)


@contextmanager
def _logging(console: Console, *, debug: bool) -> Iterator[None]:
    """Print the library's warnings; with ``debug`` also its info messages."""

    def emit(record: logging.LogRecord) -> None:
        warning = record.levelno >= logging.WARNING
        kind, style = ("warning", "yellow") if warning else ("info", "dim")
        say(console.err, f"{kind}: {record.getMessage()}", style)

    handler = logging.Handler(logging.INFO if debug else logging.WARNING)
    handler.emit = emit  # type: ignore[method-assign]
    _LOGGER.addHandler(handler)
    try:
        with _level(logging.INFO if debug else _LOGGER.level):
            yield
    finally:
        _LOGGER.removeHandler(handler)


@contextmanager
def _level(level: int) -> Iterator[None]:
    before = _LOGGER.level
    _LOGGER.setLevel(level)
    try:
        yield
    finally:
        _LOGGER.setLevel(before)


def mute_warnings() -> AbstractContextManager[None]:
    """Suppress the library's warnings."""
    return _level(logging.ERROR)
