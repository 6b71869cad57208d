"""Codes as streams of bytes, dense or entropy-coded, and compressed numbers.

Codes to be entropy-coded are bytes of shape (rows, columns, ...): output channels,
input channels and the kernel. The coder predicts each code from what has been read:

- Some rows, columns and kernels have smaller weights than others. The *level* of a code
  is the logarithm of the magnitude expected from its row, its column and the codes
  before it in its kernel.
- Kernels are smooth. The *side* of a code is where its neighbours before it in the
  kernel suggest that it lies, above or below the middle.
- Rows of a classifier resemble each other where classes do. There the side is predicted
  from the rows before, by a linear filter that learns from the columns before.

Level and side are a code's *context*. Neighbouring contexts are merged into *classes*
as long as that saves bytes, and each class has a distribution of its own: a logarithmic
histogram, interpolated between a few points.

A stream holds all that :func:`decode` needs except the shape. Levels, classes and
probabilities are integers computed from integers, and float32 holds all sums of
products exactly, so every machine reads the same codes.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, product
from math import ceil, prod, sqrt
from typing import Any

import numpy as np
from constriction import stream
from numpy.typing import NDArray

from ompq.errors import PackedFileError

Codes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Scales of a coded layer are one number times one of these; a byte says which.
SCALE_MULTIPLES = np.array([(32.0 + m) * 2**e for e in range(8) for m in range(32)])

# A level is a magnitude in quarters of an octave, from 1 / 64 to 128. Magnitudes are
# integers in units of 1 / 256.
_ONE = 256
_MAGNITUDES = np.array([round(4 * 2 ** (level / 4)) for level in range(53)])
_BETWEEN = [round(4 * 2 ** (level / 4 - 1 / 8)) for level in range(1, 53)]
_LEVEL_OF = np.searchsorted(_BETWEEN, np.arange(256 * _ONE), "right").astype(np.int32)
_SIDES = 5  # far below the middle, below, unknown, above, far above
_UNKNOWN = 2  # the side in the middle
# Stands for a kernel's width where the filter over rows predicts the sides. Its guesses
# are in quarters of the mean magnitude, up to 4 times that; one more is "unknown".
_BY_ROWS = -1
_LARGEST_GUESS = 16
_GUESSES = 2 * _LARGEST_GUESS + 2
# The filter reads every eighth row at a time, in this order, and columns in blocks.
_WAVES = (0, 4, 2, 6, 1, 5, 3, 7)
_BLOCK = 64
# The filter's weights are between -1/4 and 1/4, in units of 1 / 4096. With at most so
# many rows, all sums of products are below 2**24, where float32 is exact.
_UNIT, _LARGEST_WEIGHT = 1 << 12, 1 << 10
_LARGEST_INPUT, _LARGEST_ERROR, _MOST_ROWS = 15, 1 << 10, 1 << 10
# Rows multiplied at a time. For more, BLAS libraries start threads, which on a busy
# machine wait for each other many times longer than the products take.
_TILE = 32
# The filter needs a thousand products for a code. Shorter streams may not use it, so
# that their length bounds the time to read them.
_FEWEST_FILTERED_BITS = 0.5
_COMPARED_ROWS, _ALIKE = 128, 1000  # see rows_are_alike
_MOST_CLASSES = 255  # a byte counts them
_LARGEST_KERNEL = 64  # entries; those of a larger one count as columns
# A code is 2 ** (-step / 8) times as likely as the likeliest of its class. Steps are
# stored for codes at these distances from the middle and interpolated between them.
_KNOTS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192])
_FRACTIONS = np.array([round(2 ** (24 - eighth / 8)) for eighth in range(8)])
_LARGEST_STEP = 127  # a chance of about 2 ** -16
_STEP_BITS, _LEVEL_BITS = 6.0, 2.5  # what storing one takes, roughly
_LOST_BITS = 1.4e-4  # per code: the coder's state is an integer
_PRECISION = 24  # bits of the coder's probabilities
# No code takes fewer bits, so that a short stream cannot claim to be a vast layer.
_FEWEST_BITS = 1 / 64
_CHECKSUM = stream.model.Uniform(1 << 16)  # damage stays unseen once in 65,536
_AT_ONCE = 1 << 18  # codes that are grouped by class at a time; they fit into a cache
_FEW_CLASSES = 8  # searching for each of so few is faster than sorting


@dataclass(frozen=True, eq=False)
class CodeModel:
    """The distribution of a layer's codes."""

    centre: int  # the median code
    low: int  # the smallest code
    high: int  # the largest
    rows: Ints  # the level of each row, (rows,), or of all of them, (1,)
    columns: Ints  # what each column adds to it, (columns,) or (1,)
    width: int  # of the kernel, or _BY_ROWS, if contexts have sides; else 0
    starts: Ints  # the first context of each class but the first, (classes - 1,)
    steps: Ints  # the distribution of each class, (classes, knots)

    @classmethod
    def fit(cls, codes: Codes) -> "CodeModel":
        """Return a model that makes these codes small, its own bytes included."""
        planes = _planes(codes)
        counts = np.bincount(planes.ravel(), minlength=256)
        used = np.flatnonzero(counts)
        low, high = int(used[0]), int(used[-1])
        if low == high:  # a distribution has at least two codes
            low, high = (low, high + 1) if high < 255 else (low - 1, high)
        centre = int(counts.cumsum().searchsorted(counts.sum() / 2))
        knots = _knots(low, high, centre)
        rows, columns = _scales(_distances(planes, centre))
        price = _STEP_BITS * len(knots)
        by_level = _LEVEL_BITS * sum(len(x) for x in (rows, columns) if len(x) > 1)
        tables = _tables(planes, centre, rows, columns, _width(codes.shape))
        width, starts, fewest = 0, np.zeros(0, np.int64), _entropy(counts) + price
        for tried, table in tables.items():
            found, bits = _class_starts(table, price)
            if tried != _BY_ROWS:
                bits += by_level
            elif bits < 2 * _FEWEST_FILTERED_BITS * codes.size:
                continue
            if len(found) and bits < fewest:
                width, starts, fewest = tried, found, bits
        if not len(starts):
            rows, columns = rows[:1] * 0, columns[:1] * 0
        elif width == _BY_ROWS:
            rows, columns = np.array([_middle(rows)]), columns[:1] * 0
        table = tables[width][:, low : high + 1]
        parts = np.add.reduceat(table, [0, *starts])
        steps = np.array([_fitted_steps(part, knots) for part in parts])
        return cls(centre, low, high, rows, columns, width, starts, steps)

    @property
    def bits(self) -> Floats:
        """Bits of each code in each class, (classes, 256); infinite if it has no code.

        With :meth:`classes` this also prices other codes of the same weights:
        ``model.bits[model.classes(codes), other_codes]``.
        """
        chances = _chances(self.steps, self._knots)
        # The coder gives each code one unit and shares out the others.
        units = 2**_PRECISION - chances.shape[1]
        shares = chances / chances.sum(1, keepdims=True) * units
        table = np.full((len(chances), 256), np.inf)
        table[:, self.low : self.high + 1] = _PRECISION - np.log2(shares)
        return table

    def classes(self, codes: Codes) -> Codes:
        """Return the class of each code, which depends only on codes before it."""
        planes = _planes(codes)
        found = np.empty_like(planes)
        parts = zip(_parts(found, self.width), self._classes(planes), strict=True)
        for part, classes in parts:
            part[...] = classes
        return np.moveaxis(found, 0, -1).reshape(codes.shape)

    def size(self, codes: Codes) -> int:
        """Return the bytes that codes take with this model, or slightly more."""
        bits, planes = self.bits, _planes(codes)
        counts = _count_codes(planes, self._classes(planes), self.width, len(bits))
        used = counts > 0
        total = counts[used] @ bits[used] + _LOST_BITS * codes.size
        for numbers, width in zip(self._numbers(), (1, 8), strict=True):
            chances = _number_chances(width)
            total -= np.log2(chances[numbers + _LARGEST_NUMBER] / chances.sum()).sum()
        return 4 * ceil((total + 16 + 64) / 32)  # checksum and the last words

    @property
    def _knots(self) -> Ints:
        return _knots(self.low, self.high, self.centre)

    @cached_property
    def _distributions(self) -> list[Any]:
        """The coder's distribution of each class."""
        chances = _chances(self.steps, self._knots).astype(np.float64, order="C")
        return [stream.model.Categorical(row, perfect=False) for row in chances]

    def _classes(self, planes: Codes) -> Iterator[Codes]:
        """Yield the classes of each part; they depend on the parts before."""
        if not len(self.starts):
            yield from map(np.zeros_like, _parts(planes, self.width))
            return
        every = np.arange(_context_count(self.width))
        class_of: Codes = np.searchsorted(self.starts, every, "right").astype("u1")
        scales = self.centre, self.rows, self.columns, self.width
        for contexts in _contexts(planes, *scales):
            yield class_of[contexts]

    def _numbers(self) -> tuple[Ints, Ints]:
        """Return the model as numbers close to 0, and its distributions likewise."""
        middle = int(np.median(self.rows))
        few = [self.centre - 128, self.centre - self.low, self.high - self.centre]
        few += [len(self.starts), len(self.rows) > 1, len(self.columns) > 1, middle]
        few += [2 if self.width == _BY_ROWS else self.width > 0]
        parts = [np.array(few), np.diff(self.starts, prepend=0)]
        parts += [x for x in (self.rows - middle, self.columns) if len(x) > 1]
        return np.concatenate(parts), np.diff(self.steps, prepend=0).ravel()

    @classmethod
    def _read(cls, decoder: Any, shape: Sequence[int], width: int) -> "CodeModel":
        """Read a model for (kernel, rows, columns) codes."""
        few = _read_numbers(decoder, 8, 1)
        centre, below, above, merges, by_row, by_column, middle, sides = map(int, few)
        width = _BY_ROWS if sides == 2 else width if sides else 0
        if width == _BY_ROWS and (shape[0] > 1 or shape[1] > _MOST_ROWS):
            raise ValueError(f"a filter of {shape[1]} rows")
        centre += 128
        low, high = centre - below, centre + above
        if not (0 <= low <= centre <= high <= 255 and low < high):
            raise ValueError(f"codes from {low} to {high} around {centre}")
        if not 0 <= merges < min(_context_count(width), 256):
            raise ValueError(f"{merges + 1} classes")
        starts = np.cumsum(_read_numbers(decoder, merges, 1))
        rows, columns = np.array([middle]), np.array([0])
        if by_row:
            rows = middle + _read_numbers(decoder, shape[1], 1)
        if by_column:
            columns = _read_numbers(decoder, shape[2], 1)
        knots = len(_knots(low, high, centre))
        steps = _read_numbers(decoder, (merges + 1) * knots, 8).reshape(-1, knots)
        steps = np.cumsum(steps, 1)
        ends = np.diff([0, *starts, _context_count(width)]).min()
        if ends < 1 or steps.min() < 0 or steps.max() > _LARGEST_STEP:
            raise ValueError("a distribution is out of bounds")
        return cls(centre, low, high, rows, columns, width, starts, steps)


