"""Numbers and tables for people: short, aligned, and no wider than the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

_GAP = 2  # blanks between columns: one of padding, one of the box
_NAME_LEAST = 24  # columns go before names are cut shorter than this


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: Its heading.
        cells: Its text, row by row.
        justify: ``left`` or ``right``.
        rank: 0 is never left out; of the others the highest goes first.
        shorten: Whether its cells may be cut in the middle: names.
    """

    title: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "right"
    rank: int = 0
    shorten: bool = False

    @property
    def width(self) -> int:
        """Width of its widest cell."""
        return max(len(self.title), *(len(cell) for cell in self.cells), 0)


def fitted(columns: Sequence[Column], width: int) -> Table:
    """Return a table that fits the width: columns are left out, then names are cut."""
    kept = list(columns)
    while _least_width(kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    spare = width - _least_width(kept)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
        show_edge=False,
    )
    for column in kept:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    rows = []
    for column in kept:
        room = _least(column) + max(spare, 0) if column.shorten else column.width
        rows.append([middle_cut(cell, room) for cell in column.cells])
    for row in zip(*rows, strict=True):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _least_width(columns: Sequence[Column]) -> int:
    return sum(_least(column) + _GAP for column in columns) - _GAP


def _least(column: Column) -> int:
    return min(column.width, _NAME_LEAST) if column.shorten else column.width


def middle_cut(text: str, width: int) -> str:
    """Return the text, cut in the middle where it is longer than the width.

    Example:
        >>> middle_cut("features.12.block.3.1", 12)
        'featur…k.3.1'
    """
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    """Return a table of names and what there is to say about them."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(name, Text(text))
    return table
