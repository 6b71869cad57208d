"""Where the samples are in what a block gets and returns.

Most tensors of a network have their samples along the first dimension, but not all:
sequences may come first, windows give several rows a sample, and a mask or an embedding
of positions is the same for all samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ompq.errors import QuantizationError
from ompq.graph.observation import tensors_in, with_tensors


@dataclass(frozen=True)
class Layout:
    """Where the samples of a tensor are.

    Attributes:
        axis: The dimension along which they lie; None for what all samples share.
        rows: How many neighbours along it belong to one sample.
    """

    axis: int | None = 0
    rows: int = 1

    def sorted(self, tensor: Tensor) -> Tensor:
        """Return the tensor with its samples first, (N, ...); N is 1 if shared."""
        if self.axis is None:
            return tensor[None]
        tensor = tensor.movedim(self.axis, 0)
        shape = (-1, self.rows, *tensor.shape[1:])
        return tensor if self.rows == 1 else tensor.reshape(shape)

    def restored(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`sorted`."""
        if self.axis is None:
            return tensor[0]
        tensor = tensor if self.rows == 1 else tensor.flatten(0, 1)
        return tensor.movedim(0, self.axis)


def layout_of(one: Sequence[int], two: Sequence[int]) -> Layout:
    """Return the layout of a tensor from its shapes with one sample and with two.

    Raises:
        QuantizationError: Something other than one dimension doubled.
    """
    if tuple(one) == tuple(two):
        return Layout(None)
    pairs = zip(one, two, strict=False)
    changed = [axis for axis, sizes in enumerate(pairs) if sizes[0] != sizes[1]]
    if len(one) == len(two) and len(changed) == 1:
        (axis,) = changed
        if two[axis] == 2 * one[axis]:
            return Layout(axis, one[axis])
    raise QuantizationError(
        f"a tensor of shape {tuple(one)} with one sample has {tuple(two)} with two; "
        "reconstruction needs one dimension that grows with the samples"
    )


@dataclass(frozen=True)
class Arguments:
    """How a block is called.

    Attributes:
        example: Its arguments and keyword arguments, nested, for any samples.
        layouts: The layout of each tensor in it, in order.
    """

    example: Any
    layouts: Sequence[Layout]

    @property
    def single(self) -> bool:
        """Whether it gets one tensor, its samples first, and nothing else."""
        args, kwargs = self.example
        alone = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
        return alone and self.layouts[0] == Layout()

    def own(self, given: Any) -> list[Tensor]:
        """Return the tensors of such arguments that samples do not share, (N, ...)."""
        pairs = zip(self.layouts, tensors_in(given), strict=True)
        return [layout.sorted(t) for layout, t in pairs if layout.axis is not None]

    def filled(self, own: Sequence[Tensor]) -> Any:
        """Return arguments with these tensors, and what is shared as it was."""
        rest = iter(own)
        tensors = [
            shared if layout.axis is None else layout.restored(next(rest))
            for layout, shared in zip(
                self.layouts, tensors_in(self.example), strict=True
            )
        ]
        return with_tensors(self.example, tensors)
