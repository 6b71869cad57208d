import numpy as np
import pytest

from ompq.allocation.explanation import explain
from ompq.allocation.solver import allocate
from ompq.costs import Cost
from ompq.errors import PatternError, PlanError
from ompq.graph import Choice
from tables import network, problem


def test_a_small_explanation_is_right_and_readable():
    # 8 weights take one byte a bit. 7 bytes: (4, 3) loses 1 + 4; (3, 4) loses 3 + 2.
    it = problem([[9, 3, 1], [9, 4, 2]], weights=[8, 8])
    allocation = allocate(it, "7B")
    assert [c.weight for c in allocation.values()] == [3, 4]
    found = explain(it, "7B", allocation, "unit0")
    assert found.choice == Choice(3, 8)
    assert [option.damage for option in found.options] == [9, 3, 1]
    assert [option.costs["bytes"] for option in found.options] == [2, 3, 4]
    assert found.better.choice == Choice(4, 8)
    assert found.better.over == {"bytes": 1.0}
    assert found.worse.choice == Choice(2, 8)
    assert found.worse.over == {}
    assert found.prices == {"bytes": pytest.approx(2.0)}
    assert found.exchange.unit == "unit1"
    assert (found.exchange.choice, found.exchange.after) == (Choice(4, 8), Choice(3, 8))
    assert found.exchange.damage == 0
    assert str(found).splitlines() == [
        "unit0: W3A8",
        "",
        "  W2A8    damage 9                     2.00 B",
        "> W3A8    damage 3                     3.00 B",
        "  W4A8    damage 1                     4.00 B",
        "",
        "bytes: 7.00 B of 7.00 B used; one KiB more would save about 2.05e+03 damage.",
        "Next better: W4A8 (damage -2, +1.00 B), 1.00 B too much.",
        "Next worse: W2A8 (damage +6, -1.00 B).",
        "Exchange refused: W4A8 here and W3A8 instead of W4A8 for unit1: damage +0.",
    ]


def test_a_unit_at_its_best_under_a_loose_budget_has_nothing_better():
    it = problem([[9, 3, 1], [9, 4, 2]], weights=[8, 8])
    found = explain(it, "1KiB", allocate(it, "1KiB"), "unit1")
    assert found.better is None
    assert found.worse.choice == Choice(3, 8)
    assert found.prices == {"bytes": 0.0}
    assert "it does not bind" in str(found)
    assert "Next better" not in str(found)


def test_a_pinned_unit_alone_has_no_alternatives():
    allowed = np.array([[False, True, False]])
    it = problem([[9, 3, 1]], weights=[8], allowed=allowed)
    found = explain(it, "4B", allocate(it, "4B"), "unit0")
    assert (found.better, found.worse, found.exchange) == (None, None, None)
    assert str(found).count("not allowed") == 2


def test_tied_units_are_explained_together():
    it = problem([[9, 3, 1]] * 3, weights=[8, 16, 8], groups=[0, 1, 0])
    found = explain(it, "12B", allocate(it, "12B"), "unit2")
    assert found.tied == ("unit0",)
    assert [option.damage for option in found.options] == [18, 6, 2]
    assert "shared with unit0" in str(found)


def test_an_edited_allocation_shows_what_would_help():
    it = problem([[9, 3, 1], [90, 40, 20]], weights=[8, 8])
    edited = {"unit0": Choice(4, 8), "unit1": Choice(2, 8)}
    found = explain(it, "6B", edited, "unit0")
    assert found.exchange.damage == pytest.approx((9 - 1) + (20 - 90))
    assert "Exchange that would help: W2A8 here" in str(found)
    roomy = explain(it, "8B", edited, "unit1")
    assert "W3A8 (damage -50, +1.00 B), and it would fit" in str(roomy)


def test_no_exchange_helps_an_optimal_allocation():
    it = network(30)
    budget = "12%, 12GBOPs"
    allocation = allocate(it, budget)
    for unit in it.names:
        found = explain(it, budget, allocation, unit)
        assert found.exchange.damage >= 0
        assert found.better is None or found.better.over


def test_every_cost_has_a_price_in_words():
    slow = Cost("milliseconds", np.array([[1.0, 2.0, 3.0]] * 2))
    other = problem([[9, 3, 1], [9, 4, 2]], weights=[8, 8], milliseconds=slow)
    assert "one ms more would save about 2 damage" in str(
        explain(other, "5ms", allocate(other, "5ms"), "unit0")
    )
    it = network(10)
    for budget, words in [("3bits", "one hundredth of a bit"), ("1GBOPs", "one GBOP")]:
        assert words in str(explain(it, budget, allocate(it, budget), "unit3"))


def test_unknown_units_and_foreign_allocations_are_refused():
    it = network(8)
    with pytest.raises(
        PatternError, match=r"'conv9' is no unit; the 8 units are unit0"
    ):
        explain(it, "3bits", allocate(it, "3bits"), "conv9")
    with pytest.raises(PlanError, match="none of the 6 choices"):
        explain(it, "3bits", {"unit0": Choice(3, 8)}, "unit0")
