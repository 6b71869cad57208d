"""Data by name: samples, labelled batches and training sets for a network.

Training sets are shuffled, augmented and cut into batches. Small images are held in the
memory of the training device, and cropped and flipped there a batch at a time. Larger
ones are decoded and cropped by worker processes. Order and augmentation depend only on
the seed, the epoch and the image, not on the number of processes or workers, nor on
where a run was interrupted.
"""

import inspect
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from operator import index, itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.datasets.distillation import distilled_samples
from ompq.datasets.images import ImageFiles, decode_image, find_images, normalise
from ompq.errors import DataError, DeviceMemoryError, check_counts, shorten
from ompq.models.builtin_networks import demo_data
from ompq.models.named_models import NamedModel, output_count
from ompq.progress import Progress
from ompq.samples import (
    batch_length,
    call,
    evaluating,
    is_labelled,
    map_batch,
    model_device,
    to_device,
    token_ids,
)
from ompq.tokenizers import load_tokenizer
from ompq.user_functions import call_user_function, is_user_function, reason

# An input (a tensor, or a tuple or dict of tensors) and its target: a class index, -1
# if there is none, or whatever a metric needs.
Item: TypeAlias = tuple[Any, Any]
Split: TypeAlias = Literal["train", "test"]

_LOG = logging.getLogger(__name__)
_RANDOM_LENGTH = 1024  # inputs of --data random, as many as calibration uses
_DISTILLED_LENGTH = 128  # images of --data distilled unless a number is given
_AHEAD = 4  # inputs that each thread reads ahead


