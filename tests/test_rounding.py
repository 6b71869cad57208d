import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nets import values
from ompq.configs import RoundingConfig
from ompq.costs import coded_bytes
from ompq.entropy_coding.codec import CodeModel
from ompq.entropy_coding.rates import ZERO, code_bits, code_bytes
from ompq.grids import Grid, like_weight
from ompq.layers import quantized_layer
from ompq.reconstruction.rounding import (
    SoftRounding,
    SoftWeights,
    first_decided,
    mean_inputs,
    rows_of,
    sample_order,
    schedule,
    weight_of,
)


def quantized(layer, bits=3, step=0.1):
    with torch.no_grad():
        for number, tensor in enumerate(layer.parameters()):
            tensor.copy_(values(*tensor.shape, seed=number) * 0.2)
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    shape = [1] * layer.weight.dim()
    shape[axis] = layer.weight.shape[axis]
    scale = step * (1 + torch.arange(shape[axis]) / 10).reshape(shape)
    zero_point = torch.full(shape, (2**bits - 1) / 2)
    return quantized_layer(layer, Grid(scale, zero_point, bits)).requires_grad_(False)


LAYERS = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (8, 4, 9, 9)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (8, 4, 9, 9)),
    "linear": (lambda: nn.Linear(5, 7), (8, 5)),
    "tokens": (lambda: nn.Linear(5, 7), (8, 3, 5)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1),
        (8, 4, 5, 5),
    ),
    "transposed in groups": (
        lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2),
        (8, 4, 5, 5),
    ),
}


@pytest.fixture(params=LAYERS)
def layer_and_input(request):
    make, shape = LAYERS[request.param]
    return quantized(make()), values(*shape, seed=7) + 0.5


def soft_of(layer, x):
    return SoftRounding([layer], [lambda: layer(x)])


def used(soft):
    return soft.used(*SoftWeights.apply(*soft.learned))


def channel_means(layer, output):
    axis = output.dim() - 1 if isinstance(layer, nn.Linear) else 1
    return output.mean([d for d in range(output.dim()) if d != axis])


def test_the_soft_weight_starts_at_the_weight_within_the_grid(layer_and_input):
    layer, x = layer_and_input
    soft = soft_of(layer, x)
    grid = layer.grid_like_weight()
    low, high = (
        grid.scale * -grid.zero_point,
        grid.scale * (grid.qmax - grid.zero_point),
    )
    wanted = layer.weight.clamp(low, high)
    with used(soft):
        torch.testing.assert_close(layer.learning[0], wanted, atol=1e-6, rtol=0)
    assert layer.learning is None


def test_untouched_weights_round_to_nearest(layer_and_input):
    layer, x = layer_and_input
    wanted = layer.rounded_weight()
    bias = layer.bias.clone()
    soft = soft_of(layer, x)
    with torch.no_grad():
        soft.finish()
    torch.testing.assert_close(layer.weight, wanted)
    torch.testing.assert_close(layer.bias, bias, atol=1e-5, rtol=0)


def test_means_stay_whatever_side_weights_take(layer_and_input):
    layer, x = layer_and_input
    before = channel_means(layer, layer(x))
    soft = soft_of(layer, x)
    with torch.no_grad():
        soft.up.copy_(values(*soft.up.shape, seed=3).sigmoid())
        with used(soft):
            torch.testing.assert_close(channel_means(layer, layer(x)), before)
        soft.finish()
        torch.testing.assert_close(channel_means(layer, layer(x)), before)


