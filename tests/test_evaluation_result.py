"""The result of an evaluation: its intervals."""

import pytest
from scipy.stats import binomtest

from ompq.evaluation_result import wilson_interval


@pytest.mark.parametrize(("right", "count"), [(8, 10), (0, 5), (5, 5), (1800, 2500)])
def test_interval_is_wilsons(right, count):
    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right, count) == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )


@pytest.mark.parametrize("count", range(1, 50))
def test_the_interval_holds_the_fraction_at_both_ends(count):
    assert wilson_interval(0, count)[0] == 0
    assert wilson_interval(count, count)[1] == 1
