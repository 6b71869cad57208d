"""Heat maps of ORM: a picture on the page, and a figure for papers."""

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From light to dark; in dark mode the style sheet inverts the picture.
_HEAT_AT = (0.0, 0.45, 1.0)
_HEAT = np.array([(247, 249, 251), (140, 180, 214), (16, 52, 99)])  # (stops, RGB)
_HEAT_NAMES = 60  # labels beside the matrix; of more rows, every second or third
_NAMED = 40  # in a figure; of more rows, names are smaller
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
