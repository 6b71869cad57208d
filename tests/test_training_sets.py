from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

import ompq
from ompq.datasets.named_data import load_data
from ompq.datasets.training_sets import HeldSet, ImageSet, training_data
from ompq.errors import DataError
from ompq.models.named_models import NamedModel
from ompq.training.training_batches import TrainingData


def named(side: int, channels: int = 3, outputs: int = 2) -> NamedModel:
    return NamedModel(
        module=nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, outputs)),
        name="toy",
        input_shape=(channels, side, side),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        resize=side,
    )


def write_images(folder, count: int, size: tuple[int, int]):
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        target = folder / "train" / f"{number % 2}"
        target.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (*size, 3), generator=generator)
        image = Image.fromarray(pixels.to(torch.uint8).numpy())
        image.save(target / f"{number:03d}.png")
    return folder


def test_large_images_are_those_of_the_split_that_was_loaded(tmp_path):
    folder = write_images(tmp_path / "images", 12, (90, 110))
    (write_images(tmp_path / "more", 4, (90, 110)) / "train").rename(folder / "test")
    for split, count in (("train", 12), ("test", 4)):
        data = load_data(folder, named(72), split=split, workers=1)
        found = training_data(data)
        assert len(found) == count and found.images.files == data.images.files


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = write_images(tmp_path_factory.mktemp("small"), 24, (8, 8))
    return load_data(folder, named(8), split="train", workers=1)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = write_images(tmp_path_factory.mktemp("large"), 12, (90, 110))
    data = load_data(folder, named(72), split="train", workers=1)
    return replace(training_data(data), workers=0)


def epoch(data, number=0, **more):
    return list(data.epoch(number, **{"batch_size": 6, "seed": 3, **more}))


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def test_small_images_are_held_and_others_are_read(small, large):
    held = training_data(small)
    assert isinstance(held, HeldSet) and isinstance(large, ImageSet)
    assert isinstance(held, TrainingData) and isinstance(large, TrainingData)
    assert len(held) == 24 and len(large) == 12


def test_every_crop_is_a_window_of_its_padded_image(small):
    held = training_data(small)
    for inputs, targets in epoch(held):
        assert inputs.shape == (6, 3, 8, 8)
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        for image, target in zip(inputs, targets, strict=True):
            pixels = (image * 0.25 + 0.5) * 255  # (C, H, W)
            assert (target.item(), True) in [
                (label.item(), is_window(pixels, padded.permute(2, 0, 1)))
                for padded, label in zip(held.inputs, held.targets, strict=True)
            ]


def is_window(pixels, padded):
    """Whether an 8 × 8 image is a part of a padded one, or of its mirror image."""
    windows = padded.float().unfold(1, 8, 1).unfold(2, 8, 1)  # (C, 9, 9, 8, 8)
    return any(
        ((windows - seen[:, None, None]).abs() < 1e-3).all((0, 3, 4)).any().item()
        for seen in (pixels, pixels.flip(2))
    )


