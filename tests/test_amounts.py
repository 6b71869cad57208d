"""Numbers as people read them."""

import pytest

from ompq.amounts import (
    decades,
    digits,
    in_bytes,
    percent,
    seconds,
    short,
    short_count,
    ticks,
)


def test_numbers_read_well():
    assert [short(x) for x in (1.234, 9.996, 12.34, 123.4)] == [
        "1.23",
        "10.0",
        "12.3",
        "123",
    ]
    assert [in_bytes(x) for x in (5, 1023, 1024, 2**20 * 1.5, 2**45)] == [
        "5 B",
        "1023 B",
        "1.00 KiB",
        "1.50 MiB",
        "32.0 TiB",
    ]
    assert [short_count(x) for x in (7, 999, 999.6, 1.5e6, 3e9)] == [
        "7",
        "999",
        "1.00k",
        "1.50M",
        "3.00G",
    ]
    assert [seconds(x) for x in (0.21, 2.5, 59.97, 93.4, 119.9)] == [
        "210 ms",
        "2.50 s",
        "1 min 00 s",
        "1 min 33 s",
        "2 min 00 s",
    ]


def test_ticks_are_round_and_inside():
    assert ticks(61.2, 74.9, 5) == [65, 70]
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3) == [3]


def test_decades_enclose_all_positive_values():
    assert decades([0.02, 3.0, 0.0, -1.0]) == (-2, 1)
    assert decades([10.0]) == (1, 2)  # never empty
    assert decades([]) == (0, 1)


def test_fractions_and_significant_digits():
    assert [percent(x) for x in (0.12345, 1.0)] == ["12.3%", "100.0%"]
    assert percent(0.12345, places=2) == "12.35%"
    assert [digits(x) for x in (0.00001234, 1234.5)] == ["1.23e-05", "1.23e+03"]
    assert digits(1234.5, 6) == "1234.5"
