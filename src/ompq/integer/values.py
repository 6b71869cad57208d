"""What is known of a tensor while a network is turned into steps."""

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from ompq.errors import QuantizationError
from ompq.integer.steps import CodeGrid, Operation


@dataclass(frozen=True, eq=False)
class Codes:
    """A tensor that is known as codes: the result of a step."""

    step: int
    grid: CodeGrid
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Pending:
    """A tensor whose accumulator is known and whose grid is not: no step yet.

    Attributes:
        operation: What is accumulated.
        inputs: Positions of the steps it reads.
        module: Where.
        shape: Of the accumulator, without the batch dimension.
        low: Values below are clipped to it.
        high: Values above are clipped to it.
        moves: What moves its codes once it has any, with the shape that this gives.
    """

    operation: Operation
    inputs: tuple[int, ...]
    module: str
    shape: tuple[int, ...]
    low: float = -inf
    high: float = inf
    moves: tuple[tuple[Operation, tuple[int, ...]], ...] = ()

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """Shape after the moves, without the batch dimension."""
        return self.moves[-1][1] if self.moves else self.shape


@dataclass(frozen=True, eq=False)
class Moved:
    """Codes in other places, or clipped, on the grid that they had."""

    operation: Operation
    inputs: tuple[int, ...]
    grid: CodeGrid
    low: float = -inf
    high: float = inf


Value: TypeAlias = Codes | Pending


def as_codes(value: Value | None) -> Codes:
    """Return a value that is codes.

    Raises:
        QuantizationError: It is not.
    """
    if isinstance(value, Codes):
        return value
    where = value.module if isinstance(value, Pending) else "a constant"
    raise QuantizationError(f"reads a tensor without a grid, from {where}")


def shape_of(value: Value) -> tuple[int, ...]:
    """Return the shape of a value, without the batch dimension."""
    return value.moved_shape if isinstance(value, Pending) else value.shape
