"""The Markdown table and the figure of reproduced rows, beside the paper's numbers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ompq.bit_widths import FLOAT_BITS
from ompq.configs import PLAN_PROTOCOLS, TRAIN_PROTOCOLS, PlanConfig
from ompq.lab.paper_tables import Experiment, Row
from ompq.lab.published_bits import published_bits
from ompq.planning import free_choices
from ompq.report.figures import (
    draw_bars,
    legend_above,
    logarithmic,
    plain_axes,
    save_figure,
    styled_figure,
)
from ompq.report.heat_maps import draw_heat

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Results = Mapping[str, Any]
_MARKS = "os^DvPX*"  # of the methods in a figure
_COLOURED, _FLAT = 4, 0.01  # layers with a colour; a change that is none


def markdown(experiment: Experiment, results: Results, about: Mapping[str, Any]) -> str:
    """Return the results as a Markdown table, next to the paper's numbers.

    These are left out if another network was measured than the paper's.
    """
    settings = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [f"# {experiment.title}", "", settings, ""]
    if about["quick"]:
        lines += [
            "**Quick: scaled down to try it. The results are not meaningful.**",
            "",
        ]
    own_network = about["network"] == experiment.network
    paper = {
        row.name: _published(row, experiment.float_top1)
        for row in experiment.rows
        if own_network
    }
    # Each number of the paper stands before ours.
    sources = (("{}, paper", paper), ("{}", results))
    columns = [
        (heading.format(title), name, source, shown)
        for name, (title, shown) in _COLUMNS.items()
        for heading, source in sources
        if any(name in numbers for numbers in source.values())
    ]
    headings = ["W/A", *(heading for heading, *_ in columns)]
    lines += _row(["row", "method", *headings, "remarks"])
    lines += _row(["---"] * (len(headings) + 3))
    for row in experiment.rows:
        numbers = [
            (source.get(row.name, {}).get(name), shown)
            for *_, name, source, shown in columns
        ]
        cells = ["-" if number is None else shown(number) for number, shown in numbers]
        remarks = "; ".join(
            t for t in (row.note, results.get(row.name, {}).get("skipped")) if t
        )
        lines += _row([row.name, row.method, _widths(row), *cells, remarks])
    return "\n".join([*lines, ""])


def _widths(row: Row) -> str:
    """Return bits of weights and activations; * for mixed ones, as in the paper."""
    if row.measure == "float":
        return f"{FLOAT_BITS}/{FLOAT_BITS}"
    if row.measure not in ("network", "plan"):
        return "-"
    if row.bits:
        widths = [one.activation for one in published_bits(row.bits).values()]
        return f"*/{max(widths, key=widths.count)}"
    config = replace(PLAN_PROTOCOLS.get(row.protocol, PlanConfig()), **row.plan)
    learned = row.train and TRAIN_PROTOCOLS[row.train].weights == "fracbits"

    def shown(bits: Sequence[int]) -> str:
        return str(bits[0]) if len({*bits}) == 1 else "*"

    weights = shown([choice.weight for choice in free_choices(config)])
    inputs = shown([choice.activation for choice in free_choices(config)])
    return f"{'*' if learned else weights}/{inputs}"


def _published(row: Row, float_top1: float | None) -> dict[str, float]:
    """Return the paper's numbers of a row, by the fields of a result."""
    found = dict(row.paper)
    if row.published is not None:
        found["top1"] = row.published / 100
        if float_top1 is not None:
            found["drop"] = (float_top1 - row.published) / 100
    return found


def _row(cells: Sequence[str]) -> list[str]:
    # Unescaped, */* would be an emphasized slash.
    escaped = (re.sub(r"([|*])", r"\\\1", cell) for cell in cells)
    return [f"| {' | '.join(escaped)} |"]


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


