"""Figures as in the paper, PNG and SVG: ORM matrix, bits, accuracy against size."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ompq.costs import FLOAT_BITS
from ompq.errors import MissingExtraError
from ompq.files import replacing
from ompq.plans import Plan
from ompq.report.sections import Accuracy, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "conv": "#2f6db3",
    "pointwise": "#1f9388",
    "depthwise": "#d9861a",
    "grouped": "#8159b8",
    "transposed": "#bd4f78",
    "linear": "#5b6774",
    "attention": "#b5442f",
}
_NAMED = 40  # functions; with more, their names would not be readable
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ompq",  # the same plan gives the same file
    "text.parse_math": False,  # a "$" in a name is a "$"
}


def write_figures(
    folder: str | Path, plan: Plan, results: Sequence[Section] = ()
) -> list[Path]:
    """Write figures of a plan for a paper or a talk, each as PNG and as SVG.

    They are ``orm`` if ORM was measured, ``bits``, and ``accuracy`` if results hold
    accuracies of at least two sizes. There, "mixed, 1.5 MiB" and "mixed, 1.3 MiB" are
    joined to one line, named by what stands before the comma.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "figures") from error
    drawings: dict[str, Callable[[Figure], None]] = {}
    if plan.scores.orm is not None:
        drawings["orm"] = lambda figure: _draw_orm(figure, plan)
    drawings["bits"] = lambda figure: _draw_bits(figure, plan)
    sized = [r for r in results if isinstance(r, Accuracy) and r.size_bytes]
    if len({result.size_bytes for result in sized}) > 1:
        drawings["accuracy"] = lambda figure: _draw_accuracy(figure, sized)
    written = []
    with mpl.rc_context(_STYLE):
        for name, draw in drawings.items():
            figure = Figure(layout="constrained", dpi=200)
            draw(figure)
            written += _save(figure, Path(folder) / name)
    return written


def _save(figure: "Figure", path: Path) -> list[Path]:
    written = []
    for suffix, metadata in ((".png", {}), (".svg", {"Date": None})):
        target = path.with_name(path.name + suffix)
        with replacing(target) as temporary:
            figure.savefig(temporary, format=suffix[1:], metadata=metadata)
        written.append(target)
    return written


def _draw_orm(figure: "Figure", plan: Plan) -> None:
    from matplotlib.ticker import MaxNLocator

    assert plan.scores.orm is not None  # the caller looked
    labels = plan.scores.orm_labels
    named = 0 < len(labels) <= _NAMED
    figure.set_size_inches(*((5.6, 4.2) if named else (4.6, 3.8)))
    axes = figure.add_subplot()
    image = axes.imshow(plan.scores.orm, cmap="Blues", vmin=0, vmax=1)
    axes.spines[:].set_visible(False)
    if named:
        axes.set_yticks(range(len(labels)), labels, fontsize=6)
        axes.set_xticks(range(len(labels)), labels, fontsize=6, rotation=90)
        axes.tick_params(length=0)
    else:
        for axis, name in ((axes.xaxis, "function j"), (axes.yaxis, "function i")):
            axis.set_major_locator(MaxNLocator(integer=True))
            axis.set_label_text(name)
    bar = figure.colorbar(image, ax=axes, label="ORM", shrink=0.8)
    bar.outline.set_visible(False)


def _draw_bits(figure: "Figure", plan: Plan) -> None:
    from matplotlib.ticker import MaxNLocator

    units = plan.graph.units
    figure.set_size_inches(max(5.0, min(16.0, 0.14 * len(units) + 1.5)), 2.6)
    axes = figure.add_subplot()
    widest = max(c.weight for c in plan.choices if c.weight < FLOAT_BITS)
    bits = np.array([min(plan.allocation[u.name].weight, widest) for u in units])
    for kind in dict.fromkeys(unit.kind for unit in units):
        rows = [row for row, unit in enumerate(units) if unit.kind == kind]
        colour = _COLOURS.get(kind, "#66727f")
        places = [row + 1 for row in rows]
        axes.bar(places, bits[rows], color=colour, label=kind, width=0.8)
    axes.set_xlabel("layer, in order of execution")
    axes.set_ylabel("weight bits")
    axes.set_yticks(range(int(bits.max()) + 1))
    axes.set_xlim(0.3, len(units) + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_above(figure)


def _draw_accuracy(figure: "Figure", rows: Sequence[Accuracy]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure.set_size_inches(5.2, 3.6)
    axes = figure.add_subplot()
    every = [row.size_bytes for row in rows if row.size_bytes]
    unit, scale = ("MiB", 2**20) if min(every) >= 0.2 * 2**20 else ("KiB", 2**10)
    series: dict[str, list[Accuracy]] = {}
    for row in sorted(rows, key=lambda row: row.size_bytes or 0.0):
        series.setdefault(row.name.partition(",")[0], []).append(row)
    for name, members in series.items():
        table = np.array([[m.size_bytes, m.top1, m.low, m.high] for m in members])
        sizes, (top1, low, high) = table[:, 0] / scale, 100 * table[:, 1:].T
        spread = [top1 - low, high - top1]
        axes.errorbar(sizes, top1, spread, fmt="o-", ms=4, capsize=2, lw=1, label=name)
    if max(every) > 4 * min(every):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#e3e2de", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"size, {unit}")
    axes.set_ylabel("top-1, %")
    _legend_above(figure)


def _legend_above(figure: "Figure") -> None:
    figure.legend(loc="outside upper left", ncols=4, frameon=False, handlelength=1.2)
