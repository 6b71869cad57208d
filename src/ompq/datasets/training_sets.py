"""Training sets: shuffled, augmented, dealt to processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from ompq.datasets.images import ImageFiles, decode_image, open_image
from ompq.datasets.named_data import Data, join_items
from ompq.errors import DataError, check_type
from ompq.evaluation import is_class_indices
from ompq.models.named_models import NamedModel
from ompq.network.observation import tensors_in
from ompq.optional_libraries import torchvision_library
from ompq.progress import Progress, ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.samples import Batch, evaluating, first_tensor, map_batch, run_batch
from ompq.training.training_batches import Shard, TrainingData, dealt, mixed_seed

Crop: TypeAlias = tuple[Tensor, int]

_SMALL = 64  # images up to this side are shifted; larger ones cropped and resized
_PADDING = 4  # pixels on each side, as usual for CIFAR-10


@shows_progress("reading images")
def training_data(
    data: Data,
    *,
    device: torch.device | str = "cpu",
    augment: bool = True,
    progress: ProgressLike = None,
) -> TrainingData:
    """Return labelled data for training; small images are held in memory.

    Args:
        augment: Whether images are cropped and flipped at random; other inputs never
            are.

    Raises:
        DataError: The data has no usable labels or cannot be read.
    """
    check_type("data", data, Data)
    if data.label_problem is not None:
        raise DataError(f"{data.name}: {data.label_problem}")
    device = torch.device(device)
    large = max(data.model.input_shape[1:], default=0) > _SMALL
    if data.images is None or not large:
        return _held(data, device, augment=augment, progress=callback(progress))
    return ImageSet(
        data.images,
        # Workers need the preprocessing, but not the network itself.
        replace(data.model, module=nn.Identity()),
        workers=data.workers,
        device=device,
        augment=augment,
        skip_unreadable=data.skip_unreadable,
    )


@dataclass(frozen=True, eq=False)
class HeldSet:
    """Inputs held in device memory; images are cropped and flipped there."""

    # uint8 images (N, H, W, C), padded on all sides, or other inputs, (N, ...) each,
    # which are not augmented.
    inputs: Batch
    targets: Tensor  # classes, (N,), or what a loss of the user's own needs, (N, ...)
    padding: int  # pixels on each side; 0 for no augmentation
    mean: Tensor  # per channel, for pixels in [0, 255], (C,)
    std: Tensor  # likewise, (C,)

    def __len__(self) -> int:
        return len(self.targets)

    def epoch(
        self,
        number: int,
        *,
        batch_size: int,
        seed: int = 0,
        start: int = 0,
        shard: Shard = (0, 1),
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield inputs (N, C, H, W) and targets (N,), N = batch size / processes."""
        device = self.targets.device
        generator = torch.Generator().manual_seed(mixed_seed(seed, number))
        order = torch.randperm(len(self), generator=generator).to(device)
        # Drawn for all images at once, so that no batch waits for the host.
        shifts = torch.randint(
            2 * self.padding + 1, (len(self), 2), generator=generator
        ).to(device)
        flips = torch.randint(2, (len(self),), generator=generator).bool().to(device)
        for picked in dealt(order, batch_size=batch_size, start=start, shard=shard):
            yield self._inputs(picked, shifts, flips), self.targets[picked]

    def _inputs(self, picked: Tensor, shifts: Tensor, flips: Tensor) -> Batch:
        if not isinstance(self.inputs, Tensor) or self.inputs.dtype != torch.uint8:
            return map_batch(self.inputs, itemgetter(picked))
        if not self.padding:
            pixels = self.inputs[picked]
        else:  # shifted crops, half of them mirrored
            down, right = shifts[picked, :1], shifts[picked, 1:]  # (B, 1)
            height, width = (side - 2 * self.padding for side in self.inputs.shape[1:3])
            rows = torch.arange(height, device=picked.device) + down  # (B, H)
            across = torch.arange(width, device=picked.device)
            across = torch.where(flips[picked, None], width - 1 - across, across)
            columns = (across + right)[:, None]  # (B, 1, W)
            pixels = self.inputs[picked[:, None, None], rows[:, :, None], columns]
        values = (pixels.float() - self.mean) / self.std
        return values.permute(0, 3, 1, 2)  # channels-last in memory


