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
    accuracies of at least two sizes. There, what stands before a name's first comma is
    the name of its line: "mixed, 1.5 MiB" and "mixed, 1.3 MiB" are joined.

    Args:
        folder: Where the files go; it is made if missing.
        plan: The plan.
        results: As for ``write_report``; accuracies are used.

    Returns:
        The files written.

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
    assert plan.scores.orm is not None  # the caller looked
    figure.set_size_inches(4.2, 3.6)
    axes = figure.add_subplot()
    image = axes.imshow(plan.scores.orm, cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("function j")
    axes.set_ylabel("function i")
    figure.colorbar(image, ax=axes, label="ORM")


def _draw_bits(figure: "Figure", plan: Plan) -> None:
    units = plan.graph.units
    figure.set_size_inches(max(4.0, min(16.0, 0.14 * len(units) + 1.5)), 2.6)
    axes = figure.add_subplot()
    widest = max(c.weight for c in plan.choices if c.weight < FLOAT_BITS)
    bits = np.array([min(plan.allocation[u.name].weight, widest) for u in units])
    for kind in dict.fromkeys(unit.kind for unit in units):
        rows = [row for row, unit in enumerate(units) if unit.kind == kind]
        colour = _COLOURS.get(kind, "#66727f")
        axes.bar(rows, bits[rows], color=colour, label=kind, width=0.8)
    axes.set_xlabel("layer, in order of execution")
    axes.set_ylabel("weight bits")
    axes.set_yticks(sorted({int(b) for b in bits}))
    axes.set_xlim(-0.7, len(units) - 0.3)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _draw_accuracy(figure: "Figure", rows: Sequence[Accuracy]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure.set_size_inches(4.8, 3.2)
    axes = figure.add_subplot()
    series: dict[str, list[Accuracy]] = {}
    for row in sorted(rows, key=lambda row: row.size_bytes or 0.0):
        series.setdefault(row.name.partition(",")[0], []).append(row)
    for name, members in series.items():
        table = np.array([[m.size_bytes, m.top1, m.low, m.high] for m in members])
        sizes, (top1, low, high) = table[:, 0] / 2**20, 100 * table[:, 1:].T
        spread = [top1 - low, high - top1]
        axes.errorbar(sizes, top1, spread, fmt="o-", capsize=2, lw=1, label=name)
    every = [row.size_bytes for row in rows if row.size_bytes]
    if max(every) > 4 * min(every):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("size, MiB")
    axes.set_ylabel("top-1, %")
    axes.legend(frameon=False)
