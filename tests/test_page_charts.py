import numpy as np
import pytest

from ompq.report.page_charts import (
    accuracy_chart,
    bar_column,
    error_chart,
    histogram_chart,
    scatter_chart,
)
from ompq.report_sections import (
    Accuracy,
    AuditedRanks,
    BlockErrorSection,
    Histogram,
)


def test_positions_on_the_accuracy_axis_are_linear():
    rows = [Accuracy(n, t, t - 0.05, t + 0.05, 10) for n, t in (("a", 0.5), ("b", 0.7))]
    chart = accuracy_chart(rows)
    (x0, t0), (x1, t1) = chart["ticks"][0], chart["ticks"][-1]
    slope = (x1 - x0) / (float(t1) - float(t0))
    for row, top1 in zip(chart["rows"], (50, 70), strict=True):
        assert row["x"] == pytest.approx(x0 + slope * (top1 - float(t0)))
        assert 0 <= row["low"] < row["x"] < row["high"] <= 100
        assert row["size"] == ""


def test_errors_stand_on_a_logarithmic_axis():
    chart = error_chart(
        [BlockErrorSection("a", 0.1, 0.01), BlockErrorSection("b", 0.001, 0.0)]
    )
    first, second = chart["rows"]
    assert first["x1"] - first["x2"] == pytest.approx(first["x2"] - second["x1"])
    assert second["x2"] == 0
    assert first["ratio"] == "0.10×"
    assert error_chart([BlockErrorSection("a", 0.0, 0.0)])["rows"][0]["ratio"] == ""


def test_a_histogram_is_drawn_to_its_counts():
    chart = histogram_chart(Histogram("w", (0.0, 1.0, 4.0), (1, 4), (("at", 2.0),)))
    assert chart["path"] == "M0 100V50.00H25.00V0.00H100.00V100Z"
    assert chart["lines"] == [(50.0, "at", "2")]


def test_bars_of_any_sign_have_widths():
    assert bar_column(np.array([1.0, 2.0, 4.0])) == [25.0, 50.0, 100.0]
    assert bar_column(np.array([-1.0, 0.0, 1.0])) == [0.0, 50.0, 100.0]
    assert bar_column(np.zeros(2)) == [0.0, 0.0]


def test_equal_values_of_an_audit_share_a_rank():
    points = ((1.0, 5.0), (2.0, 5.0), (3.0, 7.0), (3.0, 5.0))
    chart = scatter_chart(AuditedRanks("orm", "", points))
    # Ranks from 0 to 3: 0, 1, 2.5, 2.5 across; 1, 1, 3, 1 from the bottom.
    across, down = zip(*chart["points"], strict=True)
    assert across == pytest.approx([0, 100 / 3, 250 / 3, 250 / 3])
    assert down == pytest.approx([200 / 3, 200 / 3, 0, 200 / 3])
    assert scatter_chart(AuditedRanks("chance", "0.4"))["points"] == []
