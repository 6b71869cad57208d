from typing import NamedTuple

import pytest

from ompq.network.dataflow import OUTSIDE, Dataflow


class Step(NamedTuple):
    function: str
    inputs: tuple[int, ...]


# input → conv 0 → view 1 → add 3 → relu 4, and input → view 2 → add 3; 1 is returned.
STEPS = [
    Step("conv", (OUTSIDE,)),
    Step("view", (0,)),
    Step("view", (OUTSIDE,)),
    Step("add", (1, 2)),
    Step("relu", (3,)),
]
FLOW = Dataflow(STEPS, {1, 4})


def views(step):
    return step.function == "view"


def test_readers_are_those_that_name_a_result():
    expected = {
        at: [n for n, s in enumerate(STEPS) if at in s.inputs] for at in (-1, 0)
    }
    assert {at: FLOW.readers(at) for at in (-1, 0)} == expected
    assert FLOW.readers(4) == []


@pytest.mark.parametrize(("at", "reader"), [(0, 1), (1, None), (OUTSIDE, None), (3, 4)])
def test_the_caller_is_a_reader_too(at, reader):
    assert FLOW.only_reader(at) == reader


def test_values_come_through_views():
    assert FLOW.back([1, 2], views) == ([0, OUTSIDE], [1, 2])
    assert FLOW.back([3], lambda _: True) == ([OUTSIDE], [3, 1, 0, 2])


def test_values_go_through_views_to_their_readers_and_to_the_caller():
    assert FLOW.ahead(0, views) == ([3, OUTSIDE], [1])
    assert FLOW.ahead(4, views) == ([OUTSIDE], [])


def test_a_chain_ends_before_what_does_something_else():
    assert [s.function for s in FLOW.chain(0, lambda _: True)] == [
        "view",
        "add",
        "relu",
    ]
    assert [s.function for s in FLOW.chain(0, views)] == ["view"]
    assert [*FLOW.chain(OUTSIDE, views)] == []


def test_long_chains_are_walked_without_recursion():
    long = Dataflow([Step("view", (at - 1,)) for at in range(20_000)])
    assert long.back([19_999], views).ends == [OUTSIDE]
