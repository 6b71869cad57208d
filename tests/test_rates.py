"""Rounding that minds what codes cost, against brute force and formulas."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ompq
from nets import TinyMobileNet, TinyResNet, demo_network, images, scenes, seeded, values
from ompq.allocation.problem import Allocation
from ompq.costs import can_be_coded, coded_bytes
from ompq.entropy_coding.codec import encode
from ompq.entropy_coding.rates import (
    PRICE,
    ZERO,
    between_codes,
    cheapest_codes,
    code_bits,
    code_bytes,
    coded_codes,
    coded_grid,
    coded_weight,
    entropy,
    lowered_codes,
    pull_to,
    rate_curve,
    scale_multiples,
    to_multiples,
)
from ompq.errors import QuantizationError
from ompq.layers import quantized_layers
from ompq.models.builtin_networks import demo_data
from ompq.network.folding import fold_norm
from ompq.network.graph import bias_key
from ompq.network.units import Choice
from ompq.quantization.record import keep_rates, quantization_of
from ompq.scores.catalogue import SCORES
from ompq.scores.weight_noise import rounded_weights
from tables import score_inputs


def laplacian(count: int, scale: float) -> torch.Tensor:
    generator = np.random.default_rng(0)
    return torch.from_numpy(ZERO + generator.laplace(scale=scale, size=count)).float()


def order_0_bytes(codes: torch.Tensor) -> int:
    return math.ceil(entropy(codes) / 8)


def test_a_code_costs_minus_log_of_its_frequency():
    codes = torch.tensor([0, 0, 1, 2], dtype=torch.uint8)
    expected = [1.0, 2.0, 2.0, 3.0]  # the last does not occur
    total = 4 + 0.5 * 253  # those that do not occur count half
    shift = math.log2(total / 4)
    found = code_bits(codes)[:4] - shift
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert entropy(codes) == pytest.approx(1 + 1 + 2 + 2)


def test_each_weight_has_the_cheaper_neighbour():
    position = laplacian(300, 0.7)
    found = cheapest_codes(position, rounds=1)
    bits = code_bits(position.round())
    for x, code in zip(position, found, strict=True):
        cost = {
            c: float((x - c) ** 2 + PRICE * bits[c])
            for c in (math.floor(x), math.floor(x) + 1)
        }
        assert cost[int(code)] <= min(cost.values()) + 1e-5


def test_no_price_rounds_to_nearest():
    position = laplacian(300, 30.0)
    expected = position.round().clamp(0, 255)
    assert torch.equal(cheapest_codes(position, price=0).float(), expected)


@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_less_error_than_rounding_to_nearest_at_equal_entropy(rate):
    weight = laplacian(20_000, 1.0) - ZERO

    def error_at(price: float) -> float:
        low, high = 0.05, 20.0
        for _ in range(30):
            step = math.sqrt(low * high)
            codes = cheapest_codes(weight / step + ZERO, price=price)
            enough = entropy(codes) <= rate * len(weight)
            low, high = (low, step) if enough else (step, high)
        codes = cheapest_codes(weight / high + ZERO, price=price)
        return float((high * (codes.float() - ZERO) - weight).square().mean())

    errors = {price: error_at(price) for price in (0, PRICE / 3, PRICE, 3 * PRICE)}
    assert errors[PRICE] == min(errors.values())
    assert errors[PRICE] < 0.95 * errors[0]


def test_lowered_codes_fit_and_move_no_more_than_they_must():
    position = laplacian(5_000, 2.0)
    codes = cheapest_codes(position)
    limit = int(0.97 * order_0_bytes(codes))
    found = lowered_codes(codes, position, 1.0, size=order_0_bytes, limit=limit)
    assert 0.995 * limit < order_0_bytes(found) <= limit
    before, after = ((each.float() - ZERO).abs() for each in (codes, found))
    assert ((before - after == 0) | (before - after == 1)).all()
    # Those near the middle cost least.
    moved = codes != found
    distance = (found.float() - position).abs()[moved]
    assert distance.quantile(0.9) < 0.8


def test_codes_that_fit_stay():
    codes = cheapest_codes(laplacian(100, 2.0))
    found = lowered_codes(codes, codes.float(), 1.0, size=order_0_bytes, limit=10**6)
    assert torch.equal(found, codes)


def test_codes_end_at_zero_if_nothing_else_fits():
    codes = cheapest_codes(laplacian(100, 2.0))
    found = lowered_codes(codes, codes.float(), 1.0, size=order_0_bytes, limit=0)
    assert (found == ZERO).all()


def test_pulled_positions_round_to_their_codes():
    position = laplacian(1_000, 1.0)
    codes = cheapest_codes(position)
    assert (codes != position.round()).any()
    pulled = pull_to(codes, position)
    assert torch.equal(pulled.round(), codes.float())
    inside = (position - codes).abs() < 0.49
    assert torch.equal(pulled[inside], position[inside])


def test_codes_of_classes_cost_what_they_cost_among_themselves():
    codes = cheapest_codes(laplacian(400, 2.0))
    classes = torch.arange(400) % 3
    found = code_bits(codes, classes)
    for number in range(3):
        alone = codes[classes == number]
        np.testing.assert_allclose(found[number], code_bits(alone), atol=1e-5)
    apart = sum(entropy(codes[classes == number]) for number in range(3))
    assert entropy(codes, classes) == pytest.approx(apart)


def test_between_two_codes_a_weight_costs_what_lies_between():
    position = laplacian(200, 2.0).requires_grad_()
    found = between_codes(position)
    found.sum().backward()
    bits = code_bits(position.detach().round())
    rows = zip(position.tolist(), found.tolist(), position.grad.tolist(), strict=True)
    for x, cost, slope in rows:
        low = math.floor(x)
        expected = np.interp(x, [low, low + 1], bits[low : low + 2])
        assert cost == pytest.approx(expected, abs=1e-3)
        assert slope == pytest.approx(float(bits[low + 1] - bits[low]), abs=1e-4)


SAMPLES = scenes(16)


@pytest.fixture(scope="module")
def weight():
    return 0.1 * values(96, 64, 3, 3) * (1 + values(96, 1, 1, 1, seed=1).abs())


@pytest.mark.parametrize("rate", [1, 2.25, 4, 6])
def test_the_curve_foretells_bytes_and_noise(weight, rate):
    curve = rate_curve(weight)
    codes = coded_codes(weight, curve.step(rate))
    used = 8 * len(encode(codes.numpy())) / weight.numel()
    assert used == pytest.approx(rate, rel=0.05)
    error = coded_weight(weight, curve.step(rate)) - weight
    noise = float(error.square().sum() / weight.square().sum())
    assert curve.noise_at(rate) == pytest.approx(noise, rel=0.1)


def test_the_curve_counts_on_rows_that_are_alike():
    # Most rows would be left out of a sample, and what they have in common with them.
    alike = values(600, 8) @ values(8, 500) + 8**0.5 * values(600, 500)
    curve = rate_curve(alike)
    codes = coded_codes(alike, curve.step(3))
    used = 8 * len(encode(codes.numpy())) / alike.numel()
    assert used == pytest.approx(3, rel=0.02)
    assert used < 0.95 * entropy(codes) / alike.numel()


def test_noise_is_near_what_rate_distortion_theory_allows():
    # A Gaussian needs R bits for a noise of 2^-2R; a uniform grid with entropy coding
    # loses at most pi e / 6 of it.
    curve = rate_curve(values(256, 512))
    for rate in (2, 3, 4):
        assert 1 < curve.noise_at(rate) * 4**rate < 1.1 * math.pi * math.e / 6


@pytest.mark.parametrize("rate", [1.25, 3, 5.5])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_grid_of_one_step_takes_what_it_may(weight, rate, axis):
    limit = coded_bytes(weight.numel(), rate)
    grid, moved = coded_grid(weight, limit, channel_dim=axis)
    codes = grid.quantize(moved)
    assert 0.97 * limit < len(encode(codes.numpy())) <= limit
    assert grid.scale.unique().numel() == 1 and grid.scale.dim() == 4
    assert grid.scale.shape[axis] == weight.shape[axis]
    assert grid.scale.equal(to_multiples(grid.scale))
    step = float(grid.scale.flatten()[0])
    assert codes.equal(coded_codes(weight, step))
    assert (moved - weight).abs().max() < 0.52 * step  # not far from where it was


@pytest.mark.parametrize(
    ("power", "first"), [(0.3, 0.05), (0.3, 0.5), (2, 0.05), (3, 1)]
)
@pytest.mark.parametrize("rate", [1.0, 2.0, 3.0])
def test_a_step_is_found_whatever_a_coarser_one_saves(power, first, rate):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    taken = {}

    def rounding(weight, step):
        codes = coded_codes(weight, first * step**power)
        taken[step] = code_bytes(codes)
        return codes

    limit = coded_bytes(weight.numel(), rate)
    grid, _ = coded_grid(weight, limit, channel_dim=0, rounding=rounding)
    step = float(grid.scale[0])
    assert 0.96 * limit < taken[step] <= limit
    assert step == min(step for step, used in taken.items() if used <= limit)


def test_zeros_are_kept_if_even_they_take_too_much():
    grid, moved = coded_grid(torch.randn(16, 64), 0, channel_dim=0)
    assert not grid.fake(moved).any()


def test_a_layer_of_zeros_stays_zero():
    grid, moved = coded_grid(torch.zeros(16, 64), 128, channel_dim=0)
    assert not grid.fake(moved).any()
    assert rate_curve(torch.zeros(4, 4)).noise_at(2) < 1e-20


def test_scales_are_bytes_times_a_number():
    torch.manual_seed(0)
    scales = 0.003 * (1 + 0.1 * torch.randn(1000)).clamp(0.3)
    unit, multiples = scale_multiples(scales)
    assert unit.dtype == torch.float32 and multiples.dtype == torch.uint8
    assert multiples.max() == 255
    found = to_multiples(scales)
    expected = [
        float(unit) * (32 + k % 32) * 2 ** (k // 32)  # exact: 12 bits times 6
        for k in multiples.tolist()
    ]
    assert found.tolist() == expected
    assert (found / scales - 1).abs().max() < 1 / 64
    spread = scales * 2.0 ** -torch.randint(7, (1000,))  # as equalization leaves them
    assert (to_multiples(spread) / spread - 1).abs().max() < 1 / 64
    again = scale_multiples(found)
    assert again[0].equal(unit) and again[1].equal(multiples)
    for scale in (1e-38, 1.0, 3e4, 1e-6):  # and for one channel
        one = to_multiples(torch.tensor([scale]))
        assert one > 0 and one.equal(to_multiples(one))
    assert to_multiples(torch.tensor([1.0, 0.0])).min() > 0


def test_scores_see_the_folded_weight_rounded():
    network = seeded(TinyResNet())
    unit = ompq.trace(network, images(1))["block1.conv2"]
    norm, conv = network.get_submodule(unit.norm), network.get_submodule(unit.name)
    [rounded] = rounded_weights(network, unit, [Choice(8, 8, rate=2.5)])
    whole = fold_norm(conv, norm)[0].detach()
    wanted = coded_weight(whole, rate_curve(whole).step(2.5))
    changed = copy.deepcopy(conv)
    changed.weight = torch.nn.Parameter(rounded)
    torch.testing.assert_close(fold_norm(changed, norm)[0].detach(), wanted)


@pytest.mark.parametrize(
    "name", sorted(set(SCORES) - {"random", "reconstruction", "block_loss"})
)
def test_every_score_tells_rates_apart(name):
    network = seeded(TinyResNet())
    graph = ompq.trace(network, images(1))
    choices = [Choice(8, 8, rate) for rate in (1.5, 3, 5)] + [Choice(8, 8)]
    table = SCORES[name](score_inputs(graph, network, images(8), choices))
    total = getattr(table, "damage", table).sum(0)
    assert total[0] > total[1]
    # A gradient at the low-bit network need not fall all the way.
    assert total[1] > total[2] or name == "gradient"


def coded_network(make, rate=3.0):
    network = seeded(make())
    graph = ompq.trace(network, SAMPLES)
    coded, fixed = Choice(8, 8, rate), Choice(8, 8)
    bits = {u.name: coded if can_be_coded(u, coded) else fixed for u in graph.units}
    return network, Allocation(bits)


@pytest.mark.parametrize("make", [TinyResNet, TinyMobileNet])
def test_quantized_and_finalized_networks_keep_their_rates(make):
    network, bits = coded_network(make)
    assert any(choice.rate for choice in bits.values())
    quantized = ompq.quantize(network, bits, SAMPLES)
    for made in (quantized, ompq.finalize(quantized, SAMPLES)):
        layers, state = quantized_layers(made), made.state_dict()
        for unit in quantization_of(made).graph.units:
            layer, rate = layers[unit.name], bits[unit.name].rate
            assert layer.rate == rate
            if rate:
                size = len(encode(layer.codes().numpy()))
                assert size <= math.ceil(unit.weights * rate / 8)
                scale, bias = layer.weight_scale, state[bias_key(unit)]
                assert scale.equal(to_multiples(scale))
                assert bias.equal(bias.half().float())
        before = copy.deepcopy(made.state_dict())
        keep_rates(made)  # once more changes nothing
        assert all(before[key].equal(value) for key, value in made.state_dict().items())


def test_equalized_channels_keep_the_codes_they_had():
    network, bits = coded_network(TinyMobileNet, rate=6.0)
    made = {
        equalize: ompq.quantize(
            network,
            bits,
            SAMPLES,
            ompq.QuantizeConfig(equalize=equalize, restore_moments=False),
        )
        for equalize in (True, False)
    }
    factors = quantization_of(made[True]).equalized
    assert any(bits[one.consumer].rate for one in factors)
    one, other = (quantized_layers(made[key]) for key in (True, False))
    for name in (name for name, choice in bits.items() if choice.rate):
        assert one[name].codes().equal(other[name].codes())
    changed = [one[n].weight_scale.unique().numel() > 1 for n in bits if bits[n].rate]
    assert any(changed)


def test_codes_that_take_too_much_are_lowered():
    network, bits = coded_network(TinyResNet)
    quantized = ompq.quantize(network, bits, SAMPLES)
    layer = next(one for one in quantized_layers(quantized).values() if one.rate)
    with torch.no_grad():  # as learning might leave it: twice as many steps
        layer.weight_scale.mul_(0.5)
    limit = coded_bytes(layer.weight.numel(), layer.rate)
    assert code_bytes(layer.codes()) > limit
    keep_rates(quantized)
    assert code_bytes(layer.codes()) <= limit


def test_transposed_convolutions_can_be_coded(tmp_path):
    layers = torch.nn.ConvTranspose2d(32, 16, 2, stride=2), torch.nn.Conv2d(16, 4, 1)
    model, samples = seeded(torch.nn.Sequential(*layers)), values(8, 32, 4, 4)
    bits = Allocation({"0": Choice(8, 8, 1.25), "1": Choice(4, 8)})
    quantized = ompq.quantize(model, bits, samples)
    layer = quantized_layers(quantized)["0"]
    steps = layer.weight_scale.reshape(1, 16, 1, 1)  # one for each output channel
    assert torch.equal(layer.rounded_weight(), steps * (layer.codes() - 128.0))
    assert len(layer.codes().unique()) <= 2**3  # at 1.25 bits a weight
    ompq.save(quantized, tmp_path / "net.safetensors")
    loaded = ompq.load(tmp_path / "net.safetensors", model)
    assert torch.equal(loaded(samples), quantized(samples))


def test_too_few_weights_cannot_be_coded():
    network = seeded(TinyResNet())
    graph = ompq.trace(network, SAMPLES)
    few = min(graph.units, key=lambda unit: unit.weights)
    bits = Allocation({**dict.fromkeys(graph.names, Choice(8, 8)), few.name: (8, 8, 1)})
    words = f"{few.name}: its {few.weights} weights are too few to be coded at 1 bits"
    with pytest.raises(QuantizationError, match=words):
        ompq.quantize(network, bits, SAMPLES)
    config = ompq.PlanConfig(score="weight_noise", storage="coded")
    plan = ompq.plan(network, SAMPLES, "3bits", config)
    row = plan.allowed[graph.names.index(few.name)]
    assert not row[plan.choices.index(Choice(8, 8, 1.0))] and row[-1]


@pytest.fixture(scope="module")
def digits():
    """The demo network, what it is planned with, and digits to compare answers on."""
    data = demo_data()
    return demo_network(), data.train_images[:128], data.test_images[:128]


@pytest.fixture(scope="module")
def plans(digits):
    model, samples, _ = digits
    return {
        storage: ompq.plan(
            model, samples[:16], "44KiB", ompq.PlanConfig(storage=storage)
        )
        for storage in ("fixed", "coded")
    }


@pytest.mark.parametrize("budget", ["20KiB", "26KiB", "38KiB"])
def test_the_file_is_within_the_budget_and_loses_nothing(
    digits, plans, budget, tmp_path
):
    model, samples, tests = digits
    plan, path = plans["coded"].with_budget(budget), tmp_path / "net.ompq.safetensors"
    quantized = ompq.finalize(ompq.quantize(model, plan, samples), samples)
    ompq.save(quantized, path, plan=plan)
    assert path.stat().st_size <= plan.totals["bytes"] <= int(budget[:2]) * 1024
    again = ompq.load(path, demo_network())
    with torch.no_grad():
        assert torch.equal(again(tests), quantized.eval()(tests))


def test_coded_weights_diverge_less_at_equal_bytes(digits, plans):
    model, samples, tests = digits
    found = {}
    for storage, plan in plans.items():
        smallest = plans["fixed"].with_budget("31KiB").totals["bytes"]
        made = ompq.quantize(model, plan.with_budget(f"{smallest}B"), samples)
        with torch.no_grad():
            float_ones, others = model(tests), made.eval()(tests)
        found[storage] = float(
            F.kl_div(
                others.log_softmax(1), float_ones.softmax(1), reduction="batchmean"
            )
        )
    assert found["coded"] < 0.5 * found["fixed"]
