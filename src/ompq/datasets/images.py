"""Images: found in folders, decoded, resized and augmented."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.errors import DataError, SampleError, check_counts, shorten, suggestion
from ompq.models.named_models import NamedModel
from ompq.optional_libraries import torchvision_library
from ompq.user_functions import reason

_LOG = logging.getLogger(__name__)
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_NAMED = ("digits", "distilled", "random")  # data sources that are not folders
_SPLITS = {"train": ("train",), "test": ("test", "val", "valid", "validation")}
_MODES = {1: "L", 3: "RGB"}
_SHIFT = 8  # views are shifted by at most one eighth of each side


@dataclass(frozen=True)
class ImageFiles:
    """Image files and their classes."""

    files: tuple[Path, ...]  # sorted within each class
    targets: tuple[int, ...] | None = None  # class of each file; None if unlabelled
    # Names of the classes. For numbered folders this includes missing numbers.
    classes: tuple[str, ...] = ()
    numbered: bool = False  # whether the folder names are class indices


def find_images(folder: Path, split: str) -> ImageFiles:
    """Find the images of a folder, and their classes if it has class folders.

    The folder holds class folders or images, either directly or below ``train`` and
    ``test`` (or ``val``), of which ``split`` selects one. Class folders named by
    numbers (``0000`` to ``0999``) are class indices, even if some are missing. Other
    names are numbered in sorted order. Hidden files are no images. (torchvision's
    ImageFolder takes them for images, needs classes, and numbers them without gaps.)
    """
    folder = _split_folder(folder, split)
    entries = _listing(folder)
    images = [path for path in entries if path.is_file() and _is_image(path.name)]
    nested = {
        # os.walk does not stat every file, of which there may be millions.
        path.name: sorted(
            Path(parent, name)
            for parent, _, names in os.walk(path, followlinks=True)
            for name in filter(_is_image, names)
        )
        for path in entries
        if path.is_dir()
    }
    if images and any(nested.values()):
        raise DataError(
            f"{folder} holds {len(images)} images next to class folders; "
            "move them into a class folder or remove them"
        )
    if images:
        return ImageFiles(tuple(images))
    if not any(nested.values()):
        content = "no images" if entries else "nothing"
        raise DataError(
            f"{folder} holds {content}; give a folder with images or class folders"
        )
    return _classified(nested)


def _split_folder(folder: Path, split: str) -> Path:
    if not folder.exists():
        raise DataError(
            f"there is no folder {folder}{suggestion(str(folder), _NAMED)}; give a "
            f"folder of images, {', '.join(_NAMED)} or FILE.py:FUNCTION"
        )
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; unpack it and give the folder")
    names = {path.name for path in _listing(folder) if path.is_dir()}
    if not names or not names <= {*_SPLITS["train"], *_SPLITS["test"]}:
        return folder
    for name in _SPLITS[split]:
        if name in names:
            return folder / name
    raise DataError(
        f"{folder} has no {split} images: it holds {', '.join(sorted(names))}"
    )


def _classified(nested: dict[str, list[Path]]) -> ImageFiles:
    empty = [name for name, files in nested.items() if not files]
    if empty:
        _LOG.warning("%d classes have no images: %s", len(empty), shorten(empty))
    numbered = all(name.isdecimal() for name in nested)
    if numbered:
        index_of = {name: int(name) for name in nested}
        classes = tuple(str(i) for i in range(max(index_of.values()) + 1))
    else:
        index_of = {name: i for i, name in enumerate(sorted(nested))}
        classes = tuple(index_of)
    pairs = [(f, index_of[name]) for name, files in nested.items() for f in files]
    files, targets = zip(*pairs, strict=True)
    return ImageFiles(files, targets, classes, numbered)


def _listing(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in _SUFFIXES


def decode_image(path: Path, model: NamedModel) -> Tensor:
    """Read an image at the network's input size, not normalised: uint8 (C, H, W).

    An image that already has this size is left as it is; any other is resized and
    cropped at the centre.
    """
    v2, image = (
        torchvision_library("torchvision.transforms.v2"),
        open_image(path, model),
    )
    _, height, width = model.input_shape
    if image.size != (width, height):
        interpolation = v2.InterpolationMode(model.interpolation)
        size = [model.resize] if isinstance(model.resize, int) else list(model.resize)
        image = v2.functional.center_crop(
            v2.functional.resize(image, size, interpolation), [height, width]
        )
    pixels: Tensor = v2.functional.pil_to_tensor(image)
    return pixels


def open_image(path: Path, model: NamedModel) -> Any:
    """Read an image at its own size, in RGB, or in grey for a one-channel network."""
    torchvision_library()  # which brings pillow
    from PIL import Image

    channels = model.input_shape[0]
    if channels not in _MODES:
        raise DataError(
            f"{model.name} takes {channels} channels, but images have 1 or 3; "
            "use FILE.py:FUNCTION for its data"
        )
    try:
        with Image.open(path) as opened:
            image: Any = opened
            if image.mode == "P":  # else Pillow warns about transparent entries
                image = image.convert("RGBA")
            elif image.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
                image = image.point(lambda value: value * (1 / 256)).convert("L")
            return image.convert(_MODES[channels])
    except Exception as error:  # each format's decoder has its own errors
        raise DataError(
            f"{path} cannot be read as an image ({reason(error)})"
        ) from error


def normalise(pixels: Tensor, model: NamedModel) -> Tensor:
    """Return uint8 images (N, C, H, W) as float32, normalised for the network."""
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (model.mean, model.std))
    return pixels.float().div_(255).sub_(mean).div_(std)


def image_views(images: Tensor, views: int, *, seed: int = 0) -> Tensor:
    """Return the images, then mirrored and shifted copies, (views · N, C, H, W).

    Reconstruction overfits with fewer than about 200 images; such copies help about as
    much as more images would.

    Raises:
        SampleError: The tensor does not hold images.
    """
    check_counts(views=views)
    if views == 1:
        return images
    if not isinstance(images, Tensor):
        raise SampleError(f"samples are {type(images).__name__}; views need images")
    if images.dim() != 4 or not images.is_floating_point():
        raise SampleError(
            f"samples of shape {tuple(images.shape)} and {images.dtype} are not "
            "images: views need floats of shape (N, C, H, W)"
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([images, *(_view(images, generator) for _ in range(views - 1))])


def _view(images: Tensor, generator: torch.Generator) -> Tensor:
    count, _, height, width = images.shape
    down, right = height // _SHIFT, width // _SHIFT
    padded = F.pad(images, (right, right, down, down), mode="reflect")
    tops = torch.randint(2 * down + 1, (count,), generator=generator).tolist()
    lefts = torch.randint(2 * right + 1, (count,), generator=generator).tolist()
    mirrored = torch.randint(2, (count,), generator=generator).tolist()
    windows = [
        image[:, top : top + height, left : left + width]
        for image, top, left in zip(padded, tops, lefts, strict=True)
    ]
    pairs = zip(windows, mirrored, strict=True)
    return torch.stack([view.flip(-1) if flip else view for view, flip in pairs])
