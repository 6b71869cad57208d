"""Data by name: the choice of samples, batches, and every source."""

import logging
import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ompq.datasets.named_data import Data, load_data
from ompq.errors import DataError, MissingExtraError, ModelError
from ompq.models.named_models import NamedModel

MODEL = NamedModel(nn.Identity(), "net", (1, 1, 1), (0.5,), (0.5,), 1)
TARGETS = tuple([0] * 40 + [1] * 10 + [2] * 5)


def read(position):
    return torch.full((1, 1, 1), float(position)), TARGETS[position]


DATA = Data("data", MODEL, len(TARGETS), read, TARGETS, workers=3)


def positions(samples):
    return samples.flatten().int().tolist()


def unreadable(*bad):
    def careful(position):
        if position in bad:
            raise DataError(f"file{position} cannot be read as an image")
        return read(position)

    return replace(DATA, read=careful)


def test_samples_are_spread_over_the_classes():
    counts = Counter(TARGETS[p] for p in positions(DATA.samples(15)))
    assert counts == {0: 5, 1: 5, 2: 5}
    counts = Counter(TARGETS[p] for p in positions(DATA.samples(31)))
    assert counts == {0: 16, 1: 10, 2: 5}


def test_samples_follow_the_seed_and_nothing_else():
    before = torch.get_rng_state()
    first = positions(DATA.samples(20))
    assert torch.equal(torch.get_rng_state(), before)
    assert positions(replace(DATA, workers=1).samples(20)) == first
    assert positions(replace(DATA, seed=1).samples(20)) != first
    assert positions(DATA.samples(7)) == first[:7]
    assert len(set(positions(DATA.samples(55)))) == 55


def test_samples_without_classes_are_a_random_choice():
    chosen = positions(replace(DATA, targets=None).samples(30))
    assert len(set(chosen)) == 30
    assert chosen != sorted(chosen)


def test_progress_counts_the_samples():
    calls: list[tuple[int, int | None, str]] = []
    DATA.samples(3, progress=lambda *call: calls.append(call))
    assert calls == [(i, 3, "reading images") for i in (1, 2, 3)]


def test_too_few_inputs():
    with pytest.raises(DataError, match="data: asked for 64 samples, found 55"):
        DATA.samples(64)
    with pytest.raises(DataError, match="asked for 56 samples, found 55"):
        DATA.batches(limit=56)
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        DATA.samples(0)


def test_batches_give_everything_in_order_again_and_again():
    batches = DATA.batches(batch_size=16)
    assert len(batches) == 4
    for _ in range(2):
        pairs = list(batches)
        assert [len(targets) for _, targets in pairs] == [16, 16, 16, 7]
        inputs = torch.cat([inputs for inputs, _ in pairs])
        targets = torch.cat([targets for _, targets in pairs])
        assert positions(inputs) == list(range(55))
        assert targets.tolist() == list(TARGETS)


def test_limited_batches_are_spread_over_the_classes():
    batches = DATA.batches(batch_size=4, limit=6)
    targets = torch.cat([targets for _, targets in batches])
    assert Counter(targets.tolist()) == {0: 2, 1: 2, 2: 2}


def test_batches_need_labels_and_a_size():
    with pytest.raises(DataError, match="data: no labels here"):
        replace(DATA, label_problem="no labels here").batches()
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        DATA.batches(batch_size=0)


def test_images_are_normalised_in_the_batch():
    image = torch.tensor([[[255]]], dtype=torch.uint8)
    data = replace(DATA, read=lambda position: (image, TARGETS[position]))
    assert data.samples(2).flatten().tolist() == [1.0, 1.0]


def test_unreadable_image_is_an_error_unless_told_otherwise():
    with pytest.raises(DataError, match=r"file3 cannot .* \(skip_unreadable\)"):
        list(unreadable(3).batches(batch_size=2))
    with pytest.raises(DataError, match="file3 cannot be read as an image"):
        unreadable(3).samples(55)


def test_unreadable_images_are_skipped_counted_and_named(caplog):
    data = replace(unreadable(3, 7), skip_unreadable=True)
    with caplog.at_level(logging.WARNING):
        inputs = torch.cat([inputs for inputs, _ in data.batches(batch_size=10)])
    assert positions(inputs) == [i for i in range(55) if i not in (3, 7)]
    assert "data: skipped what cannot be read (2): file3 cannot" in caplog.text


def test_skipped_samples_are_made_up_for(caplog):
    bad = positions(DATA.samples(5))[2]
    data = replace(unreadable(bad), skip_unreadable=True)
    expected = [p for p in positions(DATA.samples(11)) if p != bad]
    assert positions(data.samples(10)) == expected
    assert f"skipped what cannot be read (1): file{bad}" in caplog.text
    with pytest.raises(DataError, match="asked for 55 samples, found 54 that can be"):
        data.samples(55)


