import logging
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from ompq.datasets.sources import Data, Item
from ompq.errors import DataError
from ompq.models import NamedModel

MODEL = NamedModel(nn.Identity(), "net", (1, 1, 1), (0.5,), (0.5,), 1)
TARGETS = tuple([0] * 40 + [1] * 10 + [2] * 5)


def read(position: int) -> Item:
    return torch.full((1, 1, 1), float(position)), TARGETS[position]


DATA = Data("data", MODEL, len(TARGETS), read, TARGETS, workers=3)


def positions(samples: torch.Tensor) -> list[int]:
    return samples.flatten().int().tolist()


def unreadable(*bad: int) -> Data:
    def careful(position: int) -> Item:
        if position in bad:
            raise DataError(f"file{position} is no readable image")
        return read(position)

    return replace(DATA, read=careful)


def test_samples_are_spread_over_the_classes() -> None:
    counts = Counter(TARGETS[p] for p in positions(DATA.samples(15)))
    assert counts == {0: 5, 1: 5, 2: 5}
    counts = Counter(TARGETS[p] for p in positions(DATA.samples(31)))
    assert counts == {0: 16, 1: 10, 2: 5}


def test_samples_follow_the_seed_and_nothing_else() -> None:
    before = torch.get_rng_state()
    first = positions(DATA.samples(20))
    assert torch.equal(torch.get_rng_state(), before)
    assert positions(replace(DATA, workers=1).samples(20)) == first
    assert positions(replace(DATA, seed=1).samples(20)) != first
    assert positions(DATA.samples(7)) == first[:7]
    assert len(set(positions(DATA.samples(55)))) == 55


def test_samples_without_classes_are_a_random_choice() -> None:
    chosen = positions(replace(DATA, targets=None).samples(30))
    assert len(set(chosen)) == 30
    assert chosen != sorted(chosen)


def test_progress_counts_the_samples() -> None:
    calls: list[tuple[int, int | None, str]] = []
    DATA.samples(3, progress=lambda *call: calls.append(call))
    assert calls == [(i, 3, "reading images") for i in (1, 2, 3)]


def test_too_few_inputs() -> None:
    with pytest.raises(DataError, match="data: asked for 64 samples, found 55"):
        DATA.samples(64)
    with pytest.raises(DataError, match="asked for 56 samples, found 55"):
        DATA.batches(limit=56)
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        DATA.samples(0)


def test_batches_give_everything_in_order_again_and_again() -> None:
    batches = DATA.batches(batch_size=16)
    assert len(batches) == 4
    for _ in range(2):
        pairs = list(batches)
        assert [len(targets) for _, targets in pairs] == [16, 16, 16, 7]
        inputs = torch.cat([inputs for inputs, _ in pairs])
        targets = torch.cat([targets for _, targets in pairs])
        assert positions(inputs) == list(range(55))
        assert targets.tolist() == list(TARGETS)


def test_limited_batches_are_spread_over_the_classes() -> None:
    batches = DATA.batches(batch_size=4, limit=6)
    targets = torch.cat([targets for _, targets in batches])
    assert Counter(targets.tolist()) == {0: 2, 1: 2, 2: 2}


def test_batches_need_labels_and_a_size() -> None:
    with pytest.raises(DataError, match="data: no labels here"):
        replace(DATA, label_problem="no labels here").batches()
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        DATA.batches(batch_size=0)


def test_images_are_normalised_in_the_batch() -> None:
    image = torch.tensor([[[255]]], dtype=torch.uint8)
    data = replace(DATA, read=lambda position: (image, TARGETS[position]))
    assert data.samples(2).flatten().tolist() == [1.0, 1.0]


def test_unreadable_image_is_an_error_unless_told_otherwise() -> None:
    with pytest.raises(DataError, match="file3 is no readable image"):
        list(unreadable(3).batches(batch_size=2))
    with pytest.raises(DataError, match="file3 is no readable image"):
        unreadable(3).samples(55)


def test_unreadable_images_are_skipped_counted_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = replace(unreadable(3, 7), skip_unreadable=True)
    with caplog.at_level(logging.WARNING):
        inputs = torch.cat([inputs for inputs, _ in data.batches(batch_size=10)])
    assert positions(inputs) == [i for i in range(55) if i not in (3, 7)]
    assert "data: skipped 2 unreadable images: file3 is no" in caplog.text


def test_skipped_samples_are_made_up_for(caplog: pytest.LogCaptureFixture) -> None:
    bad = positions(DATA.samples(5))[2]
    data = replace(unreadable(bad), skip_unreadable=True)
    expected = [p for p in positions(DATA.samples(11)) if p != bad]
    assert positions(data.samples(10)) == expected
    assert f"skipped 1 unreadable images: file{bad}" in caplog.text
    with pytest.raises(DataError, match="asked for 55 samples, found 54 that can be"):
        data.samples(55)


def test_reading_stops_when_the_reader_stops() -> None:
    started: list[int] = []

    def counted(position: int) -> Item:
        started.append(position)
        return read(position)

    before = threading.active_count()
    batches = iter(replace(DATA, read=counted).batches(batch_size=2))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(started) <= 8
    assert threading.active_count() == before
