import math

import numpy as np
import pytest
import torch

from ompq.grids import (
    Grid,
    integer_weight,
    learned_clip,
    learned_step,
    like_weight,
    of_groups,
    round_through,
    straight_through,
)

WIDTHS = range(2, 9)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def code_of(x: float, scale: float, zero_point: float, qmax: int) -> int:
    """The formula for one number, in single precision; Python rounds half to even."""
    position = np.float32(x) / np.float32(scale) + np.float32(zero_point)
    return min(max(round(float(position)), 0), qmax)


@pytest.mark.parametrize("bits", WIDTHS)
def test_fake_quantization_is_the_formula_for_each_number(bits):
    x = values(3, 5)
    scale = torch.tensor([[0.3], [0.07], [1.9]])
    zero_point = torch.tensor([[0.0], [1.5], [2.0]])
    grid = Grid(scale, zero_point, bits)
    qmax = 2**bits - 1
    for row in range(3):
        s, z = scale[row].item(), zero_point[row].item()
        codes = [code_of(v, s, z, qmax) for v in x[row].tolist()]
        assert grid.quantize(x)[row].tolist() == codes
        expected = [np.float32(s) * np.float32(c - z) for c in codes]
        assert grid.fake(x)[row].tolist() == expected


def test_ties_go_to_the_even_code():
    grid = Grid(torch.tensor(1.0), torch.tensor(0.0), 4)
    assert grid.quantize(torch.tensor([0.5, 1.5, 2.5, 3.5])).tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_make_the_round_trip(bits):
    codes = torch.arange(2**bits, dtype=torch.uint8)
    grid = Grid(torch.tensor(0.37), torch.tensor(2.0 ** (bits - 1)), bits)
    assert torch.equal(grid.quantize(grid.dequantize(codes)), codes)
    x = values(1000)
    assert torch.equal(grid.dequantize(grid.quantize(x)), grid.fake(x))
    assert torch.equal(grid.fake(grid.fake(x)), grid.fake(x))


def test_two_bits_have_the_levels_the_zero_says():
    far = torch.tensor([-9.0, -0.4, 0.4, 9.0])
    one = torch.tensor(1.0)
    assert Grid(one, torch.tensor(1.5), 2).fake(far).tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert Grid(one, torch.tensor(2.0), 2).fake(far).tolist() == [-2, 0, 0, 1]
    narrow = Grid(one, torch.tensor(1.0), 2, narrow=True)
    assert narrow.fake(far).tolist() == [-1, 0, 0, 1]
    assert narrow.qmax == 2


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_zero_is_exact_in_signed_bytes(bits):
    qmax = 2**bits - 1
    zeros = (
        torch.arange(2 * qmax + 1) / 2 if bits <= 6 else torch.tensor([2.0**bits / 2])
    )
    codes = torch.arange(qmax + 1)[:, None]
    grid = Grid(torch.tensor(0.1234), zeros, bits)
    integers, factor = integer_weight(codes, zeros, bits)
    assert integers.dtype == torch.int8
    assert factor == (0.5 if bits <= 6 else 1)
    expected = [
        [round((c - z) / factor) for z in zeros.tolist()] for c in range(qmax + 1)
    ]
    assert integers.tolist() == expected
    assert torch.equal(integers * (grid.scale * factor), grid.dequantize(codes))


@pytest.mark.parametrize(
    ("zero_point", "bits"), [(0.25, 2), (80.0, 6), (1.5, 8), (0.0, 8)]
)
def test_zeros_that_no_byte_holds_are_refused(zero_point, bits):
    codes = torch.arange(2**bits)
    with pytest.raises(ValueError, match="zero_point=.* does not fit signed"):
        integer_weight(codes, torch.tensor(zero_point), bits)


def test_rounding_passes_the_gradient():
    x = (values(100) * 5).requires_grad_()
    rounded = round_through(x)
    assert torch.equal(rounded, x.round())
    factors = values(100, seed=1)
    (rounded * factors).sum().backward()
    assert torch.equal(x.grad, factors)


@pytest.mark.parametrize("zero_point", [0.0, 1.5, 2.0])
def test_straight_through_stops_the_gradient_outside_the_range(zero_point):
    x = (values(200) * 3).requires_grad_()
    grid = Grid(torch.tensor(0.7), torch.tensor(zero_point), 2)
    out = straight_through(x, grid)
    assert torch.equal(out, grid.fake(x))
    out.sum().backward()
    low, high = -zero_point * 0.7, (3 - zero_point) * 0.7
    inside = [float(low < v < high) for v in x.tolist()]
    assert x.grad.tolist() == inside
    assert 0 < sum(inside) < 200