@dataclass(frozen=True)
class Data:
    """Inputs for one network, read when they are needed."""

    name: str
    model: NamedModel  # the network that takes them
    length: int
    # Position → input, for example (C, H, W), and target. A uint8 input is an image
    # that has not been normalised yet.
    read: Callable[[int], Item]
    targets: tuple[int, ...] | None = None  # classes, if known without reading inputs
    label_problem: str | None = None  # why the labels cannot be used
    workers: int = 1  # threads that read
    seed: int = 0  # for the choice of samples
    skip_unreadable: bool = False  # whether unreadable images are skipped
    # Generates a number of samples if there are none to read.
    make: Callable[[int, Progress | None], Tensor] | None = None
    images: ImageFiles | None = None  # the files, if it is a folder of images

    def __len__(self) -> int:
        return self.length

    def samples(self, count: int, *, progress: Progress | None = None) -> Any:
        """Return inputs spread over the classes as one batch: (count, C, H, W).

        Inputs of several tensors give a tuple or a dict of tensors. The seed decides
        the choice; a smaller count gives the first of the same samples.

        Raises:
            DataError: There are fewer inputs, or one cannot be read.
        """
        if self.make is not None:
            return self.make(count, progress)
        order = self._order(count)
        # Each skipped image is replaced by the next one in the order.
        wanted = order if self.skip_unreadable else order[:count]
        inputs: list[Any] = []
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
        """Return the inputs with their targets; can be iterated repeatedly.

        Args:
            limit: Use only this many inputs, spread over the classes. None uses all of
                them in their original order.

        Raises:
            DataError: There are no usable labels, or fewer inputs than asked for.
        """
        check_counts(batch_size=batch_size)
        if self.label_problem is not None:
            raise DataError(f"{self.name}: {self.label_problem}")
        order = range(self.length) if limit is None else self._order(limit)[:limit]
        return Batches(self, tuple(order), batch_size)

    def _order(self, count: int) -> list[int]:
        """Return all positions, taking one of each class in turn, at random."""
        check_counts(count=count)
        if count > self.length:
            raise DataError(
                f"{self.name}: asked for {count} samples, found {self.length}; "
                "ask for fewer or add some"
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
        """Yield the inputs at these positions and their targets, read by threads.

        Decoding releases the GIL, so that threads need no processes of a DataLoader.
        """
        ahead, skipped = _AHEAD * self.workers, []
        pool = ThreadPoolExecutor(self.workers)
        chunks = (order[i : i + ahead] for i in range(0, len(order), ahead))
        reading = (pool.map(self._read, chunk) for chunk in chunks)
        try:
            # pairwise starts to read the next chunk before this one is used.
            for results, _ in pairwise(chain(reading, [None])):
                for result in results or ():
                    if isinstance(result, DataError):
                        skipped.append(str(result))
                    else:
                        yield result
        finally:  # also after an error, Ctrl-C or a caller that stops early
            pool.shutdown(cancel_futures=True)
            if skipped:
                _LOG.warning(
                    "%s: skipped what cannot be read (%d): %s",
                    self.name,
                    len(skipped),
                    shorten(skipped),
                )

    def _read(self, position: int) -> Item | DataError:
        try:
            return self.read(position)
        except DataError as error:
            if self.skip_unreadable:
                return error
            raise DataError(
                f"{error}. Remove it, or skip what cannot be read (skip_unreadable)"
            ) from error

    def stack(self, inputs: Sequence[Any]) -> Any:
        """Return inputs as one batch, (N, ...), with images normalised."""
        if isinstance(inputs[0], tuple):
            return tuple(self.stack(column) for column in zip(*inputs, strict=True))
        if isinstance(inputs[0], dict):
            return {key: self.stack([one[key] for one in inputs]) for key in inputs[0]}
        stacked = torch.stack(tuple(inputs))
        images = stacked.dtype == torch.uint8
        return normalise(stacked, self.model) if images else stacked


@dataclass(frozen=True)
class Batches:
    """Labelled batches: inputs (N, ...) and targets, (N,) if they are class indices."""

    data: Data
    order: tuple[int, ...]
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        with closing(self.data.items(self.order)) as items:
            while batch := list(islice(items, self.batch_size)):
                inputs = self.data.stack([value for value, _ in batch])
                yield inputs, join_items([target for _, target in batch])


def join_items(targets: list[Any]) -> Any:
    """Return targets as one tensor if they are numbers or tensors of one shape."""
    if all(isinstance(one, int | float) for one in targets):
        return torch.tensor(targets)
    shapes = {one.shape if isinstance(one, Tensor) else None for one in targets}
    alike = len(shapes) == 1 and None not in shapes
    return torch.stack(targets) if alike else targets


def load_data(
    name: str | os.PathLike[str],
    model: NamedModel,
    *,
    split: Split = "test",
    seed: int = 0,
    workers: int | None = None,
    skip_unreadable: bool = False,
) -> Data:
    """Find data by name; images are read when samples or batches are taken.

    Args:
        name: A folder of images (in class folders, or unlabelled), a text file for a
            decoder (cut into inputs of the network's length), ``digits``,
            ``distilled`` (from the network's batch norms), ``random``, or
            ``file.py:function`` (which is executed).
        split: Which part of ``digits`` to use, or of a folder that holds ``train`` and
            ``test`` (or ``val``).
        seed: Decides the choice of samples, and the noise of ``random`` and
            ``distilled``.
        workers: Threads that decode images; None for one per CPU core, at most 16.
        skip_unreadable: Skip unreadable images and log their number.

    Raises:
        DataError: There is no such data, or none of it can be used.
        MissingExtraError: ``digits`` needs scikit-learn, which is not installed.
    """
    name = os.fspath(name)
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} must be 'train' or 'test'")
    if workers is not None:
        check_counts(workers=workers)
    if name == "random":
        return _random(model, seed)
    if name == "distilled":
        return _distilled(model, seed)
    if name == "digits":
        return replace(_digits(model, split), seed=seed)
    if is_user_function(name):
        return replace(_from_user(name, model), seed=seed)
    if model.vocabulary and Path(name).is_file():
        return replace(_from_text(Path(name), model), seed=seed)
    return replace(
        _from_folder(Path(name), model, split),
        seed=seed,
        workers=workers or min(16, os.cpu_count() or 1),
        skip_unreadable=skip_unreadable,
    )


def _from_folder(folder: Path, model: NamedModel, split: str) -> Data:
    if len(model.input_shape) != 3:
        text = "a text file or " if model.vocabulary else ""
        raise DataError(
            f"{folder}: {model.name} takes inputs of shape {model.input_shape}, not "
            f"images; give its own data: {text}FILE.py:FUNCTION"
        )
    images = find_images(folder, split)
    targets = images.targets

    def read(position: int) -> Item:
        target = -1 if targets is None else targets[position]
        return decode_image(images.files[position], model), target

    problem = _class_problem(images, model)
    return Data(
        str(folder), model, len(images.files), read, targets, problem, images=images
    )


