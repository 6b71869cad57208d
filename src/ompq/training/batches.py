"""Batches of an epoch: which, in which order, for which process."""

import hashlib
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ompq.errors import DataError
from ompq.recording import tensors_in
from ompq.samples import Batch
from ompq.training.config import TrainConfig

LabelledBatch: TypeAlias = tuple[Batch, Tensor]
Shard: TypeAlias = tuple[int, int]  # a process, and the number of processes


@runtime_checkable
class TrainingData(Protocol):
    """Labelled images that are shuffled, augmented and cut into batches by epoch."""

    def __len__(self) -> int:
        """Return the number of images."""

    def epoch(
        self,
        number: int,
        *,
        batch_size: int,
        seed: int = 0,
        start: int = 0,
        shard: Shard = (0, 1),
    ) -> Iterator[LabelledBatch]:
        """Yield the batches of an epoch, all of one size.

        Args:
            number: Number of the epoch, which with the seed decides order and
                augmentation.
            batch_size: Images of a batch over all processes.
            seed: The run's.
            start: Number of the first batch that is wanted.
            shard: Process, and number of processes: each gets its part of every batch.
        """


Batches: TypeAlias = TrainingData | Iterable[LabelledBatch]


def batches_per_epoch(batches: Batches, config: TrainConfig, processes: int) -> int:
    """Return how many batches each process gets in an epoch: whole steps only.

    Raises:
        TypeError: They can be read only once, or have no length.
        ValueError: A batch cannot be shared out evenly.
        DataError: They do not suffice for one step.
    """
    if not isinstance(batches, Sized):
        raise TypeError(
            f"batches is {type(batches).__name__} without a length; training reads "
            "them once an epoch: pass a list, a DataLoader or training data"
        )
    parts, count = processes * config.accumulate, len(batches)
    steps, found = count // parts, f"{count} batches for {parts} a step"
    if isinstance(batches, TrainingData):
        if config.batch_size % parts:
            raise ValueError(
                f"batch_size={config.batch_size} cannot be shared evenly by "
                f"{processes} processes in {config.accumulate} parts; "
                f"take a multiple of {parts}"
            )
        steps = count // config.batch_size
        found = f"{count} images, fewer than batch_size={config.batch_size}"
    if not steps:
        raise DataError(f"there is no step in an epoch: {found}")
    return steps * config.accumulate


def epoch_batches(
    batches: Batches,
    epoch: int,
    config: TrainConfig,
    *,
    numbers: range,
    shard: Shard = (0, 1),
) -> Iterator[LabelledBatch]:
    """Yield the batches of one process in an epoch.

    Batches that are made already are dealt out in turn; images are shared out so that
    a step sees the same ones however many processes there are. The global generator
    is set before every batch, so that what a loader shuffles and a network drops
    follows the number of the batch alone.

    Args:
        batches: What to yield.
        epoch: Its number.
        config: Batch size and seed.
        numbers: Those that are wanted, to the end of the epoch.
        shard: Process, and number of processes.

    Raises:
        DataError: There are fewer than in the epoch before, or they have no targets,
            or targets that are no classes.
    """
    seed_generators(config.seed, epoch, 0)
    if isinstance(batches, TrainingData):
        first, found = (
            numbers.start,
            batches.epoch(
                epoch,
                batch_size=config.batch_size // config.accumulate,
                seed=config.seed,
                start=numbers.start,
                shard=shard,
            ),
        )
    else:
        process, processes = shard
        first, found = 0, islice(batches, process, None, processes)
    for number in range(first, numbers.stop):
        seed_generators(config.seed, epoch, number)
        batch = next(found, None)
        if batch is None:
            raise DataError(
                f"epoch {epoch + 1} ended after {number} of {numbers.stop} batches; "
                "batches must give as many every time as their length says"
            )
        if number in numbers:
            yield _pair(batch)


def dealt(
    order: Tensor, *, batch_size: int, start: int, shard: Shard
) -> Iterator[Tensor]:
    """Yield the part of each whole batch that a process gets.

    Args:
        order: Numbers of the images of an epoch, (N,).
        batch_size: Images of a batch over all processes.
        start: Number of the first batch that is wanted.
        shard: Process, and number of processes.
    """
    process, processes = shard
    for batch in range(start, len(order) // batch_size):
        yield order[batch * batch_size : (batch + 1) * batch_size][process::processes]


def seed_generators(*numbers: int) -> None:
    """Set the global generators as numbers say."""
    torch.manual_seed(mixed_seed(*numbers))


def mixed_seed(*numbers: int) -> int:
    """Return one seed for several numbers; other numbers give another seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def _pair(batch: Any) -> LabelledBatch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(
            f"a batch is {type(batch).__name__}; training needs (inputs, targets)"
        )
    inputs, targets = batch
    count = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
    if not isinstance(targets, Tensor) or targets.shape != (count,) or _real(targets):
        found = getattr(targets, "dtype", type(targets).__name__)
        shape = tuple(getattr(targets, "shape", ()))
        raise DataError(
            f"targets are {found} of shape {shape} for {count} inputs; training needs "
            f"whole numbers of shape ({count},), the classes"
        )
    return inputs, targets.long()


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
