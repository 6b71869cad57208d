"""BRECQ's genetic search against trying everything."""

import numpy as np
import pytest

from ompq.allocation.allocator import allocate
from ompq.lab.solvers import Genetic
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
