"""reproduce(): run a table or a figure of the paper, row by row, and write it down."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ompq.errors import CheckpointError, OmpqError, shortened
from ompq.files import json_object, library_version, read_json, write_text
from ompq.reproduction.drawings import draw
from ompq.reproduction.registry import EXPERIMENTS, Experiment, Row
from ompq.reproduction.rows import Bench, measured
from ompq.samples import model_device

__all__ = ["EXPERIMENTS", "Bench", "Experiment", "Row", "reproduce"]


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
    network whose batch norms were folded, tells why, and is tried again the next time.

    Args:
        rows: A pattern of the rows that are run; the others appear if they are there.
        told: Called with each row that there is.

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
        path = bench.folder / f"{_file_name(row.name)}.json"
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
    """Measure a row; one that this network or data does not allow tells why."""
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


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-.()" else "_" for c in name)


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
