from collections import namedtuple

import pytest
import torch

from ompq.reconstruction.block_data import Arguments
from ompq.reconstruction.block_layout import Layout, layout_of

Pair = namedtuple("Pair", "x mask")


@pytest.mark.parametrize(
    ("one", "two", "layout"),
    [
        ((1, 6, 4), (2, 6, 4), Layout()),
        ((6, 1, 4), (6, 2, 4), Layout(1)),
        ((3, 7), (6, 7), Layout(0, 3)),
        ((1, 6), (1, 6), Layout(None)),
        ((), (), Layout(None)),
    ],
)
def test_two_shapes_tell_the_layout(one, two, layout):
    assert layout_of(one, two) == layout
    tensor = torch.randn(two, generator=torch.Generator().manual_seed(0))
    first = layout.samples_first(tensor)
    assert len(first) == (1 if layout.axis is None else 2)
    assert torch.equal(layout.restored(first), tensor)


def test_what_samples_share_stays_in_its_place():
    x, mask = torch.arange(12.0).reshape(3, 2, 2), torch.ones(3, 1)
    arguments = Arguments(
        ((Pair(x, mask), 0.5), {"flag": True}), [Layout(1), Layout(None)]
    )
    (own,) = arguments.own(arguments.example)
    assert torch.equal(own, x.movedim(1, 0))
    (pair, half), rest = arguments.filled([2 * own])
    assert isinstance(pair, Pair)
    assert torch.equal(pair.x, 2 * x)
    assert pair.mask is mask
    assert (half, rest) == (0.5, {"flag": True})
