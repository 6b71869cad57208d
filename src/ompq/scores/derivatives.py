"""Derivatives of a network in eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ompq.samples import cudnn_kernels, evaluating


@contextmanager
def differentiating(model: nn.Module) -> Iterator[None]:
    """Enable repeatable gradients of a network in eval mode."""
    # The fast kernels of attention have no second derivative.
    with (
        evaluating(model),
        torch.enable_grad(),
        cudnn_kernels(repeatable=True),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield
