"""Figures for papers and slides, drawn with matplotlib."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ompq.bit_widths import FLOAT_BITS
from ompq.errors import MissingExtraError
from ompq.files import replacing
from ompq.plans import Plan, check_plan
from ompq.report.heat_maps import draw_heat
from ompq.report_sections import Accuracy, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLOURS = {
    "conv": "#2f6db3",
    "pointwise": "#1f9388",
    "depthwise": "#d9861a",
    "grouped": "#8159b8",
    "transposed": "#bd4f78",
    "linear": "#5b6774",
    "embedding": "#6b8e23",
    "recurrent": "#8b6b3d",
}
_NAMED = 40  # with more layers, their names are smaller
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "ompq",  # the same plan gives the same file
    "text.parse_math": False,  # names may contain "$"
}


def write_figures(
    folder: str | Path, plan: Plan, results: Sequence[Section] = ()
) -> list[Path]:
    """Write figures of a plan for a paper or a talk, each as PNG and as SVG.

    They are ``orm`` if ORM was measured, ``bits``, and ``accuracy`` if the results hold
    accuracies of at least two sizes. There, "mixed, 1.5 MiB" and "mixed, 1.3 MiB" are
    joined to one line called "mixed".

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_plan(plan)
    drawings: dict[str, Callable[[Figure], None]] = {}
    if plan.scores.orm is not None:
        matrix, labels = plan.scores.orm, plan.scores.orm_labels
        drawings["orm"] = lambda figure: draw_heat(figure, [matrix], labels)
    drawings["bits"] = lambda figure: _draw_bits(figure, plan)
    sized = [r for r in results if isinstance(r, Accuracy) and r.size_bytes]
    if len({result.size_bytes for result in sized}) > 1:
        drawings["accuracy"] = lambda figure: _draw_accuracy(figure, sized)
    written = []
    for name, draw in drawings.items():
        with styled_figure() as figure:
            draw(figure)
            written += save_figure(figure, Path(folder) / name)
    return written


@contextmanager
def styled_figure() -> Iterator["Figure"]:
    """Yield an empty figure; our style applies within the block.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "figures") from error
    with mpl.rc_context(_STYLE):
        yield Figure(layout="constrained", dpi=200)


# Metadata that leaves the date out, so that the same figure gives the same file.
_UNDATED = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def save_figure(
    figure: "Figure", path: Path, endings: Sequence[str] = (".png", ".svg")
) -> list[Path]:
    """Write a figure in several formats and return the files."""
    written = []
    for ending in endings:
        target = path.with_name(path.name + ending)
        with replacing(target) as temporary:
            figure.savefig(temporary, format=ending[1:], metadata=_UNDATED[ending])
        written.append(target)
    return written


def _draw_bits(figure: "Figure", plan: Plan) -> None:
    units = plan.graph.units
    widest = max(c.bits for c in plan.choices if c.weight < FLOAT_BITS)
    bits = [min(plan.allocation[unit.name].bits, widest) for unit in units]
    draw_bars(figure, plan.graph.names, bits, [unit.kind for unit in units])


def draw_bars(
    figure: "Figure", names: Sequence[str], bits: Sequence[float], kinds: Sequence[str]
) -> None:
    """Draw the bits of layers in order of execution, coloured by kind."""
    figure.set_size_inches(max(5.0, min(16.0, 0.14 * len(names) + 1.5)), 3.4)
    axes = figure.add_subplot()
    for kind in dict.fromkeys(kinds):
        rows = [row for row, one in enumerate(kinds) if one == kind]
        colour = _COLOURS.get(kind, "#66727f")
        axes.bar(rows, [bits[row] for row in rows], 0.8, color=colour, label=kind)
    axes.set_ylabel("weight bits")
    axes.set_yticks(range(ceil(max(bits)) + 1))
    axes.set_xlim(-0.7, len(names) - 0.3)
    fontsize = 6 if len(names) <= _NAMED else 5
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=fontsize)
    legend_above(figure)


def _draw_accuracy(figure: "Figure", rows: Sequence[Accuracy]) -> None:
    from matplotlib.ticker import LogLocator

    sizes = [row.size_bytes for row in rows if row.size_bytes]
    unit, scale = ("MiB", 2**20) if min(sizes) >= 0.2 * 2**20 else ("KiB", 2**10)
    axes = plain_axes(figure, f"size, {unit}", "top-1, %")
    series: dict[str, list[Accuracy]] = {}
    for row in sorted(rows, key=lambda row: row.size_bytes or 0.0):
        series.setdefault(row.name.partition(",")[0], []).append(row)
    for name, members in series.items():
        table = np.array([[m.size_bytes, m.top1, m.low, m.high] for m in members])
        x, (top1, low, high) = table[:, 0] / scale, 100 * table[:, 1:].T
        spread = [top1 - low, high - top1]
        axes.errorbar(x, top1, spread, fmt="o-", ms=4, capsize=2, lw=1, label=name)
    if max(sizes) > 4 * min(sizes):
        logarithmic(axes)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    legend_above(figure)


def plain_axes(figure: "Figure", x: str, y: str) -> Any:
    """Return empty axes with a grid and these labels."""
    figure.set_size_inches(5.2, 3.6)
    axes = figure.add_subplot()
    axes.grid(color="#e3e2de", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return axes


def logarithmic(axes: Any) -> None:
    """Make the horizontal axis logarithmic, labelled in plain numbers."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=7)


def legend_above(figure: "Figure") -> None:
    """Add the legend above the axes, in up to four columns, as many as fit."""
    labels = [x for axes in figure.axes for x in axes.get_legend_handles_labels()[1]]
    width = 0.45 + 0.075 * max(map(len, labels), default=0)  # inches of a column
    figure.legend(
        loc="outside upper left",
        ncols=max(1, min(4, int(figure.get_figwidth() / width))),
        frameon=False,
        handlelength=1.2,
    )
