"""Rounding that minds what codes cost, against brute force and formulas."""

import math

import numpy as np
import pytest
import torch

from ompq.prices import (
    PRICE,
    ZERO,
    between_codes,
    cheapest_codes,
    code_bits,
    entropy,
    lowered_codes,
    pulled_to,
)


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
    importance = torch.rand(300, generator=torch.Generator().manual_seed(0)) + 0.5
    found = cheapest_codes(position, importance, rounds=1)
    bits = code_bits(position.round())
    for x, weight, code in zip(position, importance, found, strict=True):
        cost = {
            c: float(weight * (x - c) ** 2 + PRICE * bits[c])
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
    pulled = pulled_to(codes, position)
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
