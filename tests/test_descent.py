from contextlib import closing

import pytest
import torch

from block_data_cases import quantized_at, runner_for
from nets import Chain, scenes, seeded, values
from ompq.reconstruction.descent import Picked
from ompq.reconstruction.rounding import block_output_error


def test_low_rank_error_keeps_the_plain_error():
    """At full rank, independent errors count alike in both."""
    model = seeded(Chain())
    quantized = quantized_at(model, 3, scenes(8))
    with closing(runner_for(quantized, model, scenes(8))) as runner:
        cache = runner.gather("conv", loss="low_rank_fisher", fisher_rank=100)
    assert cache.channels.axis == -3
    noise = values(1000, *cache.targets.shape[1:])
    picked = Picked([], [], torch.zeros_like(noise), None)
    plain, half = (block_output_error(noise, picked, c) for c in (None, cache.channels))
    assert half.item() == pytest.approx(plain.item(), rel=0.05)
    along = cache.channels.error(noise)
    assert half.item() == pytest.approx((plain + along).item() / 2, rel=1e-5)
