"""Calibration: the ranges that activations take on samples."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ompq.activation_ranges import Observed, observe_range, value_bins, with_importance
from ompq.network.observation import tensors_in, watch
from ompq.outputs import Outputs
from ompq.progress import Progress
from ompq.quantization.activation_sites import ActivationSite
from ompq.quantization.products import (
    attention_arguments,
    for_each_head,
    operands,
    probabilities,
)
from ompq.samples import (
    Samples,
    batch_length,
    cudnn_kernels,
    map_batch,
    model_device,
    to_device,
)

logger = logging.getLogger(__name__)
READING = "calibrating activations"

# Number of samples that importance is estimated from, and the largest batch, small
# because a backward pass needs all activations in memory.
_IMPORTANCE_SAMPLES, _BACKWARD_BATCH = 64, 8


def read_ranges(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    *,
    batch_size: int,
    report: Progress,
) -> list[Observed]:
    """Run the float network and return a histogram of the values at each site."""
    found: dict[int, Observed] = {}
    by_position = _sites_by_position(sites)

    def visit(at: int, *call: Any) -> None:
        for site in by_position.get(at, ()):
            values = _values(sites[site], *call)
            found[site] = observe_range(values, found.get(site))

    total, device = samples.batch_count(batch_size), model_device(model)
    for done, batch in enumerate(samples.batches(batch_size), 1):
        moved = to_device(batch, device)
        visit(-1, None, (), {}, moved)
        watch(model, moved, visit)
        report(done, total, READING)
    return [found[site] for site in sorted(found)]


def weigh_ranges(  # noqa: PLR0913 - as read_ranges, and what that found
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    seen: Sequence[Observed],
    outputs: Outputs,
    *,
    batch_size: int,
    report: Progress,
) -> list[Observed]:
    """Add the importance of the values at each site for the network's output.

    To second order, an error makes the output diverge by half its square times the
    Fisher information: the squared gradient of the network's own log-likelihood, here
    on the first 64 samples. If the network cannot be
    differentiated, all values get the same weight and a warning is logged.
    """
    found = list(seen)
    visit = _importance_hook(sites, found)
    generator = torch.Generator().manual_seed(0)
    first, device = samples.first(_IMPORTANCE_SAMPLES), model_device(model)
    size = min(batch_size, _BACKWARD_BATCH)
    try:
        for done, batch in enumerate(first.batches(size), 1):
            leaf = map_batch(to_device(batch, device), _leaf)
            leaves = [t for t in tensors_in(leaf) if t.requires_grad]
            with _differentiating(model, parameters=not leaves) as parameters:
                # The network may modify its input in place, which a leaf forbids.
                inputs = map_batch(leaf, torch.clone)
                visit(-1, None, (), {}, inputs)
                output = watch(model, inputs, visit, gradients=True)
                count = batch_length(batch)
                loss = outputs.drawn_loss(outputs.read(output), generator, count)
                torch.autograd.grad(loss, leaves or parameters, allow_unused=True)
            report(done, first.batch_count(size), READING)
    except RuntimeError as error:
        if _is_out_of_memory(error):
            raise
        logger.warning(
            "all values of an activation get the same weight: the network cannot be "
            "differentiated (%s)",
            str(error).splitlines()[0],
        )
        return list(seen)
    return found


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that a device has too little memory.

    Not every allocator has an error class of its own.
    """
    text = str(error).lower()
    words = ("out of memory", "allocate memory", "alloc_failed", "not enough memory")
    own = isinstance(error, torch.OutOfMemoryError)
    return own or any(word in text for word in words)


def _importance_hook(
    sites: Sequence[ActivationSite], found: list[Observed]
) -> Callable[..., None]:
    """Return a visitor of calls: backward passes then add importance to ``found``."""
    by_position = _sites_by_position(sites)

    def add(site: int, bins: Tensor, factor: Tensor | None, gradient: Tensor) -> None:
        gradient = gradient if factor is None else gradient @ factor
        found[site] = with_importance(found[site], bins, gradient)

    def visit(at: int, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        for site in by_position.get(at, ()):
            with torch.no_grad():
                tensor, factor = (
                    _values(sites[site], function, args, kwargs, output),
                    None,
                )
                # Computed now, because the tensor may be modified in place later.
                bins = value_bins(found[site], tensor)
            if sites[site].operand == "probabilities":
                # Fused attention does not return them. Their gradient is that of the
                # output times the transposed values.
                given = attention_arguments(args, kwargs)
                factor = for_each_head(given, "value").detach().transpose(-2, -1)
                tensor = output
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    partial(add, site, bins, factor)
                )

    return visit


def _values(
    site: ActivationSite, function: Any, args: Any, kwargs: Any, output: Any
) -> Tensor:
    """Return the tensor of a call that a site quantizes."""
    if site.operand == "probabilities":
        return probabilities(attention_arguments(args, kwargs))
    if site.operand:
        return operands(function, args, kwargs)[site.operand]
    return next(tensors_in(output))


def _sites_by_position(sites: Sequence[ActivationSite]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, site in enumerate(sites):
        for at in site.positions:
            found.setdefault(at, []).append(index)
    return found


@contextmanager
def _differentiating(model: nn.Module, *, parameters: bool) -> Iterator[list[Tensor]]:
    """Enable deterministic gradients; yield the network's floating-point parameters.

    They require gradients only if ``parameters`` is true. Otherwise gradients flow to
    the input alone, and layers save less for the backward pass.
    """
    found: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in found]
    try:
        for parameter in found:
            parameter.requires_grad_(parameters)
        with torch.enable_grad(), cudnn_kernels(repeatable=True):
            yield found
    finally:
        for parameter, flag in zip(found, flags, strict=True):
            parameter.requires_grad_(flag)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy that requires gradients if it is floating-point."""
    tensor = tensor.detach().clone()
    return tensor.requires_grad_(tensor.is_floating_point())
