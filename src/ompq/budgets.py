"""Budgets: limits on sums of costs, as people write them."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import floor
from typing import NamedTuple

from ompq.cost_tables import Cost, plain_number
from ompq.errors import BudgetError, suggestion

EXAMPLES = (
    'write for example "1.5MiB", "1.6MB", "3.2bits", "75GBOPs", "12.5%" or "5ms", '
    'or several: "1.5MiB, 75GBOPs"'
)

_LARGEST_LIMIT = 1e300
# Multiples are Decimal, because 0.001 MB must be exactly 1000 bytes.
_ONE = Decimal(1)
_BINARY = {
    "MiB": _ONE,
    "KiB": _ONE / 2**10,
    "GiB": _ONE * 2**10,
    "B": _ONE / 2**20,
}


class _Limit(NamedTuple):
    """What a field of a budget limits, and how it is written."""

    cost: str
    scale: Decimal  # units of the cost in one unit of the field
    # Unit → how many of the field's unit it is; of two that read equally well, the
    # first is written.
    units: Mapping[str, Decimal]
    relative: bool = False  # whether it is a multiple of the cost's reference
    prefix: str = ""  # what precedes a size that is not the packed file's


_LIMITS: Mapping[str, _Limit] = {
    "size_mib": _Limit("bytes", _ONE * 2**20, _BINARY),
    "size_mb": _Limit(
        "bytes", _ONE * 10**6, {"MB": _ONE, "KB": _ONE / 1000, "GB": _ONE * 1000}
    ),
    "average_bits": _Limit("weight_bits", _ONE, {"bits": _ONE}, relative=True),
    "percent": _Limit("bytes", _ONE / 100, {"%": _ONE}, relative=True),
    "latency_ms": _Limit("milliseconds", _ONE, {"ms": _ONE}),
    **{
        f"{prefix}_mib": _Limit(cost, _ONE * 2**20, _BINARY, prefix=prefix)
        for prefix, cost in (
            ("activations", "activation_bytes"),
            ("total", "total_bytes"),
            ("onnx", "onnx_bytes"),
            ("graph", "graph_bytes"),
            ("gguf", "gguf_bytes"),
        )
    },
    "bit_ops": _Limit(
        "bit_ops",
        _ONE,
        {f"{k}BOPs": _ONE * 1000**n for n, k in enumerate(("", "k", "M", "G", "T"))},
    ),
}
# Unit in lower case → the field that it is for, without a prefix.
_FIELD_OF = {
    unit.lower(): name
    for name, limit in _LIMITS.items()
    if not limit.prefix
    for unit in limit.units
}
_PREFIXES = {limit.prefix: name for name, limit in _LIMITS.items() if limit.prefix}
_PART = re.compile(
    r"(?:(\w+):\s*)?([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z%]*)"
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that must all hold.

    Attributes:
        size_mib: Size in MiB, 2**20 bytes.
        size_mb: Size in MB, 10**6 bytes.
        bit_ops: Bit-operations of one input: MACs × weight bits × activation bits.
        average_bits: Weight bits, averaged over all weights.
        percent: Size in per cent of the float network's.
        latency_ms: Milliseconds according to a latency table.
        activations_mib: Peak memory of activations for one input, in MiB.
        total_mib: This memory and the packed file together, in MiB.
        onnx_mib: Size of the ONNX file in MiB.
        graph_mib: Size of a packed file with its ONNX graph in MiB.
        gguf_mib: Size of the GGUF file in MiB.

    Example:
        >>> Budget.parse("1.5MiB, 75GBOPs")
        Budget(size_mib=1.5, size_mb=None, bit_ops=75000000000.0, average_bits=None, \
percent=None, latency_ms=None, activations_mib=None, total_mib=None, onnx_mib=None, \
graph_mib=None, gguf_mib=None)
    """

    size_mib: float | None = None
    size_mb: float | None = None
    bit_ops: float | None = None
    average_bits: float | None = None
    percent: float | None = None
    latency_ms: float | None = None
    activations_mib: float | None = None
    total_mib: float | None = None
    onnx_mib: float | None = None
    graph_mib: float | None = None
    gguf_mib: float | None = None

    def __post_init__(self) -> None:
        if not self._given():
            raise BudgetError(f"the budget is empty; {EXAMPLES}")
        for name, value in self._given().items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not value > 0:
                raise BudgetError(f"{name}={value!r} is not positive; {EXAMPLES}")
            if value > _LARGEST_LIMIT:
                raise BudgetError(
                    f"{name}={reprlib.repr(value)} is too large; {EXAMPLES}"
                )
            object.__setattr__(self, name, float(value))

    @classmethod
    def of(cls, value: "Budget | str") -> "Budget":
        """Return a budget as it is, or parsed from text."""
        return value if isinstance(value, Budget) else cls.parse(value)

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Read a budget such as ``"1.5MiB"``, ``"3.2bits"`` or ``"12.5%, 75GBOPs"``.

        Units: B, KB, KiB, MB, MiB, GB, GiB; bits (the average over all weights); BOPs
        with k, M, G or T; % of the float network's size; ms. ``activations:512KiB``
        limits the peak memory of activations, ``total:2MiB`` this plus the file,
        ``onnx:2MiB`` the ONNX file, ``graph:2MiB`` a packed file with its graph, and
        ``gguf:80MiB`` the GGUF file.

        Raises:
            BudgetError: The text is not a budget.
        """
        if not isinstance(text, str):
            raise BudgetError(f"{reprlib.repr(text)} is not a budget; {EXAMPLES}")
        found: dict[str, float] = {}
        for part in text.split(","):
            name, value = _parse_part(part.strip(), text)
            if name in found:
                raise BudgetError(f"{text!r} gives {name} twice; {EXAMPLES}")
            found[name] = value
        return cls(**found)

    def __str__(self) -> str:
        given = self._given()
        return ", ".join(_best_read(n, given[n]) for n in _LIMITS if n in given)

    def limits(self, costs: Mapping[str, Cost]) -> dict[str, float]:
        """Return the limit on the total of each cost, by name.

        Raises:
            BudgetError: A limited cost is not among the costs.
        """
        found: dict[str, float] = {}
        for name, value in self._given().items():
            limited = _LIMITS[name]
            cost = costs.get(limited.cost)
            if cost is None or (limited.relative and cost.reference <= 0):
                raise BudgetError(_missing(name, value, limited.cost, costs))
            limit = Decimal(repr(value)) * limited.scale
            if limited.relative:
                limit *= Decimal(cost.reference)
            key = limited.cost
            found[key] = min(float(limit), found.get(key, float("inf")))
        return found

    def excess(self, cost: str, size: int) -> str:
        """Say by how much a file exceeds the budget; "" if it does not."""
        for name, value in self._given().items():
            limit = _LIMITS[name]
            over = size - floor(Decimal(repr(value)) * limit.scale)
            if limit.cost == cost and not limit.relative and over > 0:
                return (
                    f"the file takes {size:,} bytes, {over:,} more than the budget of "
                    f"{_best_read(name, value)}; plan again for that much less"
                )
        return ""

    def of_file(self, file: str) -> "Budget":
        """Return the budget with its size limit, if any, applied to another file.

        Example:
            >>> print(Budget.parse("80MiB").of_file("gguf"))
            gguf:80MiB
        """
        size = self._given().keys() & {"size_mib", "size_mb"}
        if not file or not size:
            return self
        parts = str(self).split(", ")
        sizes = Budget(**{name: getattr(self, name) for name in size})
        written = str(sizes).split(", ")
        return Budget.parse(
            ", ".join(f"{file}:{one}" if one in written else one for one in parts)
        )

    def _given(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


def _parse_part(part: str, text: str) -> tuple[str, float]:
    match = _PART.fullmatch(part)
    place = repr(part) if part == text else f"{part!r} in {text!r}"
    if match is None:
        raise BudgetError(f"{place} is not a budget; {EXAMPLES}")
    prefix, number, unit = match.groups()
    if not unit:
        raise BudgetError(f"{place} has no unit; {EXAMPLES}")
    if unit.lower() in ("b", "kb", "mb", "gb") and unit[-1] == "b":
        large = unit[:-1].upper()
        better = f"{large}iB or {large}B" if large else "B"
        raise BudgetError(
            f"{unit!r} in {text!r} may be bits or bytes: use {better}; {EXAMPLES}"
        )
    unit = "bits" if unit.lower() == "bit" else unit
    name = _FIELD_OF.get(unit.lower())
    if name is None:
        known = [unit for limit in _LIMITS.values() for unit in limit.units]
        meant = suggestion(unit, known)
        raise BudgetError(f"{unit!r} in {text!r} is not a unit{meant}; {EXAMPLES}")
    if not Decimal(number) > 0:
        raise BudgetError(f"{part!r} is not positive; {EXAMPLES}")
    units = {written.lower(): scale for written, scale in _LIMITS[name].units.items()}
    amount = Decimal(number) * units[unit.lower()]
    if prefix is None:
        return name, float(amount)
    if prefix not in _PREFIXES or not name.startswith("size"):
        raise BudgetError(
            f"{place} is not a budget: only sizes may follow "
            f"{', '.join(_PREFIXES)}; {EXAMPLES}"
        )
    mebibytes = Decimal(1) if name == "size_mib" else Decimal(10**6) / 2**20
    return _PREFIXES[prefix], float(amount * mebibytes)


def _best_read(name: str, value: float) -> str:
    """Return the shortest text that is parsed as exactly this limit.

    Example:
        >>> _best_read("size_mib", 0.0703125)
        '72KiB'
    """
    texts = []
    limit = _LIMITS[name]
    for unit, scale in limit.units.items():
        exact = Decimal(repr(value)) / scale
        # Other binary units give long decimals. A rounded one will do if it is parsed
        # as the same number, which is always possible in the field's own unit.
        for digits in range(1, 18):
            text = plain_number(Decimal(f"{exact:.{digits}g}"))
            if float(Decimal(text) * scale) == value:
                texts.append(f"{text}{unit}")
                break
    return f"{limit.prefix}:" * bool(limit.prefix) + min(texts, key=len)


def _missing(name: str, value: float, cost_name: str, costs: Mapping[str, Cost]) -> str:
    if cost_name in costs:
        return (
            f"{name}={value:g} is relative, but the cost {cost_name!r} has no "
            "reference; give an absolute budget"
        )
    advice = f"use one of {', '.join(costs)}"
    if cost_name == "milliseconds":
        advice = "give a latency table, measured on your device"
    elif cost_name.endswith("_bytes"):
        advice = "plan again with such a budget: it needs the network"
    return f"{name}={value:g}: this plan has no cost {cost_name!r}; {advice}"
