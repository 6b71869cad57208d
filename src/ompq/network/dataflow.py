"""Dataflow: which call produces what another one reads."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ompq.network.observation import Call, Recording, is_linear_map
from ompq.network.passive import PARTS, PASSED, SCALINGS
from ompq.network.units import Unit


def find_sole_consumers(
    recording: Recording, consumers: Mapping[int, list[int]], unit: Unit
) -> Iterator[Call]:
    """Yield the calls after a unit, each the only one that reads the one before.

    They end before the first that does more than normalise, activate, scale, add or
    lay out.
    """
    at = unit.feature
    while len(found := consumers.get(at, [])) == 1:
        call = recording.calls[found[0]]
        scales = call.function in SCALINGS and len(call.inputs) == 1
        if not scales and not is_sum(call) and call.function not in PASSED:
            return
        yield call
        at = call.position


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


def producers(calls: Sequence[Call], at: int) -> set[int]:
    """Return the calls whose values a tensor holds, through views and parts of them."""
    if at < 0 or calls[at].function not in PARTS:
        return {at}
    return {source for each in calls[at].inputs for source in producers(calls, each)}
