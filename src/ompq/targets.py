"""Target profiles: which bits a runtime supports, and which of them it runs faster.

A profile is a small JSON file::

    {"format": "ompq-target/1", "name": "my-chip",
     "operators": {
      "default": {"weight_bits": [4, 8], "activation_bits": [8],
                  "per_channel": true, "accelerated": ["W4A8", "W8A8"],
                  "otherwise": "computed in 8 bits"},
      "depthwise": {"weight_bits": [8], "activation_bits": [8], ...}}}

Operators are kinds of units (conv, depthwise, pointwise, grouped, transposed, linear,
embedding, recurrent); ``default`` stands for all others. ``"coded": false``, beside the
name, says that the target cannot decode entropy-coded weights; ``"file": "gguf"`` that
sizes in budgets are those of a GGUF file; ``"row_multiples": {"3": 256}`` that weights
of 3 bits need rows of a multiple of 256; ``"fused": [["gate", "up"]]`` that layers of
these names in one module are computed as one and need the same bits; and ``"settings"``
has fields of :class:`ompq.QuantizeConfig` that the target requires, unless others are
given. Kinds that are supported only in float stay float. A linear layer that shares its
weight with an embedding counts as ``embedding``, if there is such an entry.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ompq.bit_widths import FLOAT_BITS, WIDTHS
from ompq.configs import QuantizeConfig
from ompq.errors import TargetError, check_known, suggestion
from ompq.network.units import Choice, Unit
from ompq.untrusted_json import convert_json, read_json

FORMAT = "ompq-target/1"
KINDS = (
    "conv", "depthwise", "pointwise", "grouped", "transposed", "linear", "embedding",
    "recurrent",
)  # fmt: skip
_DEFAULT = "default"
_FILES = ("", "gguf")
_FOLDER = Path(__file__).parent / "target_profiles"
_WIDTHS = (*WIDTHS, FLOAT_BITS)
_CHOICE = re.compile(r"W(\d+)A(\d+)")


@dataclass(frozen=True)
class OperatorSupport:
    """What a target supports for one kind of unit."""

    weight_bits: tuple[int, ...]  # supported widths of weights; 32 is float
    activation_bits: tuple[int, ...]  # supported widths of inputs
    per_channel: bool  # whether scales per channel, which ompq uses, are supported
    accelerated: tuple[str, ...]  # choices that run faster than wider ones: ``W8A8``
    otherwise: str  # why other choices are not faster


@dataclass(frozen=True)
class Target:
    """A runtime on a kind of machine."""

    name: str
    operators: Mapping[str, OperatorSupport]  # by kind of unit, or ``default``
    coded: bool = True  # whether the target can decode entropy-coded weights
    file: str = ""  # what a budget's size limits: ``gguf``; the packed file if empty
    # Fields of QuantizeConfig that the target requires.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # What the length of a weight's rows must be a multiple of, by the weight's bits.
    row_multiples: Mapping[int, int] = field(default_factory=dict)
    # Names of layers that the runtime computes as one if they are in one module.
    fused: tuple[tuple[str, ...], ...] = ()

    def siblings(self, names: Iterable[str]) -> list[list[str]]:
        """Return the layers that the runtime computes as one, several each."""
        found: dict[tuple[str, int], list[str]] = {}
        for name in names:
            parent, _, leaf = name.rpartition(".")
            for number, together in enumerate(self.fused):
                if leaf in together:
                    found.setdefault((parent, number), []).append(name)
        return [together for together in found.values() if len(together) > 1]

    def operator(self, unit: Unit) -> OperatorSupport:
        """Return what the target supports for a unit."""
        kind = (
            "embedding" if unit.shared and "embedding" in self.operators else unit.kind
        )
        return self.operators.get(kind, self.operators[_DEFAULT])

    def takes(self, unit: Unit, choice: Choice) -> bool:
        """Return whether the target supports a choice for a unit."""
        operator = self.operator(unit)
        return (
            choice.weight in operator.weight_bits
            and choice.activation in operator.activation_bits
            and (self.coded or not choice.rate)
            and unit.row_length % self.row_multiples.get(choice.weight, 1) == 0
        )

    def no_speed_up(self, unit: Unit, choice: Choice) -> str:
        """Return why a choice does not make a unit faster; "" if it does."""
        operator = self.operator(unit)
        if unit.shared_by(choice) and choice.activation < FLOAT_BITS:
            return "weights with a scale per group are multiplied as floats"
        accelerated = str(choice.computed) in operator.accelerated
        return "" if accelerated else operator.otherwise

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        kinds = {kind: asdict(one) for kind, one in self.operators.items()}
        coded = {} if self.coded else {"coded": False}
        more: dict[str, Any] = {"file": self.file} if self.file else {}
        more |= {"settings": dict(self.settings)} if self.settings else {}
        rows = {str(bits): count for bits, count in self.row_multiples.items()}
        more |= {"row_multiples": rows} if rows else {}
        more |= {"fused": [list(one) for one in self.fused]} if self.fused else {}
        about = {"format": FORMAT, "name": self.name, **coded, **more}
        return {**about, "operators": kinds}

    @classmethod
    def from_json(cls, data: Any) -> "Target":
        """Return the target of a profile; a TargetError says what is wrong with it."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TargetError(f"this is not a target profile of format {FORMAT}")
        kinds = data.get("operators")
        if not isinstance(kinds, dict) or _DEFAULT not in kinds:
            raise TargetError('"operators" must have an entry "default"')
        unknown = [kind for kind in kinds if kind not in (_DEFAULT, *KINDS)]
        if unknown:
            raise TargetError(
                f'operator "{unknown[0]}" is unknown{suggestion(unknown[0], KINDS)}; '
                f"there are {', '.join(KINDS)}"
            )
        name = data.get("name")
        if not isinstance(name, str) or not name:
            raise TargetError('"name" must be a non-empty string')
        try:
            coded = convert_json(data.get("coded", True), bool, "coded")
            read = {kind: _operator(kind, one) for kind, one in kinds.items()}
            settings, rows = _settings(data), _row_multiples(data)
            groups = convert_json(data.get("fused", []), list[list[str]], "fused")
            fused = tuple(map(tuple, groups))
            return cls(name, read, coded, _file(data), settings, rows, fused)
        except ValueError as error:
            raise TargetError(str(error)) from error


def included_targets() -> tuple[str, ...]:
    """Return the names of the profiles included in ompq."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_target(name: str | Path) -> Target:
    """Return a target by its name, or by the path of its profile.

    Raises:
        TargetError: There is no such target, or its profile is invalid.
    """
    path = _FOLDER / f"{name}.json" if str(name) in included_targets() else Path(name)
    if not path.exists():
        raise TargetError(
            f"there is no target {name}{suggestion(str(name), included_targets())}; "
            f"use {', '.join(included_targets())} or the path of a JSON file"
        )
    try:
        return Target.from_json(read_json(path))
    except (ValueError, TargetError) as error:
        raise TargetError(f"{path} is not a valid target profile: {error}") from error


def _file(data: Mapping[str, Any]) -> str:
    file = data.get("file", "")
    if file not in _FILES:
        raise ValueError(f'"file" must be one of {", ".join(_FILES[1:])}, or omitted')
    return str(file)


def _row_multiples(data: Mapping[str, Any]) -> Mapping[int, int]:
    given = convert_json(data.get("row_multiples", {}), dict[str, Any], "row_multiples")
    found = {}
    for bits, count in given.items():
        if bits not in map(str, _WIDTHS) or type(count) is not int or count < 1:
            raise ValueError(
                f"row_multiples: {bits!r:.20}: {count!r:.20} must be a width from 2 to "
                "8, or 32, and a number of weights"
            )
        found[int(bits)] = count
    return found


def _settings(data: Mapping[str, Any]) -> Mapping[str, Any]:
    given = convert_json(data.get("settings", {}), dict[str, Any], "settings")
    known = [one.name for one in fields(QuantizeConfig)]
    for name in given:
        check_known("settings", name, known)
    try:
        QuantizeConfig(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return dict(given)


def _operator(kind: str, data: Any) -> OperatorSupport:
    found = convert_json(data, OperatorSupport, f"operator {kind}")
    if not found.per_channel:
        raise TargetError(
            f"operator {kind}: per_channel must be true, because ompq rounds weights "
            "with one scale per channel"
        )
    for name in ("weight_bits", "activation_bits"):
        if not {*getattr(found, name)} <= {*_WIDTHS}:
            raise TargetError(
                f"operator {kind}: {name} must be a list of widths from 2 to 8, or 32"
            )
    if not all(map(_CHOICE.fullmatch, found.accelerated)):
        raise TargetError(
            f"operator {kind}: accelerated must be a list such as W8A8, W4A8"
        )
    return found
