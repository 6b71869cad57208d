"""Inputs of a network, read by threads when they are needed."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from ompq.datasets.images import normalise
from ompq.errors import DataError, shortened
from ompq.models.naming import NamedModel
from ompq.samples import Progress

_LOG = logging.getLogger(__name__)

Item: TypeAlias = tuple[Tensor, int]


@dataclass(frozen=True)
class Data:
    """Inputs for one network, read when they are needed.

    Attributes:
        name: The name they were loaded by.
        model: The network that takes them.
        length: How many there are.
        read: Position → input (C, H, W) and target. An uint8 input is an image that
            is still to be normalised.
        targets: Class of each input, where known without reading it.
        label_problem: Why there are no usable labels; None when there are.
        workers: Threads that read.
        seed: What the choice of a part of the inputs follows.
        skip_unreadable: Whether unreadable images are left out instead of an error.
    """

    name: str
    model: NamedModel
    length: int
    read: Callable[[int], Item]
    targets: tuple[int, ...] | None = None
    label_problem: str | None = None
    workers: int = 1
    seed: int = 0
    skip_unreadable: bool = False

    def __len__(self) -> int:
        return self.length

    def samples(self, count: int, *, progress: Progress | None = None) -> Tensor:
        """Return inputs spread over the classes, (count, C, H, W).

        The choice follows the seed; fewer samples are a prefix of more.

        Raises:
            DataError: There are fewer inputs, or one cannot be read.
        """
        order = self._order(count)
        # Unreadable images are made up for by those that would come next.
        wanted = order if self.skip_unreadable else order[:count]
        inputs: list[Tensor] = []
        with closing(self.items(wanted, ahead=2 * self.workers)) as items:
            for value, _ in islice(items, count):
                inputs.append(value)
                if progress is not None:
                    progress(len(inputs), count, "reading images")
        if len(inputs) < count:
            raise DataError(
                f"{self.name}: asked for {count} samples, "
                f"found {len(inputs)} that can be read; ask for fewer or add images"
            )
        return self.stack(inputs)

    def batches(self, *, batch_size: int = 64, limit: int | None = None) -> "Batches":
        """Return the inputs with their targets, to be iterated any number of times.

        Args:
            batch_size: Inputs a batch; the last batch may have fewer.
            limit: Take only so many, spread over the classes. None takes all, in
                their own order.

        Raises:
            DataError: There are no usable labels, or fewer inputs than asked for.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if self.label_problem is not None:
            raise DataError(f"{self.name}: {self.label_problem}")
        order = range(self.length) if limit is None else self._order(limit)[:limit]
        return Batches(self, tuple(order), batch_size)

    def _order(self, count: int) -> list[int]:
        """Return all positions: one of each class in turn, shuffled within."""
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        if count > self.length:
            raise DataError(
                f"{self.name}: asked for {count} samples, found {self.length}; "
                "ask for fewer (--samples, --limit) or add some"
            )
        generator = torch.Generator().manual_seed(self.seed)
        shuffled = torch.randperm(self.length, generator=generator).tolist()
        if self.targets is None:
            return shuffled
        seen: dict[int, int] = {}
        rounds = {}
        for position in shuffled:
            target = self.targets[position]
            rounds[position] = seen.get(target, 0)
            seen[target] = rounds[position] + 1
        return sorted(shuffled, key=lambda position: rounds[position])

    def items(self, order: Sequence[int], *, ahead: int) -> Generator[Item, None, None]:
        """Yield the inputs at these positions and their targets, read in advance."""
        skipped: list[str] = []
        results = _in_threads(self._read, order, self.workers, ahead)
        try:
            for result in results:
                if isinstance(result, DataError):
                    skipped.append(str(result))
                else:
                    yield result
        finally:
            results.close()
            if skipped:
                _LOG.warning(
                    "%s: skipped %d unreadable images: %s",
                    self.name,
                    len(skipped),
                    shortened(skipped),
                )

    def _read(self, position: int) -> Item | DataError:
        try:
            return self.read(position)
        except DataError as error:
            if self.skip_unreadable:
                return error
            raise

    def stack(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return inputs as one tensor (N, C, H, W), images normalised."""
        stacked = torch.stack(tuple(inputs))
        if stacked.dtype == torch.uint8:
            return normalise(stacked, self.model)
        return stacked


@dataclass(frozen=True)
class Batches:
    """Labelled batches: pairs of inputs (N, C, H, W) and targets (N,)."""

    data: Data
    order: tuple[int, ...]
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        held: list[Item] = []
        # Images are read ahead while the network works on the batch before.
        for item in self.data.items(self.order, ahead=2 * self.batch_size):
            held.append(item)
            if len(held) == self.batch_size:
                yield self._batch(held)
                held = []
        if held:
            yield self._batch(held)

    def _batch(self, held: Sequence[Item]) -> tuple[Tensor, Tensor]:
        inputs = self.data.stack([value for value, _ in held])
        return inputs, torch.tensor([target for _, target in held])


def _in_threads(
    read: Callable[[int], Item | DataError],
    order: Sequence[int],
    workers: int,
    ahead: int,
) -> Generator[Item | DataError, None, None]:
    """Yield what ``read`` returns, in order, reading at most ``ahead`` in advance."""
    waiting: deque[Future[Item | DataError]] = deque()
    positions = iter(order)
    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting.extend(pool.submit(read, p) for p in islice(positions, ahead))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(read, p) for p in islice(positions, 1))
                yield result
        finally:  # an error, Ctrl-C or a caller that has enough
            for future in waiting:
                future.cancel()
