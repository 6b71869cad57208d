"""The loss that scores differentiate: against labels, or the network's own answers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ompq.errors import SampleError
from ompq.samples import (
    Batch,
    Samples,
    SamplesLike,
    arguments,
    batch_length,
    cudnn_kernels,
    evaluating,
    first_tensor,
    model_device,
    to_device,
)

# Inputs and their class numbers, (N,).
LabelledBatches: TypeAlias = Iterable[tuple[Batch, Tensor]]


def first_labelled(
    model: nn.Module, samples: SamplesLike, batches: LabelledBatches | None, count: int
) -> tuple[Batch, Tensor | None]:
    """Return the first labelled inputs and their labels, or the first samples alone.

    Raises:
        SampleError: Inputs and labels differ in number.
    """
    device = model_device(model)
    if batches is None:
        return to_device(Samples.of(samples).first_batch(count), device), None
    inputs: list[Batch] = []
    labels: list[Tensor] = []
    for batch, targets in batches:
        if batch_length(batch) != len(targets):
            raise SampleError(
                f"a labelled batch has {batch_length(batch)} inputs and "
                f"{len(targets)} labels: give one class number for each input"
            )
        inputs.append(batch)
        labels.append(targets)
        if sum(map(len, labels)) >= count:
            break
    batch = Samples.of(inputs).first_batch(count)
    return to_device(batch, device), torch.cat(labels)[: batch_length(batch)].to(device)


@contextmanager
def differentiating(model: nn.Module) -> Iterator[None]:
    """Let gradients flow through a network in eval mode, the same bits every time."""
    # The fast kernels of attention have no second derivative.
    with (
        evaluating(model),
        torch.enable_grad(),
        cudnn_kernels(repeatable=True),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


def log_probabilities(
    model: nn.Module, batch: Batch, weights: Mapping[str, Tensor]
) -> Tensor:
    """Run the network with some weights replaced; return log softmax, (N, K)."""
    output = functional_call(model, dict(weights), *arguments(batch))
    return first_tensor(output).float().flatten(1).log_softmax(1)


def divergence(reference: Tensor, output: Tensor) -> Tensor:
    """Return the mean KL(reference ‖ output) of log probabilities, both (N, K)."""
    lost = (reference.exp() * (reference - output)).sum(1, dtype=torch.float64)
    return lost.mean()


def mean_loss(log_p: Tensor, labels: Tensor | None) -> Tensor:
    """Return the cross entropy with the labels, or with the network's own answers.

    Its own answers are its probabilities: their loss has no gradient, and the Hessian
    of that loss is the Fisher information.
    """
    if labels is None:
        return -(log_p.detach().exp() * log_p).sum(1).mean()
    return F.nll_loss(log_p, labels)


def weighted_labels(log_p: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a class for each row of (N, K), and how many it stands for, (N,).

    Squared gradients are to be averaged over the network's own answers. A class is
    drawn with its probability times the length of its gradient at the logits: the
    sum of what counts is right, and varies less where one answer is nearly certain.
    """
    log_p = log_p.detach()
    p = log_p.double().exp()
    length = (1 - 2 * p + p.square().sum(1, keepdim=True)).clamp_min(1e-12).sqrt()
    drawn = p * length / (p * length).sum(1, keepdim=True)
    # The largest of log probability + Gumbel noise is a class drawn with it.
    noise = -torch.empty(log_p.shape).exponential_(generator=generator).log()
    labels = (drawn.log() + noise.to(log_p.device)).argmax(1)
    return labels, (p / drawn).gather(1, labels[:, None])[:, 0]