def coded_size(codes: Codes) -> int:
    """Return how many bytes :func:`encode` writes, or slightly more."""
    return CodeModel.fit(codes).size(codes) if codes.size else 0


def encode(codes: Codes) -> bytes:
    """Return the stream of a layer's codes, (rows, columns, ...)."""
    if not codes.size:
        return b""
    model, planes = CodeModel.fit(codes), _planes(codes)
    encoder = stream.queue.RangeEncoder()
    for numbers, width in zip(model._numbers(), (1, 8), strict=True):
        encoder.encode(
            (numbers + _LARGEST_NUMBER).astype(np.int32), _number_model(width)
        )
    parts = zip(_parts(planes, model.width), model._classes(planes), strict=True)
    for part, classes in parts:
        for some, kinds in _chunks(part, classes):
            symbols = some.astype(np.int32) - model.low
            for places, _, distribution in _group_codes(kinds, model._distributions):
                encoder.encode(symbols[places], distribution)
    encoder.encode(_checksum(planes), _CHECKSUM)
    return bytes(encoder.get_compressed().astype("<u4").tobytes())


def decode(data: bytes, shape: Sequence[int]) -> Codes:
    """Return the codes of a stream; its length bounds memory and time.

    Raises:
        PackedFileError: The stream is damaged, or of another shape.
    """
    size = prod(shape)
    if size > len(data) * 8 / _FEWEST_BITS or len(data) % 4:
        raise PackedFileError(f"a stream of {len(data)} bytes cannot hold {size} codes")
    planes = _planes(np.zeros(shape, np.uint8))
    decoder = stream.queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))
    try:
        if size:
            model = CodeModel._read(decoder, planes.shape, _width(shape))
            filtered = 8 * len(data) / _FEWEST_FILTERED_BITS
            if model.width == _BY_ROWS and size > filtered:
                raise ValueError(f"a filter for {size} codes")
            _read_codes(decoder, model, planes)
            if decoder.decode(_CHECKSUM) != _checksum(planes):
                raise ValueError("its checksum is wrong")
    except (AssertionError, ValueError) as error:  # assertions are constriction's
        raise PackedFileError(f"a stream of codes is damaged: {error}") from error
    if not decoder.maybe_exhausted():
        raise PackedFileError("a stream of codes is damaged: it does not end")
    return np.moveaxis(planes, 0, -1).reshape(shape)


