"""Data by name: samples and labelled batches for a network."""

import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.datasets.images import ImageFiles, decode, find_images, normalise
from ompq.errors import DataError, shortened
from ompq.models import NamedModel, output_count
from ompq.models.demo_network import demo_data
from ompq.samples import Progress
from ompq.userfiles import call_user_function, is_user_function, reason

Item: TypeAlias = tuple[Tensor, int]
Split: TypeAlias = Literal["train", "test"]

_LOG = logging.getLogger(__name__)
_RANDOM_LENGTH = 1024
_AHEAD = 4  # inputs that each thread reads in advance


@dataclass(frozen=True)
class Data:
    """Inputs for one network, read when they are needed."""

    name: str
    model: NamedModel  # the network that takes them
    length: int
    # Position → input (C, H, W) and target. An uint8 input is an image that is still to
    # be normalised.
    read: Callable[[int], Item]
    # Class of each input, where known without reading it.
    targets: tuple[int, ...] | None = None
    # Why there are no usable labels; None when there are.
    label_problem: str | None = None
    workers: int = 1
    seed: int = 0  # decides the choice of samples
    # Whether unreadable images are skipped instead of an error.
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
        # Skipped images are replaced by those that would come next.
        wanted = order if self.skip_unreadable else order[:count]
        inputs: list[Tensor] = []
        with closing(self.items(wanted)) as items:
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
            limit: Use only so many, spread over the classes. None uses all, in
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
            rounds[position] = seen[target] = seen.get(target, -1) + 1
        return sorted(shuffled, key=lambda position: rounds[position])

    def items(self, order: Sequence[int]) -> Generator[Item, None, None]:
        """Yield the inputs at these positions and their targets, read by threads."""
        ahead, skipped = _AHEAD * self.workers, []
        pool = ThreadPoolExecutor(self.workers)
        chunks = (order[i : i + ahead] for i in range(0, len(order), ahead))
        reading = (pool.map(self._read, chunk) for chunk in chunks)
        try:
            # Pairs: the next chunk is being read while this one is used.
            for results, _ in pairwise(chain(reading, [None])):
                for result in results or ():
                    if isinstance(result, DataError):
                        skipped.append(str(result))
                    else:
                        yield result
        finally:  # an error, Ctrl-C or a caller that has enough
            pool.shutdown(cancel_futures=True)
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
        images = stacked.dtype == torch.uint8
        return normalise(stacked, self.model) if images else stacked


@dataclass(frozen=True)
class Batches:
    """Labelled batches: pairs of inputs (N, C, H, W) and targets (N,)."""

    data: Data
    order: tuple[int, ...]
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with closing(self.data.items(self.order)) as items:
            while held := list(islice(items, self.batch_size)):
                inputs = self.data.stack([value for value, _ in held])
                yield inputs, torch.tensor([target for _, target in held])


def load_data(
    name: str | os.PathLike[str],
    model: NamedModel,
    *,
    split: Split = "test",
    seed: int = 0,
    workers: int | None = None,
    skip_unreadable: bool = False,
) -> Data:
    """Find data by name; images are read later, when samples or batches are asked for.

    Args:
        name: A folder of images (class folders, or images alone: unlabelled),
            ``digits``, ``random`` or ``file.py:function`` (which is executed).
        split: Which part to use where the data has two: ``digits``, or a folder that
            holds ``train`` and ``test`` (or ``val``).
        seed: Decides the choice of samples; for ``random``, also the noise.
        workers: Threads that decode; None for one per CPU core, at most 16.
        skip_unreadable: Skip unreadable images, with a logged count.

    Raises:
        DataError: There is no such data, or it holds nothing that can be used.
        MissingExtraError: ``digits`` without scikit-learn.
    """
    name = os.fspath(name)
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} must be 'train' or 'test'")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if name == "random":
        return _random(model, seed)
    if name == "digits":
        return replace(_digits(model, split), seed=seed)
    if is_user_function(name):
        return replace(_from_user(name, model), seed=seed)
    return replace(
        _from_folder(Path(name), model, split),
        seed=seed,
        workers=workers or min(16, os.cpu_count() or 1),
        skip_unreadable=skip_unreadable,
    )


