from fractions import Fraction

import numpy as np
import pytest
import torch

from lowering_cases import margin
from nets import TinyMobileNet, images, seeded
from ompq.bit_widths import STRETCHED
from ompq.errors import QuantizationError
from ompq.grids import Grid
from ompq.integer.arithmetic import (
    CodeGrid,
    IntegerWeight,
    dyadic,
    float_dyadic,
    float_rescaled,
    pad_integers,
    rescale,
)
from ompq.integer.finalization import clear_scale
from ompq.integer.lowering import lower
from ompq.integer.operators import Average, Requantize, Sum
from ompq.weight_ranges import search_weight
from quantized import quantized

INPUT = CodeGrid(scale=0.02, zero_point=3, bits=8)


def weight_and_grid(bits, shape=(5, 4, 3, 3)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    return weight, search_weight(weight, bits)


def numbers(weight, grid, bias=None):
    return IntegerWeight.of(grid.quantize(weight), grid, bias, INPUT)


@pytest.mark.parametrize("bits", range(2, 9))
def test_bytes_times_their_scale_are_the_quantized_weight(bits):
    weight, grid = weight_and_grid(bits)
    bias = torch.linspace(-1, 1, 5)
    found = numbers(weight, grid, bias)
    made = found.values.double() * found.scale.view(-1, 1, 1, 1)
    torch.testing.assert_close(made, grid.fake(weight).double(), rtol=1e-6, atol=1e-7)
    steps = INPUT.scale * found.scale
    assert ((found.bias * steps - bias).abs() <= steps / 2).all()
    assert found.affine


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_narrow_weights_are_stretched_but_fit_two_to_16_bits(bits):
    weight, grid = weight_and_grid(bits)
    largest = int(numbers(weight, grid).values.int().abs().max())
    assert STRETCHED / 2 < largest <= STRETCHED
    assert 2 * largest * 255 < 2**15


def test_without_bias_there_is_none():
    assert not numbers(*weight_and_grid(4)).bias.any()


def test_largest_sum_is_reached_by_some_input():
    weight, grid = weight_and_grid(4, (2, 6))
    found = numbers(weight, grid, torch.tensor([0.3, -0.2]))
    inputs = found.values.long().sign() * INPUT.reach  # the worst there could be
    inputs = inputs * found.bias.long().sign().view(-1, 1)
    sums = (found.values.long() * inputs).sum(1) + found.bias
    assert torch.equal(sums.abs(), found.largest_sum(INPUT))


def test_nearly_dead_channel_keeps_its_bias():
    weight, _ = weight_and_grid(4, (3, 4))
    scale = torch.tensor([[0.1], [1e-9], [1e-30]])
    grid = Grid(scale, torch.full((3, 1), 7.5), bits=4)
    bias = torch.tensor([0.5, 0.5, -0.5])
    found = numbers(weight * scale, grid, bias)
    torch.testing.assert_close(
        (found.bias * INPUT.scale * found.scale).float(), bias, rtol=1e-2, atol=1e-6
    )
    assert found.stretch[0] > 0
    assert found.stretch[1:].tolist() == [0, 0]
    assert not found.values[1:].any()
    assert found.affine


def test_channel_that_must_be_coarser_is_no_longer_affine():
    codes = torch.full((1, 64), 255, dtype=torch.uint8)
    grid = Grid(torch.tensor([[2e-8]]), torch.tensor([[128.0]]), bits=8)
    bias = torch.tensor([2.0])
    found = IntegerWeight.of(codes, grid, bias, INPUT)
    assert not found.affine
    assert found.values.any()
    made = found.values[0, 0] * found.scale[0]
    assert made == pytest.approx(127 * 2e-8, rel=0.1)


def test_sums_beyond_32_bits_are_refused():
    codes = torch.zeros(1, 70_000, dtype=torch.uint8)
    one = torch.ones(1)
    with pytest.raises(
        QuantizationError, match="sums of 70000 products reach .* 32 bits hold .*fewer"
    ):
        IntegerWeight.of(codes, Grid(one, 128 * one, 8), None, INPUT)


def integers(count, bound, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound, (count,), generator=generator)


@pytest.mark.parametrize("shift", [0, 1, 5, 40])
def test_shifts_round_half_to_even(shift):
    products = torch.cat([torch.arange(-70, 70), integers(200, 1 << 50)])
    for zero_point in (0, 3):
        found = rescale(products, torch.tensor(shift), zero_point)
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
    assert rescale(found.multiplier, found.shift) > 255


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


def test_padding_keeps_the_kind_of_integer():
    codes = torch.ones(1, 2, 2, dtype=torch.uint8)
    found = pad_integers(codes, ((0, 1), (2, 0)), 7)
    assert found.tolist() == [[[7, 7, 1, 1], [7, 7, 1, 1], [7, 7, 7, 7]]]
    assert found.dtype == torch.uint8
    assert pad_integers(codes, ((0, 0), (0, 0))) is codes


def test_clipping_goes_into_the_codes():
    steps = lower(quantized(seeded(TinyMobileNet()), images()), images())
    stem = steps.steps[1]
    assert (stem.low, stem.high) == (0.0, 6.0)
    assert stem.grid.zero_point == 0
    grid = CodeGrid(scale=0.03, zero_point=0, bits=8)
    assert grid.limits(0.0, 6.0) == (0, 200)
    assert CodeGrid(scale=0.1, zero_point=10, bits=4).limits(-0.5, 9.0) == (5, 15)
    assert CodeGrid(scale=0.1, zero_point=10, bits=4).reach == 10


@pytest.mark.parametrize("window", [2, 8, 24])
@pytest.mark.parametrize("scale", [0.0171, 0.49999, 1.0])
def test_a_cleared_scale_is_cleared_for_good(scale, window):
    # With a window of 24 not all results can be kept off the middle.
    source = CodeGrid(0.02, 0, 8)
    pool = Average((window, window), (window, window), (0, 0), False)
    results = pool.possible_results([source])
    once = clear_scale(results, CodeGrid(scale, 3, 4))
    assert once == pytest.approx(scale, rel=0.008)
    assert clear_scale(results, CodeGrid(once, 3, 4)) == once


def test_no_sum_lies_halfway():
    first, second = CodeGrid(0.02, 3, 4), CodeGrid(0.03, 0, 4)
    target = CodeGrid(0.04, 5, 4)  # (0.02 * 3) / 0.04 is a half
    values = [
        first.scale * (a - first.zero_point) + second.scale * (b - second.zero_point)
        for a in range(16)
        for b in range(16)
    ]
    assert margin(values, target.scale, 5, 15) < 1e-9
    scale = clear_scale(Sum().possible_results([first, second]), target)
    assert scale == pytest.approx(target.scale, rel=0.008)
    assert margin(values, scale, 5, 15) >= 4e-5


def test_no_average_lies_halfway():
    source = CodeGrid(0.02, 0, 8)
    results = Average((2, 2), (2, 2)).possible_results([source])
    scale = clear_scale(results, source)
    values = [source.scale * total / 4 for total in range(4 * 255 + 1)]
    assert margin(values, source.scale, 0, 255) < 1e-9
    assert margin(values, scale, 0, 255) >= 4e-5


def test_scales_that_are_clear_stay_and_huge_averages_too():
    source = CodeGrid(0.02, 0, 8)
    whole = Average((64, 64), (64, 64), whole=True).possible_results([source])
    assert clear_scale(whole, source) == source.scale
    other = CodeGrid(float(torch.tensor(0.0231)), 0, 8)
    assert clear_scale(Requantize().possible_results([source]), other) == other.scale