@pytest.mark.parametrize(
    ("negative", "positive"), [(0, 15), (8, 7)], ids=["unsigned", "signed"]
)
def test_learned_step_has_the_gradient_of_the_paper(negative, positive):
    # Esser et al. 2020, equations 3 and 4.
    x = (values(300) * 4).requires_grad_()
    scale = torch.tensor(0.45, requires_grad=True)
    grid = Grid(scale, torch.tensor(float(negative)), 4)
    out = learned_step(x, grid)
    assert torch.equal(out, grid.fake(x))
    upstream = values(300, seed=1)
    (out * upstream).sum().backward()
    expected = 0.0
    for v, g in zip(x.tolist(), upstream.tolist(), strict=True):
        ratio = v / scale.item()
        if ratio <= -negative:
            slope = -negative
        elif ratio >= positive:
            slope = positive
        else:
            slope = -ratio + round(ratio)
        expected += g * slope
    expected /= math.sqrt(300 * positive)
    assert scale.grad.item() == pytest.approx(expected, rel=1e-4)
    inside = [-negative < v / 0.45 < positive for v in x.tolist()]
    assert torch.allclose(x.grad, upstream * torch.tensor(inside))


def test_learned_step_counts_the_weights_of_each_channel():
    x = values(4, 3, 3)
    scale = torch.full((4, 1, 1), 0.3, requires_grad=True)
    zero_point = torch.tensor([0.0, 1.5, 2.0, 3.0])[:, None, None]
    learned_step(x, Grid(scale, zero_point, 2)).sum().backward()
    plain = scale.detach().clone().requires_grad_()
    straight_through(x, Grid(plain, zero_point, 2)).sum().backward()
    for channel, level in enumerate([3, 1.5, 1, 1]):
        factor = 1 / math.sqrt(9 * level)
        expected = plain.grad[channel].item() * factor
        assert scale.grad[channel].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("zero_point", [0, 5])
def test_learned_clip_has_the_gradient_of_the_paper(zero_point):
    # Choi et al. 2018, equation 3: 1 above the limit, 0 inside. A range with a lower
    # end, which moves with the limit, adds the end's slope below it.
    x = (values(300) * 2).requires_grad_()
    limit = torch.tensor(1.3, requires_grad=True)
    out = learned_clip(x, limit, torch.tensor(float(zero_point)), bits=4)
    scale = limit.detach() / (15 - zero_point)
    assert torch.equal(out, Grid(scale, torch.tensor(float(zero_point)), 4).fake(x))
    upstream = values(300, seed=1)
    (out * upstream).sum().backward()
    low = -1.3 * zero_point / (15 - zero_point)
    pairs = list(zip(x.tolist(), upstream.tolist(), strict=True))
    expected = sum(g for v, g in pairs if v >= 1.3)
    expected += sum(g * low / 1.3 for v, g in pairs if v <= low)
    assert limit.grad.item() == pytest.approx(expected, rel=1e-4)
    assert x.grad.tolist() == [g if low < v < 1.3 else 0 for v, g in pairs]


def gradients(x, scale, limit):
    zero_point = torch.zeros((), device=x.device)
    grid = Grid(scale, zero_point + 1.5, 2)
    total = learned_step(x, grid).square().sum()
    return total + learned_clip(x, limit, zero_point, 4).square().sum()


def inputs(device="cpu"):
    tensors = (values(4, 9), torch.full((4, 1), 0.4), torch.tensor(1.2))
    return [t.to(device).requires_grad_() for t in tensors]


def test_all_of_it_compiles_in_one_graph():
    eager, compiled = inputs(), inputs()
    gradients(*eager).backward()
    torch.compile(gradients, fullgraph=True, backend="eager")(*compiled).backward()
    for one, other in zip(eager, compiled, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@cuda
def test_cuda_gives_the_same_codes_and_gradients():
    x = values(64, 99)
    grid = Grid(torch.full((64, 1), 0.1), torch.full((64, 1), 7.5), 4)
    there = Grid(grid.scale.cuda(), grid.zero_point.cuda(), 4)
    assert torch.equal(there.quantize(x.cuda()).cpu(), grid.quantize(x))
    here, away = inputs(), inputs("cuda")
    gradients(*here).backward()
    gradients(*away).backward()
    for one, other in zip(here, away, strict=True):
        assert torch.allclose(one.grad, other.grad.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@cuda
def test_the_step_is_captured_in_a_cuda_graph():
    leaves = inputs("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(*leaves).backward()
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients(*leaves).backward()
    for leaf in leaves:
        leaf.grad.zero_()
    graph.replay()
    expected = inputs("cuda")
    gradients(*expected).backward()
    for one, other in zip(leaves, expected, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_what_groups_have_goes_with_a_weight_and_back():
    given = torch.arange(6.0).reshape(2, 3)
    wide = like_weight(given, (2, 8), group_size=3)
    rows = [[0, 0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4, 5, 5]]
    assert wide.tolist() == rows
    assert torch.equal(of_groups(wide, 3), given)
    channels = like_weight(torch.arange(4.0), (5, 4, 2), axis=1)
    assert channels.shape == (1, 4, 1)
    assert of_groups(channels, 0).tolist() == [0, 1, 2, 3]
