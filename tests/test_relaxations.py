from math import fsum

import numpy as np
import pytest

from ompq.allocation import allocate, halfway
from ompq.allocation.relaxations import (
    Relaxation,
    bracket,
    evolved,
    floor_or_ceiling,
    relaxation,
    rounded,
)
from ompq.allocation.search import minimum
from tables import exhaustive, fixture, problem, program

SMALL = fixture("alloc_small.json")
BITS = np.array([2.0, 3.0, 4.0])


def paper_case(case):
    """Return the paper's program of a fixture: bits times coefficients, maximised."""
    bits = np.arange(case["bits_lo"], case["bits_hi"] + 1)
    costs = np.array(SMALL["params"])[:, None] * bits
    damage = -np.array(case["coef"])[:, None] * bits
    return bits, program(damage, [costs], [case["budget_bits"]])


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
    assert rounded(it) is None
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
        columns = rounded(it)
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
    columns = rounded(it)
    assert BITS[columns].tolist() == [4.0, 3.0]


def test_rounding_gives_up_where_only_several_moves_would_do():
    generator = np.random.default_rng(0)
    given_up = 0
    for _ in range(60):
        rows = np.rint(1e9 * generator.random((3, 5, 4)))
        middle = rows.mean(2).sum(1) * 0.95
        it = program(generator.random((5, 4)), rows, middle)
        columns, best = rounded(it), minimum(it)
        if columns is None:
            given_up += best.columns is not None
        else:
            assert (it.used(columns) <= it.limits).all()
            assert it.value(columns) >= it.value(best.columns)
    assert given_up > 0


def test_floor_or_ceiling_matches_the_released_depth_first_search():
    for case in fixture("dfs.json"):
        value, weight = np.array(case["value"]), np.array(case["weight"])
        bits = np.stack([np.floor(value), np.ceil(value)], 1)
        use = weight[:, None] * bits
        # Costs are whole steps; these have at most six decimals.
        steps = [np.rint(1e6 * use)], [np.floor(1e6 * case["threshold"] + 1e-3)]
        columns = minimum(program(-use, *steps)).columns
        chosen = bits[np.arange(len(value)), columns]
        assert chosen.tolist() == case["dfs"]
        assert case["threshold"] - fsum(weight * chosen) == pytest.approx(case["slack"])


def test_floor_or_ceiling_keeps_one_or_two_choices_and_stays_feasible():
    for case in SMALL["cases"]:
        _, it = paper_case(case)
        narrow = floor_or_ceiling(it)
        assert set(narrow.allowed.sum(1).tolist()) <= {1, 2}
        found = minimum(narrow).columns
        assert it.used(found) <= it.limits
        assert -it.value(found) <= case["exact_objective"] * (1 + 1e-12)


def test_floor_or_ceiling_lets_a_unit_pay_for_a_better_mixture():
    # The relaxation gives (4, 3.6); its floor (4, 3) wastes room that (3, 4) uses.
    it = program([[-2, -3, -4], [-2, -3, -4]], [np.array([[1.0], [1.1]]) * BITS], [7.5])
    narrow = floor_or_ceiling(it)
    assert it.value(minimum(narrow).columns) == -7


def test_floor_or_ceiling_without_a_solution_keeps_what_there_is():
    it = program([[0, -3]], [[[2, 3]]], [1.0])
    assert floor_or_ceiling(it).allowed.all()
    assert minimum(floor_or_ceiling(it)) == (None, 0)


def test_affordable_drops_what_fits_nowhere():
    it = program(np.zeros((2, 3)), [[[1, 5, 9], [2, 3, 4]]], [8.0])
    assert it.affordable().allowed.tolist() == [[True, True, False], [True, True, True]]


def test_core_survives_the_smallest_numbers():
    tiny = program([[0.0, 5e-324], [1e-310, 0.0]], [[[0, 1], [0, 1]]], [2.0])
    assert minimum(tiny).columns.tolist() == [0, 1]


def test_small_programs_are_solved_as_by_trying_everything():
    generator = np.random.default_rng(7)
    for _ in range(3):
        tables = generator.random((2, 5, 3)).round(3)
        it = program(tables[0], tables[1:], [2.0])
        found = evolved(it, rounds=20)
        wanted = exhaustive(it)
        assert it.value(found) == pytest.approx(float(wanted[0]))
        assert it.used(found) <= it.limits


def test_it_depends_on_nothing_but_the_seed():
    generator = np.random.default_rng(8)
    damage = np.sort(generator.random((60, 3)))[:, ::-1]
    it = problem(damage, weights=[8] * 60)
    few = [allocate(it, "150B", method="genetic", seed=seed) for seed in (1, 1, 2)]
    assert few[0] == few[1] != few[2]
    exact = it.damage_of(allocate(it, "150B"))
    for each in few:
        assert it.total("bytes", each) <= 150
        assert exact <= it.damage_of(each) < 1.2 * exact
        assert each.gap >= it.damage_of(each) - exact - 1e-9


def test_limits_that_nothing_meets_give_nothing():
    damage, cheap = np.ones((2, 2)), np.array([[1.0, 2.0], [1.0, 2.0]])
    assert evolved(program(damage, [cheap], [1.0])) is None
    opposed = program(damage, [cheap, cheap[:, ::-1]], [2.0, 2.0])
    assert evolved(opposed) is None


def test_halfway_is_between_the_fewest_and_the_most_bits():
    it = problem(np.zeros((2, 3)), weights=[8, 16])
    assert halfway(it, "bytes") == (24 * 2 / 8 + 24 * 4 / 8) / 2