def test_mean_inputs_times_weights_are_mean_outputs(layer_and_input):
    layer, x = layer_and_input
    (mean,) = mean_inputs([layer], [lambda: layer(x)])
    for seed in (1, 2):
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight.copy_(
                other.grid_like_weight().fake(values(*layer.weight.shape, seed=seed))
            )
        wanted = channel_means(layer, other(x)) - layer.bias
        found = rows_of(layer, other.weight * mean).sum(1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_rows_and_weights_are_each_other_s_inverse(layer_and_input):
    layer, _ = layer_and_input
    rows = rows_of(layer, layer.weight)
    assert len(rows) == len(layer.bias)
    torch.testing.assert_close(weight_of(layer, rows), layer.weight.detach())


def test_gradients_are_those_of_the_written_out_formula():
    layer, x = quantized(nn.Conv2d(4, 6, 3, padding=1)), values(8, 4, 5, 5) + 0.5
    grid = layer.grid_like_weight()
    bias = layer.bias.clone()
    start = layer.rounded_weight()
    patches = F.unfold(x, 3, padding=1).mean((0, 2)).reshape(1, 4, 3, 3)
    soft = soft_of(layer, x)
    for tensor in (soft.up, soft.stretch, soft.bias):
        tensor.requires_grad_()
    with used(soft):
        output = layer(x)
    output.square().mean().backward()

    position = layer.weight / grid.scale + grid.zero_point
    up = (position - position.floor()).requires_grad_()
    stretch = torch.zeros(6, 1, 1, 1, requires_grad=True)
    free = bias.clone().requires_grad_()
    code = (position.floor() + up).clamp(0, grid.qmax)
    weight = grid.scale * stretch.exp() * (code - grid.zero_point)
    moved = ((start - weight) * patches).sum((1, 2, 3))
    F.conv2d(x, weight, free + moved, padding=1).square().mean().backward()
    inside = (position > 0) & (position < grid.qmax)
    close = {"atol": 1e-6, "rtol": 1e-4}
    torch.testing.assert_close(
        soft.up.grad.reshape(6, 4, 3, 3)[inside], up.grad[inside], **close
    )
    assert (soft.up.grad.reshape(6, 4, 3, 3)[~inside] == 0).all()
    torch.testing.assert_close(soft.stretch.grad, stretch.grad.flatten(), **close)
    torch.testing.assert_close(soft.bias.grad, free.grad, **close)


def test_several_layers_share_one_tensor_and_keep_apart():
    layers = [quantized(nn.Linear(5, 7)), quantized(nn.Linear(7, 3), bits=4)]
    alone = [copy.deepcopy(layer) for layer in layers]
    x = values(20, 5) + 0.5
    soft = SoftRounding(layers, [lambda: layers[1](layers[0](x))])
    assert soft.up.shape == (7 * 5 + 3 * 7,)
    with torch.no_grad():
        soft.stretch[7:] = 0.5
        soft.finish()
    torch.testing.assert_close(layers[0].weight, alone[0].rounded_weight())
    torch.testing.assert_close(
        layers[1].weight, alone[1].rounded_weight() * torch.tensor(0.5).exp()
    )
    torch.testing.assert_close(
        layers[1].weight_scale, alone[1].weight_scale * torch.tensor(0.5).exp()
    )


def test_weights_are_driven_to_their_sides_and_no_further():
    layer, x = quantized(nn.Linear(5, 1)), values(20, 5)
    soft = soft_of(layer, x)
    soft.up.copy_(torch.tensor([0.2, 0.4, 0.5, 0.75, 0.999]))
    exponent, step = torch.tensor(3.0), torch.tensor(0.2)
    soft.decide(exponent, step)
    wanted = [0.2 - 0.2 * 0.6**2, 0.4 - 0.2 * 0.2**2, 0.5, 0.75 + 0.2 * 0.5**2, 1.0]
    torch.testing.assert_close(soft.up, torch.tensor(wanted))
    soft.harden()
    assert soft.up.tolist() == [0, 0, 0, 1, 1]


def test_layers_without_bias_stay_without():
    layer, x = quantized(nn.Linear(5, 7, bias=False)), values(20, 5)
    soft = soft_of(layer, x)
    with used(soft):
        assert layer.learning[1] is None
    with torch.no_grad():
        soft.finish()
    assert layer.bias is None


def test_scales_that_groups_share_are_not_stretched():
    layer = quantized(nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2))
    x = values(8, 4, 5, 5)
    soft = soft_of(layer, x)
    soft.stretch.requires_grad_()
    with used(soft):
        output = layer(x)
    output.square().sum().backward()
    assert (soft.stretch.grad == 0).all()


