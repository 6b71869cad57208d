"""BRECQ's genetic search against trying everything."""

import numpy as np
import pytest

from ompq.allocation.allocator import SOLVERS, allocate
from ompq.lab.solvers import Genetic, search_depth_first
from tables import exhaustive, problem, program


def test_small_programs_are_solved_as_by_trying_everything():
    generator = np.random.default_rng(7)
    for _ in range(3):
        tables = generator.random((2, 5, 3)).round(3)
        it = program(tables[0], tables[1:], [2.0])
        found = Genetic(rounds=20)(it)
        wanted = exhaustive(it)
        assert it.value(found) == pytest.approx(float(wanted[0]))
        assert it.used(found) <= it.limits


def test_it_depends_on_nothing_but_the_seed():
    generator = np.random.default_rng(8)
    damage = np.sort(generator.random((60, 3)))[:, ::-1]
    it = problem(damage, weights=[8] * 60)
    few = [allocate(it, "150B", method=Genetic(seed=s)) for s in (1, 1, 2)]
    assert few[0] == few[1] != few[2]
    exact = it.damage_of(allocate(it, "150B"))
    for each in few:
        assert it.total("bytes", each) <= 150
        assert exact <= it.damage_of(each) < 1.2 * exact
        assert each.gap >= it.damage_of(each) - exact - 1e-9


def test_limits_that_nothing_meets_give_nothing():
    damage, cheap = np.ones((2, 2)), np.array([[1.0, 2.0], [1.0, 2.0]])
    assert Genetic()(program(damage, [cheap], [1.0])) is None
    opposed = program(damage, [cheap, cheap[:, ::-1]], [2.0, 2.0])
    assert Genetic()(opposed) is None


def test_depth_first_search_is_never_better_than_the_exact_one_of_1000_problems():
    generator = np.random.default_rng(3)
    worse = 0
    for _ in range(1000):
        units = int(generator.integers(2, 8))
        bits = np.array([2.0, 3.0, 4.0])
        weights = generator.integers(1, 4000, units)  # in the paper, bits × weights
        worth = generator.random(units)
        limit = float(np.ceil(weights.sum() * generator.uniform(2.1, 3.9)))
        it = program(-np.outer(worth, bits), [np.outer(weights, bits)], [limit])
        found, exact = search_depth_first(it), SOLVERS["relax-dfs"](it)
        assert (it.used(found) <= it.limits).all()
        assert (it.used(exact) <= it.limits).all()
        assert it.value(exact) <= it.value(found) + 1e-9
        worse += it.value(exact) < it.value(found) - 1e-9
    assert 0 < worse < 500  # where a unit that does not mix gives up a bit


def test_depth_first_search_without_a_solution_finds_none():
    it = program(np.ones((2, 2)), [np.array([[1.0, 2.0], [1.0, 2.0]])], [1.0])
    assert search_depth_first(it) is None


def test_solvers_that_break_the_rules_are_told():
    it = problem([[9, 3, 1]] * 2, weights=[80, 80])
    with pytest.raises(ValueError, match="the solver greedy returned choices that exc"):
        allocate(it, "41B", method=greedy)
    with pytest.raises(ValueError, match="returned int64 of shape .1,., not a choice"):
        allocate(it, "50B", method=lambda _: np.array([0]))
    with pytest.raises(
        ValueError, match="returned choices beyond the 3 that there are"
    ):
        allocate(it, "50B", method=lambda _: np.array([0, 7]))


def greedy(given):
    return np.full(len(given.damage), 2)


def test_a_solver_of_ones_own_decides_and_its_gap_is_known():
    it = problem([[9, 3, 1]] * 2, weights=[80, 80])
    found = allocate(it, "100B", method=lambda p: np.zeros(len(p.damage), int))
    assert {choice.weight for choice in found.values()} == {2}
    assert found.gap > 0