def _from_text(path: Path, model: NamedModel) -> Data:
    """Cut a text into inputs of token ids; each input is its own target."""
    if not model.tokenizer:
        raise DataError(
            f"{path}: {model.name} has no tokenizer; give token ids: FILE.py:FUNCTION"
        )
    try:
        tokenize = load_tokenizer(model.tokenizer)
        ids = torch.tensor(tokenize(path.read_text(), verbose=False)["input_ids"])
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be tokenized with the tokenizer of {model.name}: "
            f"{reason(error)}; give token ids: FILE.py:FUNCTION"
        ) from error
    (length,) = model.input_shape
    if len(ids) < length:
        raise DataError(
            f"{path} has {len(ids)} tokens, too few for one input of {length}; give a "
            "longer text or a smaller input shape"
        )
    rows = ids[: len(ids) // length * length].reshape(-1, length)
    return Data(str(path), model, len(rows), lambda at: (rows[at], rows[at]))


def _class_problem(images: ImageFiles, model: NamedModel) -> str | None:
    if images.targets is None:
        return "the images have no labels; sort them into one folder per class"
    count, outputs = len(images.classes), output_count(model)
    if images.numbered and count > outputs:
        return (
            f"class folder {count - 1} is beyond {model.name}'s {outputs} outputs; "
            f"numbered folders are class indices, 0 to {outputs - 1}"
        )
    if not images.numbered and count != outputs:
        return (
            f"there are {count} class folders ({shorten(images.classes)}), "
            f"but {model.name} has {outputs} outputs"
        )
    return None


def _random(model: NamedModel, seed: int) -> Data:
    _LOG.warning("the data is noise with random labels: only the sizes are valid")
    generator = torch.Generator().manual_seed(seed)
    if model.vocabulary:
        shape = _RANDOM_LENGTH, *model.input_shape
        ids = torch.randint(model.vocabulary, shape, generator=generator)
        return Data("random", model, _RANDOM_LENGTH, lambda at: (ids[at], ids[at]))
    outputs = output_count(model)
    targets = torch.randint(outputs, (_RANDOM_LENGTH,), generator=generator).tolist()

    def read(position: int) -> Item:
        own = torch.Generator().manual_seed(seed * _RANDOM_LENGTH + position)
        return torch.randn(model.input_shape, generator=own), targets[position]

    return Data("random", model, _RANDOM_LENGTH, read, tuple(targets), seed=seed)


def _distilled(model: NamedModel, seed: int) -> Data:
    def make(count: int, progress: Progress | None) -> Tensor:
        return distilled_samples(
            model.module,
            model.input_shape,
            count,
            normalised=any(model.mean),
            seed=seed,
            progress=progress,
        )

    def read(position: int) -> Item:
        return make(position + 1, None)[position], -1

    problem = "distilled images have no labels; give labelled data"
    return Data(
        "distilled",
        model,
        _DISTILLED_LENGTH,
        read,
        label_problem=problem,
        seed=seed,
        make=make,
    )


def _digits(model: NamedModel, split: str) -> Data:
    # The same split as the demo network's, which has not seen the test images.
    data = demo_data()
    images, labels = data.test_images, data.test_targets
    if split == "train":
        images, labels = data.train_images, data.train_targets
    targets = tuple(labels.tolist())
    channels, height, width = model.input_shape
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (model.mean, model.std))

    def read(position: int) -> Item:
        image = images[position : position + 1]
        image = F.interpolate(image, (height, width), mode=model.interpolation)[0]
        return (image.expand(channels, -1, -1) - mean) / std, targets[position]

    outputs, problem = output_count(model), None
    if outputs != 10:
        problem = f"there are 10 digits, but {model.name} has {outputs} outputs"
    return Data("digits", model, len(targets), read, targets, problem)


def _from_user(name: str, model: NamedModel) -> Data:
    get, length, targets = _indexed(name, call_user_function(name, DataError), model)
    if length == 0:
        raise DataError(f"{name} returned no inputs; give at least one")

    def read(position: int) -> Item:
        try:
            value, target = _item(get(position), model)
            shapes = _shapes(value)
            if _is_missing(target) and (ids := token_ids(value)) is not None:
                target = ids  # a language model predicts the next token
        except Exception as error:  # the user's code may raise anything
            raise DataError(f"{name}: item {position}: {reason(error)}") from error
        if first and shapes != first[0]:
            raise DataError(
                f"{name}: item {position} has shape {_text(shapes)}; the first has "
                f"{_text(first[0])}"
            )
        return value, target

    first: list[Any] = []
    value, target = read(0)
    first.append(_shapes(value))
    if isinstance(value, Tensor):
        model = replace(model, input_shape=tuple(value.shape))
    data = Data(name, model, length, read, targets)
    _check_taken(data, value)
    problem = "the inputs have no labels; return (inputs, targets)"
    return replace(data, label_problem=problem if _is_missing(target) else None)


