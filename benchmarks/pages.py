"""Writes the pages that show measurements from what was measured.

python benchmarks/pages.py [--check]

Each template of ``benchmarks/pages`` becomes a page; its numbers are read from
``benchmarks/results``, so that none is typed. With ``--check`` nothing is written;
pages that differ from their data are named, and the exit status is 1. A test does the
same.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import floor, log10
from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).parent
ROOT, RESULTS, TEMPLATES = HERE.parent, HERE / "results", HERE / "pages"
# Template → the page that it makes.
PAGES = {"README.md.j2": ROOT / "README.md", "results.md.j2": ROOT / "docs/results.md"}
NAMES = {
    "resnet18": "ResNet-18",
    "mobilenet_v2": "MobileNetV2",
    "squeezenet": "SqueezeNet 1.1",
    "deit_tiny": "DeiT-tiny",
    "resnet20": "CIFAR ResNet-20",
    "resnet56": "CIFAR ResNet-56",
}
Row = Mapping[str, Any]


@cache
def rows_of(topic: str) -> Sequence[Row]:
    """Return the rows of a topic; what they have in common is in each of them."""
    data = json.loads((RESULTS / f"{topic}.json").read_text())
    shared = {key: value for key, value in data.items() if key not in _ABOUT}
    return [{**shared, **row} for row in data["rows"]]


_ABOUT = ("rows", "command", "commands")  # of a file, not of its rows


def find(topic: str, **where: Any) -> list[Row]:
    """Return the rows with these values; a list or tuple means any of its values."""

    def meets(row: Row) -> bool:
        return all(
            row.get(key) in value
            if isinstance(value, list | tuple)
            else row.get(key) == value
            for key, value in where.items()
        )

    return [row for row in rows_of(topic) if meets(row)]


def mean(rows: Sequence[Row], key: str) -> float:
    """Return the mean of a value, over seeds as a rule."""
    return statistics.fmean(row[key] for row in rows)


def number(value: float, digits: int = 3) -> str:
    """Return a number with so many digits, without a leading zero: .0263."""
    places = max(digits - 1 - floor(log10(abs(value))), 0) if value else digits
    text = f"{value:.{places}f}"
    return text.replace("0.", ".", 1) if abs(float(text)) < 1 else text


def divergence(rows: Sequence[Row]) -> str:
    """Return the mean divergence of some rows; a dash if there are none."""
    return number(mean(rows, "divergence")) if rows else "-"


def loss(rows: Sequence[Row]) -> str:
    """Return the mean loss of top-1 in points, with the error that the images cause."""
    if not rows:
        return "-"
    points = round(mean(rows, "drop"), 1) + 0.0  # not minus zero
    return f"{points:.1f} ± {mean(rows, 'drop_error'):.1f}".replace("-", "−")


def pivot(
    groups: Iterable[tuple[str, Mapping[str, Any]]],
    columns: Iterable[tuple[str, Mapping[str, Any]]],
    topic: str,
    shown: Callable[[Sequence[Row]], str] = divergence,
    corner: str = "",
) -> str:
    """Return a table: a line for each group, a column for each set of values."""
    columns = list(columns)
    lines = [[corner, *(title for title, _ in columns)], ["---"] * (1 + len(columns))]
    for title, where in groups:
        cells = [shown(find(topic, **where, **more)) for _, more in columns]
        lines.append([title, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sources(topic: str, **where: Any) -> str:
    """Return the commits and machines behind some rows."""
    found = find(topic, **where)
    commits = ", ".join(sorted({str(row["commit"]) for row in found}))
    machines = ", ".join(sorted({str(row["device"]) for row in found}))
    return f"{machines}; commits {commits}"


def rendered(template: str) -> str:
    """Return the page that a template makes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    tools = (find, mean, number, divergence, loss, pivot, sources)
    environment.globals.update({tool.__name__: tool for tool in tools}, names=NAMES)
    return environment.get_template(template).render()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    differing = []
    for template, page in PAGES.items():
        text = rendered(template)
        if check and page.read_text(encoding="utf-8") != text:
            differing.append(page.name)
        elif not check:
            page.write_text(text, encoding="utf-8")
    if differing:
        raise SystemExit(f"not what the data say: {', '.join(differing)}")


if __name__ == "__main__":
    main()
