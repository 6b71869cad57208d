import pytest

from ompq.allocation.explanation import explain
from ompq.network.units import Choice
from tables import problem


def test_an_edited_allocation_shows_what_would_help():
    it = problem([[9, 3, 1], [90, 40, 20]], weights=[8, 8])
    edited = {"unit0": Choice(4, 8), "unit1": Choice(2, 8)}
    found = explain(it, "6B", edited, "unit0")
    assert found.exchange.damage == pytest.approx((9 - 1) + (20 - 90))
    assert "Best exchange: W2A8 here" in str(found)
    roomy = explain(it, "8B", edited, "unit1")
    assert "W3A8 (damage -50, +1.00 B), and it would fit" in str(roomy)
