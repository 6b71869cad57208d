import numpy as np
import pytest

from ompq.budgets import Budget
from tables import COSTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5MiB", Budget(size_mib=1.5)),
        ("1.5 mib", Budget(size_mib=1.5)),
        ("512KiB", Budget(size_mib=0.5)),
        ("2GiB", Budget(size_mib=2048)),
        ("1048576B", Budget(size_mib=1)),
        ("1.6MB", Budget(size_mb=1.6)),
        ("900kB", Budget(size_mb=0.9)),
        ("900KB", Budget(size_mb=0.9)),
        ("1GB", Budget(size_mb=1000)),
        ("3.2bits", Budget(average_bits=3.2)),
        ("3.2bit", Budget(average_bits=3.2)),
        ("75GBOPs", Budget(bit_ops=75e9)),
        ("75 gbops", Budget(bit_ops=75e9)),
        ("7TBOPs", Budget(bit_ops=7e12)),
        ("7MBOPs", Budget(bit_ops=7e6)),
        ("7kBOPs", Budget(bit_ops=7e3)),
        ("7BOPs", Budget(bit_ops=7)),
        ("12.5%", Budget(percent=12.5)),
        ("5ms", Budget(latency_ms=5)),
        (".5e1ms", Budget(latency_ms=5)),
        ("1.5MiB, 75GBOPs", Budget(size_mib=1.5, bit_ops=75e9)),
        ("1.5MiB,1.6MB,12.5%", Budget(size_mib=1.5, size_mb=1.6, percent=12.5)),
    ],
)
def test_text_and_numbers_say_the_same(text, expected):
    assert Budget.parse(text) == expected
    assert Budget.of(text) == expected
    assert Budget.of(expected) is expected


def test_text_round_trips_for_any_number():
    generator = np.random.default_rng(0)
    for _ in range(200):
        values = 10.0 ** generator.uniform(-6, 18, 6)
        size_mib, size_mb, bit_ops, average_bits, percent, latency_ms = values.tolist()
        budget = Budget(
            size_mib=size_mib,
            size_mb=size_mb,
            bit_ops=bit_ops,
            average_bits=average_bits,
            percent=percent,
            latency_ms=latency_ms,
        )
        assert Budget.parse(str(budget)) == budget
    assert str(Budget(bit_ops=74.4e9)) == "74.4GBOPs"
    assert str(Budget(bit_ops=0.5, size_mib=2)) == "2MiB, 0.5BOPs"


@pytest.mark.parametrize(
    "text", ["72KiB", "1.5MiB", "0.9MiB", "61.2KiB", "61234B", "2GiB", "300KB", "4.2MB"]
)
def test_text_is_in_the_unit_that_reads_best(text):
    assert str(Budget.parse(text)) == text.replace("300KB", "0.3MB")
    assert Budget.parse(str(Budget.parse(text))) == Budget.parse(text)


def test_limits_are_in_the_units_of_the_costs():
    budget = Budget(size_mib=1.5, bit_ops=75e9, average_bits=4.35, latency_ms=5)
    assert budget.limits(COSTS) == {
        "bytes": 1572864.0,
        "bit_ops": 75e9,
        "weight_bits": 435.0,  # where 4.35 * 100 in float64 is 434.99999999999994
        "milliseconds": 5.0,
    }
    assert Budget.parse("1573KB").limits(COSTS) == {"bytes": 1573000.0}
    assert Budget.parse("1572863B").limits(COSTS) == {"bytes": 1572863.0}
    assert Budget.parse("12.5%").limits(COSTS) == {"bytes": 1e6}


def test_of_several_sizes_the_smallest_holds():
    both = Budget(size_mib=1.0, size_mb=1.0)
    assert both.limits(COSTS) == {"bytes": 1e6}
    assert Budget(size_mb=2.0, percent=12.5).limits(COSTS) == {"bytes": 1e6}