def test_reading_stops_when_the_reader_stops():
    started: list[int] = []

    def counted(position):
        started.append(position)
        return read(position)

    before = threading.active_count()
    batches = iter(replace(DATA, read=counted).batches(batch_size=2))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(started) <= 24  # of 55: two times four for each of three threads
    assert threading.active_count() == before


USER_FILE = """
import torch

def tensor():
    return torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 8, 8)

def pair():
    return tensor(), torch.tensor([3, 2, 1, 0])

def numbers():
    return tensor(), torch.tensor([0.5, 1.5, 2.5, 3.5])

class Images:
    def __len__(self):
        return 4
    def __getitem__(self, position):
        return tensor()[position], position % 2

def dataset():
    return Images()

def dataset_with_targets():
    images = Images()
    images.targets = [0, 1, 0, 1]
    return images

def list_of_batches():
    return list(torch.utils.data.DataLoader(Images(), batch_size=2))

def too_few_targets():
    return tensor(), torch.tensor([1])

def loader():
    return torch.utils.data.DataLoader(Images())

def generator():
    for image, label in Images():
        yield image[None], torch.tensor([label])

def number():
    return 3

def broken_loader():
    yield 1 / 0

def broken_later():
    yield torch.zeros(4, 1, 8, 8)
    yield 1 / 0

def uneven():
    return [torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 9)]

def list_of_inputs():
    return [torch.zeros(8, 8), torch.zeros(8, 8)]

def labelled_list():
    return list(pair())

def nothing():
    return []

def wrong_size():
    return torch.zeros(2, 1, 8, 9)

def words():
    return ["not", "tensors"]

def endless():
    class Endless:
        def __getitem__(self, position):
            return torch.zeros(1, 8, 8)
    return Endless()
"""


def network(outputs=10, channels=1, side=8):
    module = nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, outputs))
    values = (0.5,) * channels
    shape = (channels, side, side)
    return NamedModel(module.eval(), "net", shape, values, values, side)


def picture(path, grey):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (grey, grey, grey)).save(path)


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_folder_of_classes_gives_samples_and_batches(tmp_path):
    for name, grey in (("0001/x.png", 0), ("0004/x.png", 255), ("0004/y.png", 51)):
        picture(tmp_path / name, grey)
    data = load_data(tmp_path, network(5, 3), workers=2)
    assert len(data) == 3
    ((inputs, targets),) = data.batches()
    assert inputs.shape == (3, 3, 8, 8)
    assert inputs[:, 0, 0, 0].tolist() == pytest.approx([-1, 1, -0.6])
    assert targets.tolist() == [1, 4, 4]
    assert data.samples(2).shape == (2, 3, 8, 8)
    assert len(data.samples(2)[:, 0, 0, 0].unique()) == 2  # one of each class


def test_folder_of_images_alone_gives_samples_only(tmp_path):
    picture(tmp_path / "x.png", 3)
    data = load_data(str(tmp_path), network())
    assert data.samples(1).shape == (1, 1, 8, 8)
    with pytest.raises(DataError, match="the images have no labels; sort them into"):
        data.batches()


