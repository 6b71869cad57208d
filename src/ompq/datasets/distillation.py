"""Samples distilled from a network's batch norms, where there are no data (ZeroQ).

A trained batch norm stores the mean and variance of its inputs; noise is optimised
until it produces the stored statistics at every batch norm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.errors import SampleError, check_counts
from ompq.progress import ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.samples import (
    attached,
    cudnn_kernels,
    evaluating,
    in_this_thread,
    model_device,
)

_EPSILON = 1e-6  # added to variances, as in ZeroQ's released code
# The learning rate is divided by ten after this many steps without a lower loss.
_PATIENCE, _LOWEST_RATE = 100, 1e-4


class _Statistics(NamedTuple):
    """Mean and standard deviation of each channel, as a batch norm stores them."""

    mean: Tensor  # (C,)
    deviation: Tensor  # (C,)

    def distance(self, x: Tensor) -> Tensor:
        """Return the mean squared distance of the images of x (N, C, ...) from these.

        Statistics are taken for each image of x by itself, (N, C).
        """
        rows = x.flatten(2)
        mean, deviation = rows.mean(2), (rows.var(2) + _EPSILON).sqrt()
        gaps = mean - self.mean.to(x), deviation - self.deviation.to(x)
        return torch.stack([gap.square().sum() for gap in gaps]).sum() / len(x)


@shows_progress("distilling")
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
    progress: ProgressLike = None,
) -> Tensor:
    """Return images distilled from a network's batch norms, (count, C, H, W).

    As in ZeroQ, Adam changes Gaussian noise until each image produces, in every
    channel, the mean and standard deviation that the norms store for their inputs. The
    images show nothing recognizable, but calibrate far better than noise. The
    publication leaves out the schedule: the learning rate is divided by ten after 100
    steps without a lower loss. Statistics are those of each image by itself.

    Args:
        input_shape: Channels, height and width of an image.
        steps: Steps of Adam for each batch of images.
        batch_size: Number of images optimised together.
        normalised: Whether the network's inputs are normalised, so that the images
            themselves should have mean 0 and standard deviation 1.

    Raises:
        SampleError: The network has no batch norms, or they were never trained.
    """
    check_counts(count=count, steps=steps, batch_size=batch_size)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, *input_shape, generator=generator)
    total = -(-count // batch_size) * steps
    finished: list[Tensor] = []
    with evaluating(model), _distances(model, normalised=normalised) as distance:
        for number, part in enumerate(torch.split(noise, batch_size)):
            images = part.to(model_device(model)).requires_grad_()
            adam = torch.optim.Adam([images], lr=learning_rate)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
                adam, patience=_PATIENCE, min_lr=_LOWEST_RATE
            )
            for step in range(1, steps + 1):
                with torch.enable_grad():
                    loss = distance(images)
                (images.grad,) = torch.autograd.grad(loss, [images])
                adam.step()
                schedule.step(loss.item())
                if progress is not None:
                    text = f"distilling images: loss {loss.item():.3g}"
                    callback(progress)(number * steps + step, total, text)
            finished.append(images.detach().cpu())
    return torch.cat(finished)


_UNIT = _Statistics(torch.tensor(0.0), torch.tensor(1.0))


@contextmanager
def _distances(
    model: nn.Module, *, normalised: bool
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function: images → their distance from the statistics of all norms."""
    norms: dict[nn.Module, _Statistics] = {
        norm: _Statistics(norm.running_mean, (norm.running_var + _EPSILON).sqrt())
        for norm in model.modules()
        if isinstance(norm, _BatchNorm)
        and norm.running_mean is not None
        and norm.running_var is not None
    }
    if not norms:
        raise SampleError(
            f"{type(model).__name__} has no batch norms, so images cannot be "
            "distilled from it; give samples of your own"
        )
    # A norm starts with mean 0 and variance 1.
    if all(
        (one.mean == 0).all() and (one.deviation - 1).abs().max() < 1e-4
        for one in norms.values()
    ):
        raise SampleError(
            f"the batch norms of {type(model).__name__} hold only initial values "
            "(mean 0, variance 1): they were folded or never trained; give samples of "
            "your own"
        )
    terms: list[Tensor] = []

    def add(norm: nn.Module, args: tuple[Any, ...]) -> None:
        terms.append(norms[norm].distance(args[0]))

    hooks = (norm.register_forward_pre_hook(in_this_thread(add)) for norm in norms)
    with attached(hooks), cudnn_kernels(repeatable=True):

        def distance(images: Tensor) -> Tensor:
            terms.clear()
            model(images)
            if normalised:
                terms.append(_UNIT.distance(images))
            return torch.stack(terms).sum()

        yield distance
