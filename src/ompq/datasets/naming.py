"""Data by name: images for a network, as samples or as labelled batches.

A name is a folder of images, ``random``, ``digits`` or ``file.py:function``. A
function of the user's own returns inputs as the network takes them: a tensor
(N, C, H, W), a tuple of such a tensor and targets (N,), or a dataset with a length
and indices, whose items are inputs (C, H, W) or tuples of an input and a target.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.datasets.images import ImageFiles, decode, find_images
from ompq.datasets.inputs import Data, Item
from ompq.errors import DataError, shortened
from ompq.models.demo_network import demo_data
from ompq.models.naming import NamedModel, output_count
from ompq.userfiles import call_user_function, is_user_function, reason

_LOG = logging.getLogger(__name__)
_RANDOM_LENGTH = 1024

Split: TypeAlias = Literal["train", "test"]


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
        model: The network whose preprocessing applies.
        split: Which part to take where the data has two: ``digits``, or a folder that
            holds ``train`` and ``test`` (or ``val``).
        seed: What the choice of samples follows; for ``random``, also the noise.
        workers: Threads that decode; None for one a CPU core, at most 16.
        skip_unreadable: Leave unreadable images out, with a logged count.

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
    # One split for both, so that ompq:demo has never seen the test images.
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

    outputs = output_count(model)
    problem = None
    if outputs != 10:
        problem = f"there are 10 digits, but {model.name} has {outputs} outputs"
    return Data("digits", model, len(targets), read, targets, problem)


def _from_user(name: str, model: NamedModel) -> Data:
    given = call_user_function(name, DataError)
    get, length, targets = _opened(name, given)
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
