"""The progress bar: a line that moves in terminals and notebooks, lines in logs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from time import perf_counter
from typing import Any, TypeVar, cast

from rich import progress as bars
from rich.console import Console
from rich.table import Column
from rich.text import Text

from ompq.amounts import seconds as duration
from ompq.progress import Progress, Stages, TimeLeft

_Verb = TypeVar("_Verb", bound=Callable[..., Any])
_LINE_SECONDS = 10.0  # time between lines of progress if there is no terminal
_PARTS = 1000  # of a bar


def shown_stages(console: Console | None = None) -> Stages:
    """Return stages whose progress is shown on a console, stderr by default.

    A terminal or a notebook gets a bar for all stages together, anything else a line
    every ten seconds.
    """
    console = console or Console(stderr=True, highlight=False)
    left = TimeLeft()
    live = console.is_terminal or console.is_jupyter
    return Stages(partial(_bar if live else _lines, console, left), left=left)


def shows_progress(name: str, *, by_message: bool = False) -> Callable[[_Verb], _Verb]:
    """Decorate a verb so that ``progress=True`` shows a bar while it runs.

    Args:
        name: What the verb does, for example ``reconstructing``.
        by_message: Whether the verb's messages name stages of their own.
    """

    def decorate(verb: _Verb) -> _Verb:
        @wraps(verb)
        def shown(*args: Any, **named: Any) -> Any:
            progress = named.get("progress")
            if not (
                progress is None or isinstance(progress, bool) or callable(progress)
            ):
                raise TypeError(
                    f"progress={progress!r} is neither True nor a function; a function "
                    "is called as progress(done, total, message)"
                )
            if progress is not True:
                return verb(*args, **named)
            stages = shown_stages()
            stage = stages.named_by_messages if by_message else stages.stage
            with stage(name) as report:
                return verb(*args, **{**named, "progress": report})

        return cast(_Verb, shown)

    return decorate


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


def say(console: Console, text: str, style: str = "") -> None:
    """Print one line of text, wrapped only on a terminal."""
    console.print(Text(plain(text), style), soft_wrap=not console.is_terminal)


@contextmanager
def _bar(console: Console, left: TimeLeft, name: str) -> Iterator[Progress]:
    columns = (
        bars.TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        bars.TextColumn("{task.fields[count]}", style="dim"),
        bars.BarColumn(bar_width=20),
        bars.TextColumn("{task.fields[elapsed]}", style="progress.elapsed"),
        bars.TextColumn("{task.fields[left]}", style="dim"),
    )
    with bars.Progress(
        *columns, console=console, transient=True, expand=True
    ) as display:
        task = display.add_task(name, total=None, count="", elapsed="", left="")

        def progress(done: int, total: int | None, message: str) -> None:
            rest, elapsed = left.predict(done, total), left.elapsed
            share = None if rest is None else elapsed / max(elapsed + rest, 1e-9)
            display.update(
                task,
                description=plain(message),
                count=f"{done}/{total}" if total else "",
                elapsed=f"{int(elapsed) // 60}:{int(elapsed) % 60:02d}",
                left=_rest(rest),
                total=None if share is None else _PARTS,
                completed=0 if share is None else int(_PARTS * share),
            )

        progress(0, None, name)
        yield progress


@contextmanager
def _lines(console: Console, left: TimeLeft, name: str) -> Iterator[Progress]:
    """Report progress as lines for a log, at most one every ten seconds."""
    last = perf_counter()

    def progress(done: int, total: int | None, message: str) -> None:
        nonlocal last
        rest, now = _rest(left.predict(done, total)), perf_counter()
        if now - last < _LINE_SECONDS or done == total:
            return
        last = now
        parts = [message, f"{done}/{total}" if total else "", rest]
        text = ", ".join(part for part in parts if part)
        say(console, text if text.startswith(name) else f"{name}: {text}")

    yield progress


def _rest(seconds: float | None) -> str:
    """Return the time left, in words."""
    known = seconds is not None and seconds >= 1
    return f"{duration(seconds)} left" if known and seconds is not None else ""
