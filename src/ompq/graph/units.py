"""The nouns: Unit, LayerGraph, Choice, and the patterns that name units."""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ompq.errors import PatternError, shortened


class Choice(NamedTuple):
    """Bit-widths that a unit may get: of its weight, and of its input."""

    weight: int
    activation: int

    def __str__(self) -> str:
        return f"W{self.weight}A{self.activation}"


@dataclass(frozen=True)
class Unit:
    """One layer whose bits are chosen.

    Attributes:
        name: The module's name, for example ``layer1.0.conv1``.
        kind: ``conv``, ``depthwise``, ``pointwise``, ``grouped``, ``transposed``,
            ``linear`` or ``attention``.
        parameter: The weight's key in the network's ``state_dict``.
        weight_shape: Shape of the weight.
        out_channels: Number of output channels; one scale each.
        bias_parameters: Length of the bias; 0 without one.
        norm: Name of the batch norm that follows directly and can be folded, or "".
        norm_parameters: Its affine parameters, or 0.
        activation: Function that alone reads the (normalised) output, or "".
        macs: Multiply-accumulates for one input, all calls together.
        calls: How often one forward pass calls the layer.
        block: Name of the block; the unit's own name when it stands alone.
        stage: Number of the stage: it grows where the resolution changes.
        group: Units with the same group share their bits.
        feature: Position, among the observed calls, of the output that represents
            the unit (after batch norm and activation, after a residual sum).
    """

    name: str
    kind: str
    parameter: str
    weight_shape: tuple[int, ...]
    out_channels: int
    bias_parameters: int
    norm: str
    norm_parameters: int
    activation: str
    macs: int
    calls: int
    block: str
    stage: int
    group: str
    feature: int

    @property
    def weights(self) -> int:
        """Number of weights."""
        return prod(self.weight_shape)


@dataclass(frozen=True)
class Skipped:
    """A layer or operation that is not quantized, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class LayerGraph:
    """The units of a network in execution order, and what is not a unit.

    Attributes:
        units: Units in execution order.
        skipped: Layers that are not units, with reasons.
        float_parameters: Parameters and buffers that stay float once the batch norms
            that follow a unit are folded into it.
    """

    units: tuple[Unit, ...]
    skipped: tuple[Skipped, ...] = ()
    float_parameters: int = 0

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, name: str) -> Unit:
        try:
            return self._by_name[name]
        except KeyError:
            raise PatternError(_no_match(name, self.names)) from None

    @cached_property
    def _by_name(self) -> dict[str, Unit]:
        return {unit.name: unit for unit in self.units}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the units, in execution order."""
        return tuple(unit.name for unit in self.units)

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Group name → positions of its units, in order of first execution."""
        found: dict[str, list[int]] = {}
        for position, unit in enumerate(self.units):
            found.setdefault(unit.group, []).append(position)
        return {name: tuple(members) for name, members in found.items()}

    @cached_property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Block name → positions of its units, in order of first execution."""
        found: dict[str, list[int]] = {}
        for position, unit in enumerate(self.units):
            found.setdefault(unit.block, []).append(position)
        return {name: tuple(members) for name, members in found.items()}

    def tie(self, patterns: Iterable[str | Sequence[str]]) -> "LayerGraph":
        """Return a graph in which the units that match one pattern share their bits.

        Args:
            patterns: Each ties its matches: a pattern, or several patterns together.

        Raises:
            PatternError: A pattern matches nothing.
        """
        group_of = {unit.name: unit.group for unit in self.units}
        for pattern in patterns:
            several = [pattern] if isinstance(pattern, str) else pattern
            names = [name for one in several for name in select(self.names, one)]
            merged = {group_of[name] for name in names}
            target = group_of[names[0]]
            group_of = {n: target if g in merged else g for n, g in group_of.items()}
        return replace(
            self, units=tuple(replace(u, group=group_of[u.name]) for u in self.units)
        )

    def untie(self) -> "LayerGraph":
        """Return a graph in which every unit is free."""
        return replace(self, units=tuple(replace(u, group=u.name) for u in self.units))

    def differing(self, other: "LayerGraph") -> list[str]:
        """Return the units that only one of two graphs has, or with another shape."""
        ours, theirs = (
            {unit.name: unit.weight_shape for unit in graph.units}
            for graph in (self, other)
        )
        changed = [name for name in ours if ours[name] != theirs.get(name)]
        return changed + [name for name in theirs if name not in ours]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LayerGraph":
        """Rebuild a graph from :meth:`to_json`."""
        units = tuple(
            Unit(**{**unit, "weight_shape": tuple(unit["weight_shape"])})
            for unit in data["units"]
        )
        skipped = tuple(Skipped(**entry) for entry in data["skipped"])
        return cls(units, skipped, data["float_parameters"])


def select(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that match a pattern.

    Args:
        names: Unit names in execution order.
        pattern: An exact name, a glob (``layer4.*``), a regular expression
            (``re:conv[12]$``, searched), ``@first`` or ``@last``.

    Raises:
        PatternError: Nothing matches, or the regular expression is malformed.

    Example:
        >>> select(["stem", "a.conv1", "a.conv2"], "a.*")
        ['a.conv1', 'a.conv2']
    """
    if pattern in ("@first", "@last") and names:
        return [names[0 if pattern == "@first" else -1]]
    if pattern in names:
        return [pattern]
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern[3:])
        except re.error as error:
            raise PatternError(
                f"{pattern!r} is no regular expression: {error}"
            ) from error
        matches = [name for name in names if expression.search(name)]
    else:
        matches = fnmatch.filter(names, pattern)
    if not matches:
        raise PatternError(_no_match(pattern, names))
    return matches


def _no_match(pattern: str, names: Sequence[str]) -> str:
    return f"{pattern!r} matches no unit; the {len(names)} units are {shortened(names)}"
