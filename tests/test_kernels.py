import pytest
import torch
from torch.nn import functional as F

from ompq.integer.operators import (
    Average,
    Convolution,
    IntegerWeight,
    MaxPool,
    convolve,
    largest,
    padded,
    window_sums,
)


def integers(*shape, low=-20, high=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def weight_of(values):
    channels = values.shape[0]
    nothing = torch.zeros(channels, dtype=torch.int32)
    return IntegerWeight(
        codes=values.to(torch.uint8),
        bits=8,
        unit=1,
        offset=nothing,
        stretch=nothing,
        values=values.to(torch.int8),
        scale=torch.ones(channels, dtype=torch.float64),
        bias=integers(channels, seed=9),
    )


@pytest.mark.parametrize(
    ("shape", "groups", "stride", "padding", "dilation"),
    [
        ((6, 4, 3, 3), 1, (1, 1), (1, 1, 1, 1), (1, 1)),
        ((6, 4, 1, 1), 1, (2, 2), (0, 0, 0, 0), (1, 1)),
        ((4, 1, 3, 3), 4, (2, 1), (1, 1, 1, 1), (1, 1)),
        ((8, 1, 3, 3), 4, (1, 1), (1, 1, 1, 1), (1, 1)),
        ((6, 2, 3, 2), 2, (1, 2), (0, 1, 1, 2), (2, 1)),
    ],
    ids=["plain", "pointwise", "depthwise", "multiplied", "grouped"],
)
def test_convolution_equals_that_of_torch(shape, groups, stride, padding, dilation):
    x = integers(3, 4, 9, 8)
    weight = weight_of(integers(*shape, seed=1))
    operation = Convolution(weight, stride, padding, dilation, groups)
    found = convolve(x, operation)
    qmax, left, bottom, right = padding
    expected = F.conv2d(
        F.pad(x.double(), (left, right, qmax, bottom)),
        weight.values.double(),
        weight.bias.double(),
        stride,
        0,
        dilation,
        groups,
    )
    assert found.dtype == torch.int32
    assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("size", [7, 8, 9, 11])
@pytest.mark.parametrize(
    ("window", "stride", "padding", "dilation"),
    [(3, 2, 0, 1), (3, 2, 1, 1), (2, 3, 1, 1), (3, 1, 1, 2), (2, 2, 0, 1)],
)
def test_largest_codes_equal_max_pooling(size, window, stride, padding, dilation, ceil):
    codes = integers(2, 3, size, size, low=0, high=256).to(torch.uint8)
    operation = MaxPool(
        (window, window), (stride, stride), (padding,) * 2, (dilation,) * 2, ceil
    )
    expected = F.max_pool2d(
        codes.double(), window, stride, padding, dilation, ceil_mode=ceil
    )
    assert torch.equal(largest(codes, operation).double(), expected)


def test_window_sums_are_averages_times_their_size():
    x = integers(2, 3, 8, 6)
    whole = Average((8, 6), (8, 6), (0, 0), whole=True)
    assert torch.equal(window_sums(x, whole)[:, :, 0, 0], x.sum((2, 3)))
    part = Average((3, 2), (2, 2), (1, 1), whole=False)
    expected = F.avg_pool2d(x.double(), (3, 2), (2, 2), (1, 1)) * 6
    torch.testing.assert_close(window_sums(x, part).double(), expected)


def test_padding_keeps_the_kind_of_integer():
    codes = torch.ones(1, 2, 2, dtype=torch.uint8)
    found = padded(codes, ((0, 1), (2, 0)), 7)
    assert found.tolist() == [[[7, 7, 1, 1], [7, 7, 1, 1], [7, 7, 7, 7]]]
    assert found.dtype == torch.uint8
    assert padded(codes, ((0, 0), (0, 0))) is codes
