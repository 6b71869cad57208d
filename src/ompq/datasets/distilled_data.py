"""Images made from a network alone, for quantizing without any data (ZeroQ).

A trained batch norm remembers the mean and the spread of what it normalised. Noise is
changed until it gives every norm what it remembers.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.errors import SampleError, check_counts
from ompq.samples import (
    attached,
    cudnn_kernels,
    evaluating,
    in_this_thread,
    model_device,
)
from ompq.stages import Progress

_EPSILON = 1e-6  # added to variances, as in ZeroQ's released code
# The learning rate falls to a tenth after this many steps without a lower loss, but no
# further than to the second number.
_PATIENCE, _LEAST_RATE = 100, 1e-4


class _Statistics(NamedTuple):
    """What a norm remembers, or a tensor shows: (C,), or (N, C) image by image."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "_Statistics":
        """Return those of each image and channel of x (N, C, ...)."""
        rows = x.flatten(2)
        return cls(rows.mean(2), (rows.var(2) + _EPSILON).sqrt())

    def distance(self, x: Tensor) -> Tensor:
        """Return the squared distance of an image of x (N, C, ...) from these."""
        seen = _Statistics.of(x)
        pairs = zip(seen, self, strict=True)
        gaps = [(one - other.to(one)).square().sum() for one, other in pairs]
        return torch.stack(gaps).sum() / len(x)

    def blank(self) -> bool:
        """Whether these are what a norm starts with: mean 0 and variance 1."""
        return bool((self.mean == 0).all() and (self.deviation - 1).abs().max() < 1e-4)


def distilled_samples(  # noqa: PLR0913 - only the network and the shape are needed
    model: nn.Module,
    input_shape: tuple[int, ...],
    count: int = 64,
    *,
    steps: int = 500,
    learning_rate: float = 0.5,
    batch_size: int = 32,
    normalised: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tensor:
    """Return images made from a network's batch norms, (count, C, H, W).

    As ZeroQ does it: Gaussian noise is moved by Adam until the mean and the standard
    deviation of each channel, image by image, are those that the norms remember of
    their inputs. They show nothing recognizable, but calibrate far better than noise.

    Args:
        input_shape: Channels, height and width of an image.
        steps: Steps of Adam for each batch of images.
        batch_size: How many images are made at a time.
        normalised: Whether the network's inputs are normalised, so that the images
            themselves should have mean 0 and standard deviation 1.
        progress: Called with the steps done, the steps in all and a message.

    Raises:
        SampleError: The network has no batch norms, or they remember nothing.
    """
    check_counts(count=count, steps=steps, batch_size=batch_size)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, *input_shape, generator=generator)
    total = -(-count // batch_size) * steps
    done = itertools.count(1)

    def report(loss: float) -> None:
        if progress is not None:
            progress(next(done), total, f"distilling images: loss {loss:.3g}")

    with evaluating(model), _distances(model, normalised=normalised) as distance:
        found = [
            _nearest(
                part.to(model_device(model)), distance, steps, learning_rate, report
            )
            for part in torch.split(noise, batch_size)
        ]
    return torch.cat(found)


def _nearest(
    images: Tensor,
    distance: Callable[[Tensor], Tensor],
    steps: int,
    learning_rate: float,
    report: Callable[[float], None],
) -> Tensor:
    """Return images, on the CPU, that were moved to lower their distance."""
    images.requires_grad_()
    adam = torch.optim.Adam([images], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        adam, patience=_PATIENCE, min_lr=_LEAST_RATE
    )
    for _ in range(steps):
        with torch.enable_grad():
            loss = distance(images)
        (images.grad,) = torch.autograd.grad(loss, [images])
        adam.step()
        schedule.step(loss.item())
        report(loss.item())
    return images.detach().cpu()


_UNIT = _Statistics(torch.tensor(0.0), torch.tensor(1.0))


@contextmanager
def _distances(
    model: nn.Module, *, normalised: bool
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function: images → how far from what all batch norms remember."""
    norms: dict[nn.Module, _Statistics] = {
        norm: _Statistics(norm.running_mean, (norm.running_var + _EPSILON).sqrt())
        for norm in model.modules()
        if isinstance(norm, _BatchNorm)
        and norm.running_mean is not None
        and norm.running_var is not None
    }
    if not norms:
        raise SampleError(
            f"{type(model).__name__} has no batch norms, so that images cannot be "
            "distilled from it; give samples of your own"
        )
    if all(remembered.blank() for remembered in norms.values()):
        raise SampleError(
            f"the batch norms of {type(model).__name__} remember nothing (mean 0, "
            "variance 1): they were folded, or never trained; give samples of your own"
        )
    found: list[Tensor] = []

    def add(norm: nn.Module, args: tuple[Any, ...]) -> None:
        found.append(norms[norm].distance(args[0]))

    hooks = (norm.register_forward_pre_hook(in_this_thread(add)) for norm in norms)
    with attached(hooks), cudnn_kernels(repeatable=True):

        def distance(images: Tensor) -> Tensor:
            found.clear()
            model(images)
            if normalised:
                found.append(_UNIT.distance(images))
            return torch.stack(found).sum()

        yield distance
