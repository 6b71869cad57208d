"""Blocks: the units between two sums, and the stages of a network."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from torch import nn

from ompq.network.dataflow import OUTSIDE, call_flow, is_sum, rearranges
from ompq.network.observation import Call, Recording


def find_stages(
    recording: Recording, blocks: Sequence[str], features: Sequence[int]
) -> dict[str, int]:
    """Number the stages: a new one begins where a block's resolution changes.

    Each unit has a block and a feature, the call that represents it.
    """
    resolution = {}
    for block, feature in zip(blocks, features, strict=True):
        # The block's last unit wins: it is the block's output.
        shape = recording.calls[feature].shape
        resolution[block] = prod(shape[2:]) if len(shape) > 3 else 1  # of images
    numbers: dict[str, int] = {}
    stage, previous = -1, None
    for block, pixels in resolution.items():
        stage += pixels != previous
        numbers[block], previous = stage, pixels
    return numbers


def find_blocks(
    modules: Mapping[str, nn.Module], recording: Recording, units: Sequence[str]
) -> dict[str, str]:
    """Return the block of each unit: the module that reconstructs as one piece.

    A class whose ``forward`` itself adds or concatenates activations makes blocks; so
    does every other module of that class (a MobileNetV2 block without a shortcut). A
    unit belongs to its innermost such module, or stands alone.
    """
    joining = {call.module for call in _joins(recording)}
    classes = {type(modules[name]) for name in joining if name}
    blocks = {name for name, m in modules.items() if name and type(m) in classes}
    # A block that holds another is a container; its own units stand alone.
    holders = {outer for inner in blocks for outer in _ancestors(inner)} & blocks
    found = {}
    for unit in units:
        inside = [name for name in _ancestors(unit) if name in blocks]
        innermost = inside[-1] if inside else unit
        found[unit] = unit if innermost in holders else innermost
    return found


def _joins(recording: Recording) -> Iterator[Call]:
    """Yield the calls that add or concatenate what different calls computed.

    Rotary positions do so with parts of one tensor, which are not branches.
    """
    dataflow, computed = call_flow(recording), {OUTSIDE}
    for call in recording.calls:
        weights = call.parameters and not rearranges(call)
        if weights or not computed.isdisjoint(call.inputs):  # otherwise a constant
            computed.add(call.position)
        if is_sum(call) or call.function == "cat":
            walks = (dataflow.back([at], rearranges) for at in call.inputs)
            origins = {frozenset(computed.intersection(walk.ends)) for walk in walks}
            if len(origins - {frozenset()}) > 1:
                yield call


def _ancestors(name: str) -> list[str]:
    """Return the modules that hold ``name``, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