def test_unreadable_image_is_named_or_skipped(tmp_path, caplog):
    picture(tmp_path / "0" / "a.png", 3)
    (tmp_path / "0" / "b.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(DataError, match="b.png cannot be read as an image"):
        list(load_data(tmp_path, network()).batches())
    data = load_data(tmp_path, network(), skip_unreadable=True)
    assert sum(len(targets) for _, targets in data.batches()) == 1
    assert "skipped what cannot be read (1)" in caplog.text


def test_classes_must_fit_the_outputs_for_labels_but_not_for_samples(tmp_path):
    for name in ("cat", "dog"):
        picture(tmp_path / "named" / name / "x.png", 0)
        picture(tmp_path / "numbered" / "12" / f"{name}.png", 0)
    named = load_data(tmp_path / "named", network())
    assert len(named.samples(2)) == 2
    words = r"there are 2 class folders \(cat, dog\), but net has 10 outputs"
    with pytest.raises(DataError, match=words):
        named.batches()
    words = r"class folder 12 is beyond net's 10 outputs; .* 0 to 9"
    with pytest.raises(DataError, match=words):
        load_data(tmp_path / "numbered", network()).batches()
    assert len(load_data(tmp_path / "numbered", network(13)).batches()) == 1


def test_network_that_does_not_take_the_images_is_told_at_once(tmp_path):
    picture(tmp_path / "0" / "x.png", 0)
    wrong = NamedModel(nn.Linear(3, 2), "net", (3, 8, 8), (0.5,) * 3, (0.5,) * 3, 8)
    with pytest.raises(ModelError, match="net does not take an input of shape"):
        load_data(tmp_path, wrong)


def test_folders_are_for_networks_that_take_images(tmp_path):
    sound = NamedModel(nn.Linear(3, 2), "net", (1, 800), (0.5,), (0.5,), 8)
    with pytest.raises(DataError, match="not images; give its own data: FILE.py"):
        load_data(tmp_path, sound)


def test_random_is_loud_reproducible_noise(caplog):
    model = network()
    before = torch.get_rng_state()
    samples = load_data("random", model).samples(500)
    again = load_data("random", model).samples(500)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(samples, again)
    assert abs(samples.mean()) < 0.02
    assert abs(samples.std() - 1) < 0.02
    assert len(samples.flatten(1).unique(dim=0)) == 500
    assert not torch.equal(load_data("random", model, seed=1).samples(500), samples)
    assert caplog.records[0].levelno == logging.WARNING
    assert "only the sizes are valid" in caplog.text
    _, targets = next(iter(load_data("random", network(7)).batches()))
    assert targets.max() < 7


def test_digits_are_split_for_good():
    from sklearn.datasets import load_digits

    train = load_data("digits", network(), split="train")
    test = load_data("digits", network())
    assert (len(train), len(test)) == (1347, 450)
    images = {i.tobytes() for i in load_digits().images}
    seen = [((x.numpy() * 0.5 + 0.5) * 16).round()[:, 0].astype(np.float64)
            for data in (train, test) for x, _ in data.batches()]  # fmt: skip
    assert {image.tobytes() for batch in seen for image in batch} == images
    assert test.targets is not None
    assert test.targets[:8] == (2, 8, 2, 6, 6, 7, 1, 9)
    _, targets = next(iter(test.batches(batch_size=8)))
    assert targets.tolist() == [2, 8, 2, 6, 6, 7, 1, 9]


def test_digits_take_the_networks_size_and_channels():
    samples = load_data("digits", network(10, 3, 16)).samples(20)
    assert samples.shape == (20, 3, 16, 16)
    assert torch.equal(samples[:, 0], samples[:, 2])
    assert -1 <= samples.min() < -0.9


def test_digits_need_ten_outputs_and_scikit_learn(monkeypatch):
    with pytest.raises(DataError, match="there are 10 digits, but net has 5 outputs"):
        load_data("digits", network(5)).batches()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[demo\]'"):
        load_data("digits", network())


def test_users_tensor_is_unlabelled(user_file):
    data = load_data(f"{user_file}:tensor", network())
    assert sorted(data.samples(4)[:, 0, 0, 0].tolist()) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="the inputs have no labels; return"):
        data.batches()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("pair", [3, 2, 1, 0]),
        ("dataset", [0, 1, 0, 1]),
        ("dataset_with_targets", [0, 1, 0, 1]),
        ("list_of_batches", [0, 1, 0, 1]),
        ("labelled_list", [3, 2, 1, 0]),
        ("loader", [0, 1, 0, 1]),
        ("generator", [0, 1, 0, 1]),
    ],
)
def test_users_labels_are_used(user_file, function, expected):
    data = load_data(f"{user_file}:{function}", network())
    ((inputs, targets),) = data.batches()
    assert inputs[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert targets.tolist() == expected
    if data.targets is not None:
        assert data.targets == tuple(expected)
        _, chosen = next(iter(data.batches(limit=2)))
        assert max(Counter(chosen.tolist()).values()) == 1


def test_users_targets_may_be_numbers(user_file):
    data = load_data(f"{user_file}:numbers", network())
    ((_, targets),) = data.batches()
    assert targets.tolist() == [0.5, 1.5, 2.5, 3.5]
    assert data.targets is None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("too_few_targets", "returned 4 inputs and 1 targets"),
        ("number", "returned int; it must return a tensor, .* yield batches"),
        ("broken_loader", "batch 0: ZeroDivisionError"),
        ("broken_later", "batch 1: ZeroDivisionError"),
        ("uneven", r"item 1 has shape \(1, 8, 9\); the first has \(1, 8, 8\)"),
        ("nothing", "returned no inputs; give at least one"),
        ("wrong_size", r"net does not take an input of shape \(1, 8, 9\): .* batches"),
        ("list_of_inputs", r"shape \(8,\): .*Lists and generators give batches"),
        ("endless", "returned Endless; it must return a tensor"),
        ("words", "batch 0: TypeError: str is not a tensor; return tensors"),
        ("absent", "has no function absent"),
    ],
)
def test_users_data_that_cannot_be_used(user_file, function, words):
    with pytest.raises(DataError, match=words):
        load_data(f"{user_file}:{function}", network()).samples(2)


def test_wrong_arguments(tmp_path):
    with pytest.raises(DataError, match=r"no folder digit \(did you mean digits\?\);"):
        load_data("digit", network())
    with pytest.raises(DataError, match="there is no folder .*nowhere; .* random"):
        load_data(tmp_path / "nowhere", network())
    with pytest.raises(ValueError, match="split='val' must be 'train' or 'test'"):
        load_data("digits", network(), split="val")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        load_data("digits", network(), workers=0)
