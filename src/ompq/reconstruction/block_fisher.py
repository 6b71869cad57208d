"""Fisher information of a block's output, as a weight of its errors."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ompq.network.observation import tensors_in, with_tensors
from ompq.outputs import CLASSES, Outputs, random_signs
from ompq.parallel import add_up, rank
from ompq.reconstruction.block_layout import Layout
from ompq.samples import (
    Batch,
    batch_length,
    class_rows,
    evaluating,
    model_device,
    run_batch,
)

_SIGN_DRAWS = 4  # backward passes per sample for a Fisher matrix


def fisher_weights(
    model: nn.Module,
    end: str,
    batches: Iterable[Batch],
    *,
    outputs: Outputs = CLASSES,
    layout: Layout = Layout(),
) -> Iterator[Tensor]:
    """Yield squared gradients of the network's loss by a block's output, (N, ...).

    The loss of classes is −log p of the network's own most likely one, as BRECQ's; of
    other outputs, answers are drawn (:meth:`ompq.outputs.Outputs.drawn_loss`).
    """
    generator = torch.Generator().manual_seed(rank())
    for batch in batches:
        output, returned = _rest_of_pass(model, end, batch)
        tensors, count = outputs.read(returned), batch_length(batch)
        if outputs.kinds == ("classes",):
            log_p = class_rows(tensors[0].float()).log_softmax(1)
            loss = -log_p.amax(1).sum()
        else:
            loss = outputs.drawn_loss(tensors, generator, count)
        (gradient,) = torch.autograd.grad(loss, output)
        yield layout.samples_first(gradient.square())


class ChannelFisher(NamedTuple):
    """The largest part of a block's Fisher matrix over channels, of trace 1.

    All samples and positions share it: directions of single samples are so many that
    the rounding overfits them.
    """

    directions: Tensor  # eigenvectors, each times the root of its eigenvalue, (R, C)
    axis: int  # of the channels in an output (N, ...), from the end

    def error(self, difference: Tensor) -> Tensor:
        """Return the mean of eᵀFe over the errors e of all samples and positions."""
        directions = self.directions.to(difference.dtype)
        along = difference.movedim(self.axis, -1) @ directions.T  # (N, ..., R)
        return along.square().sum(-1).mean()


def fisher_matrix(
    model: nn.Module,
    end: str,
    batches: Iterable[Batch],
    *,
    axis: int,
    outputs: Outputs = CLASSES,
    layout: Layout = Layout(),
) -> Tensor:
    """Return the Fisher matrix over channels of a block's output, of trace 1, (C, C).

    It is the mean over samples and positions of sum ∇φ ∇φᵀ over the features φ of the
    output; half its quadratic form is the divergence that a small error causes. The
    gradient of the sum of ±φ with random signs has the same mean square as all features
    have together, and takes one backward pass.
    """
    device = model_device(model)
    generator = torch.Generator().manual_seed(rank())
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        output, returned = _rest_of_pass(model, end, batch)
        features = outputs.features(outputs.read(returned), batch_length(batch))
        for draw in range(_SIGN_DRAWS):
            signs = [random_signs(one, generator) for one in features]
            more = draw < _SIGN_DRAWS - 1
            (found,) = torch.autograd.grad(features, output, signs, retain_graph=more)
            moved = layout.samples_first(found).movedim(axis, -1)
            rows = moved.reshape(-1, moved.shape[-1])
            total = total + (rows.T @ rows).double()
    matrix = add_up(total)
    return matrix / clamp_positive(matrix.trace())


def channel_fisher(matrix: Tensor, axis: int, most: int) -> ChannelFisher:
    """Keep the ``most`` largest eigenvalues of a Fisher matrix, or all."""
    values, vectors = torch.linalg.eigh(matrix)  # in ascending order
    scaled = vectors * values.clamp_min(0).sqrt()
    return ChannelFisher(scaled.T.flip(0)[:most], axis)


def clamp_positive(value: Tensor) -> Tensor:
    """Return values that can be divided by."""
    return value.clamp_min(torch.finfo(value.dtype).tiny)


def _rest_of_pass(model: nn.Module, end: str, batch: Batch) -> tuple[Tensor, Any]:
    """Return a block's output as a leaf, and what the network returns from it."""
    seen: list[Tensor] = []

    def leaf(_module: nn.Module, _args: Any, result: Any) -> Any:
        # Detached: layers up to here need no gradient.
        first, *others = tensors_in(result)
        seen.append(first.detach().requires_grad_())
        # Later layers may modify it in place, which a leaf does not allow.
        return with_tensors(result, [seen[0].clone(), *others])

    block = model.get_submodule(end)
    with evaluating(model), block.register_forward_hook(leaf), torch.enable_grad():
        output = run_batch(model, batch)
        return seen[0], output
