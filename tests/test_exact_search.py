"""The relaxation, and the ways to solve a program, against exhaustive search."""

from math import fsum

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from exact_search_cases import BITS, SMALL, large, paper_case
from ompq.allocation import exact_search
from ompq.allocation.exact_search import minimum
from ompq.allocation.infeasibility import halfway
from ompq.allocation.relaxation import floor_or_ceiling, round_relaxation
from tables import exhaustive, fixture, problem, program


def test_rounding_gives_up_where_only_several_moves_would_do():
    generator = np.random.default_rng(0)
    given_up = 0
    for _ in range(60):
        rows = np.rint(1e9 * generator.random((3, 5, 4)))
        middle = rows.mean(2).sum(1) * 0.95
        it = program(generator.random((5, 4)), rows, middle)
        columns, best = round_relaxation(it), minimum(it)
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


def test_affordable_drops_what_fits_nowhere():
    it = program(np.zeros((2, 3)), [[[1, 5, 9], [2, 3, 4]]], [8.0])
    assert it.affordable().allowed.tolist() == [[True, True, False], [True, True, True]]


def test_core_survives_the_smallest_numbers():
    tiny = program([[0.0, 5e-324], [1e-310, 0.0]], [[[0, 1], [0, 1]]], [2.0])
    assert minimum(tiny).columns.tolist() == [0, 1]


def test_halfway_is_between_the_fewest_and_the_most_bits():
    it = problem(np.zeros((2, 3)), weights=[8, 16])
    assert halfway(it, "bytes") == (24 * 2 / 8 + 24 * 4 / 8) / 2


ARCHITECTURES = fixture("alloc_arch.json")


def random_program(generator, kind):
    """Return a program of at most 6 units × 4 choices under 1 to 3 budgets."""
    units, choices = int(generator.integers(1, 7)), int(generator.integers(2, 4))
    shape = (units, choices)
    damage = {
        "ties": lambda: generator.integers(-3, 4, shape).astype(float),
        "scales": lambda: (
            generator.normal(size=shape) * 10.0 ** generator.uniform(-12, 0, (units, 1))
        ),
        "wild": lambda: (
            generator.normal(size=shape) * 10.0 ** generator.uniform(-12, 0, shape)
        ),
        "forbidding": lambda: (
            generator.normal(size=shape) + generator.choice([0, 0, 0, 1e30], shape)
        ),
    }[kind]()
    count = int(generator.integers(1, 4))
    rows = [
        generator.integers(0, 5, (count, *shape)).astype(float),
        generator.integers(1, 10**9, (count, units, 1)) * np.arange(2.0, 2 + choices),
        np.rint(1e12 * generator.random((count, *shape))),
    ][generator.integers(3)]
    allowed = generator.random(shape) < 0.85
    allowed[np.arange(units), generator.integers(0, choices, units)] = True
    limits = []
    for row in rows:
        low = fsum(np.where(allowed, row, np.inf).min(1))
        high = fsum(np.where(allowed, row, -np.inf).max(1))
        some = [generator.choice(np.flatnonzero(a)) for a in allowed]
        met = fsum(row[np.arange(units), some])  # exactly what some allocation costs
        share = generator.uniform(-0.05, 1)
        limits.append(generator.choice([low, met, low + share * (high - low)]))
    ties = rows[0] if generator.random() < 0.7 else generator.integers(0, 3, shape)
    return program(damage, rows, limits, ties=ties, allowed=allowed)


@pytest.mark.parametrize("kind", ["ties", "scales", "wild", "forbidding"])
def test_minimum_equals_exhaustive_search(kind):
    generator = np.random.default_rng(7)
    infeasible = 0
    for _ in range(60):
        it = random_program(generator, kind)
        expected, found = exhaustive(it), minimum(it)
        if expected is None:
            assert found == (None, 0)
            infeasible += 1
            continue
        assert found.gap == 0
        if expected[0] > 1e29:  # forced: float64 sums see nothing else beside it
            assert it.value(found.columns) == float(expected[0])
            continue
        # Ties by damage, bytes, rows and columns are exact, not only the damage.
        assert tuple(found.columns.tolist()) == expected[-1]
    assert 0 < infeasible < 40


@pytest.mark.parametrize("case", range(len(ARCHITECTURES["cases"])))
def test_minimum_reaches_the_exact_optima_of_published_networks(case):
    case = ARCHITECTURES["cases"][case]
    key = f"{case['model']}_{case['qt']}"
    network = ARCHITECTURES["arch"][key]
    sizes = np.array(network["official_params_per_layer"], dtype=float)
    gamma = np.array(ARCHITECTURES["gamma"][key])
    beta = float(case["beta"].split("=")[-1])
    theta = np.exp(-beta * (gamma - gamma.min()))  # scaled, so that none underflows
    coefficients = np.cumsum(theta[::-1])[::-1] / np.arange(len(sizes), 0, -1)
    coefficients /= coefficients.max()
    bits = np.arange(4, 9) if case["qt"] == "QAT" else np.arange(2, 5)
    budget = case["T"] * 2**23 - 8 * network["official_first_last_params"]
    found = minimum(
        program(
            -coefficients[:, None] * (bits - bits[0]), [sizes[:, None] * bits], [budget]
        )
    )
    assert found.gap == 0
    assert fsum(sizes * bits[found.columns]) <= budget
    if case["exact_bits"] is not None:
        gain = fsum(coefficients * (bits[found.columns] - bits[0]))
        assert gain == pytest.approx(case["exact_gain_scaled"], rel=1e-12)
        assert bits[found.columns].tolist() == case["exact_bits"]


