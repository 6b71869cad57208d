"""Geometry of the page's charts, and figures for papers as PNG, SVG and PDF.

Positions on the page are in per cent; the template draws them.
"""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log10, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import rankdata
from torch import Tensor, nn

from ompq.amounts import decades, digits, in_bytes, percent, ticks
from ompq.attention import with_layers
from ompq.costs import FLOAT_BITS
from ompq.errors import MissingExtraError
from ompq.files import replacing
from ompq.graph import folded
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.plans import Plan, check_plan, refinement_summary
from ompq.rates import ZERO
from ompq.recording import tensors_in
from ompq.results import Accuracy, AuditedRanks, BlockError, Histogram, Section
from ompq.samples import Samples, SamplesLike, collect
from ompq.units import Unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From light to dark; in dark mode the style sheet inverts the picture.
_HEAT_AT = (0.0, 0.45, 1.0)
_HEAT = np.array([(247, 249, 251), (140, 180, 214), (16, 52, 99)])  # (stops, RGB)
_CODED_SHOWN = 12  # coded layers whose codes are drawn
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


def error_chart(rows: Sequence[BlockError]) -> dict[str, Any]:
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

    Weights are the float network's, with the batch norm folded in, in units of codes:
    values around 1 are rounded to 1. Inputs are the float network's for 32 samples; the
    lines show the range that the quantized layer reads, and so where values are
    clipped. For the largest coded layers, the counts of their codes follow.
    """
    check_plan(plan)
    layers, samples = quantized_layers(quantized), Samples.of(samples)
    model = with_layers(model, samples)
    damage = plan.scores.damage[range(len(plan.columns)), plan.columns]
    ranked = sorted(zip(damage, plan.graph.units, strict=True), key=lambda one: -one[0])
    worst = [unit for _, unit in ranked if unit.name in layers][:count]
    names = [unit.name for unit in worst]
    given, read = (_inputs(network, names, samples) for network in (model, quantized))
    histograms = []
    for unit in worst:
        if not layers[unit.name].rate:  # coded layers are shown by their codes
            histograms.append(_weight_histogram(model, unit, layers[unit.name]))
        if unit.name in given:
            # Adding zero turns -0.0 into 0.0.
            low, high = (float(end) + 0.0 for end in read[unit.name].aminmax())
            ends = [("lowest value", low), ("highest value", high)]
            histograms.append(
                _histogram(f"{unit.name}, inputs", given[unit.name], ends)
            )
    coded = [u for u in plan.graph.units if u.name in layers and layers[u.name].rate]
    coded.sort(key=lambda unit: -unit.weights)
    largest = coded[:_CODED_SHOWN]
    return histograms + [_code_histogram(unit, layers[unit.name]) for unit in largest]


def _weight_histogram(model: nn.Module, unit: Unit, layer: QuantizedLayer) -> Histogram:
    grid = layer.grid_like_weight()
    weight: Tensor = model.get_parameter(unit.parameter)
    if unit.norm:
        norm = model.get_submodule(unit.norm)
        weight = folded(model.get_submodule(unit.name), norm)[0]
    with torch.no_grad():
        codes = weight.to(grid.scale.device) / grid.scale + grid.zero_point
    ends = [("lowest code", 0.0), ("highest code", float(grid.qmax))]
    name = f"{unit.name}, weights as codes of {layer.bits} bits"
    return _histogram(name, codes, ends)


def _code_histogram(unit: Unit, layer: QuantizedLayer) -> Histogram:
    """Return the counts of a coded layer's codes, as signed levels."""
    levels = layer.codes().long().flatten().cpu() - ZERO
    low, high = int(levels.min()), int(levels.max())
    counts = torch.bincount(levels - low, minlength=high - low + 1)
    edges = tuple(level - 0.5 for level in range(low, high + 2))
    name = f"{unit.name}, codes: {layer.rate:g} bits coded"
    return Histogram(name, edges, tuple(map(float, counts.tolist())))


