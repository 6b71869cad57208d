"""Activations with heavy tails, and what calibration sees of them."""

import pytest
import torch

from ompq.activation_ranges import observe_range

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def activations(*shape: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed and off centre."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x * x.abs() + 0.2


def observe(*batches: torch.Tensor):
    seen = None
    for batch in batches:
        seen = observe_range(batch, seen)
    return seen
