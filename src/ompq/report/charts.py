"""Geometry of the page's charts, and figures for papers as PNG, SVG and PDF.

Positions on the page are in per cent; the template draws them.
"""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from ompq.amounts import decades, digits, in_bytes, percent, ticks
from ompq.plans import Plan, refinement_summary
from ompq.sections import Accuracy, AuditedRanks, BlockErrorSection, Histogram

# From light to dark; in dark mode the style sheet inverts the picture.
_HEAT_AT = (0.0, 0.45, 1.0)
_HEAT = np.array([(247, 249, 251), (140, 180, 214), (16, 52, 99)])  # (stops, RGB)

_HEAT_NAMES = 60  # labels beside the matrix; of more rows, every second or third
_HEAT_LIMIT = 400  # rows; a larger matrix is averaged to keep the page small


@dataclass(frozen=True)
class Heat:
    """A symmetric matrix as a picture and as numbers."""

    labels: tuple[str, ...]  # of rows and columns
    low: float  # the value of the lightest colour; the darkest is 1
    image: str  # data URI of a PNG with one pixel per entry
    values: str  # upper triangle with diagonal in 1/65535, big-endian, base64
    pooled: int  # number of functions averaged into one row

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Some of the labels and their positions in per cent of the height."""
        count = len(self.labels)
        step = max(1, -(-count // _HEAT_NAMES))
        return [
            (100 * (n + 0.5) / count, self.labels[n]) for n in range(0, count, step)
        ]


def accuracy_chart(rows: Sequence[Accuracy]) -> dict[str, Any]:
    """Place each network's top-1, interval and size."""
    low, high = min(r.low for r in rows), max(r.high for r in rows)
    pad = max(0.002, 0.06 * (high - low))
    low, high = max(0.0, low - pad), min(1.0, high + pad)
    largest = max((r.size_bytes or 0 for r in rows), default=0) or 1

    def at(value: float) -> float:
        return 100 * (value - low) / (high - low)

    marks = ticks(100 * low, 100 * high, 5)
    return {
        "ticks": [(at(mark / 100), f"{mark:g}") for mark in marks],
        "rows": [
            {
                "name": r.name,
                "note": r.note,
                "count": f"{r.count:,}",
                "x": at(r.top1),
                "low": at(r.low),
                "high": at(r.high),
                "top1": percent(r.top1, 2),
                "interval": f"{100 * r.low:.1f} to {100 * r.high:.1f}",
                "size": in_bytes(r.size_bytes) if r.size_bytes else "",
                "width": 100 * (r.size_bytes or 0) / largest,
            }
            for r in rows
        ],
    }


def error_chart(rows: Sequence[BlockErrorSection]) -> dict[str, Any]:
    """Place each block's error before and after on a logarithmic axis."""
    low, high = decades([e for r in rows for e in (r.before, r.after)])

    def at(error: float) -> float:
        return 100 * (log10(error) - low) / (high - low) if error > 0 else 0.0

    return {
        "ticks": [
            (100 * (n - low) / (high - low), f"1e{n}") for n in range(low, high + 1)
        ],
        "rows": [
            {
                "name": r.name,
                "kept": r.kept,
                "x1": at(r.before),
                "x2": at(r.after),
                "before": digits(r.before),
                "after": digits(r.after),
                "ratio": f"{r.after / r.before:.2f}×" if r.before > 0 else "",
            }
            for r in rows
        ],
    }


def histogram_chart(histogram: Histogram) -> dict[str, Any]:
    """Draw a histogram as one path in a box of 100 × 100."""
    edges = np.asarray(histogram.edges, dtype=np.float64)
    counts = np.asarray(histogram.counts, dtype=np.float64)
    # Square roots keep the tails visible, where values are clipped.
    heights = 100 * np.sqrt(counts / max(counts.max(), 1e-300))

    def at(x: Any) -> Any:
        return 100 * (x - edges[0]) / (edges[-1] - edges[0])

    corners = zip(heights, at(edges[1:]), strict=True)
    steps = [f"V{100 - height:.2f}H{right:.2f}" for height, right in corners]
    lines = [(at(x), label, digits(x)) for label, x in histogram.lines]
    return {
        "name": histogram.name,
        "path": f"M0 100{''.join(steps)}V100Z",
        "ends": (digits(float(edges[0])), digits(float(edges[-1]))),
        "lines": [line for line in lines if 0 <= line[0] <= 100],
        "outside": [line for line in lines if not 0 <= line[0] <= 100],
    }