def test_minimum_equals_published_brute_force():
    small = fixture("alloc_small.json")
    sizes = np.array(small["params"], dtype=float)
    for case in small["cases"]:
        bits = np.arange(case["bits_lo"], case["bits_hi"] + 1)
        coefficients = np.array(case["coef"])
        damage = -coefficients[:, None] * bits
        it = program(damage, [sizes[:, None] * bits], [case["budget_bits"]])
        columns = minimum(it).columns
        gain = fsum(coefficients * bits[columns])
        assert gain == pytest.approx(case["exact_objective"], rel=1e-12)
        if case["exact_ties"] == 1:
            assert bits[columns].tolist() == case["exact_bits"]


def highs(it):
    """Return the least damage as HiGHS finds it, or None if it finds nothing."""
    units, choices = it.damage.shape
    low = np.where(it.allowed, it.damage, np.inf).min(1)
    damage = np.where(it.allowed, it.damage - low[:, None], 0.0)
    scale = damage.max() or 1.0
    rows = it.rows.reshape(len(it.rows), -1)
    sizes = np.abs(rows).max(1)
    result = milp(
        damage.ravel() / scale,
        integrality=np.ones(it.damage.size),
        bounds=Bounds(0, it.allowed.ravel().astype(float)),
        constraints=[
            LinearConstraint(np.kron(np.eye(units), np.ones(choices)), 1, 1),
            LinearConstraint(rows / sizes[:, None], -np.inf, it.limits / sizes),
        ],
        options={"mip_rel_gap": 0},
    )
    if result.x is None:
        return None
    columns = result.x.reshape(units, choices).argmax(1)
    # Its tolerances may let it exceed a limit a little, which is no solution.
    return it.value(columns) if (it.used(columns) <= it.limits).all() else None


def hard_program(generator, units=24):
    """Return a program with several budgets, ties, pins and coefficients far apart."""
    choices, count = int(generator.integers(2, 6)), int(generator.integers(1, 4))
    shape = (units, choices)
    sizes = 10.0 ** generator.uniform(0, 12, (count, units, 1))
    rows = np.rint(sizes * np.sort(generator.random((count, *shape)), 2)) + 1
    if generator.random() < 0.3:
        rows[0] = rows[0, :, ::-1]  # pulls in the opposite direction
    damage = -np.sort(generator.random(shape), 1)
    damage *= 10.0 ** generator.uniform(-6, 6, (units, 1))
    if generator.random() < 0.3:
        damage = -rows.sum(0)  # as the costs: a subset sum
    allowed = generator.random(shape) < 0.9
    allowed[np.arange(units), generator.integers(0, choices, units)] = True
    some = [generator.choice(np.flatnonzero(row)) for row in allowed]
    limits = rows[:, np.arange(units), some].sum(1)
    return program(damage, rows, limits, allowed=allowed)


def test_minimum_is_never_behind_highs_on_hard_tables():
    generator = np.random.default_rng(5)
    compared = 0
    for _ in range(24):
        it = hard_program(generator, units=16)
        found, other = minimum(it), highs(it)
        assert found.columns is not None  # the limits are met by construction
        assert (it.used(found.columns) <= it.limits).all()
        if other is not None:
            value = it.value(found.columns)
            assert value <= other + 1e-9 * abs(other)
            assert other >= value - found.gap - 1e-9 * abs(value)
            compared += 1
    assert compared > 12


def test_minimum_agrees_with_highs_on_larger_tables():
    for seed in range(6):
        generator = np.random.default_rng(seed)
        rows = np.rint(1e9 * generator.random((2, 30, 5)))
        it = program(generator.random((30, 5)), rows, rows.mean(2).sum(1) * 0.8)
        found = minimum(it)
        assert found.gap == 0
        assert it.value(found.columns) == pytest.approx(highs(it), abs=2e-6)


def test_identical_units_and_equal_damage_do_not_blow_up():
    ones, bits = np.ones((100, 1)), np.arange(2.0, 9.0)
    zero_point = program(0 * ones * bits, [ones * bits, ones * bits**2], [500.0, 2e4])
    assert minimum(zero_point).columns.tolist() == [0] * 100  # fewest bytes
    same = program(-ones * bits, [ones * bits], [437.0])
    found = minimum(same)
    assert found.gap == 0
    assert -same.value(found.columns) == 437
    # Equally good and equally large: the lexicographically first columns.
    assert found.columns.tolist() == sorted(found.columns.tolist())


def test_budgets_that_exclude_each_other_have_no_minimum():
    it = program([[0, 0]], [[[1, 3]], [[3, 1]]], [2.0, 2.0])
    assert minimum(it) == (None, 0)


def test_many_units_that_cannot_meet_two_limits_have_no_minimum():
    rows = np.array([[[1.0, 3.0]] * 40, [[3.0, 1.0]] * 40])
    assert minimum(program(np.zeros((40, 2)), rows, [79.0, 79.0])) == (None, 0)
    assert minimum(program(np.zeros((40, 2)), rows, [80.0, 80.0])).gap == 0


def test_the_gap_tells_when_the_proof_is_given_up():
    generator = np.random.default_rng(0)
    sizes = generator.integers(10**5, 10**7, 60)[:, None] * np.arange(2.0, 9.0)
    limit = 0.6 * sizes.min(1).sum() + 0.4 * sizes.max(1).sum()
    it = program(-sizes, [sizes], [np.floor(limit) + 0.5])  # a subset sum: use it all
    found = minimum(it, passes=2, nodes=0)
    assert it.used(found.columns) <= it.limits
    assert np.floor(it.limits[0]) + it.value(found.columns) <= found.gap * (1 + 1e-9)
    assert 0 < found.gap < 1e-3 * limit


def test_a_pass_too_narrow_to_find_anything_is_followed_by_wider_ones(monkeypatch):
    generator = np.random.default_rng(2)
    rows = generator.integers(1, 1000, (3, 12, 3)).astype(float)
    some = generator.integers(0, 3, 12)
    limits = rows[:, np.arange(12), some].sum(1)  # met by some, and by few others
    it = program(generator.random((12, 3)), rows, limits)
    expected = minimum(it)
    monkeypatch.setattr("ompq.allocation.exact_search.LABELS", 1)
    monkeypatch.setattr("ompq.allocation.exact_search.NARROWEST", 1)
    monkeypatch.setattr("ompq.allocation.exact_search.NEAR", 0)
    found = minimum(it, passes=20)
    assert found.gap == 0
    assert (found.columns == expected.columns).all()


def opposing(units, share):
    """Return a program whose second budget is met by many bits, the first by few."""
    generator = np.random.default_rng(1)
    weights = np.exp(generator.normal(8, 1.5, units)).astype(int) + 50
    bits = np.arange(2.0, 9.0)
    slow = weights[:, None] * (12 - bits) * generator.uniform(0.9, 1.1, (units, 7))
    rows = np.array([weights[:, None] * bits, np.rint(slow)])
    some = generator.integers(0, 7, units)
    limits = rows[:, np.arange(units), some].sum(1) * share
    return program(generator.random((units, 1)) * 4.0**-bits, rows, np.floor(limits))


@pytest.mark.parametrize("share", [0.8, 0.97, 1.0])
def test_budgets_that_pull_apart_end_soon(share, monkeypatch):
    sizes = []
    branch = exact_search._branch
    monkeypatch.setattr(
        exact_search,
        "_branch",
        lambda *it: sizes.append(len(it[0].damage)) or branch(*it),
    )
    found = minimum(opposing(53, share))
    assert found.gap < 1e-3
    assert max(sizes, default=0) < exact_search.LABELS * exact_search.WIDENING**2
    # Impossible already for mixtures of choices: no label is ever made.
    assert (found.columns is None) == (share == 0.8)
    assert (sizes == []) == (share == 0.8)


def test_what_is_neither_found_nor_proved_is_told():
    generator = np.random.default_rng(3)
    rows = generator.integers(10**8, 10**9, (1, 40, 2)).astype(float)
    rows = np.concatenate([rows, 2e9 - rows])  # exactly half of all: a partition
    it = program(np.zeros((40, 2)), rows, rows.mean(2).sum(1))
    found = minimum(it, passes=1, nodes=5)
    assert found == (None, np.inf)


def test_a_thousand_units_under_two_tight_budgets_are_nearly_proved():
    it = large("network", 2, seed=1)
    generator = np.random.default_rng(0)
    uneven = it.rows[1] * generator.choice([1, 49, 196, 784, 3136], (1000, 1))
    rows = np.stack([it.rows[0], uneven])
    alone = minimum(program(it.damage, rows[:1], it.limits[:1]), nodes=0)
    used = program(it.damage, rows, [0, 0]).used(alone.columns)[1]
    least = uneven.min(1).sum()
    both = program(it.damage, rows, [it.limits[0], least + 0.7 * (used - least)])
    found = minimum(both, nodes=100)
    assert (both.used(found.columns) <= both.limits).all()
    assert found.gap < 1e-4 * both.value(found.columns)


def test_minimum_leaves_the_program_and_the_global_generator_alone():
    it = large("table", 1, seed=3)
    before = [it.damage.copy(), it.rows.copy(), it.allowed.copy()]
    state = np.random.get_state()[1].copy()
    first, second = minimum(it), minimum(it)
    assert (first.columns == second.columns).all()
    assert (state == np.random.get_state()[1]).all()
    for array, copy in zip((it.damage, it.rows, it.allowed), before, strict=True):
        assert (array == copy).all()
