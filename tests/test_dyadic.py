from fractions import Fraction

import numpy as np
import pytest
import torch

from ompq.integer.arithmetic import dyadic, float_dyadic, float_rescaled, rescaled


def integers(count, bound, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound, (count,), generator=generator)


@pytest.mark.parametrize("shift", [0, 1, 5, 40])
def test_shifts_round_half_to_even(shift):
    products = torch.cat([torch.arange(-70, 70), integers(200, 1 << 50)])
    for zero_point in (0, 3):
        found = rescaled(products, torch.tensor(shift), zero_point)
        # Python rounds fractions exactly, half to even.
        expected = [round(Fraction(int(p), 2**shift) + zero_point) for p in products]
        assert found.tolist() == expected


def test_ratios_are_exact_to_31_bits():
    ratios = torch.tensor([0.75, 1e-3, 3.14159, 1e-9], dtype=torch.float64)
    found = dyadic(ratios)
    made = found.multiplier.double() / torch.pow(2.0, found.shift.double())
    torch.testing.assert_close(made, ratios, rtol=2**-30, atol=2**-61)
    assert found.multiplier.max() < 2**31


def test_ratios_together_share_a_shift():
    found = dyadic(torch.tensor([0.5, 0.001], dtype=torch.float64), together=True)
    assert found.shift.dim() == 0
    assert found.multiplier[0] / 2**found.shift == 0.5
    assert found.multiplier[1] / 2**found.shift == pytest.approx(0.001, rel=1e-6)


def test_a_ratio_beyond_all_codes_saturates():
    found = dyadic(torch.tensor(1e12, dtype=torch.float64))
    assert rescaled(found.multiplier, found.shift) > 255


def test_integers_round_as_float32_arithmetic():
    sums = integers(20_000, 1 << 30)
    small = integers(20_000, 1 << 18, seed=1)
    ratios = np.float32([0.0013, 0.37, 1.0, 5.4e-7, 2.0**-20, 1e-13])
    for values in (sums, small):
        for ratio in ratios:
            found = float_rescaled(
                values, float_dyadic(torch.tensor(ratio)), zero_point=7
            )
            product = values.numpy().astype(np.float32) * ratio
            expected = np.rint(product).astype(np.int64) + 7
            assert np.array_equal(found.numpy(), expected)


def test_float_ratios_broadcast():
    ratios = torch.tensor([0.25, 0.5]).view(2, 1)
    found = float_rescaled(torch.tensor([[4, 8]]), float_dyadic(ratios))
    assert found.tolist() == [[1, 2], [2, 4]]
