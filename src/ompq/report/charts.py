"""Geometry of the charts: positions in percent, drawn by the template."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ompq.attention import with_layers
from ompq.costs import decades, digits, in_bytes, percent, seconds, ticks
from ompq.graph import folded
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.plans import Measurement, Plan
from ompq.rates import ZERO
from ompq.recording import tensors_in
from ompq.report.sections import Accuracy, AuditedScore, BlockError, Histogram
from ompq.samples import Samples, SamplesLike, collect
from ompq.units import Unit

# From paper to ink; the style sheet inverts the picture in the dark.
_HEAT_AT = (0.0, 0.45, 1.0)
_HEAT = np.array([(247, 249, 251), (140, 180, 214), (16, 52, 99)])  # (stops, RGB)
_CODED_SHOWN = 12  # coded layers whose codes are drawn
_HEAT_NAMES = 12  # labels beside the matrix
_HEAT_LIMIT = 400  # functions; more are averaged, so that the page stays small


@dataclass(frozen=True)
class Heat:
    """A matrix as a picture and as numbers to read off."""

    labels: tuple[str, ...]  # of the rows, and of the columns
    low: float  # the value of the lightest colour; the darkest is 1
    image: str  # data URI of a PNG with one pixel an entry
    values: str  # upper triangle with diagonal in 1/65535, big-endian, base64
    pooled: int  # how many functions one row stands for

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Some of the labels, and where their rows are, in per cent of the height."""
        count = len(self.labels)
        step = max(1, -(-count // _HEAT_NAMES))
        return [
            (100 * (n + 0.5) / count, self.labels[n]) for n in range(0, count, step)
        ]


def accuracy_chart(rows: Sequence[Accuracy]) -> dict[str, Any]:
    """Place top-1 and its interval, and the size, of each row."""
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


def error_chart(rows: Sequence[BlockError]) -> dict[str, Any]:
    """Place the error before and after of each block on a logarithmic axis."""
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
    # Square roots: the tails, where clipping happens, would be invisible otherwise.
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


def scatter_chart(score: AuditedScore) -> dict[str, Any]:
    """Place the points of an audited score in a box of 100 × 100, both axes by rank.

    Ranks are what the correlation sees; damages of two scores have no common unit.
    """
    table = np.array(score.points or [(0.0, 0.0)])
    ranks = table.argsort(0).argsort(0) / max(len(table) - 1, 1)
    rho = score.spearman
    return {
        "name": score.name,
        "points": [(100 * x, 100 - 100 * y) for x, y in ranks.tolist()],
        "spearman": f"{rho[0]:.2f}" if rho else "",
        "interval": f"{rho[1]:.2f} to {rho[2]:.2f}" if rho else "",
        "divergence": digits(score.divergence),
        "regret": percent(score.regret),
        "seconds": seconds(score.seconds),
    }


def refinement_chart(measured: Sequence[Measurement]) -> dict[str, Any]:
    """Place measured divergences in a box of 100 × 100, and the best so far as a path.

    Only those of the last judge can be compared.
    """
    rows = [one for one in measured if one.judge == measured[-1].judge]
    values = np.array([one.divergence for one in rows])
    least = np.minimum.accumulate(values)
    low, high = float(values.min()), float(values.max())
    across = 100 * (np.arange(len(rows)) + 0.5) / len(rows)
    heights = [100 - 100 * (v - low) / max(high - low, 1e-300) for v in (values, least)]
    path = [f"L{x:.1f} {y:.1f}" for x, y in zip(across, heights[1], strict=True)]
    best = int(values.argmin())
    return {
        "points": list(zip(across.tolist(), heights[0].tolist(), strict=True)),
        "path": "M" + "".join(path)[1:],
        "rows": [(one.name, digits(one.divergence)) for one in rows],
        "text": f"{len(rows)} allocations measured: divergence {digits(values[0])} at "
        f"first, {digits(low)} at best ({rows[best].name})",
    }


def heat_map(matrix: NDArray[np.float64], labels: Sequence[str]) -> Heat:
    """Make a picture of a symmetric matrix of values from 0 to 1, (L, L)."""
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


def bar_column(values: NDArray[np.float64]) -> list[float]:
    """Return widths in percent of bars for values of any sign, (L,)."""
    sizes = values - min(0.0, float(values.min()))
    return [float(w) for w in 100 * sizes / max(float(sizes.max()), 1e-300)]


def _png(levels: NDArray[np.uint8]) -> bytes:
    """Return a PNG with our palette, one pixel a level, (height, width)."""
    at = np.linspace(0, 1, 256)
    palette = np.stack([np.interp(at, _HEAT_AT, colour) for colour in _HEAT.T], 1)
    image = Image.fromarray(levels, mode="P")
    image.putpalette(palette.round().astype(np.uint8).tobytes())
    with io.BytesIO() as file:
        image.save(file, "PNG", optimize=True)
        return file.getvalue()


_BINS, _SAMPLES = 64, 32


def worst_histograms(
    quantized: nn.Module,
    model: nn.Module,
    plan: Plan,
    samples: SamplesLike,
    *,
    count: int = 3,
) -> list[Histogram]:
    """Return histograms of the layers with the largest expected damage.

    Of coded layers, those with the most weights follow: how often each code is used.

    Weights are the float network's, with the batch norm folded in, in units of codes:
    what lies around 1 is rounded to 1. Inputs are the float network's for 32 samples;
    the lines show what the quantized layer reads, and so where values are clipped.
    """
    layers, samples = quantized_layers(quantized), Samples.of(samples)
    model = with_layers(model, samples)
    damage = plan.scores.damage[range(len(plan.columns)), plan.columns]
    ranked = sorted(zip(damage, plan.graph.units, strict=True), key=lambda one: -one[0])
    worst = [unit for _, unit in ranked if unit.name in layers][:count]
    names = [unit.name for unit in worst]
    given, read = (_inputs(network, names, samples) for network in (model, quantized))
    found = []
    for unit in worst:
        if not layers[unit.name].rate:  # of those that are coded, codes tell more
            found.append(_of_weight(model, unit, layers[unit.name]))
        if unit.name in given:
            found.append(_of_input(unit, given[unit.name], read[unit.name]))
    coded = [u for u in plan.graph.units if u.name in layers and layers[u.name].rate]
    coded = sorted(coded, key=lambda unit: -unit.weights)[:_CODED_SHOWN]
    return [*found, *(_of_codes(unit, layers[unit.name]) for unit in coded)]


def _of_weight(model: nn.Module, unit: Unit, layer: QuantizedLayer) -> Histogram:
    grid = layer.grid_like_weight()
    with torch.no_grad():
        weight = _float_weight(model, unit).to(grid.scale.device)
        codes = weight / grid.scale + grid.zero_point
    ends = [("lowest code", 0.0), ("highest code", float(grid.qmax))]
    name = f"{unit.name}, weights as codes of {layer.bits} bits"
    return _histogram(name, codes, ends)


def _of_codes(unit: Unit, layer: QuantizedLayer) -> Histogram:
    """Return how often each code of a coded layer is used, 0 in the middle."""
    levels = layer.codes().long().flatten().cpu() - ZERO
    low, high = int(levels.min()), int(levels.max())
    counts = torch.bincount(levels - low, minlength=high - low + 1)
    edges = tuple(level - 0.5 for level in range(low, high + 2))
    name = f"{unit.name}, codes: {layer.rate:g} bits coded"
    return Histogram(name, edges, tuple(map(float, counts.tolist())))


def _float_weight(model: nn.Module, unit: Unit) -> Tensor:
    if not unit.norm:
        return model.get_parameter(unit.parameter)
    norm = model.get_submodule(unit.norm)
    return folded(model.get_submodule(unit.name), norm)[0]


def _of_input(unit: Unit, values: Tensor, read: Tensor) -> Histogram:
    # Plus zero, since rounding leaves a zero its sign.
    low, high = (float(end) + 0.0 for end in (read.min(), read.max()))
    ends = [("least read", low), ("greatest read", high)]
    return _histogram(f"{unit.name}, inputs", values, ends)


def _inputs(
    network: nn.Module, names: Sequence[str], samples: Samples
) -> dict[str, Tensor]:
    """Return the first tensor that each module gets, for a few samples."""
    found: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                found.setdefault(name, tensor.detach())

        return hook

    watched = [(network.get_submodule(name), remember(name)) for name in names]
    collect(network, samples.first(_SAMPLES), watched, batch_size=_SAMPLES)
    return found


def _histogram(
    name: str, values: Tensor, lines: Sequence[tuple[str, float]]
) -> Histogram:
    flat = values.detach().float().flatten().cpu()
    low = min(float(flat.min()), *(at for _, at in lines))
    high = max(float(flat.max()), *(at for _, at in lines))
    if high <= low:  # a constant still has a bar
        low, high = low - 0.5, high + 0.5
    counts, edges = torch.histogram(flat, _BINS, range=(low, high))
    return Histogram(name, tuple(edges.tolist()), tuple(counts.tolist()), tuple(lines))
