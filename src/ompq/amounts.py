"""Readable numbers: sizes, counts, fractions, durations, ticks of an axis."""

import re
from collections.abc import Sequence
from math import ceil, floor, log10

from ompq.errors import check_type


def short(value: float) -> str:
    """Return about three digits, no exponent: 1.23, 12.3, 123, 1234."""
    size = abs(value)
    places = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{places}f}"


def in_bytes(value: float) -> str:
    """Return a size in binary units.

    Example:
        >>> in_bytes(1_572_864)
        '1.50 MiB'
    """
    return _scale(value, 1024, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "GB": 10**9, "MB": 10**6}


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes that a text such as ``8GiB`` says; ``name`` is the option's."""
    check_type(name, text, str)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\w+)\s*", text)
    if match is None or match[2] not in _SIZES or not float(match[1]):
        raise ValueError(
            f"{name}={text} is not an amount of memory; write for example 8GiB"
        )
    return int(float(match[1]) * _SIZES[match[2]])


def short_count(value: float) -> str:
    """Return a count with a decimal prefix.

    Example:
        >>> counted(3_469_760)
        '3.47M'
    """
    return _scale(value, 1000, 999.5, ("", "k", "M", "G", "T", "P"))


def _scale(value: float, base: int, limit: float, units: Sequence[str]) -> str:
    """Return a value in the largest unit in which it is at least 1."""
    power = 0
    while abs(value) >= limit and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{short(value) if power else format(value, '.0f')}{units[power]}"


def digits(value: float, count: int = 3) -> str:
    """Return a number with ``count`` significant digits, with an exponent if small."""
    return f"{value:.{count}g}"


def percent(fraction: float, places: int = 1) -> str:
    """Return a fraction in percent."""
    return f"{100 * fraction:.{places}f}%"


def seconds(value: float) -> str:
    """Return a duration."""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 59.95:
        return f"{short(value)} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers from ``low`` to ``high``."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    unit = 10 ** floor(log10(raw))
    step = next(s * unit for s in (1, 2, 2.5, 5, 10) if s * unit >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [n * step for n in range(first, floor(high / step + 1e-9) + 1)]


def decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten that enclose all positive values."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = floor(log10(min(positive))), ceil(log10(max(positive)))
    return low, max(high, low + 1)