def test_each_step_reads_its_rates_from_the_table():
    config = RoundingConfig(
        iterations=1000,
        travel=2.0,
        activation_learning_rate=1e-4,
        scale_learning_rate=1e-3,
        bias_learning_rate=1e-2,
        warmup=0.2,
        tail=0.1,
        drive=20.0,
        exponent=(8.0, 2.0),
    )
    table = schedule(config)
    assert table.shape == (1000, 6)
    assert first_decided(config) == 900
    for step in (0, 199, 200, 500, 899, 900, 999):
        left = 1 - step / 1000
        phase = min(max((step / 1000 - 0.2) / 0.7, 0), 1)
        rate = 0.002 if step < 900 else 0.0
        wanted = (
            rate,
            1e-4 * left,
            1e-3 * left,
            1e-2 * left,
            8 - 6 * phase,
            20 * phase * rate,
        )
        assert table[step].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-7)


def test_long_runs_move_nothing_farther_than_1000_iterations_do():
    usual, long = (schedule(RoundingConfig(iterations=n)) for n in (1000, 3000))
    torch.testing.assert_close(
        long[:, :4].sum(0), usual[:, :4].sum(0), rtol=2e-3, atol=0
    )
    short = schedule(RoundingConfig(iterations=500))
    assert short[0, 1:4].tolist() == usual[0, 1:4].tolist()