# Field of a result → its heading, and how it is shown.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "top1": ("top-1", _percent),
    "drop": ("drop", _percent),
    "drop_error": ("standard error of the drop", _percent),
    "divergence": ("divergence", lambda v: f"{v:.4f}"),
    "orthogonality": ("orthogonality", lambda v: f"{v:.4g}"),
    "mib": ("MiB", lambda v: f"{v:.2f}"),
    "bit_ops": ("GBOPs", lambda v: f"{v / 1e9:,.4g}"),
    "images": ("images", lambda v: f"{v:,}"),
    "inner_product": ("seconds by Gram matrices", lambda v: f"{v:.3g}"),
    "norm": ("seconds by features", lambda v: f"{v:.3g}"),
    "ratio": ("the faster by a factor of", lambda v: f"{v:.3g}"),
    "seconds": ("seconds", lambda v: f"{v:.1f}"),
}


def draw(
    experiment: Experiment, results: Results, folder: Path, *, published: bool = True
) -> list[Path]:
    """Write the figure of an experiment, if it has one and any row was measured.

    Args:
        published: Whether to show the paper's numbers, which are of its own network.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    measured = [row for row in experiment.rows if row.name in results]
    rows = [
        row
        for row in measured
        if "skipped" not in results[row.name] and row.measure != "float"
    ]
    if not published:
        rows = [replace(row, published=None) for row in rows]
    if not experiment.drawing or not rows:
        return []
    with styled_figure() as figure:
        _DRAWINGS[experiment.drawing](figure, rows, results)
        return save_figure(figure, folder / experiment.name, (".svg", ".pdf", ".png"))


def _accuracy(figure: "Figure", rows: list[Row], results: Results) -> None:
    """Draw accuracy against size, a line for each method; the paper's are hollow."""
    axes = plain_axes(figure, "size, MiB", "top-1, %")
    sizes = {row.name: results[row.name]["mib"] for row in rows}
    methods: dict[str, list[Row]] = {}
    for row in rows:
        (bits,) = row.plan.get("activation_choices", (8,))
        name = row.method if bits == 8 else f"{row.method}, A{bits}"
        methods.setdefault(name, []).append(row)
    for place, (method, members) in enumerate(methods.items()):
        own = sorted(members, key=lambda row: sizes[row.name])
        colour, mark = f"C{place}", _MARKS[place % len(_MARKS)]
        _top1_line(
            axes,
            [sizes[row.name] for row in own],
            [results[row.name] for row in own],
            color=colour,
            marker=mark,
            label=method,
        )
        paper = [(row.paper["mib"], row.published) for row in own if row.published]
        if paper:
            axes.plot(*zip(*paper, strict=True), mark, color=colour, mfc="none", ms=6)
    if any(row.published for row in rows):
        axes.plot([], [], "o", color="#66727f", mfc="none", ms=6, label="the paper's")
    legend_above(figure)


def _top1_line(
    axes: Any, across: Sequence[Any], found: Sequence[Results], **style: Any
) -> None:
    """Draw top-1 with the standard error of its drop."""
    top1, error = ([100 * one[k] for one in found] for k in ("top1", "drop_error"))
    axes.errorbar(across, top1, error, ms=4, lw=1, capsize=2, **style)


def _beta(figure: "Figure", rows: list[Row], results: Results) -> None:
    axes = plain_axes(figure, "β", "top-1, %")
    found = [results[row.name] for row in rows]
    _top1_line(axes, [row.at for row in rows], found, marker="o")
    logarithmic(axes)


def _scatter(figure: "Figure", rows: list[Row], results: Results) -> None:
    axes = plain_axes(figure, "orthogonality, sum of 1 − ORM", "top-1, %")
    found = [results[row.name] for row in rows]
    points = np.array([(one["orthogonality"], 100 * one["top1"]) for one in found])
    axes.plot(*points.T, "o", ms=4)
    sizes = f"{len(points)} lists of bits in {max(one['mib'] for one in found):.2f} MiB"
    if len(points) > 2 and np.ptp(points, axis=0).all():
        sizes += f", correlation {np.corrcoef(points.T)[0, 1]:.2f}"
    axes.set_title(sizes, fontsize=9)


