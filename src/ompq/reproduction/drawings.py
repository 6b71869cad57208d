"""The paper's figures, as vector files: SVG and PDF, and PNG to look at."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ompq.report.figures import draw_bars, draw_heat, save_figure, styled_figure
from ompq.reproduction.registry import Experiment, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
_MARKS = "os^Dv"


def draw(experiment: Experiment, results: Results, folder: Path) -> list[Path]:
    """Write the figure of an experiment, if it has one and there is something to show.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    rows = [row for row in experiment.rows if _shown(results.get(row.name, {}))]
    if not experiment.drawing or not rows:
        return []
    with styled_figure() as figure:
        _DRAWINGS[experiment.drawing](figure, rows, results)
        return save_figure(figure, folder / experiment.name, (".svg", ".pdf", ".png"))


def _shown(result: Mapping[str, Any]) -> bool:
    return bool(result) and "skipped" not in result


def _accuracy(figure: "Figure", rows: list[Row], results: Results) -> None:
    """Draw accuracy against size, a line for each method; the paper's are hollow."""
    axes = _axes(figure, "size, MiB", "top-1, %")
    for number, method in enumerate(dict.fromkeys(row.method for row in rows)):
        own = [row for row in rows if row.method == method]
        found = sorted((results[row.name] for row in own), key=lambda one: one["mib"])
        sizes = [one["mib"] for one in found]
        top1 = [100 * one["top1"] for one in found]
        error = [100 * one["drop_error"] for one in found]
        colour, mark = f"C{number}", _MARKS[number % len(_MARKS)]
        axes.errorbar(
            sizes,
            top1,
            error,
            color=colour,
            marker=mark,
            ms=4,
            lw=1,
            capsize=2,
            label=method,
        )
        paper = [(results[r.name]["mib"], r.published) for r in own if r.published]
        if paper:
            axes.plot(*zip(*paper, strict=True), mark, color=colour, mfc="none", ms=6)
    _legend(figure)


def _beta(figure: "Figure", rows: list[Row], results: Results) -> None:
    axes = _axes(figure, "β", "top-1, %")
    beta = [row.at for row in rows]
    top1 = [100 * results[row.name]["top1"] for row in rows]
    error = [100 * results[row.name]["drop_error"] for row in rows]
    axes.errorbar(beta, top1, error, marker="o", ms=4, lw=1, capsize=2)
    _logarithmic(axes)


def _scatter(figure: "Figure", rows: list[Row], results: Results) -> None:
    axes = _axes(figure, "orthogonality, sum of 1 − ORM", "top-1, %")
    points = np.array(
        [
            (results[r.name]["orthogonality"], 100 * results[r.name]["top1"])
            for r in rows
        ]
    )
    axes.plot(*points.T, "o", ms=4)
    if len(points) > 2 and np.ptp(points, axis=0).all():
        correlation = np.corrcoef(points.T)[0, 1]
        axes.set_title(f"correlation {correlation:.2f}", fontsize=9)


def _layer(figure: "Figure", rows: list[Row], results: Results) -> None:
    axes = _axes(figure, "bits", "orthogonality, mean of 1 − ORM")
    names = list(results[rows[0].name]["layers"])
    bits = [row.at for row in rows]
    for number, name in enumerate(names):
        values = [results[row.name]["layers"][name] for row in rows]
        mark = _MARKS[number % len(_MARKS)]
        axes.plot(bits, values, marker=mark, ms=4, lw=1, label=name)
    _legend(figure)


def _matrix(figure: "Figure", rows: list[Row], results: Results) -> None:
    matrices = [np.array(results[row.name]["matrix"]) for row in rows]
    labels = results[rows[0].name]["labels"]
    titles = [f"N = {results[row.name]['samples']}" for row in rows]
    draw_heat(figure, matrices, labels, titles)


def _bits(figure: "Figure", rows: list[Row], results: Results) -> None:
    found = results[rows[0].name]
    names = list(found["bits"])
    bits = [int(found["bits"][name][1:].split("A")[0]) for name in names]
    draw_bars(figure, names, bits, [found["kinds"][name] for name in names])


def _cost(figure: "Figure", rows: list[Row], results: Results) -> None:
    """Draw images and seconds that each method takes to choose the bits."""
    figure.set_size_inches(6.4, 2.6)
    names = [row.method for row in rows]
    paper = [float(row.at or np.nan) for row in rows]
    planned = [row.measure == "plan" for row in rows]
    found = [results[row.name] for row in rows]
    images = [o["images"] if p else np.nan for o, p in zip(found, planned, strict=True)]
    seconds = [
        o["seconds"] if p else np.nan for o, p in zip(found, planned, strict=True)
    ]
    axes = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(names))
    axes[0].barh(places - 0.2, paper, 0.38, color="#b8c4d2", label="the paper's")
    axes[0].barh(places + 0.2, images, 0.38, label="here")
    axes[1].barh(places, seconds, 0.5)
    for one, title in zip(axes, ("images", "seconds to choose bits"), strict=True):
        _logarithmic(one)
        one.set_xlabel(title)
    axes[0].set_yticks(places, names)
    axes[0].invert_yaxis()
    _legend(figure)


def _axes(figure: "Figure", x: str, y: str) -> Any:
    figure.set_size_inches(4.6, 3.2)
    axes = figure.add_subplot()
    axes.grid(color="#e3e2de", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return axes


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=7)


def _legend(figure: "Figure") -> None:
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)


_DRAWINGS: dict[str, Callable[["Figure", list[Row], Results], None]] = {
    "accuracy": _accuracy,
    "beta": _beta,
    "bits": _bits,
    "cost": _cost,
    "layer": _layer,
    "matrix": _matrix,
    "scatter": _scatter,
}