def _from_folder(folder: Path, model: NamedModel, split: str) -> Data:
    images = find_images(folder, split)
    targets = images.targets

    def read(position: int) -> Item:
        target = -1 if targets is None else targets[position]
        return decode(images.files[position], model), target

    problem = _class_problem(images, model)
    return Data(str(folder), model, len(images.files), read, targets, problem)


def _class_problem(images: ImageFiles, model: NamedModel) -> str | None:
    if images.targets is None:
        return "the images have no labels; sort them into one folder a class"
    found, outputs = len(images.classes), output_count(model)
    if images.numbered and found > outputs:
        return (
            f"class folder {found - 1} is beyond {model.name}'s {outputs} outputs; "
            f"numbered folders are class indices, 0 to {outputs - 1}"
        )
    if not images.numbered and found != outputs:
        return (
            f"there are {found} class folders ({shortened(images.classes)}), "
            f"but {model.name} has {outputs} outputs"
        )
    return None


def _random(model: NamedModel, seed: int) -> Data:
    _LOG.warning("--data random is noise with random labels: the results mean nothing")
    generator = torch.Generator().manual_seed(seed)
    outputs = output_count(model)
    targets = torch.randint(outputs, (_RANDOM_LENGTH,), generator=generator).tolist()

    def read(position: int) -> Item:
        own = torch.Generator().manual_seed(seed * _RANDOM_LENGTH + position)
        return torch.randn(model.input_shape, generator=own), targets[position]

    return Data("random", model, _RANDOM_LENGTH, read, tuple(targets), seed=seed)


def _digits(model: NamedModel, split: str) -> Data:
    # The demo network was trained on the same split, so the test images are new to it.
    data = demo_data()
    images, labels = data.test_images, data.test_targets
    if split == "train":
        images, labels = data.train_images, data.train_targets
    targets = tuple(labels.tolist())
    channels, height, width = model.input_shape
    mean = torch.tensor(model.mean).view(-1, 1, 1)
    std = torch.tensor(model.std).view(-1, 1, 1)

    def read(position: int) -> Item:
        image = images[position : position + 1]
        image = F.interpolate(image, (height, width), mode=model.interpolation)[0]
        return (image.expand(channels, -1, -1) - mean) / std, targets[position]

    outputs, problem = output_count(model), None
    if outputs != 10:
        problem = f"there are 10 digits, but {model.name} has {outputs} outputs"
    return Data("digits", model, len(targets), read, targets, problem)


def _from_user(name: str, model: NamedModel) -> Data:
    get, length, targets = _opened(name, call_user_function(name, DataError))
    if length == 0:
        raise DataError(f"{name} returned no inputs; give at least one")

    def read(position: int) -> Item:
        try:
            item = get(position)
            value, target = item if isinstance(item, tuple | list) else (item, -1)
            found = tuple(value.shape)
        except Exception as error:  # whatever the user's code raises
            raise DataError(f"{name}: item {position}: {reason(error)}") from error
        if found != model.input_shape:
            raise DataError(
                f"{name}: item {position} has shape {found}; "
                f"{model.name} takes {model.input_shape}"
            )
        return value, int(target)

    problem = None
    if read(0)[1] < 0:
        problem = "the inputs have no labels; return (inputs, targets)"
    return Data(name, model, length, read, targets, problem)


def _opened(
    name: str, given: Any
) -> tuple[Callable[[int], Any], int, tuple[int, ...] | None]:
    """Return access by position, the length, and the targets where they are known."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Tensor):
        inputs, targets = given
        if len(inputs) != len(targets):
            raise DataError(
                f"{name} returned {len(inputs)} inputs and {len(targets)} targets"
            )
        known = tuple(int(target) for target in targets)
        return lambda position: (inputs[position], known[position]), len(inputs), known
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise DataError(
            f"{name} returned {type(given).__name__}; it must return a tensor, "
            "(inputs, targets) or a dataset with a length and indices"
        )
    targets = getattr(given, "targets", None)
    if targets is None or len(targets) != len(given):
        return given.__getitem__, len(given), None
    return given.__getitem__, len(given), tuple(int(target) for target in targets)