def test_few_iterations_do_not_make_the_rate_large():
    assert schedule(RoundingConfig(iterations=10))[0, 0].item() == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((100, 8, 4, 4), 16),  # 2048 / 128
        ((100, 64, 8, 8), 8),  # half a sample would do: never fewer than eight
        ((100, 10), 64),  # never more than the batch size
        ((20, 10), 20),  # nor than there are
    ],
)
def test_large_outputs_take_fewer_samples_a_step(shape, size):
    config = RoundingConfig(iterations=7, step_elements=2048, batch_size=64)
    order = sample_order(torch.zeros(shape), config, 0)
    assert order.shape == (7, size)
    assert order.min() >= 0 and order.max() < shape[0]
    assert torch.equal(order, sample_order(torch.zeros(shape), config, 0))
    other = sample_order(torch.zeros(shape), RoundingConfig(iterations=7), 1)
    assert not torch.equal(order[:, :8], other[:, :8])
    some = sample_order(torch.zeros(shape), config, 0, count=9)
    assert some.max() < 9


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"iterations": 0}, "'iterations' of RoundingConfig must be at least 1"),
        ({"batch_size": 0}, "'batch_size' of RoundingConfig must be at least 1"),
        ({"drop": 2.0}, "'drop' of RoundingConfig must be from 0 to 1"),
        (
            {"float_inputs": -0.5},
            "'float_inputs' of RoundingConfig must be from 0 to 1",
        ),
        ({"tail": 1.5}, "'tail' of RoundingConfig must be from 0 to 1"),
        ({"warmup": -1}, "'warmup' of RoundingConfig must be from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        RoundingConfig(**setting)


def coded(layer, rate, step=0.05):
    """Return a layer whose weights have one step and a rate."""
    with torch.no_grad():
        layer.weight.copy_(values(*layer.weight.shape, seed=3) * 0.2)
    shape = [len(layer.weight), *[1] * (layer.weight.dim() - 1)]
    grid = Grid(torch.full(shape, step), torch.full(shape, float(ZERO)), 8)
    made = quantized_layer(layer, grid).requires_grad_(False)
    made.rate = rate
    return made


def test_weights_of_coded_layers_feel_what_their_neighbours_cost():
    layer, x = coded(nn.Conv2d(8, 16, 3), rate=2.0), values(4, 8, 6, 6)
    soft = soft_of(layer, x)
    for each in soft.coded:
        each.set_price(0.5)
    soft.up.requires_grad_()
    with used(soft):
        layer(x).sum().backward()
    with_price = soft.up.grad.clone()
    soft.up.grad = None
    soft._slope.zero_()
    with used(soft):
        layer(x).sum().backward()
    felt = with_price - soft.up.grad
    model = CodeModel.fit(layer.codes().numpy())
    classes = torch.from_numpy(model.classes(layer.codes().numpy())).flatten()
    bits = code_bits(layer.codes(), classes)
    low = (layer.weight / 0.05).floor().flatten().long() + ZERO
    kinds = classes.long()
    expected = bits[kinds, low + 1] - bits[kinds, low]
    price = felt.norm() / expected.norm()
    assert torch.allclose(felt, price * expected, atol=1e-2 * float(felt.abs().max()))


def test_bits_cost_more_while_codes_take_too_much():
    codes = coded(nn.Conv2d(8, 16, 3), rate=1.0).codes()
    taken, slopes = 8 * code_bytes(codes) / codes.numel(), []
    for rate in (1.03 * taken, taken, 0.97 * taken):
        soft = soft_of(coded(nn.Conv2d(8, 16, 3), rate=rate), values(4, 8, 6, 6))
        for each in soft.coded:
            each.set_price(0.5)
        slopes.append(float(soft._slope.abs().sum()))
    assert slopes[0] < slopes[1] < slopes[2]


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_decided_codes_take_what_they_may(kind):
    layer, x = coded(kind(16, 16, 3), rate=2.5), values(4, 16, 6, 6)
    before = layer.codes()
    assert code_bytes(before) > coded_bytes(before.numel(), 2.5)
    soft = soft_of(layer, x)
    soft.harden()
    soft.keep_rates(torch.ones_like(soft.up))
    soft.decide(torch.tensor(2.0), torch.tensor(0.1))  # leaves them where they are
    soft.finish()
    limit = coded_bytes(before.numel(), 2.5)
    assert 0.97 * limit < code_bytes(layer.codes()) <= limit
    levels = layer.codes().float() - ZERO
    assert (levels.abs() <= (before.float() - ZERO).abs()).all()


def test_weights_beyond_the_last_code_have_a_price_and_stay_there():
    """One far weight needs no class of its own to be the last one in the table."""
    layer = coded(nn.Conv2d(8, 16, 3), rate=4.0)
    with torch.no_grad():
        layer.weight.view(-1)[[0, -1]] = torch.tensor([99.0, -99.0])
    codes = layer.codes()
    assert {0, 255} <= set(codes.flatten().tolist())
    soft = soft_of(layer, values(4, 8, 6, 6))
    (own,) = soft.coded
    assert torch.equal(own._codes(), rows_of(layer, codes).flatten())
    for each in soft.coded:
        each.set_price(1.0)
    assert own._slope[0] == own._slope[-1] == 0
    assert torch.isfinite(own._slope).all()


def test_scales_of_groups_have_gradients_of_their_own():
    steps = like_weight(0.05 + torch.arange(6.0) / 100, (3, 40), group_size=32)
    grid = Grid(steps, torch.full((3, 40), 3.5), 3)
    layer = quantized_layer(nn.Linear(40, 3), grid, 32).requires_grad_(False)
    x, start = values(8, 40, seed=7) + 0.5, layer.rounded_weight()
    grid, bias = layer.grid_like_weight(), layer.bias.clone()
    soft = soft_of(layer, x)
    for tensor in (soft.up, soft.stretch, soft.bias):
        tensor.requires_grad_()
    with used(soft):
        output = layer(x)
    output.square().mean().backward()

    position = layer.weight / grid.scale + grid.zero_point
    up = (position - position.floor()).requires_grad_()
    stretch = torch.zeros(3, 2, requires_grad=True)
    each = torch.cat([stretch[:, :1].expand(3, 32), stretch[:, 1:].expand(3, 8)], 1)
    code = (position.floor() + up).clamp(0, grid.qmax)
    weight = grid.scale * each.exp() * (code - grid.zero_point)
    moved = ((start - weight) * x.mean(0)).sum(1)
    F.linear(x, weight, bias + moved).square().mean().backward()
    close = {"atol": 1e-6, "rtol": 1e-4}
    torch.testing.assert_close(soft.stretch.grad, stretch.grad.flatten(), **close)
    inside = (position > 0) & (position < grid.qmax)
    torch.testing.assert_close(
        soft.up.grad.reshape(3, 40)[inside], up.grad[inside], **close
    )
    with torch.no_grad():
        soft.stretch += torch.arange(6.0) / 10
        before = layer.weight_scale.clone()
        soft.finish()
    factors = (torch.arange(6.0) / 10).exp().reshape(3, 2)
    torch.testing.assert_close(layer.weight_scale, before * factors)
