"""Training data: shuffled, augmented and cut into batches, the same for every seed.

Small images are held in the memory of the device that trains, and cropped and flipped
there, a batch at once. Larger ones are decoded and cropped by worker processes. Order
and augmentation follow the seed, the epoch and the image alone: neither the number of
processes nor that of workers, nor where a run was interrupted, changes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

from ompq.datasets.images import ImageFiles, decode, find_images, open_image
from ompq.datasets.sources import Data
from ompq.errors import DataError
from ompq.models import NamedModel, output_count
from ompq.samples import Progress
from ompq.training.batches import Shard, TrainingData, dealt, mixed_seed

Crop: TypeAlias = tuple[Tensor, int]

_SMALL = 64  # up to this side images are shifted; above, cropped and resized
_PADDING = 4  # pixels on each side, as is usual for CIFAR-10


def training_data(
    data: Data,
    *,
    device: torch.device | str = "cpu",
    augment: bool = True,
    progress: Progress | None = None,
) -> TrainingData:
    """Return labelled data as training reads it: small images in memory.

    Args:
        augment: Whether images are cropped and flipped at random; inputs that are not
            images never are.

    Raises:
        DataError: It has no usable labels, or cannot be read.
    """
    if data.label_problem is not None:
        raise DataError(f"{data.name}: {data.label_problem}")
    device = torch.device(device)
    large = max(data.model.input_shape[1:], default=0) > _SMALL
    if not (large and Path(data.name).is_dir()):
        return _held(data, device, augment=augment, progress=progress)
    return ImageSet(
        find_images(Path(data.name), "train"),
        # Workers need to know how to prepare images, not the network itself.
        replace(data.model, module=nn.Identity()),
        workers=data.workers,
        device=device,
        augment=augment,
        skip_unreadable=data.skip_unreadable,
    )


@dataclass(frozen=True, eq=False)
class HeldSet:
    """Inputs held in memory; images are cropped and flipped where they are."""

    # Images (N, H, W, C) as uint8, padded on all sides, or other inputs (N, ...) as
    # floats, which are left as they are.
    inputs: Tensor
    targets: Tensor  # classes, (N,)
    padding: int  # pixels on each side; 0 for no augmentation
    mean: Tensor  # of the channels of an image in [0, 255], (C,)
    std: Tensor  # of the same, (C,)

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
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs (N, C, H, W) and targets (N,), N = batch size / processes."""
        device = self.inputs.device
        generator = torch.Generator().manual_seed(mixed_seed(seed, number))
        order = torch.randperm(len(self), generator=generator).to(device)
        # For all images at once: a batch then needs nothing from the host.
        shifts = torch.randint(
            2 * self.padding + 1, (len(self), 2), generator=generator
        ).to(device)
        flips = torch.randint(2, (len(self),), generator=generator).bool().to(device)
        for picked in dealt(order, batch_size=batch_size, start=start, shard=shard):
            yield self._inputs(picked, shifts, flips), self.targets[picked]

    def _inputs(self, picked: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
        if self.inputs.dtype != torch.uint8:
            return self.inputs[picked]
        if not self.padding:
            pixels = self.inputs[picked]
        else:  # windows, some of them mirrored
            down, right = shifts[picked, :1], shifts[picked, 1:]  # (B, 1)
            height, width = (side - 2 * self.padding for side in self.inputs.shape[1:3])
            rows = torch.arange(height, device=picked.device) + down  # (B, H)
            across = torch.arange(width, device=picked.device)
            across = torch.where(flips[picked, None], width - 1 - across, across)
            columns = (across + right)[:, None]  # (B, 1, W)
            pixels = self.inputs[picked[:, None, None], rows[:, :, None], columns]
        values = (pixels.float() - self.mean) / self.std
        return values.permute(0, 3, 1, 2)  # in memory it is channels-last


def _held(
    data: Data, device: torch.device, *, augment: bool, progress: Progress | None
) -> HeldSet:
    """Read everything into the device's memory."""
    inputs: Tensor | None = None
    targets = torch.zeros(len(data), dtype=torch.long)
    found = 0
    for value, target in data.items(range(len(data))):
        if inputs is None:
            inputs = torch.empty(len(data), *value.shape, dtype=value.dtype)
        inputs[found], targets[found] = value, target
        found += 1
        if progress is not None and found % 100 == 0:
            progress(found, len(data), "reading images")
    if inputs is None:
        raise DataError(f"{data.name}: none of its {len(data)} inputs can be read")
    inputs, targets = inputs[:found], targets[:found]
    outputs, low, high = output_count(data.model), targets.min(), targets.max()
    if low < 0 or high >= outputs:
        raise DataError(
            f"{data.name}: targets go from {low} to {high}, but {data.model.name} has "
            f"{outputs} outputs; targets are class indices, 0 to {outputs - 1}"
        )
    images = inputs.dtype == torch.uint8
    padding = _PADDING if images and augment else 0
    if images:
        inputs = torch.nn.functional.pad(inputs, [padding] * 4).permute(0, 2, 3, 1)
    return HeldSet(
        inputs.contiguous().to(device),
        targets.to(device),
        padding,
        255 * torch.tensor(data.model.mean, device=device),
        255 * torch.tensor(data.model.std, device=device),
    )


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Image files that worker processes read, crop and flip."""

    images: ImageFiles  # the files and their classes
    model: NamedModel  # how images are prepared
    workers: int  # processes that read; 0 reads in the process that trains
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
        cuda = self.device.type == "cuda"
        loader = DataLoader(
            _Crops(self, (seed, number)),
            batch_sampler=[part.tolist() for part in parts],
            num_workers=self.workers,
            pin_memory=cuda,
            generator=generator,  # or it would draw from the global one
            collate_fn=_batch,
        )
        mean = 255 * torch.tensor(self.model.mean, device=self.device).view(-1, 1, 1)
        std = 255 * torch.tensor(self.model.std, device=self.device).view(-1, 1, 1)
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            pixels, targets = batch
            moved = pixels.to(self.device, non_blocking=True)
            moved = moved.contiguous(memory_format=torch.channels_last)
            yield (moved.float() - mean) / std, targets.to(self.device)


def _batch(items: Sequence[Crop | DataError]) -> Any:
    """Return pixels (N, C, H, W) and targets (N,), or the first error."""
    broken = [item for item in items if isinstance(item, DataError)]
    return broken[0] if broken else default_collate(list(items))


class _Crops(Dataset[Crop | DataError]):
    """A crop of each image in one epoch, as uint8 (C, H, W)."""

    def __init__(self, owner: ImageSet, seeds: tuple[int, int]) -> None:
        self.images, self.model, self.seeds = owner.images, owner.model, seeds
        self.skip_unreadable = owner.skip_unreadable
        self.augmented: v2.Compose | None = None
        if owner.augment:
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
        broken = DataError("there are no images")
        for further in range(count if self.skip_unreadable else 1):
            try:
                return self._crop((position + further) % count)
            except DataError as error:
                broken = error
        return broken  # raised here, it would show a worker's traceback

    def _crop(self, position: int) -> Crop:
        path = self.images.files[position]
        assert self.images.targets is not None  # training_data() checked the labels
        target = self.images.targets[position]
        if self.augmented is None:
            return decode(path, self.model), target
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would look for GPUs in every worker.
            torch.default_generator.manual_seed(mixed_seed(*self.seeds, position))
            return self.augmented(open_image(path, self.model)), target
