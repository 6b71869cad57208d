from itertools import pairwise

import pytest
import torch

import ompq.ranges
from ompq.ranges import search_weight, weight_noise, weight_noises

BITS = (2, 3, 4, 5, 6, 8)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def weights(*shape: int, tail: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Gaussian (tail 1) or heavier channels of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(*shape, generator=generator)
    size = torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) + 0.1
    return normal.sign() * normal.abs() ** tail * size


@pytest.mark.parametrize("tail", [1.0, 1.3])
@pytest.mark.parametrize("shape", [(16, 150), (64, 48, 3, 3), (12, 200, 3, 3)])
def test_noise_is_within_percents_of_the_search(shape, tail):
    weight = weights(*shape, tail=tail)
    some = (2, 3, 5, 8)
    for bits, found in zip(some, weight_noises(weight, some), strict=True):
        full = float(search_weight(weight, bits).noise)
        assert found == pytest.approx(full, rel=0.12)


def test_noise_of_depthwise_channels_is_near_the_search():
    weight = weights(100, 1, 3, 3)
    noise = weight_noises(weight, BITS)
    # With nine weights a search finds lucky grids, and more of them at more bits.
    for bits, found in zip(BITS, noise, strict=True):
        full = float(search_weight(weight, bits).noise)
        assert 0.95 * full < found < (1.2 if bits < 5 else 1.6) * full


def test_gaussian_noise_is_what_the_textbook_says():
    # Max 1960: the least noise of a uniform quantizer for a unit Gaussian.
    weight = torch.randn(16, 4000, generator=torch.Generator().manual_seed(0))
    noise = weight_noises(weight, (2, 3, 4), max_weights=4000)
    assert noise == pytest.approx([0.1188, 0.03744, 0.01154], rel=0.05)


def test_noise_falls_with_every_bit_and_vanishes_for_zeros():
    noise = weight_noises(weights(20, 300), range(2, 9))
    assert all(a > 2 * b for a, b in pairwise(noise))
    for shape in ((3, 9), (3, 300), (3, 9000)):
        assert weight_noises(torch.zeros(shape), BITS) == [0] * len(BITS)
    some = weights(20, 300)
    some[::2] = 0
    alone = weight_noises(some[1::2], BITS)
    assert weight_noises(some, BITS) == pytest.approx(alone, rel=0.05)


def test_equal_and_single_weights_have_little_noise():
    for shape in ((4, 1), (4, 9), (4, 700)):
        assert max(weight_noises(torch.full(shape, 0.7), BITS)) < 0.01


def test_widths_do_not_influence_each_other():
    for shape in ((30, 9), (30, 400), (60, 700)):
        weight = weights(*shape)
        together = weight_noises(weight, BITS)
        alone = [weight_noise(weight, bits) for bits in BITS]
        assert together == pytest.approx(alone, rel=1e-5)
        assert weight_noises(weight, []) == []


def test_size_and_order_of_channels_do_not_matter(monkeypatch):
    weight = weights(40, 30, 5)
    noise = weight_noises(weight, BITS)
    assert weight_noises(weight, BITS) == noise
    assert weight_noises(weight * 1e-4, BITS) == pytest.approx(noise, rel=1e-3)
    moved = weight_noises(weight.movedim(0, 2), BITS, channel_dim=2)
    assert moved == pytest.approx(noise, rel=1e-5)
    monkeypatch.setattr(ompq.ranges, "elements_at_once", lambda _device: 1000)
    assert weight_noises(weight, BITS) == pytest.approx(noise, rel=1e-5)


def test_few_of_many_weights_are_enough():
    weight = weights(32, 4608)
    whole = weight_noises(weight, BITS, max_weights=4608)
    some = weight_noises(weight, BITS, max_weights=512)
    assert some == pytest.approx(whole, rel=0.08)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="bits=9 .* integer from 2 to 8"):
        weight_noises(weights(2, 3), [4, 9])
    with pytest.raises(ValueError, match="is empty"):
        weight_noise(torch.empty(0, 3), 4)
    with pytest.raises(ValueError, match="max_weights=0 must be at least 1"):
        weight_noise(weights(2, 3), 4, max_weights=0)


def test_the_weight_is_left_alone():
    weight = weights(4, 50).requires_grad_()
    before = weight.detach().clone()
    weight_noises(weight, BITS)
    assert torch.equal(weight.detach(), before)


@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("shape", [(64, 9), (64, 64), (64, 2000)])
def test_cuda_gives_the_same_noise(shape):
    weight = weights(*shape)
    there = weight_noises(weight.cuda(), BITS)
    assert there == pytest.approx(weight_noises(weight, BITS), rel=1e-3)
