"""What a command prints: results on stdout, progress and warnings on stderr.

The second half shows plans and evaluations as text and tables.
"""

import ctypes
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from io import StringIO
from math import ceil, floor, log10
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TextIO, TypeAlias

from rich import box, progress as bars
from rich.console import Console as RichConsole, RenderableType
from rich.table import Column as RichColumn, Table
from rich.text import Text

from ompq.amounts import counted, digits, in_bytes, seconds as duration
from ompq.cost_tables import PURPOSES, readable
from ompq.errors import shortened
from ompq.evaluation import Evaluation
from ompq.network.units import Skipped
from ompq.plans import Plan, refinement_summary, unit_rows
from ompq.progress import Progress, Stages, silent

_LINE_SECONDS = 10.0  # time between lines of progress if there is no terminal
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


def fitted(columns: Iterable[Column], width: int) -> Table:
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
        shown = _bar if self.err.is_terminal else _lines
        return Stages(partial(shown, self.err))

    def stage(self, name: str) -> AbstractContextManager[Progress]:
        """Show the progress of a stage and record its time."""
        return self.stages.stage(name)

    def show(self, *items: Shown) -> None:
        """Print results; strings are not parsed for markup, and wrap unless quiet."""
        for item in items:
            with self.out.capture() as captured:
                text: Any = Text(plain(item)) if isinstance(item, str) else item
                if isinstance(item, list):
                    text = fitted(item, self.out.width)
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


def plain(text: str) -> str:
    r"""Return text with its control characters escaped, except newlines.

    Names of layers and files may hold escape sequences that a terminal would obey.

    Example:
        >>> plain("conv\x1b[31m1")
        'conv\\x1b[31m1'
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text
    )


def say(console: RichConsole, text: str, style: str = "") -> None:
    """Print one line of text, wrapped only on a terminal."""
    console.print(Text(plain(text), style), soft_wrap=not console.is_terminal)


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


def muted() -> AbstractContextManager[None]:
    """Suppress the library's warnings."""
    return _level(logging.ERROR)