def scatter_chart(ranked: AuditedRanks) -> dict[str, Any]:
    """Place the points of an audit in a box of 100 × 100, both axes by rank.

    The correlation depends on ranks alone, and scores have no common unit of damage.
    """
    table = np.array(ranked.points).reshape(-1, 2)
    # Equal values, as of top-1, share a rank, as in the correlation.
    ranks = (rankdata(table, axis=0) - 1) / max(len(table) - 1, 1)
    return {
        "name": ranked.name,
        "text": ranked.text,
        "points": [(100 * x, 100 - 100 * y) for x, y in ranks.tolist()],
    }


def refinement_chart(plan: Plan) -> dict[str, Any]:
    """Place measured divergences in a box of 100 × 100, and the best so far as a path.

    Only measurements made like the last one (``judge``) can be compared.
    """
    rows = [one for one in plan.measured if one.judge == plan.measured[-1].judge]
    values = np.array([one.divergence for one in rows])
    lowest = np.minimum.accumulate(values)
    low, high = float(values.min()), float(values.max())
    xs = 100 * (np.arange(len(rows)) + 0.5) / len(rows)
    ys = [100 - 100 * (v - low) / max(high - low, 1e-300) for v in (values, lowest)]
    path = [f"L{x:.1f} {y:.1f}" for x, y in zip(xs, ys[1], strict=True)]
    return {
        "points": list(zip(xs.tolist(), ys[0].tolist(), strict=True)),
        "path": "M" + "".join(path)[1:],
        "rows": [(one.name, digits(one.divergence)) for one in rows],
        "text": refinement_summary(plan),
    }


def heat_map(matrix: NDArray[np.float64], labels: Sequence[str]) -> Heat:
    """Return a picture of a symmetric matrix of values from 0 to 1, (L, L)."""
    pooled = -(-len(labels) // _HEAT_LIMIT)
    if pooled > 1:
        starts = np.arange(0, len(labels), pooled)
        sizes = np.diff([*starts, len(labels)])
        sums = np.add.reduceat(np.add.reduceat(matrix, starts, 0), starts, 1)
        matrix = sums / np.outer(sizes, sizes)
        labels = [
            f"{labels[a]} … {labels[a + n - 1]}"
            for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]
    matrix = np.clip(matrix, 0.0, 1.0)
    low = float(np.floor(10 * matrix.min()) / 10) if len(labels) > 1 else 0.0
    low = min(low, 0.9)
    upper = matrix[np.triu_indices(len(labels))]
    codes = np.round(65535 * upper).astype(">u2").tobytes()
    levels = np.round(255 * (matrix - low) / (1 - low)).astype(np.uint8)
    picture, values = (base64.b64encode(x).decode() for x in (_png(levels), codes))
    image = f"data:image/png;base64,{picture}"
    return Heat(tuple(labels), low, image, values, pooled)


def bar_column(values: NDArray[np.float64]) -> Any:
    """Return the widths of bars in per cent for values of any sign, (L,)."""
    sizes = values - min(0.0, float(values.min()))
    return (100 * sizes / max(float(sizes.max()), 1e-300)).tolist()


def _png(levels: NDArray[np.uint8]) -> bytes:
    """Return a PNG with our palette and one pixel per level, (height, width)."""
    at = np.linspace(0, 1, 256)
    palette = np.stack([np.interp(at, _HEAT_AT, colour) for colour in _HEAT.T], 1)
    height, width = levels.shape
    rows = np.pad(levels, ((0, 0), (1, 0))).tobytes()  # 0: stored as it is
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),  # a palette
        b"PLTE": palette.round().astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(rows, 9),
        b"IEND": b"",
    }
    parts = (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
