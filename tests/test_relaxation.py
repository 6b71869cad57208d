import time
from math import fsum

import numpy as np
import pytest

from exact_search_cases import BITS, SMALL, large, paper_case
from ompq.allocation.exact_search import minimum
from ompq.allocation.relaxation import (
    Relaxation,
    bracket,
    floor_or_ceiling,
    relaxation,
    round_relaxation,
)
from tables import program


def test_relaxation_reaches_the_published_linear_optimum():
    for case in SMALL["cases"]:
        _, it = paper_case(case)
        shares = relaxation(it).shares
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-9)
        np.testing.assert_allclose(
            -(shares * it.damage).sum(), case["lp_objective"], rtol=1e-9
        )


def test_one_limit_gives_what_the_solver_gives_for_two_of_the_same():
    generator = np.random.default_rng(0)
    for case in range(60):
        units, choices = generator.integers(1, 12), generator.integers(1, 7)
        damage = generator.exponential(size=(units, choices)) * 10.0 ** (case % 7 - 3)
        costs = generator.integers(0, 9, size=(units, choices)).astype(float)
        least, most = costs.min(1).sum(), costs.max(1).sum()
        limit = least + generator.uniform(0, 1.1) * (most - least)
        alone = relaxation(program(damage, [costs], [limit]))
        twice = relaxation(program(damage, [costs, costs], [limit, limit]))
        np.testing.assert_allclose(alone.shares.sum(1), 1)
        assert (alone.shares * costs).sum() <= limit * (1 + 1e-12)
        np.testing.assert_allclose(
            (alone.shares * damage).sum(), (twice.shares * damage).sum(), rtol=1e-6
        )
        # By duality: what is left when every unit pays the price for what it spends.
        bound = (damage + alone.prices[0] * costs).min(1).sum()
        value = (alone.shares * damage).sum()
        np.testing.assert_allclose(bound - alone.prices[0] * limit, value, rtol=1e-9)


def test_a_limit_below_the_least_has_no_solution():
    it = program(np.ones((2, 2)), [np.array([[2.0, 3.0], [2.0, 3.0]])], [3.9])
    assert relaxation(it).shares is None


def test_the_price_is_the_best_rate_left():
    # Efficiencies 3, 2, 1 per unit of cost; room for one and a half units.
    it = program([[0, -3], [0, -2], [0, -1]], [[[0, 1], [0, 1], [0, 1]]], [1.5])
    np.testing.assert_allclose(relaxation(it).prices, [2.0])


def test_a_loose_limit_has_no_price():
    it = program([[0, -3], [0, -2]], [[[0, 1], [0, 1]]], [2.0])
    np.testing.assert_allclose(relaxation(it).prices, [0.0])


def test_relaxation_without_solution_says_so():
    it = program([[0, -3]], [[[2, 3]]], [1.0])
    assert relaxation(it).shares is None
    assert round_relaxation(it) is None
    with pytest.raises(ValueError, match="without a solution has nothing to round"):
        bracket(it, relaxation(it))


def test_a_unit_without_choices_has_no_relaxation():
    it = program([[0, 1]], [[[0, 1]]], [1.0], allowed=np.zeros((1, 2), dtype=bool))
    assert relaxation(it).shares is None


def test_bracket_is_floor_and_ceiling_of_the_bits():
    for case in SMALL["cases"]:
        bits, it = paper_case(case)
        if max(case["coef"]) <= 0:
            continue
        relaxed = relaxation(it)
        down, up = bracket(it, relaxed)
        mean = np.round((relaxed.shares * bits).sum(1), 6)
        mixed = mean % 1 > 0
        assert (bits[down] == np.floor(mean))[mixed].all()
        assert (bits[up] == np.ceil(mean))[mixed].all()
        assert (down == up)[~mixed].all()


def test_bracket_takes_the_least_damage_among_equally_expensive_choices():
    it = program([[5.0, 1.0, 0.0]], [[[1, 1, 2]]], [1.0])
    relaxed = Relaxation(np.array([[1.0, 0.0, 0.0]]), np.array([1.0]))
    down, up = bracket(it, relaxed)
    assert (down.tolist(), up.tolist()) == ([1], [1])


def test_rounding_never_exceeds_the_budget_where_the_released_code_does():
    exceeded = 0
    for case in SMALL["cases"]:
        bits, it = paper_case(case)
        columns = round_relaxation(it)
        used = fsum(np.array(SMALL["params"]) * bits[columns])
        assert used <= case["budget_bits"]
        gain = fsum(np.array(case["coef"]) * bits[columns])
        assert gain <= case["exact_objective"] * (1 + 1e-12)
        exceeded += case["official_round_over_budget_bits"] > 0
    assert exceeded > 0


def test_rounding_takes_the_nearer_choice_when_there_is_room():
    # The second unit's mixture is 3.6 bits; rounded up it takes too much.
    it = program(
        -np.array([[4.0], [1.0]]) * BITS, [np.array([[1.0], [10.0]]) * BITS], [40.0]
    )
    shares = relaxation(it).shares
    np.testing.assert_allclose((shares * BITS).sum(1), [4.0, 3.6])
    columns = round_relaxation(it)
    assert BITS[columns].tolist() == [4.0, 3.0]


def test_floor_or_ceiling_without_a_solution_keeps_what_there_is():
    it = program([[0, -3]], [[[2, 3]]], [1.0])
    assert floor_or_ceiling(it).allowed.all()
    assert minimum(floor_or_ceiling(it)) == (None, 0)


@pytest.mark.parametrize("kind", ["network", "linear", "table"])
def test_a_thousand_units_are_proved_in_about_a_second(kind):
    it = large(kind, 2, seed=1)
    start = time.process_time()
    found = minimum(it)
    assert time.process_time() - start < 5  # about 0.3 s on one quiet core
    assert found.gap == 0
    assert (it.used(found.columns) <= it.limits).all()
    bound = (relaxation(it).shares * it.damage).sum()
    assert bound - 1e-6 * abs(bound) <= it.value(found.columns)
    approximate = round_relaxation(it)
    if approximate is not None:
        assert it.value(found.columns) <= it.value(approximate)