@contextmanager
def _bar(console: RichConsole, name: str) -> Iterator[Progress]:
    columns = (
        bars.TextColumn(
            "{task.description}",
            markup=False,
            table_column=RichColumn(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        bars.BarColumn(bar_width=20),
        bars.TextColumn("{task.fields[count]}", style="dim"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[left]}", style="dim"),
    )
    with bars.Progress(
        *columns, console=console, transient=True, expand=True
    ) as display:
        task = display.add_task(name, total=None, count="", left="")
        estimate = _estimator()

        def progress(done: int, total: int | None, message: str) -> None:
            left = estimate(done, total)
            count = f"{done}/{total}" if total else ""
            display.update(task, description=plain(message), count=count, left=left)
            display.update(task, completed=done, total=total)

        yield progress


@contextmanager
def _lines(console: RichConsole, name: str) -> Iterator[Progress]:
    """Report progress as lines for a log, at most one every ten seconds."""
    last = perf_counter()
    estimate = _estimator()

    def progress(done: int, total: int | None, message: str) -> None:
        nonlocal last
        left = estimate(done, total)
        now = perf_counter()
        if now - last < _LINE_SECONDS or done == total:
            return
        last = now
        parts = [message, f"{done}/{total}" if total else "", left]
        say(console, f"{name}: {', '.join(part for part in parts if part)}")

    yield progress


def _estimator() -> Callable[[int, int | None], str]:
    """Return a function that predicts the time left from the progress so far."""
    start, first, last = perf_counter(), -1, 0

    def left(done: int, total: int | None) -> str:
        nonlocal start, first, last
        now = perf_counter()
        if first < 0 or not total or done < last:  # a stage starts or resumes
            start, first = now, done
        last = done
        if not total or done <= first:
            return ""
        rest = (now - start) * (total - done) / (done - first)
        return f"{duration(rest)} left" if rest >= 1 else ""

    return left


def size_budgets(sizes: Sequence[float]) -> list[str]:
    """Return sizes as budgets, all in the unit that suits the largest."""
    unit, factor = ("MiB", 2**20) if max(sizes) >= 2**20 else ("KiB", 2**10)
    return [as_budget(size / factor, unit) for size in sizes]


def operation_budgets(numbers: Sequence[float]) -> list[str]:
    """Return bit operations as budgets, all in the unit that suits the largest."""
    unit, factor = ("GBOPs", 1e9) if max(numbers) >= 1e9 else ("MBOPs", 1e6)
    return [as_budget(number / factor, unit) for number in numbers]


def cost_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return size, percentage of float, average bits and BOPs, each a valid budget."""
    shares = [as_budget(row["percent"], "%") for row in rows]
    averages = [as_budget(row["average_bits"], "bits") for row in rows]
    operations = [row["bit_ops"] for row in rows]
    return [
        Column("size", size_budgets([row["bytes"] for row in rows])),
        Column("of float", shares, rank=2),
        Column("average", averages),
        Column("BOPs", operation_budgets(operations), rank=1),
    ]


def as_budget(value: float, unit: str) -> str:
    """Return a budget of four digits, rounded up so that ``value`` meets it."""
    if value <= 0:
        return f"0{unit}"
    digits = max(0, 3 - floor(log10(value)))
    scaled = value * 10**digits
    return f"{ceil(scaled - 1e-9) / 10**digits:.{digits}f}{unit}"


def time_line(seconds: Mapping[str, float]) -> str:
    """Return the total time and the time of each stage."""
    stages = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    return f"{duration(sum(seconds.values()))} ({stages})"


def top1_text(result: Evaluation) -> str:
    """Return top-1 with its interval, as in ``71.39 % (69.58 to 73.13)``."""
    if result.top1 is None or result.interval is None:
        return "-"
    low, high = (100 * limit for limit in result.interval)
    return f"{100 * result.top1:.2f} % ({low:.2f} to {high:.2f})"


def quality_rows(result: Evaluation | None) -> list[tuple[str, str]]:
    """Return the accuracy of a network, next to the float one's if it was measured."""
    if result is None:
        return []
    images = f"{result.count:,} images"
    rows = []
    if result.top1 is not None:
        rows.append(("top-1", f"{top1_text(result)} of {images} (95 % interval)"))
    if result.top5 is not None:
        rows.append(("top-5", f"{100 * result.top5:.2f} %"))
    if result.top1 is not None and result.drop is not None:
        rows.append(("float", f"top-1 {100 * (result.top1 + result.drop):.2f} %"))
        low, high = (100 * limit for limit in result.drop_interval)
        text = f"{100 * result.drop:.2f} points ({low:.2f} to {high:.2f}, paired, 95 %)"
        rows.append(("drop", text))
    for name, value in result.metrics.items():
        reference = result.reference_metrics.get(name)
        compared = "" if reference is None else f", float {digits(reference, 5)}"
        rows.append((name, f"{digits(value, 5)}{compared}, on {images}"))
    if result.agreement is not None and result.divergence is not None:
        text = f"{100 * result.agreement:.2f} % of the answers, divergence"
        rows.append(("as float", f"{text} {digits(result.divergence)}, on {images}"))
    if result.top1 is None and not result.metrics:
        rows.append(("accuracy", "not measured: give class labels, or --metric"))
    return rows


def quality_text(result: Evaluation) -> str:
    """Return the most important measure of a network's quality, for one line."""
    return "; ".join(" ".join(row) for row in quality_rows(result)[:1])


def warning(about: Mapping[str, Any], what: str) -> list[Shown]:
    """Return a warning if random weights or random data were used."""
    options = ["--weights none"] if about.get("weights") == "none (random)" else []
    options += ["--data random"] if about.get("data") == "random" else []
    text = f"{' and '.join(options)}: {what} mean nothing; only sizes are real"
    return [Text(text, style="bold yellow")] if options else []


def plan_view(
    plan: Plan,
    about: Mapping[str, Any],
    seconds: Mapping[str, float],
    file: Path | None = None,
) -> View:
    """Return a plan as ``ompq plan`` and ``ompq replan`` show it."""
    identity = plan.hash if file is None else f"{plan.hash}, saved to {file}"
    data = {
        **about,
        "plan": None if file is None else str(file),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        **plan.to_dict(),
    }
    rows = [
        *totals(plan),
        ("plan", identity),
        *(("stays float", text) for text in reasons(plan.graph.skipped)),
        ("time", time_line(seconds)),
    ]
    line = f"{'; '.join(used(plan))}, {identity}"
    end = warning(about, "these bits")
    return View(data, line, [plan_columns(plan), "", facts(rows), *end])


def plan_columns(plan: Plan) -> list[Column]:
    """Return the table of units and their bits."""
    units, gamma = plan.graph.units, plan.scores.gamma
    several = len({choice.activation for choice in plan.allocation.values()}) > 1
    bits = [plan.allocation[unit.name] for unit in units]
    rows = unit_rows(plan)
    columns = [
        Column("layer", [unit.name for unit in units], "left", shorten=True),
        Column("kind", [unit.kind for unit in units], "left", rank=4),
        Column("shape", ["×".join(map(str, u.weight_shape)) for u in units], rank=6),
        Column("params", [counted(unit.weights) for unit in units], rank=2),
        Column("MACs", [counted(unit.macs) for unit in units], rank=3),
        Column("damage", [f"{row['damage']:.2e}" for row in rows], rank=1),
        Column("bits", [str(b) if several else b.weight_text for b in bits]),
        Column("bytes", [in_bytes(row["bytes"]) for row in rows]),
        Column("", ["▬" * round(b.bits) for b in bits], "left", rank=8),
        Column("", [_remark(plan, row) for row in rows], "left", rank=7),
    ]
    if gamma is not None:
        cells = [f"{value:.2f}" for value in gamma]
        columns.insert(5, Column("gamma", cells, rank=5))
    return columns


def _remark(plan: Plan, row: Mapping[str, Any]) -> str:
    if row["pinned"]:
        return "pinned"
    if len(plan.graph.groups[row["group"]]) > 1:
        return f"tied to {row['group']}" if row["group"] != row["name"] else "tied"
    return ""


def totals(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan's totals as names and texts."""
    sums, reference = plan.totals, plan.problem.costs["bytes"].reference
    ratio = reference / sums["bytes"]
    compared = f"{ratio:.1f} times smaller" if ratio > 1 else "no smaller"
    items = [
        f"{name.replace('_', ' ')} {in_bytes(value)}"
        for name, value in plan.bytes_by_item.items()
        if value
    ]
    if plan.accounting == "paper":
        items = ["counted as in the paper, without scales"]
    widths = sorted({choice.activation for choice in plan.allocation.values()})
    gap = f", at most {plan.gap:.2g} above the least possible" if plan.gap else ""
    rows = [
        ("budget", "; ".join(used(plan))),
        (
            "size",
            f"{in_bytes(sums['bytes'])}, {compared} than float ({in_bytes(reference)})",
        ),
        ("", ", ".join(items)),
        (
            "bits",
            f"{sums['average_bits']:.3f} per weight on average, "
            f"{sums['bits_per_parameter']:.2f} per parameter of the whole network, "
            f"activations {', '.join(map(str, widths))}",
        ),
        ("BOPs", counted(sums["bit_ops"])),
        ("damage", f"{plan.damage:.4g} by {plan.score_name}{gap}"),
    ]
    if plan.measured:
        rows.append(("refined", refinement_summary(plan)))
    if "activation_bytes" in sums:
        peak, total = in_bytes(sums["activation_bytes"]), sums["total_bytes"]
        text = f"{peak} of activations at once, {in_bytes(total)} with the weights"
        rows.append(("memory", text))
    if plan.files:
        words = {"onnx_bytes": "ONNX", "graph_bytes": "packed with its graph"}
        sizes = [f"{words[one.name]} {in_bytes(sums[one.name])}" for one in plan.files]
        rows.append(("files", ", ".join(sizes)))
    if "milliseconds" in sums:
        rows.append(("latency", f"{sums['milliseconds']:.3g} ms"))
    if plan.target is not None:
        rows.append(("target", plan.target.name))
        rows += [("no faster", text) for text in reasons(plan.no_speed_up)]
    return rows


def used(plan: Plan) -> list[str]:
    """Return how much of each limit is used, in the budget's own unit."""
    sums, costs, budget = plan.totals, plan.problem.costs, plan.budget
    size = sums["bytes"]
    texts = []
    for limit, amount, unit in (
        (budget.size_mb, size / 1e6, "MB"),
        (budget.percent, 100 * size / costs["bytes"].reference, "% of float"),
        (budget.average_bits, sums["average_bits"], "bits"),
        (budget.latency_ms, sums.get("milliseconds", 0.0), "ms"),
    ):
        if limit is not None:
            texts.append(f"{amount:.5g} of {limit:g} {unit} ({amount / limit:.1%})")
    for limit, name in (
        (budget.size_mib, "bytes"),
        (budget.bit_ops, "bit_ops"),
        (budget.activations_mib, "activation_bytes"),
        (budget.total_mib, "total_bytes"),
        (budget.onnx_mib, "onnx_bytes"),
        (budget.graph_mib, "graph_bytes"),
    ):
        if limit is not None:
            limit *= 1 if name == "bit_ops" else 2**20
            amount_text, limit_text = readable(costs[name], sums[name], limit)
            purpose, fraction = PURPOSES.get(name, ""), sums[name] / limit
            texts.append(f"{amount_text} of {limit_text}{purpose} ({fraction:.1%})")
    return texts


def reasons(skipped: Sequence[Skipped]) -> list[str]:
    """Return what was skipped and why, one line per reason."""
    floats: dict[str, list[tuple[str, int]]] = {}
    others: dict[str, list[str]] = {}
    for entry in skipped:
        if entry.kind:
            name = entry.name.strip("()")  # of "(network)"
            floats.setdefault(entry.kind, []).append((name, entry.parameters))
        else:
            others.setdefault(entry.reason, []).append(entry.name)
    lines = []
    for kind, entries in floats.items():
        names, numbers = zip(*entries, strict=True)
        verb, plural = "stay" if len(names) > 1 else "stays", "s" * (sum(numbers) > 1)
        what = f"{sum(numbers):,} parameter{plural} ({shortened(names, 2)})"
        lines.append(f"{len(names)} {kind} {verb} float: {what}")
    return lines + [f"{shortened(names, 3)}: {why}" for why, names in others.items()]