def _layers(figure: "Figure", rows: list[Row], results: Results) -> None:
    """Draw the layers whose orthogonality depends most on their bits in colour."""
    axes = plain_axes(figure, "bits", "orthogonality, mean of 1 − ORM")
    bits = [row.at for row in rows]
    table = [results[row.name]["layers"] for row in rows]
    lines = {name: [one[name] for one in table] for name in table[0]}
    changes = {name: np.ptp(values) for name, values in lines.items()}
    most = sorted(changes, key=lambda name: -changes[name])[:_COLOURED]
    for name in [*(lines.keys() - most), *most]:
        if name in most:
            mark = _MARKS[most.index(name) % len(_MARKS)]
            axes.plot(bits, lines[name], marker=mark, ms=4, lw=1, label=name)
        else:
            axes.plot(bits, lines[name], color="#c3c8ce", lw=0.6, zorder=1)
    flat = sum(change < _FLAT for change in changes.values())
    axes.set_title(
        f"{flat} of {len(lines)} layers change by less than {_FLAT}", fontsize=9
    )
    legend_above(figure)


def _matrices(figure: "Figure", rows: list[Row], results: Results) -> None:
    found = [results[row.name] for row in rows]
    titles = [f"N = {one['samples']}" for one in found]
    matrices = [np.array(one["matrix"]) for one in found]
    draw_heat(figure, matrices, found[0]["labels"], titles)


def _bits(figure: "Figure", rows: list[Row], results: Results) -> None:
    found = results[rows[0].name]
    bits = [int(text[1:].split("A")[0]) for text in found["bits"].values()]
    names = list(found["bits"])
    draw_bars(figure, names, bits, [found["kinds"][name] for name in names])


def _method(figure: "Figure", rows: list[Row], results: Results) -> None:
    """Draw the steps side by side: ORM, the coefficients of the program, its bits."""
    figure.set_size_inches(9.6, 3.8)
    found = results[rows[0].name]
    names = list(found["bits"])
    places = np.arange(len(names))
    heat, *charts = figure.subplots(1, 3)
    image = heat.imshow(np.array(found["matrix"]), cmap="Blues")
    heat.set_title(f"ORM of {found['images']} images", fontsize=9)
    figure.colorbar(image, ax=heat, shrink=0.6).outline.set_visible(False)
    bits = [int(found["bits"][name][1:].split("A")[0]) for name in names]
    values = {
        "coefficient of a bit": [found["importance"][name] for name in names],
        f"bits in {found['mib']:.2f} MiB": bits,
    }
    for axes, (title, heights) in zip(charts, values.items(), strict=True):
        axes.barh(places, heights, 0.8)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
    charts[0].set_yticks(places, names, fontsize=5)
    charts[1].set_yticks([])
    heat.set_xticks([])
    heat.set_yticks(range(len(found["labels"])), found["labels"], fontsize=5)


def _cost(figure: "Figure", rows: list[Row], results: Results) -> None:
    """Draw images and seconds that each method takes to choose the bits."""
    figure.set_size_inches(6.4, 2.6)
    paper = [row.paper.get("images", np.nan) for row in rows]
    images, seconds = (
        [results[r.name][k] if r.measure == "plan" else np.nan for r in rows]
        for k in ("images", "seconds")
    )
    axes = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(rows))
    axes[0].barh(places - 0.2, paper, 0.38, color="#b8c4d2", label="the paper's")
    axes[0].barh(places + 0.2, images, 0.38, label="here")
    axes[1].barh(places, seconds, 0.5)
    for one, title in zip(axes, ("images", "seconds to choose bits"), strict=True):
        logarithmic(one)
        one.set_xlabel(title)
    axes[0].set_yticks(places, [row.method for row in rows])
    axes[0].invert_yaxis()
    legend_above(figure)


_DRAWINGS: dict[str, Callable[["Figure", list[Row], Results], None]] = {
    "accuracy": _accuracy,
    "beta": _beta,
    "bits": _bits,
    "cost": _cost,
    "layer": _layers,
    "matrix": _matrices,
    "method": _method,
    "scatter": _scatter,
}