def test_shifts_and_flips_take_all_values(small):
    held = training_data(small)
    marked = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
    marked[0] = (
        torch.arange(16)[:, None, None] * 16 + torch.arange(16)[:, None]
    ).expand(16, 16, 3)  # every pixel says where it is
    marked_set = replace(held, inputs=marked, targets=torch.zeros(1, dtype=torch.long))
    seen = set()
    for number in range(600):
        ((inputs, _),) = epoch(marked_set, number, batch_size=1)
        corner = ((inputs[0, 0, 0] * 0.25 + 0.5) * 255).round().int()
        first, last = corner[0].item(), corner[-1].item()
        flipped = first > last
        seen.add((min(first, last) // 16, min(first, last) % 16, flipped))
    assert {y for y, _, _ in seen} == {x for _, x, _ in seen} == set(range(9))
    assert {flipped for *_, flipped in seen} == {True, False}


@pytest.mark.parametrize("kind", ["small", "large"])
def test_an_epoch_follows_its_number_and_seed(kind, small, large):
    data = training_data(small) if kind == "small" else large
    generator = torch.get_rng_state()
    first = epoch(data)
    assert same(first, epoch(data))
    assert not same(first, epoch(data, 1))
    assert not same(first, epoch(data, seed=4))
    assert torch.equal(torch.get_rng_state(), generator)
    assert same(first[1:], epoch(data, start=1))


@pytest.mark.parametrize("kind", ["small", "large"])
def test_processes_share_every_batch(kind, small, large):
    data = training_data(small) if kind == "small" else large
    whole = epoch(data)
    parts = [epoch(data, shard=(process, 3)) for process in range(3)]
    for number, (inputs, targets) in enumerate(whole):
        for process in range(3):
            assert torch.equal(parts[process][number][0], inputs[process::3])
            assert torch.equal(parts[process][number][1], targets[process::3])


def test_workers_change_nothing(large):
    assert same(epoch(large), epoch(replace(large, workers=2)))


@pytest.mark.parametrize("kind", ["small", "large"])
def test_without_augmentation_images_are_those_that_are_evaluated(
    kind, small, large, tmp_path
):
    data = small
    if kind == "large":
        folder = write_images(tmp_path, 6, (90, 110))
        data = load_data(folder, named(72), split="train", workers=1)
    plain = training_data(data, augment=False)
    plain = replace(plain, workers=0) if kind == "large" else plain
    expected = torch.cat([x for x, _ in data.batches()])
    found = torch.cat([x for x, _ in epoch(plain)])
    order = [int((expected - image).abs().sum((1, 2, 3)).argmin()) for image in found]
    assert sorted(order) == list(range(len(data)))
    assert torch.allclose(expected[order], found, atol=1e-5)


def test_inputs_that_are_no_images_are_taken_as_they_are(tmp_path):
    (tmp_path / "data.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.arange(32.0).reshape(8, 1, 2, 2), torch.arange(8) % 2\n"
    )
    data = load_data(f"{tmp_path / 'data.py'}:make", named(2, channels=1))
    inputs, targets = epoch(training_data(data), batch_size=8)[0]
    order = inputs[:, 0, 0, 0].div(4).long()
    assert sorted(order.tolist()) == list(range(8))
    assert torch.equal(targets, order % 2)


def test_images_without_labels_are_refused(tmp_path):
    write_images(tmp_path, 4, (8, 8))
    alone = load_data(tmp_path / "train" / "0", named(8))
    with pytest.raises(DataError, match=r"the images have no labels; sort them into"):
        training_data(alone)


def test_the_next_image_takes_the_place_of_a_broken_one(tmp_path):
    folder = write_images(tmp_path, 6, (90, 110))
    (folder / "train" / "0" / "000.png").write_bytes(b"broken")
    data = load_data(folder, named(72), split="train", workers=1)
    strict = replace(training_data(data), workers=0)
    with pytest.raises(DataError, match=r"000.png cannot be read as an image"):
        epoch(strict)
    skipping = training_data(replace(data, skip_unreadable=True))
    ((inputs, targets),) = epoch(replace(skipping, workers=0))
    assert len(inputs) == 6 and targets.sum() == 3


def test_reading_tells_its_progress(small):
    seen = []
    data = replace(small, length=200, read=lambda position: small.read(position % 24))
    training_data(data, progress=lambda *told: seen.append(told))
    assert seen == [(100, 200, "reading images"), (200, 200, "reading images")]


def test_networks_learn_from_held_images(small):
    held = training_data(small)
    model = small.model.module
    allocation = ompq.plan(model, held.epoch(0, batch_size=8).__next__()[0], "8bits")
    samples, _ = next(held.epoch(0, batch_size=8))
    quantized = ompq.quantize(model, allocation, samples)
    config = ompq.TrainConfig(epochs=2, batch_size=8)
    trained = ompq.train(quantized, held, config)
    assert not torch.equal(trained[1].weight, quantized[1].weight)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_sees_what_a_cpu_sees(small):
    here, there = (
        epoch(training_data(small)),
        epoch(training_data(small, device="cuda")),
    )
    for (inputs, targets), (moved, labels) in zip(here, there, strict=True):
        assert moved.is_cuda and torch.equal(targets, labels.cpu())
        assert torch.allclose(inputs, moved.cpu())


def test_sets_of_unreadable_images_are_refused(tmp_path):
    folder = write_images(tmp_path, 4, (8, 8))
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    for side, words in (
        (8, r"none of its 4 inputs can be read"),
        (72, r"cannot be read as"),
    ):
        model = named(side)
        data = load_data(folder, model, split="train", workers=1, skip_unreadable=True)
        with pytest.raises(DataError, match=words):
            list(training_data(data).epoch(0, batch_size=2))


def test_targets_beyond_the_outputs_are_refused(small):
    inputs = torch.zeros(3, 8, 8)
    for targets, words in (((0, 5), "from 0 to 5"), ((1, -3), "from -3 to 1")):
        data = replace(small, length=2, read=lambda at, t=targets: (inputs, t[at]))
        words += r", but toy has 2 outputs; targets are class indices, 0 to 1"
        with pytest.raises(DataError, match=words):
            training_data(data)


class Sum(nn.Module):
    def forward(self, a, b):
        return a + b


@pytest.mark.parametrize("kind", [tuple, dict])
def test_inputs_and_targets_of_any_kind_are_held(small, kind):
    rows = torch.arange(24.0).view(12, 2)

    def read(at):
        two = {"a": rows[at], "b": -rows[at]}
        return (two if kind is dict else (*two.values(),)), 3 * rows[at]

    model = replace(named(8), module=Sum())
    data = replace(small, model=model, length=12, read=read, images=None)
    held = training_data(data)
    for inputs, targets in epoch(held):
        first, second = inputs.values() if kind is dict else inputs
        assert torch.equal(first, -second) and torch.equal(targets, 3 * first)
    seen = torch.cat([targets for _, targets in epoch(held)])
    assert sorted(seen[:, 0].tolist()) == (3 * rows[:, 0]).tolist()


def test_targets_must_have_one_shape(small):
    inputs = torch.zeros(3, 8, 8)
    data = replace(small, length=2, read=lambda at: (inputs, torch.zeros(at)))
    with pytest.raises(DataError, match="targets differ in shape or are not tensors"):
        training_data(data)
