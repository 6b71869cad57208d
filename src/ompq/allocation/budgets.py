"""Budget: limits on what an allocation costs, from text or numbers."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from math import ceil, isfinite
from types import MappingProxyType

from ompq.costs import Cost
from ompq.errors import BudgetError

EXAMPLES = (
    'write for example "1.5MiB", "1.6MB", "3.2bits", "75GBOPs", "12.5%" or "5ms", '
    'or several: "1.5MiB, 75GBOPs"'
)

# Unit in lower case → field, and how many of the field's unit one of it is. Decimal,
# because 0.001 MB must be 1000 bytes and not a little less.
_UNITS: Mapping[str, tuple[str, Decimal]] = MappingProxyType(
    {
        "b": ("size_mib", 1 / Decimal(2**20)),
        "kib": ("size_mib", 1 / Decimal(2**10)),
        "mib": ("size_mib", Decimal(1)),
        "gib": ("size_mib", Decimal(2**10)),
        "kb": ("size_mb", Decimal("1e-3")),
        "mb": ("size_mb", Decimal(1)),
        "gb": ("size_mb", Decimal("1e3")),
        "bit": ("average_bits", Decimal(1)),
        "bits": ("average_bits", Decimal(1)),
        "bops": ("bit_ops", Decimal(1)),
        "kbops": ("bit_ops", Decimal("1e3")),
        "mbops": ("bit_ops", Decimal("1e6")),
        "gbops": ("bit_ops", Decimal("1e9")),
        "tbops": ("bit_ops", Decimal("1e12")),
        "%": ("percent", Decimal(1)),
        "ms": ("latency_ms", Decimal(1)),
    }
)
# Field → units that it may be written in; of two that read equally well, the first.
_WRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "size_mib": ("MiB", "KiB", "GiB", "B"),
        "size_mb": ("MB", "KB", "GB"),
        "average_bits": ("bits",),
        "percent": ("%",),
        "latency_ms": ("ms",),
        "bit_ops": ("BOPs", "kBOPs", "MBOPs", "GBOPs", "TBOPs"),
    }
)
_PART = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z%]*)")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that all hold at once.

    Attributes:
        size_mib: Size in MiB, 2**20 bytes.
        size_mb: Size in MB, 10**6 bytes.
        bit_ops: Bit-operations of one input: MACs × weight bits × activation bits.
        average_bits: Weight bits, averaged over all weights.
        percent: Size in per cent of the float network's.
        latency_ms: Milliseconds, by a latency table.

    Example:
        >>> Budget.parse("1.5MiB, 75GBOPs")
        Budget(size_mib=1.5, size_mb=None, bit_ops=75000000000.0, average_bits=None, \
percent=None, latency_ms=None)
    """

    size_mib: float | None = None
    size_mb: float | None = None
    bit_ops: float | None = None
    average_bits: float | None = None
    percent: float | None = None
    latency_ms: float | None = None

    def __post_init__(self) -> None:
        if not self._given():
            raise BudgetError(f"the budget is empty; {EXAMPLES}")
        for name, value in self._given().items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not isfinite(value) or value <= 0:
                raise BudgetError(f"{name}={value!r} is not positive; {EXAMPLES}")
            object.__setattr__(self, name, float(value))

    @classmethod
    def of(cls, value: "Budget | str") -> "Budget":
        """Return a budget as it is, or parsed from text."""
        return value if isinstance(value, Budget) else cls.parse(value)

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read a budget such as ``"1.5MiB"``, ``"3.2bits"`` or ``"12.5%, 75GBOPs"``.

        Units: B, KB, KiB, MB, MiB, GB, GiB; bits (the average over all weights); BOPs
        with k, M, G or T; % of the float network's size; ms.

        Raises:
            BudgetError: The text is no budget.
        """
        if not isinstance(text, str):
            raise BudgetError(f"{text!r} is no budget; {EXAMPLES}")
        found: dict[str, float] = {}
        for part in text.split(","):
            name, value = _parse_part(part.strip(), text)
            if name in found:
                raise BudgetError(f"{text!r} gives {name} twice; {EXAMPLES}")
            found[name] = value
        return cls(**found)

    def __str__(self) -> str:
        given = self._given()
        return ", ".join(
            _best_read(name, given[name]) for name in _WRITTEN if name in given
        )

    def limits(self, costs: Mapping[str, Cost]) -> dict[str, float]:
        """Return cost name → the most that its constant and chosen entries may sum to.

        Raises:
            BudgetError: A limited cost is not among the costs.
        """
        found: dict[str, float] = {}
        for name, value in self._given().items():
            cost_name, scale, relative = _LIMITED[name]
            cost = costs.get(cost_name)
            if cost is None or (relative and cost.reference <= 0):
                raise BudgetError(_missing(name, value, cost_name, costs))
            limit = Decimal(repr(value)) * scale
            if relative:
                limit *= Decimal(cost.reference)
            found[cost_name] = min(float(limit), found.get(cost_name, float("inf")))
        return found

    def _given(self) -> dict[str, float]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


# Field → the cost it limits, the cost's units in one of the field's, and whether that
# is relative to the cost's reference.
_LIMITED: Mapping[str, tuple[str, Decimal, bool]] = MappingProxyType(
    {
        "size_mib": ("bytes", Decimal(2**20), False),
        "size_mb": ("bytes", Decimal(10**6), False),
        "percent": ("bytes", Decimal("0.01"), True),
        "bit_ops": ("bit_ops", Decimal(1), False),
        "average_bits": ("weight_bits", Decimal(1), True),
        "latency_ms": ("milliseconds", Decimal(1), False),
    }
)


def readable(cost: Cost, *values: float) -> tuple[str, ...]:
    """Return amounts of a cost for people, in one unit, told apart if they differ.

    Example:
        >>> readable(Cost("bytes", np.zeros((1, 1))), 2**20, 1.5 * 2**20)
        ('1.00 MiB', '1.50 MiB')
    """
    scale, unit = _scale(cost, values)
    for digits in range(2, 12):
        texts = tuple(f"{value / scale:.{digits}f} {unit}" for value in values)
        if len(set(texts)) == len(set(values)):
            break
    return texts


def enough(cost: Cost, value: float) -> str:
    """Return the least budget of two decimals that allows an amount of a cost.

    Example:
        >>> enough(Cost("bytes", np.zeros((1, 1))), 29_146)
        '28.47KiB'
    """
    scale, unit = _scale(cost, (value,))
    return f"{_plain(Decimal(ceil(100 * value / scale)) / 100)}{unit}"


def _scale(cost: Cost, values: tuple[float, ...]) -> tuple[float, str]:
    if cost.name == "weight_bits" and cost.reference > 0:
        return cost.reference, "bits"
    scales: list[tuple[float, str]] = {
        "bytes": [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")],
        "bit_ops": [(1e12, "TBOPs"), (1e9, "GBOPs"), (1e6, "MBOPs"), (1.0, "BOPs")],
        "milliseconds": [(1.0, "ms")],
    }.get(cost.name, [(1.0, cost.name)])
    largest = max(values)
    smallest = min((value for value in values if value > 0), default=0.0)
    return next(
        (s for s in scales if largest >= s[0] and smallest >= s[0] / 10), scales[-1]
    )


def _parse_part(part: str, text: str) -> tuple[str, float]:
    match = _PART.fullmatch(part)
    if match is None:
        raise BudgetError(f"{part!r} in {text!r} is no budget; {EXAMPLES}")
    number, unit = match.groups()
    if not unit:
        raise BudgetError(f"{part!r} in {text!r} has no unit; {EXAMPLES}")
    if unit.lower() in ("b", "kb", "mb", "gb") and unit[-1] == "b":
        prefix = unit[:-1].upper()
        better = f"{prefix}iB or {prefix}B" if prefix else "B"
        raise BudgetError(
            f"{unit!r} in {text!r} may be bits or bytes: use {better}; {EXAMPLES}"
        )
    if unit.lower() not in _UNITS:
        raise BudgetError(f"{unit!r} in {text!r} is no unit; {EXAMPLES}")
    if not Decimal(number) > 0:
        raise BudgetError(f"{part!r} is not positive; {EXAMPLES}")
    name, scale = _UNITS[unit.lower()]
    return name, float(Decimal(number) * scale)


def _best_read(name: str, value: float) -> str:
    """Return a limit in the unit that needs the fewest characters, read back exactly.

    Example:
        >>> _best_read("size_mib", 0.0703125)
        '72KiB'
    """
    texts = [text for unit in _WRITTEN[name] for text in _written(value, unit)]
    return min(texts, key=len)


def _written(value: float, unit: str) -> Iterator[str]:
    _, scale = _UNITS[unit.lower()]
    exact = Decimal(repr(value)) / scale
    # Binary units leave long decimals behind; a rounded one is as good if it is read
    # back as the same number.
    for digits in range(1, 18):
        text = _plain(Decimal(f"{exact:.{digits}g}"))
        if float(Decimal(text) * scale) == value:
            yield f"{text}{unit}"
            return
    # Not in this unit; the field's own unit always can.


def _plain(value: Decimal) -> str:
    return format(value.normalize(), "f")


def _missing(name: str, value: float, cost_name: str, costs: Mapping[str, Cost]) -> str:
    if cost_name in costs:
        return (
            f"{name}={value:g} is relative, but the cost {cost_name!r} has no "
            "reference; give an absolute budget"
        )
    advice = (
        "measure a latency table (ompq latency) and give it (--latency FILE)"
        if cost_name == "milliseconds"
        else f"use one of {', '.join(costs)}"
    )
    return f"{name}={value:g} limits {cost_name}, which are not known here; {advice}"
