"""The layout of a block's output: its channels, positions and parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ompq.errors import QuantizationError
from ompq.network.units import Unit

_CHANNELS_LAST = ("linear", "embedding", "recurrent")  # kinds of units


@dataclass(frozen=True)
class Layout:
    """How samples are laid out in a tensor."""

    axis: int | None = 0  # the dimension of the samples; None if all share the tensor
    rows: int = 1  # number of consecutive rows along the axis that make up one sample

    def samples_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor as (N, ...); N is 1 if all samples share it."""
        if self.axis is None:
            return tensor[None]
        tensor = tensor.movedim(self.axis, 0)
        shape = (-1, self.rows, *tensor.shape[1:])
        return tensor if self.rows == 1 else tensor.reshape(shape)

    def restored(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`samples_first`."""
        if self.axis is None:
            return tensor[0]
        tensor = tensor if self.rows == 1 else tensor.flatten(0, 1)
        return tensor.movedim(0, self.axis)


PART = (
    "Reconstruct the part of the network that takes a batch, such as the backbone and "
    "head of a detector, or leave the network as it is"
)


def layout_of(one: Sequence[int], two: Sequence[int]) -> Layout:
    """Infer a tensor's layout from its shapes with one sample and with two."""
    if tuple(one) == tuple(two):
        return Layout(None)
    pairs = zip(one, two, strict=False)
    changed = [axis for axis, sizes in enumerate(pairs) if sizes[0] != sizes[1]]
    if len(one) == len(two) and len(changed) == 1:
        (axis,) = changed
        if two[axis] == 2 * one[axis]:
            return Layout(axis, one[axis])
    raise QuantizationError(
        f"a tensor has shape {tuple(one)} with one sample and {tuple(two)} with two; "
        "reconstruction needs exactly one dimension that grows with the samples. "
        f"{PART}"
    )


def output_axis(unit: Unit, shape: Sequence[int]) -> int:
    """Return the axis, from the end, of the channels in an output (N, ...).

    ``unit`` is the last one before the output. Its channels are where its kind puts
    them, unless only the other usual axis has their number: a block may move them.
    """
    linear = unit.kind in _CHANNELS_LAST
    first = max(1 - len(unit.weight_shape), 1 - len(shape))
    usual, other = (-1, 1 - len(shape)) if linear else (first, -1)
    sizes = shape[usual], shape[other]
    moved = sizes[0] != unit.out_channels == sizes[1]
    return other if moved else usual
