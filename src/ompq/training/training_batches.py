"""Batches of a training run: dealt to processes, in an order that the seed gives."""

import hashlib
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ompq.configs import TrainConfig
from ompq.errors import DataError
from ompq.network.observation import tensors_in
from ompq.samples import Batch

LabelledBatch: TypeAlias = tuple[Batch, Any]
Shard: TypeAlias = tuple[int, int]  # index of a process, and number of processes


@runtime_checkable
class TrainingData(Protocol):
    """Labelled images that are shuffled, augmented and batched epoch by epoch."""

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
        """Yield the batches of an epoch, all of the same size, from ``start`` on.

        Order and augmentation depend only on the epoch's number and the seed. Each
        process gets its part, ``shard``, of every batch.
        """


Batches: TypeAlias = TrainingData | Iterable[LabelledBatch]


def checked_length(
    batches: Batches, config: TrainConfig, processes: int, device: torch.device
) -> int:
    """Return the number of batches per epoch and process; drops an incomplete step."""
    alone = processes == config.accumulate == 1
    if config.cuda_graph and not (alone and device.type == "cuda"):
        raise ValueError(
            "cuda_graph needs one process on a GPU without accumulation, not "
            f"{processes} on {device.type} with accumulate={config.accumulate}"
        )
    if not isinstance(batches, Sized):
        raise TypeError(
            f"batches is {type(batches).__name__} without a length; training reads it "
            "once per epoch, so pass a list, a DataLoader or training data"
        )
    parts, count = processes * config.accumulate, len(batches)
    steps, reason = count // parts, f"{count} batches, but a step takes {parts}"
    if isinstance(batches, TrainingData):
        if config.batch_size % parts:
            raise ValueError(
                f"batch_size={config.batch_size} cannot be split evenly over "
                f"{processes} processes and accumulate={config.accumulate}; "
                f"use a multiple of {parts}"
            )
        steps = count // config.batch_size
        reason = f"{count} images, but batch_size={config.batch_size}; lower it"
    if not steps:
        raise DataError(f"an epoch has no step: {reason}")
    return steps * config.accumulate


def epoch_batches(
    batches: Batches, epoch: int, config: TrainConfig, numbers: range, shard: Shard
) -> Iterator[LabelledBatch]:
    """Yield those batches of an epoch that have the given numbers, for one process.

    Ready-made batches are dealt to the processes in turn. Training data splits each
    batch, so that a step sees the same images for any number of processes. The global
    generator is seeded before every batch, so that shuffling and dropout depend only on
    the number of the batch, even in a resumed run.
    """
    torch.manual_seed(mixed_seed(config.seed, epoch, 0))
    if isinstance(batches, TrainingData):
        first = numbers.start
        iterator = batches.epoch(
            epoch,
            batch_size=config.batch_size // config.accumulate,
            seed=config.seed,
            start=first,
            shard=shard,
        )
    else:
        process, processes = shard
        first, iterator = 0, islice(batches, process, None, processes)
    for number in range(first, numbers.stop):
        torch.manual_seed(mixed_seed(config.seed, epoch, number))
        batch = next(iterator, None)
        if batch is None:
            raise DataError(
                f"epoch {epoch + 1} ended after {number} of {numbers.stop} batches; "
                "batches must yield as many as its length in every epoch"
            )
        if number in numbers:
            yield batch


def dealt(
    order: Tensor, *, batch_size: int, start: int, shard: Shard
) -> Iterator[Tensor]:
    """Yield a process's part of each full batch of indices (N,), from ``start`` on."""
    process, processes = shard
    for batch in range(start, len(order) // batch_size):
        yield order[batch * batch_size : (batch + 1) * batch_size][process::processes]


def mixed_seed(*numbers: int) -> int:
    """Return a seed that depends on all of the numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def as_labelled(batch: Any, *, class_indices: bool = True) -> LabelledBatch:
    """Return inputs and targets, which are class indices, (N,), unless told otherwise.

    Raises:
        DataError: The batch is not a pair, or its targets are not class indices.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(
            f"a batch is {type(batch).__name__}; training needs (inputs, targets)"
        )
    inputs, targets = batch
    if not class_indices:
        return inputs, targets
    count = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
    whole = isinstance(targets, Tensor) and not (
        targets.is_floating_point() or targets.is_complex()
    )
    if not whole or targets.shape != (count,):
        found = getattr(targets, "dtype", type(targets).__name__)
        shape = tuple(getattr(targets, "shape", ()))
        raise DataError(
            f"targets are {found} of shape {shape} for {count} inputs; training needs "
            f"class indices, integers of shape ({count},), or a loss of your own"
        )
    return inputs, targets.long()
