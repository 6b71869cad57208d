import math

import pytest
import torch

from ompq.ranges import (
    Rule,
    channel_rows,
    elements_at_once,
    even_span,
    row_span,
    span_grid,
    thinned,
)


def test_rows_are_channels_whatever_their_dimension():
    weight = torch.arange(24.0).reshape(2, 3, 4)
    assert channel_rows(weight, 0)[1].tolist() == list(range(12, 24))
    assert channel_rows(weight, 1)[2].tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    assert channel_rows(weight, -1)[0].tolist() == [0, 4, 8, 12, 16, 20]
    assert channel_rows(torch.arange(3).half(), 0).dtype == torch.float32
    assert channel_rows(torch.arange(3), 0).shape == (3, 1)


def test_an_empty_weight_is_refused():
    with pytest.raises(ValueError, match=r"weight of shape \(0, 3\) is empty"):
        channel_rows(torch.empty(0, 3), 0)


def test_spans_contain_zero():
    low, high = row_span(torch.tensor([[1.0, 2.0], [-3.0, -1.0], [-1.0, 4.0]]))
    assert low.tolist() == [[0], [-3], [-1]]
    assert high.tolist() == [[2], [0], [4]]


def test_an_even_span_has_the_zero_of_its_rule():
    low, high = torch.tensor([-1.0, -6.0]), torch.tensor([4.0, 1.0])
    for zero_point in (1.0, 1.5, 2.0):
        ends = even_span(low, high, Rule(2, 3, zero_point))
        scale, found = span_grid(*ends, 3)
        assert found.tolist() == [zero_point, zero_point]
        # The least scale whose first and last levels reach both ends.
        for i in range(2):
            needed = max(high[i].item() / (3 - zero_point), -low[i].item() / zero_point)
            assert scale[i].item() == pytest.approx(needed)
    free = Rule(2, 3, math.nan)
    assert even_span(low, high, free) == (low, high)


def test_thinning_visits_every_phase_of_a_kernel():
    # 4608 = 512 inputs x 9 taps: every ninth weight would be one tap only.
    rows = torch.arange(4608.0)[None]
    kept = thinned(rows, 512)[0]
    assert 500 <= len(kept) <= 512
    taps = torch.bincount(kept.long() % 9, minlength=9)
    assert taps.min() >= 0.9 * len(kept) / 9
    assert (kept.diff() > 0).all()
    assert torch.equal(thinned(rows, 4608), rows)


def test_work_is_cut_into_pieces_on_every_device():
    assert elements_at_once(torch.device("cpu")) == 2**18
    assert elements_at_once(torch.device("cuda")) > 2**18
