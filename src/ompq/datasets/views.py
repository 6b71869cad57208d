"""Views of images: more to learn from where there are few."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ompq.errors import SampleError

_SHIFT = 8  # images move by at most this part of their sides


def image_views(images: Tensor, views: int, *, seed: int = 0) -> Tensor:
    """Return the images, followed by mirrored and shifted copies of them.

    With fewer than some 200 images reconstruction learns them by heart; what the float
    network does with such copies is as good a lesson as what it does with more images.

    Args:
        images: Inputs of a network, (N, C, H, W).
        views: How many of each image there will be, the image itself included.
        seed: Seed of shifts and mirroring.

    Returns:
        (views · N, C, H, W); the images themselves first.

    Raises:
        ValueError: There would be no views.
        SampleError: These are no images.
    """
    if views < 1:
        raise ValueError(f"views={views} must be at least 1")
    if views == 1:
        return images
    if images.dim() != 4 or not images.is_floating_point():
        raise SampleError(
            f"samples of shape {tuple(images.shape)} and {images.dtype} are no images: "
            "views need floats of shape (N, C, H, W)"
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([images, *(_view(images, generator) for _ in range(views - 1))])


def _view(images: Tensor, generator: torch.Generator) -> Tensor:
    count, _, height, width = images.shape
    down, right = height // _SHIFT, width // _SHIFT
    wide = F.pad(images, (right, right, down, down), mode="reflect")
    tops = torch.randint(2 * down + 1, (count,), generator=generator).tolist()
    lefts = torch.randint(2 * right + 1, (count,), generator=generator).tolist()
    mirrored = torch.randint(2, (count,), generator=generator).tolist()
    cut = [
        image[:, top : top + height, left : left + width]
        for image, top, left in zip(wide, tops, lefts, strict=True)
    ]
    pairs = zip(cut, mirrored, strict=True)
    return torch.stack([view.flip(-1) if flip else view for view, flip in pairs])
