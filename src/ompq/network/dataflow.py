"""Dataflow: which operation reads what which other one computed.

One walker serves recordings of forward passes and graphs of ONNX files alike.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, Protocol, TypeVar

from ompq.network.observation import Call, Recording, is_linear_map
from ompq.network.passive import CLIPS, LAYOUTS, MERGES, VIEWS
from ompq.network.units import Unit

NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
ACTIVATIONS = {
    *CLIPS, "hardtanh", "hardswish", "hardsigmoid", "silu", "gelu", "elu",
    "selu", "celu", "leaky_relu", "prelu", "mish", "sigmoid", "tanh", "softplus",
    "clamp", "clip", "clamp_max", "threshold",
}  # fmt: skip
_SCALINGS = {"add", "sub", "mul", "div"}  # by a constant or a parameter
_REARRANGING = VIEWS | MERGES | _SCALINGS | {"neg"}
_FOLLOWING = LAYOUTS | NORMS | ACTIVATIONS
OUTSIDE = -1  # as a source the network's input, as a reader its caller


class Operation(Protocol):
    """One operation; it is known by its place in a sequence of them."""

    @property
    def function(self) -> str:
        """What it computes, for example ``conv2d``."""

    @property
    def inputs(self) -> Sequence[int]:
        """The operations whose results it reads; ``OUTSIDE`` is the input."""


Each = TypeVar("Each", bound=Operation)


class Walk(NamedTuple):
    """Where a walk led."""

    ends: list[int]  # operations at which it stopped, or OUTSIDE, in order
    passed: list[int]  # operations that it went through


class Dataflow(Generic[Each]):
    """Operations in order of execution, and who reads whose result."""

    def __init__(
        self, operations: Sequence[Each], returned: Collection[int] = ()
    ) -> None:
        """Prepare walks; ``returned`` are the operations that the caller reads."""
        self.operations, self.returned = operations, frozenset(returned)

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place, operation in enumerate(self.operations):
            for source in operation.inputs:
                found.setdefault(source, []).append(place)
        return found

    def readers(self, at: int) -> list[int]:
        """Return the operations that read a result; the caller is not among them."""
        return self._readers.get(at, [])

    def only_reader(self, at: int) -> int | None:
        """Return the one operation that reads a result; None if the caller does, too.

        The result is None as well if there are several readers, or none.
        """
        found = self.readers(at)
        return found[0] if len(found) == 1 and at not in self.returned else None

    def back(self, read: Sequence[int], through: Callable[[Each], bool]) -> Walk:
        """Find where the values of results come from, through some operations."""
        return self._walk(read, lambda place: self.operations[place].inputs, through)

    def ahead(self, at: int, through: Callable[[Each], bool]) -> Walk:
        """Find who reads a result, directly or through some operations.

        The caller, ``OUTSIDE``, is among the ends if it reads the result on the way.
        """
        return self._walk(self._all_readers(at), self._all_readers, through)

    def chain(self, at: int, through: Callable[[Each], bool]) -> Iterator[Each]:
        """Yield the operations after one, while each has a single reader."""
        while len(found := self.readers(at)) == 1:
            (at,) = found
            if not through(self.operations[at]):
                return
            yield self.operations[at]

    def _all_readers(self, at: int) -> list[int]:
        return [*self.readers(at), *[OUTSIDE] * (at in self.returned)]

    def _walk(
        self,
        start: Sequence[int],
        following: Callable[[int], Sequence[int]],
        through: Callable[[Each], bool],
    ) -> Walk:
        walk, seen, left = Walk([], []), set(), [*reversed(start)]
        while left:
            place = left.pop()
            if place in seen:
                continue
            seen.add(place)
            if place != OUTSIDE and through(self.operations[place]):
                walk.passed.append(place)
                left.extend(reversed(following(place)))
            else:
                walk.ends.append(place)
        return walk


def call_flow(recording: Recording) -> Dataflow[Call]:
    """Return the dataflow of a forward pass; a call is known by its position."""
    return Dataflow(recording.calls, recording.returned)


def is_view(call: Call) -> bool:
    """Whether a call returns values of its input, all or some, as they are."""
    return call.function in VIEWS


def rearranges(call: Call) -> bool:
    """Whether a call moves, merges, scales or shifts values."""
    return call.function in _REARRANGING


def follows_unit(call: Call) -> bool:
    """Whether a call belongs to the unit whose output it alone reads.

    It does not if it does more than normalise, activate, scale, add or lay out.
    """
    scales = call.function in _SCALINGS and len(call.inputs) == 1
    return scales or is_sum(call) or call.function in _FOLLOWING


def is_sum(call: Call) -> bool:
    """Whether a call adds two activations, as a residual connection does."""
    return call.function == "add" and len(call.inputs) == 2


def units_read_once(recording: Recording, units: Collection[Unit]) -> dict[int, Unit]:
    """Return the units whose weight one call alone reads, by the call's position."""
    times = Counter(key for call in recording.calls for key in call.parameters)
    return unit_calls(recording, [u for u in units if times[u.parameter] == 1])


def unit_calls(recording: Recording, units: Collection[Unit]) -> dict[int, Unit]:
    """Return the unit whose weight a call multiplies by, by the call's position."""
    by_weight = {unit.parameter: unit for unit in units}
    return {
        call.position: by_weight[key]
        for call in recording.calls
        if is_linear_map(call.function)
        for key in call.parameters
        if key in by_weight
    }
