"""The plain data of a plan: units, their choices, activations and scores."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ompq.bit_widths import CODED_BITS, FLOAT_BITS, GROUP_SIZES
from ompq.errors import PatternError, shorten, suggestion
from ompq.untrusted_json import (
    Count,
    Index,
    Number,
    convert_json,
    row_type,
    whole_number,
)

Table = NDArray[np.float64]
Width = Annotated[int, Meta(ge=1, le=FLOAT_BITS)]

_MOST_WEIGHTS = 1 << 53  # limit for a unit read from a file; exact in float64
_MOST_AXES = 8  # limit for a weight read from a file; a Conv3d's has five
# Kinds whose weights are rounded in place, because the module does more than multiply.
IN_PLACE = ("embedding", "recurrent")
# Kinds whose weights, (out, in), may have a scale for each group of inputs. Those of an
# embedding are tokens and channels.
GROUPED = ("linear", "recurrent", "embedding")
SUPER_BLOCK = 256  # weights of a super-block in GGUF files
_SMALL_GROUPS = {2: 16, 3: 16, 6: 16}  # of super-blocks, by the width of the weights


class Choice(NamedTuple):
    """Bit-widths of a unit's weight and input; coded weights also have a rate.

    Entropy-coded weights take on average at most ``rate`` bits each in a packed file.
    Everywhere else they are ordinary 8-bit weights.

    Example:
        >>> print(Choice(4, 8), Choice(8, 8, rate=2.5))
        W4A8 C2.5A8
    """

    weight: Width
    activation: Width
    rate: Number = 0.0  # bits per coded weight; 0 for weights of fixed width

    def __str__(self) -> str:
        weight = f"C{self.rate:g}" if self.rate else f"W{self.weight}"
        return f"{weight}A{self.activation}"

    @property
    def bits(self) -> float:
        """Bits that a weight takes in a packed file."""
        return self.rate or self.weight

    @property
    def weight_text(self) -> str:
        """The bits of a weight, for display: ``4``, or ``2.5 coded``."""
        return f"{self.rate:g} coded" if self.rate else str(self.weight)

    @property
    def computed(self) -> "Choice":
        """The widths that a runtime computes with: without the rate."""
        return Choice(self.weight, self.activation)

    @property
    def with_float_input(self) -> "Choice":
        """The same weight bits with a float input."""
        return self._replace(activation=32)

    def with_input(self, bits: int) -> "Choice":
        """Return the choice with other input bits; 0 keeps them."""
        return self._replace(activation=bits) if bits else self

    def to_json(self) -> list[float]:
        """Return two numbers, or three with a rate."""
        return [*self] if self.rate else [self.weight, self.activation]

    @classmethod
    def from_json(cls, data: Any, what: str) -> "Choice":
        """Rebuild a choice from :meth:`to_json`; ``what`` names it in errors."""
        return convert_json(data, cls, what).checked()

    def checked(self) -> "Choice":
        """Return the choice itself, or raise a ValueError if it is impossible."""
        if min(self.weight, self.activation) < 1:
            raise ValueError(f"bits must be positive, not {self}")
        if self.rate and (not 0 < self.rate <= CODED_BITS or self.weight != CODED_BITS):
            raise ValueError(
                f"rate={self.rate:g} with {self.weight}-bit weights: a rate must be "
                f"above 0 and at most {CODED_BITS}, with {CODED_BITS}-bit weights"
            )
        return self


def by_bits(choices: Iterable[Choice]) -> list[Choice]:
    """Return choices from the fewest bits to the most."""
    return sorted(choices, key=lambda c: (c.bits, c.activation, c.rate))


@dataclass(frozen=True)
class Unit:
    """One layer whose bits are chosen.

    Attributes:
        name: The module's name, for example ``layer1.0.conv1``.
        kind: ``conv``, ``depthwise``, ``pointwise``, ``grouped``, ``transposed``,
            ``linear``, ``embedding`` or ``recurrent``.
        parameter: The weight's key in the network's ``state_dict``.
        out_channels: Number of output channels; one scale each.
        bias_parameters: Length of the bias; 0 without one.
        norm: Name of the batch norm that follows directly and can be folded, or "".
        norm_parameters: Its affine parameters, or 0.
        activation: Activation function that alone reads the (normalized) output, or "".
        macs: Multiply-accumulates for one input, summed over all calls.
        calls: How often one forward pass calls the layer.
        block: Name of the block; the unit's own name when it stands alone.
        stage: Number of the stage: it grows where the resolution changes.
        group: Units with the same group share their bits.
        feature: Position, among the recorded calls, of the output that represents
            the unit (after batch norm and activation, after a residual sum).
        element_size: Bytes of one weight in the float network.
        shared: Whether another module, such as an embedding, has the same weight.
        input_bits: Bits of its input if a plan fixes them for every choice, or 0.
        group_size: Number of inputs whose weights share a scale within an output
            channel; 0 for one scale per channel.
        super_blocks: Whether groups are those of GGUF's types with super-blocks, where
            some widths have smaller groups and zero points are any numbers.
    """

    name: str
    kind: str
    parameter: str
    weight_shape: tuple[Count, ...]
    out_channels: Count
    bias_parameters: Count
    norm: str
    norm_parameters: Count
    activation: str
    macs: Count
    calls: Count
    block: str
    stage: Count
    group: str
    feature: Index
    element_size: Count = 4
    shared: bool = False
    input_bits: Count = 0
    group_size: Count = 0
    super_blocks: bool = False

    @property
    def replaced(self) -> bool:
        """Whether quantization replaces the layer, adding a bias if it has none.

        A weight that another module reads as well is rounded in place instead.
        """
        return self.kind not in IN_PLACE and self.calls > 0 and not self.shared

    @property
    def weights(self) -> int:
        """Number of weights."""
        return prod(self.weight_shape)

    @property
    def row_length(self) -> int:
        """Number of weights of an output channel."""
        return self.weights // self.out_channels

    def shared_by(self, choice: Choice) -> int:
        """Return how many inputs share a scale at a choice; 0 for one per channel.

        Coded weights need no groups: the entropy coder adapts to their magnitudes.
        """
        if self.super_blocks and choice.weight in _SMALL_GROUPS:
            return _SMALL_GROUPS[choice.weight]
        return 0 if choice.rate else self.group_size

    def scales(self, choice: Choice) -> int:
        """Return the number of scales per output channel."""
        size = self.shared_by(choice)
        return -(-self.weight_shape[1] // size) if size else 1


@dataclass(frozen=True)
class Skipped:
    """A layer or operation that is not quantized, and why.

    Attributes:
        kind: The class of a module whose own parameters stay float. Plans of ompq 0.1
            do not hold it.
        parameters: Number of these parameters.
    """

    name: str
    reason: str
    kind: str = ""
    parameters: Count = 0

    @classmethod
    def parameters_of(cls, name: str, kind: str, count: int) -> "Skipped":
        """Return the record of a module whose own parameters stay float."""
        size = f"{count:,} parameter{'s' * (count > 1)}"
        return cls(name, f"{kind} stays float: {size}", kind, count)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON, without fields that say nothing."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class LayerGraph:
    """The units of a network in execution order, and what is not a unit.

    Attributes:
        skipped: Layers that are not units, with reasons.
        float_bytes: Bytes, in a packed file, of the parameters and buffers that belong
            to no unit after batch norms are folded.
        other_tensors: Number of these tensors, plus the number of quantizable
            activations not read by exactly one unit: sums, averages, repeated calls.
        movable_channels: Number of inputs of linear units, after a LayerNorm or an
            attention, whose scales and means equalization may change.
    """

    units: tuple[Unit, ...]
    skipped: tuple[Skipped, ...] = ()
    float_bytes: Count = 0
    other_tensors: Count = 0
    movable_channels: Count = 0

    def __len__(self) -> int:
        return len(self.units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.units)

    def __repr__(self) -> str:
        weights = sum(unit.weights for unit in self.units)
        return (
            f"LayerGraph({len(self)} units in {len(self.blocks)} blocks, "
            f"{weights:,} weights, {len(self.skipped)} layers left float)"
        )

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
        return _positions(unit.group for unit in self.units)

    @cached_property
    def blocks(self) -> dict[str, tuple[int, ...]]:
        """Block name → positions of its units, in order of first execution."""
        return _positions(unit.block for unit in self.units)

    def tie(self, patterns: Iterable[str | Sequence[str]]) -> "LayerGraph":
        """Return a graph in which units that match the same pattern share their bits.

        Args:
            patterns: Each entry, a pattern or several, ties all units that it matches.

        Raises:
            PatternError: A pattern matches nothing.
        """
        group_of = {unit.name: unit.group for unit in self.units}
        for pattern in patterns:
            parts = [pattern] if isinstance(pattern, str) else pattern
            names = [name for part in parts for name in select(self.names, part)]
            merged = {group_of[name] for name in names}
            target = group_of[names[0]]
            group_of = {n: target if g in merged else g for n, g in group_of.items()}
        return replace(
            self, units=tuple(replace(u, group=group_of[u.name]) for u in self.units)
        )

    def untie(self) -> "LayerGraph":
        """Return a graph without ties between units."""
        return replace(self, units=tuple(replace(u, group=u.name) for u in self.units))

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale in linear units; 0 without groups."""
        return max((unit.group_size for unit in self.units), default=0)

    def grouped(self, size: int | None) -> "LayerGraph":
        """Return a graph whose linear units have a scale for each group of inputs.

        Convolutions, and units with no more inputs than one group, keep one scale per
        channel. With None or 0 all units do.
        """
        units = (
            replace(u, group_size=size)
            if size and u.kind in GROUPED and u.weight_shape[1] > size
            else replace(u, group_size=0)
            for u in self.units
        )
        return replace(self, units=tuple(units))

    def with_super_blocks(self) -> "LayerGraph":
        """Return a graph in which rows of whole super-blocks consist of them."""
        units = (
            replace(u, super_blocks=u.weight_shape[1] % SUPER_BLOCK == 0)
            if u.group_size
            else u
            for u in self.units
        )
        return replace(self, units=tuple(units))

    def differing(self, other: "LayerGraph") -> list[str]:
        """Return the units that two graphs do not have in common with equal shapes."""
        ours, theirs = (
            {unit.name: unit.weight_shape for unit in graph.units}
            for graph in (self, other)
        )
        changed = [name for name in ours if ours[name] != theirs.get(name)]
        return changed + [name for name in theirs if name not in ours]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        # ``asdict`` would be slow for graphs with thousands of units. Fields that no
        # unit uses are left out, as in files written before there were such fields.
        optional = ("input_bits", "group_size", "super_blocks")
        unused = {n for n in optional if not any(getattr(u, n) for u in self.units)}
        names = [f.name for f in fields(Unit) if f.name not in unused]
        units = [{n: getattr(u, n) for n in names} for u in self.units]
        skipped = [one.to_json() for one in self.skipped]
        rest = asdict(replace(self, units=(), skipped=()))
        return {**rest, "skipped": skipped, "units": units}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LayerGraph":
        """Rebuild a graph from :meth:`to_json`; a ValueError says what is wrong."""
        graph = convert_json(data, cls, "graph")
        for unit in graph.units:
            axes = unit.weight_shape
            if not 1 <= len(axes) <= _MOST_AXES or min(axes) < 1:
                raise ValueError(f"weight_shape={list(axes)[:9]} is not a shape")
            if unit.weights > _MOST_WEIGHTS:
                raise ValueError(
                    f"unit {unit.name:.80} has {unit.weights:,} weights; at most "
                    f"{_MOST_WEIGHTS:,} are supported"
                )
            known = unit.group_size in GROUP_SIZES and unit.kind in GROUPED
            whole = unit.group_size > 0 and axes[-1] % SUPER_BLOCK == 0
            if unit.super_blocks and not whole:
                raise ValueError(
                    f"unit {unit.name:.80} with rows of {axes[-1]} and groups of "
                    f"{unit.group_size} cannot have super-blocks of {SUPER_BLOCK}"
                )
            if unit.group_size and not (known and len(axes) == 2):
                raise ValueError(
                    f"unit {unit.name:.80} ({unit.kind:.80}) cannot have groups of "
                    f"{unit.group_size}"
                )
        if len(graph._by_name) < len(graph):
            raise ValueError("two units have the same name")
        return graph


