"""reproduce(): run a table or a figure of the paper, row by row, and write it down."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ompq.errors import CheckpointError, OmpqError, shortened
from ompq.files import json_object, library_version, read_json, write_text
from ompq.report.figures import draw_bars, draw_heat, save_figure, styled_figure
from ompq.reproduction.registry import EXPERIMENTS, Experiment, Row
from ompq.reproduction.rows import Bench, measured
from ompq.samples import model_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPERIMENTS", "Bench", "Experiment", "Row", "reproduce"]

Results = Mapping[str, Any]
_MARKS = "os^Dv"  # of the methods in a figure


def reproduce(
    bench: Bench,
    folder: Path,
    *,
    rows: str = "*",
    told: Callable[[Row, Mapping[str, Any]], None] = lambda _row, _found: None,
) -> list[Path]:
    """Run the rows of an experiment and write JSON, a Markdown table and the figure.

    Each row is written when it is there, and read again the next time: a stopped run
    continues with the next row. A row that cannot be, such as samples distilled from a
    network whose batch norms were folded, says why, and is tried again the next time.

    Args:
        rows: A pattern of the rows that are run; the others appear if they are there.
        told: Called with each row that was measured.

    Raises:
        CheckpointError: The folder holds rows of another network, data or settings.
        ValueError: No row matches.
    """
    experiment = bench.experiment
    wanted = [row for row in experiment.rows if fnmatchcase(row.name, rows)]
    if not wanted:
        names = shortened([row.name for row in experiment.rows])
        raise ValueError(
            f"no row of {experiment.name} matches {rows!r}; it has {names}"
        )
    about = _about(bench)
    bench.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for row in experiment.rows:
        name = re.sub(r"[^\w.()-]", "_", row.name)
        path = bench.folder / f"{name}.json"
        found = _read(path, row, about)
        if found is None and row in wanted:
            found = _tried(row, bench)
            data = {**about, "row": _identity(row), "result": found}
            if "skipped" not in found:
                write_text(path, json.dumps(data, indent=1) + "\n")
        if found is not None:
            results[row.name] = found
            told(row, found)
    target = folder / f"{experiment.name}.json"
    write_text(target, json.dumps({**about, "rows": results}, indent=1) + "\n")
    table = folder / f"{experiment.name}.md"
    write_text(table, markdown(experiment, results, about))
    return [target, table, *draw(experiment, results, folder)]


def _tried(row: Row, bench: Bench) -> dict[str, Any]:
    """Measure a row; one that this network or data does not allow says why."""
    try:
        return measured(row, bench)
    except OmpqError as error:
        return {"skipped": str(error), "seconds": 0.0}


def _about(bench: Bench) -> dict[str, Any]:
    return {
        "experiment": bench.experiment.name,
        "network": bench.model.name,
        "weights": bench.model.weights,
        "data": bench.data.name,
        "samples": len(bench.samples),
        "seed": bench.seed,
        "quick": bench.quick,
        "device": model_device(bench.model.module).type,
        "ompq": library_version(),
    }


def _identity(row: Row) -> str:
    """Return a digest of a row's settings: a row that has changed is run again."""
    return hashlib.sha256(repr(row).encode()).hexdigest()[:16]


def _read(path: Path, row: Row, about: Mapping[str, Any]) -> Any:
    """Return what is known of a row; None if nothing is."""
    if not path.exists():
        return None
    data = json_object(read_json(path), str(path))
    differing = [name for name, value in about.items() if data.get(name) != value]
    if differing:
        raise CheckpointError(
            f"{path} was measured with another {', '.join(differing)}; name another "
            "folder, or remove it"
        )
    return data["result"] if data.get("row") == _identity(row) else None


def markdown(
    experiment: Experiment, results: Mapping[str, Any], about: Mapping[str, Any]
) -> str:
    """Return the results beside the paper's numbers, as a Markdown table."""
    told = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [f"# {experiment.title}", "", told, ""]
    if about["quick"]:
        lines += [
            "**Quick: scaled down to try the paths. The numbers mean nothing.**",
            "",
        ]
    columns = [name for name in _COLUMNS if any(name in r for r in results.values())]
    header = ["row", "method", "top-1, paper", "drop, paper"]
    lines += _row([*header, *(_COLUMNS[name][0] for name in columns), "remarks"])
    lines += _row(["---"] * (len(header) + len(columns) + 1))
    for row in experiment.rows:
        found = results.get(row.name, {})
        cells = [
            _COLUMNS[name][1](found[name]) if found.get(name) is not None else "-"
            for name in columns
        ]
        remarks = "; ".join(t for t in (row.note, found.get("skipped")) if t)
        lines += _row([row.name, row.method, *_paper(experiment, row), *cells, remarks])
    return "\n".join([*lines, ""])


def _paper(experiment: Experiment, row: Row) -> list[str]:
    if row.published is None:
        return ["-", "-"]
    drop = None
    if experiment.float_top1 is not None:
        drop = experiment.float_top1 - row.published
    return [f"{row.published:.2f}", "-" if drop is None else f"{drop:.2f}"]


def _row(cells: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"]


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


# Field of a result → its heading, and how it is shown.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "top1": ("top-1", _percent),
    "drop": ("drop", _percent),
    "drop_error": ("± of the drop", _percent),
    "divergence": ("divergence", lambda v: f"{v:.4f}"),
    "orthogonality": ("orthogonality", lambda v: f"{v:.4g}"),
    "mib": ("size, MiB", lambda v: f"{v:.2f}"),
    "bit_ops": ("GBOPs", lambda v: f"{v / 1e9:.3g}"),
    "images": ("images", lambda v: f"{v:,}"),
    "inner_product": ("by Gram matrices, s", lambda v: f"{v:.3g}"),
    "norm": ("by features, s", lambda v: f"{v:.3g}"),
    "seconds": ("seconds", lambda v: f"{v:.1f}"),
}


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