def _inputs(
    network: nn.Module, names: Sequence[str], samples: Samples
) -> dict[str, Tensor]:
    """Return the first input tensor of each module, for a few samples."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                inputs.setdefault(name, tensor.detach())

        return hook

    hooks = [(network.get_submodule(name), keep(name)) for name in names]
    collect(network, samples.first(_SAMPLES), hooks, batch_size=_SAMPLES)
    return inputs


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


_COLOURS = {
    "conv": "#2f6db3",
    "pointwise": "#1f9388",
    "depthwise": "#d9861a",
    "grouped": "#8159b8",
    "transposed": "#bd4f78",
    "linear": "#5b6774",
    "embedding": "#6b8e23",
    "recurrent": "#8b6b3d",
}
_NAMED = 40  # with more layers, their names are smaller
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "ompq",  # the same plan gives the same file
    "text.parse_math": False,  # names may contain "$"
}


def write_figures(
    folder: str | Path, plan: Plan, results: Sequence[Section] = ()
) -> list[Path]:
    """Write figures of a plan for a paper or a talk, each as PNG and as SVG.

    They are ``orm`` if ORM was measured, ``bits``, and ``accuracy`` if the results hold
    accuracies of at least two sizes. There, "mixed, 1.5 MiB" and "mixed, 1.3 MiB" are
    joined to one line called "mixed".

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    check_plan(plan)
    drawings: dict[str, Callable[[Figure], None]] = {}
    if plan.scores.orm is not None:
        matrix, labels = plan.scores.orm, plan.scores.orm_labels
        drawings["orm"] = lambda figure: draw_heat(figure, [matrix], labels)
    drawings["bits"] = lambda figure: _draw_bits(figure, plan)
    sized = [r for r in results if isinstance(r, Accuracy) and r.size_bytes]
    if len({result.size_bytes for result in sized}) > 1:
        drawings["accuracy"] = lambda figure: _draw_accuracy(figure, sized)
    written = []
    for name, draw in drawings.items():
        with styled_figure() as figure:
            draw(figure)
            written += save_figure(figure, Path(folder) / name)
    return written