def _check_taken(data: Data, value: Any) -> None:
    """Raise an error if the network does not take an input."""
    network = data.model.module
    try:
        with evaluating(network):
            call(network, to_device(data.stack([value]), model_device(network)))
    except DeviceMemoryError:
        raise
    except Exception as error:
        raise DataError(
            f"{data.name}: {data.model.name} does not take an input of shape "
            f"{_text(_shapes(value))}: {reason(error)}. (Lists and generators give "
            "batches, whose first dimension counts inputs; each item of a dataset is "
            "one input)"
        ) from error


def _is_missing(target: Any) -> bool:
    return isinstance(target, int) and target < 0


def _item(item: Any, model: NamedModel) -> Item:
    """Return an input and its target, which is -1 if there is none.

    A pair is (input, target), unless it is two tensors for a network of two inputs.
    """
    if isinstance(item, list):
        item = tuple(item)
    pair = isinstance(item, tuple) and len(item) == 2
    if pair and not (isinstance(item[0], Tensor) and _required_inputs(model) > 1):
        value, target = item
        value = tuple(value) if isinstance(value, list) else value
        if isinstance(target, Tensor) and not target.dim():
            target = target.item()
        return value, int(target) if isinstance(target, np.integer) else target
    if isinstance(item, tuple) and len(item) == 1:
        item = item[0]
    return item, -1


def _required_inputs(model: NamedModel) -> int:
    """Return the number of required arguments of the network's forward pass."""
    parameters = inspect.signature(model.module.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is one.empty for one in parameters)


def _shapes(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_shapes(one) for one in value)
    if isinstance(value, dict):
        return {key: _shapes(one) for key, one in value.items()}
    if not hasattr(value, "shape"):
        kind = type(value).__name__
        raise TypeError(f"{kind} is not a tensor; return tensors, or tuples or dicts")
    return value.shape


def _text(shapes: Any) -> str:
    if isinstance(shapes, dict):
        return ", ".join(f"{key} {_text(one)}" for key, one in shapes.items())
    if type(shapes) is tuple:
        return " and ".join(map(_text, shapes))
    return str(tuple(shapes))


def _indexed(
    name: str, given: Any, model: NamedModel
) -> tuple[Callable[[int], Any], int, tuple[int, ...] | None]:
    """Return a function position → item, the length, and the targets if known."""
    pair = isinstance(given, tuple) and len(given) == 2
    if pair and isinstance(given[0], Tensor) and _required_inputs(model) <= 1:
        inputs, targets = given
        if len(inputs) != len(targets):
            raise DataError(
                f"{name} returned {len(inputs)} inputs and {len(targets)} targets"
            )
        classes = _classes(targets)
        return lambda at: (inputs[at], targets[at]), len(inputs), classes
    one_batch = isinstance(given, tuple | dict) or is_labelled(given)
    if one_batch or isinstance(given, list) or not hasattr(given, "__getitem__"):
        items = _split(name, [given] if one_batch else given, model)
        return items.__getitem__, len(items), None
    if not hasattr(given, "__len__"):
        raise DataError(_unusable(name, given))
    targets = getattr(given, "targets", None)
    if targets is None or len(targets) != len(given):
        return given.__getitem__, len(given), None
    return given.__getitem__, len(given), _classes(targets)


def _classes(targets: Any) -> tuple[int, ...] | None:
    """Return targets as class indices, or None if they are something else."""
    try:
        return tuple(map(index, targets))
    except TypeError:  # floats, or tensors of several values
        return None


def _split(name: str, batches: Any, model: NamedModel) -> list[Item]:
    """Return the items of all batches that a function returned or yielded."""
    if not hasattr(batches, "__iter__"):
        raise DataError(_unusable(name, batches))
    items: list[Item] = []
    number = 0  # of the batch that an error is about
    try:
        for batch in batches:
            inputs, targets = _item(batch, model)
            _shapes(inputs)  # says what is not a tensor
            unlabelled = isinstance(targets, int)
            for at in range(batch_length(inputs)):
                one = map_batch(inputs, itemgetter(at))
                target = -1 if unlabelled else _item((one, targets[at]), model)[1]
                items.append((one, target))
            number += 1
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"{name}: batch {number}: {reason(error)}") from error
    return items


def _unusable(name: str, given: Any) -> str:
    return (
        f"{name} returned {type(given).__name__}; it must return a tensor, "
        "(inputs, targets), a dataset with a length and indices, or list or yield "
        "batches: tensors, tuples, dicts, or pairs of these and targets"
    )
