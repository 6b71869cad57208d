"""Charts on the page: where their points, bars and axes lie.

Positions on the page are in per cent; the template draws them.
"""

from collections.abc import Sequence
from math import log10
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from ompq.amounts import decades, digits, in_bytes, percent, ticks
from ompq.plans import Plan, refinement_summary
from ompq.report_sections import Accuracy, AuditedRanks, BlockErrorSection, Histogram


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


def bar_column(values: NDArray[np.float64]) -> Any:
    """Return the widths of bars in per cent for values of any sign, (L,)."""
    sizes = values - min(0.0, float(values.min()))
    return (100 * sizes / max(float(sizes.max()), 1e-300)).tolist()