@contextmanager
def styled_figure() -> Iterator["Figure"]:
    """Yield an empty figure; our style applies within the block.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "figures") from error
    with mpl.rc_context(_STYLE):
        yield Figure(layout="constrained", dpi=200)


# Metadata that leaves the date out, so that the same figure gives the same file.
_UNDATED = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def save_figure(
    figure: "Figure", path: Path, endings: Sequence[str] = (".png", ".svg")
) -> list[Path]:
    """Write a figure in several formats and return the files."""
    written = []
    for ending in endings:
        target = path.with_name(path.name + ending)
        with replacing(target) as temporary:
            figure.savefig(temporary, format=ending[1:], metadata=_UNDATED[ending])
        written.append(target)
    return written


def draw_heat(
    figure: "Figure",
    matrices: Sequence[NDArray[np.float64]],
    labels: Sequence[str],
    titles: Sequence[str] = ("",),
) -> None:
    """Draw ORM matrices of the same functions on a common colour scale."""
    across = ceil(sqrt(len(matrices)))
    down = ceil(len(matrices) / across)
    small = len(labels) > _NAMED
    size = max(2.0, min(8.0, (0.08 if small else 0.11) * len(labels)))
    figure.set_size_inches(size * across + 2.0, size * down + 1.0)
    figure.set_layout_engine("compressed")  # panels are square, their margins equal
    panels = figure.subplots(down, across, squeeze=False)
    # The diagonal is always 1 and must not stretch the scale.
    others = [m[~np.eye(len(m), dtype=bool)] for m in matrices]
    low = min((float(m.min()) for m in others if m.size), default=0.0)
    high = max((float(m.max()) for m in others if m.size), default=1.0)
    low, high = (low, high) if high > low else (0.0, 1.0)
    places, fontsize = range(len(labels)), 4 if small else 6
    for axes in panels.flat[len(matrices) :]:
        axes.set_axis_off()
    for at, (matrix, title) in enumerate(zip(matrices, titles, strict=True)):
        axes = panels.flat[at]
        image = axes.imshow(matrix, cmap="Blues", vmin=low, vmax=high)
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=9)
        # Only the outer panels are named: rows on the left, columns at the bottom.
        below = labels if at + across >= len(matrices) else []
        beside = labels if at % across == 0 else []
        axes.set_xticks(places if below else [], below, fontsize=fontsize, rotation=90)
        axes.set_yticks(places if beside else [], beside, fontsize=fontsize)
        axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=panels.ravel().tolist(), label="ORM", shrink=0.8)
    bar.outline.set_visible(False)


def _draw_bits(figure: "Figure", plan: Plan) -> None:
    units = plan.graph.units
    widest = max(c.bits for c in plan.choices if c.weight < FLOAT_BITS)
    bits = [min(plan.allocation[unit.name].bits, widest) for unit in units]
    draw_bars(figure, plan.graph.names, bits, [unit.kind for unit in units])


def draw_bars(
    figure: "Figure", names: Sequence[str], bits: Sequence[float], kinds: Sequence[str]
) -> None:
    """Draw the bits of layers in order of execution, coloured by kind."""
    figure.set_size_inches(max(5.0, min(16.0, 0.14 * len(names) + 1.5)), 3.4)
    axes = figure.add_subplot()
    for kind in dict.fromkeys(kinds):
        rows = [row for row, one in enumerate(kinds) if one == kind]
        colour = _COLOURS.get(kind, "#66727f")
        axes.bar(rows, [bits[row] for row in rows], 0.8, color=colour, label=kind)
    axes.set_ylabel("weight bits")
    axes.set_yticks(range(ceil(max(bits)) + 1))
    axes.set_xlim(-0.7, len(names) - 0.3)
    fontsize = 6 if len(names) <= _NAMED else 5
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=fontsize)
    legend_above(figure)


def _draw_accuracy(figure: "Figure", rows: Sequence[Accuracy]) -> None:
    from matplotlib.ticker import LogLocator

    sizes = [row.size_bytes for row in rows if row.size_bytes]
    unit, scale = ("MiB", 2**20) if min(sizes) >= 0.2 * 2**20 else ("KiB", 2**10)
    axes = plain_axes(figure, f"size, {unit}", "top-1, %")
    series: dict[str, list[Accuracy]] = {}
    for row in sorted(rows, key=lambda row: row.size_bytes or 0.0):
        series.setdefault(row.name.partition(",")[0], []).append(row)
    for name, members in series.items():
        table = np.array([[m.size_bytes, m.top1, m.low, m.high] for m in members])
        x, (top1, low, high) = table[:, 0] / scale, 100 * table[:, 1:].T
        spread = [top1 - low, high - top1]
        axes.errorbar(x, top1, spread, fmt="o-", ms=4, capsize=2, lw=1, label=name)
    if max(sizes) > 4 * min(sizes):
        logarithmic(axes)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    legend_above(figure)


def plain_axes(figure: "Figure", x: str, y: str) -> Any:
    """Return empty axes with a grid and these labels."""
    figure.set_size_inches(5.2, 3.6)
    axes = figure.add_subplot()
    axes.grid(color="#e3e2de", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return axes


def logarithmic(axes: Any) -> None:
    """Make the horizontal axis logarithmic, labelled in plain numbers."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=7)


def legend_above(figure: "Figure") -> None:
    """Add the legend above the axes, in up to four columns, as many as fit."""
    labels = [x for axes in figure.axes for x in axes.get_legend_handles_labels()[1]]
    width = 0.45 + 0.075 * max(map(len, labels), default=0)  # inches of a column
    figure.legend(
        loc="outside upper left",
        ncols=max(1, min(4, int(figure.get_figwidth() / width))),
        frameon=False,
        handlelength=1.2,
    )