def _read_codes(decoder: Any, model: CodeModel, planes: Codes) -> None:
    # Classes depend on the parts before, which have been read by then.
    parts = zip(_parts(planes, model.width), model._classes(planes), strict=True)
    for part, classes in parts:
        read = part if part.flags.c_contiguous else np.empty(part.shape, np.uint8)
        for some, kinds in _chunks(read, classes):
            for places, amount, distribution in _group_codes(
                kinds, model._distributions
            ):
                some[places] = decoder.decode(distribution, amount)
            some += np.uint8(model.low)
        if read is not part:
            part[...] = read


def _checksum(planes: Codes) -> int:
    return zlib.crc32(planes.data, zlib.crc32(repr(planes.shape).encode())) & 0xFFFF


def _width(shape: Sequence[int]) -> int:
    """Return the width of a kernel whose codes have sides; 0 if there is none."""
    return shape[-1] if 1 < prod(shape[2:]) <= _LARGEST_KERNEL else 0


def _context_count(width: int) -> int:
    if width == _BY_ROWS:
        return _GUESSES
    return len(_MAGNITUDES) * (_SIDES if width else 1)


def _middle(rows: Ints) -> int:
    return int(np.median(rows.clip(0, len(_MAGNITUDES) - 1)))


def _planes(codes: Codes) -> Codes:
    """Return codes as (kernel, rows, columns)."""
    rows = codes.shape[0] if codes.ndim > 1 else 1
    kernel = prod(codes.shape[2:]) if _width(codes.shape) else 1
    cells = codes.reshape(rows, codes.size // max(rows * kernel, 1), kernel)
    return np.ascontiguousarray(np.moveaxis(cells, -1, 0))


def _parts(planes: Codes, width: int) -> Iterator[Codes]:
    """Yield views of the codes that are coded together, in order."""
    if width != _BY_ROWS:
        yield from planes
        return
    for start, first in product(range(0, planes.shape[2], _BLOCK), _WAVES):
        yield planes[0, first :: len(_WAVES), start : start + _BLOCK]


def _tables(
    planes: Codes, centre: int, rows: Ints, columns: Ints, width: int
) -> dict[int, Ints]:
    """Return counts of codes by context, (contexts, 256), for each width to try."""
    alike = not width and rows_are_alike(planes[0].astype(np.float32) - centre)
    found = {}
    for tried in (width, _BY_ROWS) if alike else (width,):
        contexts = _contexts(planes, centre, rows, columns, tried)
        found[tried] = _count_codes(planes, contexts, tried, _context_count(tried))
    if width:
        found[0] = found[width].reshape(_SIDES, -1, 256).sum(0)
    return found


def _count_codes(
    planes: Codes, kinds: Iterable[NDArray[Any]], width: int, count: int
) -> Ints:
    """Count each code in each class or context, (count, 256)."""
    table = np.zeros(count * 256, np.int64)
    for part, kind in zip(_parts(planes, width), kinds, strict=True):
        pairs = kind * np.int32(256) + part
        table += np.bincount(pairs.ravel(), minlength=len(table))
    return table.reshape(count, 256)


def _chunks(part: Codes, classes: Codes) -> Iterator[tuple[Codes, Codes]]:
    flat, kinds = part.reshape(-1), classes.reshape(-1)
    for start in range(0, len(flat), _AT_ONCE):
        cut = slice(start, start + _AT_ONCE)
        yield flat[cut], kinds[cut]


def _group_codes(
    kinds: Codes, distributions: Sequence[Any]
) -> Iterator[tuple[Any, int, Any]]:
    """Yield where the codes of each class are, how many, and their distribution."""
    if len(distributions) == 1:
        yield slice(None), len(kinds), distributions[0]
    elif len(distributions) <= _FEW_CLASSES:
        for kind, distribution in enumerate(distributions):
            places = np.flatnonzero(kinds == kind)
            yield places, len(places), distribution
    else:
        order = np.argsort(kinds, kind="stable")
        every = np.arange(len(distributions))
        ends = np.searchsorted(kinds[order], every, "right").tolist()
        for (start, end), distribution in zip(
            pairwise([0, *ends]), distributions, strict=True
        ):
            yield order[start:end], end - start, distribution


def _distances(planes: Codes, centre: int) -> Codes:
    distances: Codes = np.abs(planes.astype(np.int16) - np.int16(centre)).astype("u1")
    return distances


def _contexts(
    planes: Codes, centre: int, rows: Ints, columns: Ints, width: int
) -> Iterator[NDArray[Any]]:
    """Yield the contexts of each part; they depend on the parts before."""
    if width == _BY_ROWS:
        yield from _guesses(planes[0], centre, int(_MAGNITUDES[_middle(rows)]))
        return
    # No file has levels beyond -1000 and 1000; 16 bits are faster than 64.
    levels = rows.astype(np.int16)[:, None] + columns.astype(np.int16)
    levels = levels.clip(0, len(_MAGNITUDES) - 1)
    levels = np.broadcast_to(levels, planes.shape[1:]).astype(np.int32)
    yield levels + np.int32(len(_MAGNITUDES) * _UNKNOWN) if width else levels
    if len(planes) == 1:
        return
    # The level of row and column counts as much as one code of the kernel.
    total = _MAGNITUDES[levels].astype(np.int32)
    before: list[NDArray[np.int32]] = []
    for plane in planes[:-1]:
        before.append(plane.astype(np.int32) - np.int32(centre))
        total += np.abs(before[-1]) * np.int32(_ONE)
        expected = total // np.int32(len(before) + 1)
        contexts = _LEVEL_OF[expected]
        if width:
            slope = _slope(before, width)
            far = np.abs(slope) * np.int32(_ONE // 2) > expected
            side = np.sign(slope) * (1 + far) + np.int32(_UNKNOWN)
            contexts = contexts + side * np.int32(len(_MAGNITUDES))
        yield contexts


def _guesses(plane: Codes, centre: int, magnitude: int) -> Iterator[Codes]:
    """Yield the sides of each part, as a filter over rows predicts them.

    The prediction of a code is a weighted sum of the codes in its column that belong to
    the waves before. After each block the weights are corrected by the errors that were
    made there: normalised least mean squares.
    """
    scaled = np.rint((np.arange(256) - centre) * (4 * _ONE / magnitude))
    scaled = scaled.clip(-_LARGEST_INPUT, _LARGEST_INPUT).astype(np.float32)
    waves = [plane[first :: len(_WAVES)] for first in _WAVES]
    # Rows of a wave are divided into tiles, the last of which is filled up with zeros.
    tiles = ceil(len(waves[0]) / _TILE)
    tile = ceil(len(waves[0]) / tiles)
    weights = [
        np.zeros((place * tiles, len(wave), tile), np.float32)
        for place, wave in enumerate(waves)
    ]
    for start in range(0, plane.shape[1], _BLOCK):
        width = min(_BLOCK, plane.shape[1] - start)
        inputs = np.zeros((len(waves), tiles * tile, width), np.float32)
        products = np.zeros((width, width))
        for place, wave in enumerate(waves):
            own, known = weights[place], inputs[:place].reshape(-1, tile, width)
            guess = (own @ known).sum(0) * np.float32(1 / _UNIT)
            sides = np.rint(guess).clip(-_LARGEST_GUESS, _LARGEST_GUESS)
            if start == 0 or place == 0:
                sides[:] = _LARGEST_GUESS + 1  # unknown
            yield (sides + _LARGEST_GUESS).astype(np.uint8)
            codes = scaled[wave[:, start : start + _BLOCK]]  # have been read by now
            error = np.rint(16 * (codes - guess)).clip(-_LARGEST_ERROR, _LARGEST_ERROR)
            # The largest step that is stable for any rows is 2 / power.
            power = sqrt(np.vdot(products, products))
            change = error @ known.swapaxes(1, 2)
            change *= np.float32(_UNIT * 2 / (16 * max(power, 1.0)))
            own += np.rint(change, out=change)
            own.clip(-_LARGEST_WEIGHT, _LARGEST_WEIGHT, out=own)
            inputs[place, : len(wave)] = codes
            new = inputs[place].reshape(tiles, tile, width)
            # A copy, since BLAS multiplies a matrix by itself with threads.
            products += (new.swapaxes(1, 2).copy() @ new).sum(0)


def rows_are_alike(values: NDArray[Any]) -> bool:
    """Return whether rows, (rows, columns, ...), are so similar that a filter pays.

    The squared correlation of independent rows is 1 / columns on average; what rows
    have in common beyond that can be predicted.
    """
    rows, columns = len(values), values.size // max(len(values), 1)
    if _width(values.shape) or rows > _MOST_ROWS or columns < 2 * _BLOCK:
        return False
    some = values[:: max(1, rows // _COMPARED_ROWS)].reshape(-1, columns)
    some = some / np.sqrt(np.square(some).sum(1, keepdims=True)).clip(1e-30)
    common = np.square(some @ some.T).mean() - 1 / len(some)
    return bool(rows * (common * columns - 1) > _ALIKE)


def _slope(before: Sequence[NDArray[np.int32]], width: int) -> NDArray[np.int32]:
    """Return about twice the code that its neighbours on the left and above suggest.

    ``before`` are the planes before it in the kernel, less the centre.
    """
    place = len(before)
    if place < width:
        return 2 * before[-1]
    if place % width == 0:
        return 2 * before[-width]
    return 2 * (before[-1] + before[-width]) - before[-width - 1]


def _scales(distances: Codes) -> tuple[Ints, Ints]:
    """Return the level of each row and what each column adds, where that saves bits."""
    kernel, rows, columns = distances.shape
    mean = float(distances.mean())
    levels = np.array([_level(np.array(mean))])
    added = np.array([0])
    by_row = distances.sum((0, 2), dtype=np.int64)
    by_column = distances.sum((0, 1), dtype=np.int64)
    if _gain(by_row, kernel * columns) > _LEVEL_BITS * rows:
        # One more code of average size, since the mean of a few codes is uncertain.
        levels = _level((by_row + mean) / (kernel * columns + 1))
    if _gain(by_column, kernel * rows) > _LEVEL_BITS * columns:
        added = _level((by_column + mean) / (kernel * rows + 1)) - _level(mean)
    return levels, added


def _level(magnitude: Any) -> Any:
    level = np.round(4 * np.log2(np.maximum(magnitude, 1 / 64) * 64))
    return level.astype(np.int64)


def _gain(sums: Ints, each: int) -> float:
    """Return the bits saved if each part has a geometric distribution of its own."""

    def bits(mean: Any) -> Any:
        return (1 + mean) * np.log2(1 + mean) - mean * np.log2(np.maximum(mean, 1e-9))

    means = sums / each
    return float(each * (len(sums) * bits(means.mean()) - bits(means).sum()))


def _entropy(counts: Any) -> Any:
    """Return the entropy, in bits, of codes counted along the last axis."""
    total = counts.sum(-1)
    logs = np.log2(np.maximum(counts, 1))
    return total * np.log2(np.maximum(total, 1)) - (counts * logs).sum(-1)


def _class_starts(table: Ints, price: float) -> tuple[Ints, float]:
    """Merge neighbouring contexts into classes as long as that saves bits.

    ``table`` counts each code in each context, (contexts, codes), and ``price`` is what
    the distribution of a class takes. Returns the first context of each class but the
    first, and the bits in total.
    """
    starts = [0, *(np.flatnonzero(table.sum(1))[1:])]
    parts = [*np.add.reduceat(table, starts)]
    bits = [float(_entropy(part)) for part in parts]

    def lost(place: int) -> float:
        both = _entropy(parts[place] + parts[place + 1])
        return float(both - bits[place] - bits[place + 1])

    losses = [lost(place) for place in range(len(parts) - 1)]
    while losses and (min(losses) <= price or len(parts) > _MOST_CLASSES):
        least = losses.index(min(losses))
        bits[least] += bits[least + 1] + losses[least]
        parts[least] = parts[least] + parts[least + 1]
        for several in (bits, parts, starts):
            del several[least + 1]
        del losses[least]
        for place in {least - 1, least} & {*range(len(losses))}:
            losses[place] = lost(place)
    return np.array(starts[1:], dtype=np.int64), sum(bits) + price * len(parts)


def _knots(low: int, high: int, centre: int) -> Ints:
    """Return the codes whose steps are stored, less the smallest code."""
    # Not by np.unique, which takes as long as reading a layer to import something.
    codes = {low, high, *(centre - _KNOTS).tolist(), *(centre + _KNOTS).tolist()}
    return np.array(sorted(code - low for code in codes if low <= code <= high))


def _fitted_steps(counts: Ints, knots: Ints) -> Ints:
    """Return the steps at the knots that make codes of these counts small."""
    halves = (knots[1:] + knots[:-1] + 1) // 2
    starts = np.array([0, *halves])
    wanted = np.add.reduceat(counts, starts) + 0.5
    logs = np.log2(wanted / np.diff([*starts, len(counts)]))
    everywhere = np.arange(len(counts))
    for _ in range(4):  # corrects for what interpolation adds to each knot's part
        drawn = np.exp2(np.interp(everywhere, knots, logs))
        logs += np.log2(wanted / np.add.reduceat(drawn, starts))
    steps: Ints = np.round(8 * (logs.max() - logs)).astype(np.int64)
    return steps.clip(0, _LARGEST_STEP)


def _chances(steps: Ints, knots: Ints) -> Ints:
    """Return integers proportional to the probabilities, (classes, codes)."""
    codes = np.arange(knots[-1] + 1)
    after = np.searchsorted(knots, codes, "right").clip(max=len(knots) - 1)
    left, right = knots[after - 1], knots[after]
    weighted = steps[:, after - 1] * (right - codes) + steps[:, after] * (codes - left)
    drawn = weighted // (right - left)
    chances: Ints = _FRACTIONS[drawn % 8] >> (drawn // 8)
    # The likeliest code is at most 90 times as likely as all others: _FEWEST_BITS.
    largest = chances.max(1, keepdims=True)
    lacking = largest // 90 - (chances.sum(1, keepdims=True) - largest)
    chances += np.maximum(lacking // (len(codes) - 1) + 1, 0)
    return chances


_LARGEST_NUMBER = 320  # of a model's numbers, positive or negative


@cache
def _number_chances(width: int) -> Floats:
    """Return integers proportional to a Cauchy distribution of a model's numbers."""
    numbers = np.arange(-_LARGEST_NUMBER, _LARGEST_NUMBER + 1)
    return (2**30 // (width**2 + numbers**2)).astype(np.float64)


@cache
def _number_model(width: int) -> Any:
    return stream.model.Categorical(_number_chances(width), perfect=False)


def _read_numbers(decoder: Any, amount: int, width: int) -> Ints:
    numbers: Ints = decoder.decode(_number_model(width), amount).astype(np.int64)
    return numbers - _LARGEST_NUMBER
