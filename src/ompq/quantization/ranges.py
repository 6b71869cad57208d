"""What each point of a network sees: its values, and how much each of them matters."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ompq.graph.observation import tensors_in, watch
from ompq.quantization.placement import Point
from ompq.quantizers.calibration import (
    Observed,
    observe_range,
    value_bins,
    with_importance,
)
from ompq.samples import (
    Progress,
    Samples,
    batch_count,
    cudnn_kernels,
    first_samples,
    first_tensor,
    map_batch,
    model_device,
    sample_batches,
    to_device,
)

logger = logging.getLogger(__name__)
_FOR_IMPORTANCE = 64  # samples suffice to tell what matters
_AT_ONCE = 16  # of them: a backward pass needs what the forward pass computed
READING = "reading ranges of activations"


def read_ranges(
    model: nn.Module,
    samples: Samples,
    points: Sequence[Point],
    *,
    batch_size: int,
    report: Progress,
) -> list[Observed]:
    """Run the float network and gather what each point's range is found from.

    Args:
        model: The float network.
        samples: Unlabelled inputs.
        points: Where activations will be quantized.
        batch_size: How many samples run at a time.
        report: Called after each batch.
    """
    found: list[Observed | None] = [None] * len(points)
    point_at = _points_by_position(points)
    device = model_device(model)

    def see(at: int, value: Any) -> None:
        index = point_at[at]
        found[index] = observe_range(next(tensors_in(value)), found[index])

    def visit(at: int, _function: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        if at in point_at:
            see(at, output)

    total = batch_count(samples, batch_size)
    for done, batch in enumerate(sample_batches(samples, batch_size=batch_size), 1):
        moved = to_device(batch, device)
        if -1 in point_at:
            see(-1, moved)
        watch(model, moved, visit)
        report(done, total, READING)
    return [statistics for statistics in found if statistics is not None]


def weigh_ranges(
    model: nn.Module,
    samples: Samples,
    points: Sequence[Point],
    seen: Sequence[Observed],
    *,
    report: Progress,
) -> list[Observed]:
    """Add how much the values of each point matter to what the network returns.

    To second order, an error changes the divergence between the network's answers by
    half its square times the squared gradient of the network's own likelihood (its
    Fisher information). Where the network cannot be differentiated, all values count
    alike, and a warning says so.

    Args:
        model: The float network; neither its gradients nor its flags are changed.
        samples: Unlabelled inputs; the first 64 are used.
        points: Where activations will be quantized.
        seen: What :func:`read_ranges` found with these samples.
        report: Called after each batch.
    """
    weighing = _Weighing(points, seen)
    generator = torch.Generator().manual_seed(0)
    first = to_device(first_samples(samples, _FOR_IMPORTANCE), model_device(model))
    try:
        for done, batch in enumerate(sample_batches(first, batch_size=_AT_ONCE), 1):
            leaf = map_batch(batch, _leaf)
            ends = [t for t in tensors_in(leaf) if t.requires_grad]
            with _differentiating(model, parameters=not ends) as parameters:
                # The network may work on its input in place, which no leaf allows.
                inputs = map_batch(leaf, torch.clone)
                weighing.await_gradient(-1, inputs)
                output = watch(model, inputs, weighing.visit, gradients=True)
                loss = _loss(first_tensor(output), generator)
                torch.autograd.grad(loss, ends or parameters, allow_unused=True)
            report(done, batch_count(first, _AT_ONCE), READING)
    except RuntimeError as error:
        logger.warning(
            "ranges of activations weigh all values alike: the network cannot be "
            "differentiated (%s)",
            str(error).splitlines()[0],
        )
        return list(seen)
    return weighing.found


class _Weighing:
    """Adds the importance of values to what is known of each point, as gradients come.

    Attributes:
        found: What is known of each point.
    """

    def __init__(self, points: Sequence[Point], seen: Sequence[Observed]) -> None:
        self.found = list(seen)
        self._point_at = _points_by_position(points)

    def visit(
        self, at: int, _function: Any, _args: Any, _kwargs: Any, output: Any
    ) -> None:
        """See a call's output while the network runs."""
        self.await_gradient(at, output)

    def await_gradient(self, at: int, value: Any) -> None:
        """Have a tensor's gradient counted once it comes, if it is a point's."""
        index = self._point_at.get(at)
        if index is None:
            return
        tensor = next(tensors_in(value))
        if not tensor.requires_grad:
            return
        # Now: the network may change the tensor in place.
        bins = value_bins(self.found[index], tensor)

        def add(gradient: Tensor) -> None:
            self.found[index] = with_importance(self.found[index], bins, gradient)

        tensor.register_hook(add)  # type: ignore[no-untyped-call]


def _points_by_position(points: Sequence[Point]) -> dict[int, int]:
    return {at: i for i, point in enumerate(points) for at in point.positions}


@contextmanager
def _differentiating(model: nn.Module, *, parameters: bool) -> Iterator[list[Tensor]]:
    """Yield the network's parameters, and make gradients repeatable meanwhile.

    Args:
        model: The network.
        parameters: Whether gradients flow to them. They need not where they flow to the
            input, and what a layer got need not be kept then.
    """
    each: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in each]
    try:
        for parameter in each:
            parameter.requires_grad_(parameters)
        with torch.enable_grad(), cudnn_kernels(repeatable=True):
            yield each
    finally:
        for parameter, flag in zip(each, flags, strict=True):
            parameter.requires_grad_(flag)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy that gradients flow to, if it can be one."""
    tensor = tensor.detach().clone()
    return tensor.requires_grad_(tensor.is_floating_point())


def _loss(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return a loss whose squared gradients are the output's Fisher information.

    For logits, −log p of classes drawn from p itself; else the output's elements with
    signs drawn at random, as for a squared error.
    """
    if output.dim() == 2 and output.shape[1] > 1:
        log_p = output.float().log_softmax(1)
        # The largest of log p + Gumbel noise is a class drawn from p.
        noise = -torch.empty(log_p.shape).exponential_(generator=generator).log()
        drawn = (log_p.detach() + noise.to(log_p.device)).argmax(1, keepdim=True)
        return -log_p.gather(1, drawn).sum()
    signs = torch.randint(2, output.shape, generator=generator) * 2 - 1
    return (output * signs.to(output.device)).sum()
