import pytest
import torch

from ompq.errors import QuantizationError
from ompq.integer.arithmetic import STRETCHED, largest_sum, whole_numbers
from ompq.integer.operators import CodeGrid
from ompq.quantizers import Grid
from ompq.ranges import search_weight

INPUT = CodeGrid(scale=0.02, zero_point=3, bits=8)


def weight_and_grid(bits, shape=(5, 4, 3, 3)):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    return weight, search_weight(weight, bits).grid


def numbers(weight, grid, bias=None):
    return whole_numbers(
        grid.quantize(weight),
        grid.zero_point.flatten(),
        grid.scale.flatten(),
        grid.bits,
        bias,
        INPUT,
    )


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
    assert torch.equal(sums.abs(), largest_sum(found, INPUT))


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
    found = whole_numbers(
        codes, grid.zero_point.flatten(), grid.scale.flatten(), 8, bias, INPUT
    )
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
        whole_numbers(codes, 128 * one, one, 8, None, INPUT)
