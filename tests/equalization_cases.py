"""What several files of tests share: see test_equalization.py."""

import torch


def rows(seed=0):
    return torch.randn(32, 5, 8, generator=torch.Generator().manual_seed(seed))