def _positions(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return {name: tuple(members) for name, members in positions.items()}


def select(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that match a pattern.

    Args:
        pattern: An exact name, a glob (``layer4.*``), a regular expression
            (``re:conv[12]$``, which may match anywhere), ``@first`` or ``@last``.

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
                f"{pattern!r} is not a regular expression: {error}"
            ) from error
        matches = [name for name in names if expression.search(name)]
    else:
        matches = fnmatch.filter(names, pattern)
    if not matches:
        raise PatternError(_no_match(pattern, names))
    return matches


def _no_match(pattern: str, names: Sequence[str]) -> str:
    dots = [(name, dot.start()) for name in names for dot in re.finditer(r"\.", name)]
    hint = suggestion(pattern, [*names, *(f"{name[:at]}.*" for name, at in dots)])
    return (
        f"{pattern!r} matches no unit{hint}; the {len(names)} units are "
        f"{shorten(names)}"
    )


class LiveTensor(NamedTuple):
    """An activation and its lifetime, in positions of the recorded calls."""

    values: int  # number of values for one input
    first: int  # the call that computes it
    last: int  # the last call that reads it
    readers: tuple[int, ...]  # units that read it, whose choices set its bits
    returned: bool  # whether the network returns it, which keeps it float

    def to_json(self) -> list[Any]:
        """Return plain data for JSON."""
        return [*self[:3], list(self.readers), int(self.returned)]


def live_tensors_from_json(data: Any, units: int) -> tuple[LiveTensor, ...]:
    """Rebuild live tensors; a ValueError says what is wrong."""
    found, start = [], 0
    readers_type = row_type(whole_number(0, units - 1), ...)
    row = row_type(Count, Count, Count, readers_type, whole_number(0, 1))
    rows = convert_json(data, row_type(row, ...), "activations")
    for values, first, last, readers, returned in rows:
        if not start <= first <= last < 1 << 24:
            raise ValueError("activations must be in order of the calls that make them")
        start = first
        found.append(LiveTensor(values, first, last, readers, bool(returned)))
    return tuple(found)