def _held(
    data: Data, device: torch.device, *, augment: bool, progress: Progress
) -> HeldSet:
    """Read all inputs into the device's memory."""
    inputs: Batch | None = None
    found: list[Any] = []  # fewer than len(data) if unreadable images are skipped
    for value, target in data.items(range(len(data))):
        if inputs is None:
            outputs = _outputs(data, value)
            inputs = map_batch(value, lambda one: one.new_empty(len(data), *one.shape))
        for place, one in zip(tensors_in(inputs), tensors_in(value), strict=True):
            place[len(found)] = one
        found.append(target)
        if len(found) % 100 == 0:
            progress(len(found), len(data), "reading images")
    if inputs is None:
        raise DataError(f"{data.name}: none of its {len(data)} inputs can be read")
    targets = _held_targets(data, found, outputs).to(device)
    inputs = map_batch(inputs, lambda one: one[: len(found)])
    padding = 0
    if isinstance(inputs, Tensor) and inputs.dtype == torch.uint8:
        padding = _PADDING if augment else 0
        inputs = F.pad(inputs, [padding] * 4).permute(0, 2, 3, 1)
    return HeldSet(
        map_batch(inputs, lambda one: one.contiguous().to(device)),
        targets,
        padding,
        255 * torch.tensor(data.model.mean, device=device),
        255 * torch.tensor(data.model.std, device=device),
    )


def _outputs(data: Data, value: Any) -> int:
    """Return the number of outputs that the network has for an input."""
    model = data.model.module
    with evaluating(model):
        return first_tensor(run_batch(model, data.stack([value]))).shape[-1]


def _held_targets(data: Data, found: list[Any], outputs: int) -> Tensor:
    """Return targets as one tensor, (N, ...); class indices are those of outputs."""
    targets = join_items(found)
    if not isinstance(targets, Tensor):
        raise DataError(
            f"{data.name}: targets differ in shape or are not tensors; training needs "
            "numbers, or tensors of one shape"
        )
    low, high = targets.min(), targets.max()
    if is_class_indices(targets, len(found)) and (low < 0 or high >= outputs):
        raise DataError(
            f"{data.name}: targets range from {low} to {high}, but {data.model.name} "
            f"has {outputs} outputs; targets are class indices, 0 to {outputs - 1}"
        )
    return targets


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Image files that worker processes read, crop and flip."""

    images: ImageFiles  # the files and their classes
    model: NamedModel  # for its preprocessing
    workers: int  # processes that read; 0 reads in the training process
    device: torch.device  # where images are normalised
    augment: bool = True  # whether images are cropped and flipped at random
    skip_unreadable: bool = False  # whether the next image replaces an unreadable one

    def __len__(self) -> int:
        return len(self.images.files)

    def epoch(
        self,
        number: int,
        *,
        batch_size: int,
        seed: int = 0,
        start: int = 0,
        shard: Shard = (0, 1),
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs (N, C, H, W) and targets (N,), N = batch size / processes."""
        generator = torch.Generator().manual_seed(mixed_seed(seed, number))
        order = torch.randperm(len(self), generator=generator)
        parts = dealt(order, batch_size=batch_size, start=start, shard=shard)
        loader = DataLoader(
            _Crops(self, (seed, number)),
            batch_sampler=[part.tolist() for part in parts],
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=generator,  # leaves the global generator alone
            collate_fn=_batch,
        )
        mean, std = (
            255 * torch.tensor(values, device=self.device).view(-1, 1, 1)
            for values in (self.model.mean, self.model.std)
        )
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            pixels, targets = batch
            moved = pixels.to(self.device, non_blocking=True)
            moved = moved.contiguous(memory_format=torch.channels_last)
            yield (moved.float() - mean) / std, targets.to(self.device)


def _batch(items: Sequence[Crop | DataError]) -> Any:
    """Return pixels (N, C, H, W) and targets (N,), or the first error."""
    errors = [item for item in items if isinstance(item, DataError)]
    return errors[0] if errors else default_collate(list(items))


class _Crops(Dataset[Crop | DataError]):
    """A crop of each image in one epoch, as uint8 (C, H, W)."""

    def __init__(self, owner: ImageSet, seeds: tuple[int, int]) -> None:
        self.images, self.model, self.seeds = owner.images, owner.model, seeds
        self.skip_unreadable = owner.skip_unreadable
        self.augmented: Any = None
        if owner.augment:
            v2 = torchvision_library("torchvision.transforms.v2")
            size = owner.model.input_shape[1:]
            interpolation = v2.InterpolationMode(owner.model.interpolation)
            self.augmented = v2.Compose(
                [
                    v2.RandomResizedCrop(size, interpolation=interpolation),
                    v2.RandomHorizontalFlip(),
                    v2.PILToTensor(),
                ]
            )

    def __getitem__(self, position: int) -> Crop | DataError:
        count = len(self.images.files)
        failure = DataError("there are no images")
        for skipped in range(count if self.skip_unreadable else 1):
            try:
                return self._crop((position + skipped) % count)
            except DataError as error:
                failure = error
        return failure  # raising it here would show the worker's traceback

    def _crop(self, position: int) -> Crop:
        path = self.images.files[position]
        assert self.images.targets is not None  # training_data() checked the labels
        target = self.images.targets[position]
        if self.augmented is None:
            return decode_image(path, self.model), target
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would look for GPUs in every worker.
            torch.default_generator.manual_seed(mixed_seed(*self.seeds, position))
            return self.augmented(open_image(path, self.model)), target
