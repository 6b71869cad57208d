import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nets import demo_network
from ompq.models.builtin_networks import (
    DEMO_WEIGHTS,
    CifarResNet,
    DemoNetwork,
    InvertedResidual,
    PadShortcut,
    cifar_resnet18,
    demo_data,
)


def published_keys(depth):
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    keys = {"conv1.weight", "linear.weight", "linear.bias"}
    keys |= {f"bn1.{key}" for key in norm}
    for stage in (1, 2, 3):
        for block in range((depth - 2) // 6):
            for i in (1, 2):
                keys.add(f"layer{stage}.{block}.conv{i}.weight")
                keys |= {f"layer{stage}.{block}.bn{i}.{key}" for key in norm}
    return keys


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (56, 853_018)])
def test_keys_and_parameters_are_those_of_the_published_network(depth, parameters):
    network = CifarResNet(depth)
    assert set(network.state_dict()) == published_keys(depth)
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_shortcut_subsamples_and_pads_channels_on_both_sides():
    x = torch.arange(2 * 2 * 4 * 4, dtype=torch.float32).view(2, 2, 4, 4)
    y = PadShortcut(4)(x)
    assert y.shape == (2, 6, 2, 2)
    for n in range(2):
        for row in range(2):
            for column in range(2):
                expected = [0, 0, *x[n, :, 2 * row, 2 * column].tolist(), 0, 0]
                assert y[n, :, row, column].tolist() == expected


def test_resnet18_keeps_the_resolution_in_its_stem():
    network = cifar_resnet18().eval()
    with torch.no_grad():
        stem = network.maxpool(network.conv1(torch.zeros(1, 3, 32, 32)))
        logits = network(torch.zeros(1, 3, 32, 32))
    assert stem.shape == (1, 64, 32, 32)
    assert logits.shape == (1, 10)


@pytest.mark.parametrize("width", [0.375, 2.0])
def test_the_channels_of_resnet18_are_multiplied(width):
    network, usual = cifar_resnet18(width=width).eval(), cifar_resnet18()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    shapes = {name: [*value.shape] for name, value in network.state_dict().items()}
    assert shapes == {
        name: [int(n * width) if n >= 64 else n for n in value.shape]
        for name, value in usual.state_dict().items()
    }
    strides = [m.stride for m in usual.modules() if isinstance(m, torch.nn.Conv2d)]
    own = [m.stride for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    assert own == strides
    spread = network.layer4[1].conv2.weight.std().item()
    assert spread == pytest.approx((2 / (9 * 512 * width)) ** 0.5, rel=0.05)


def test_depth_that_is_no_6n_plus_2_is_refused():
    with pytest.raises(ValueError, match="depth=21 is not 6n \\+ 2"):
        CifarResNet(21)


SCRIPT = Path(__file__).parents[1] / "scripts" / "train_demo.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_network_reads_nearly_every_held_out_digit():
    data = demo_data()
    network = demo_network()
    assert not network.training
    with torch.no_grad():
        read = network(data.test_images).argmax(1)
    wrong = [n for n, d in zip(read, data.test_targets, strict=True) if n != d]
    assert len(wrong) <= 9  # of 450: 98 %


def test_weights_are_small_float_and_finite():
    assert DEMO_WEIGHTS.stat().st_size < 1_000_000
    weights = load_file(DEMO_WEIGHTS)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert all(np.isfinite(value.numpy()).all() for value in weights.values())
    assert 75_000 < sum(p.numel() for p in DemoNetwork().parameters()) < 250_000


def test_digits_are_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data = demo_data()
    assert data.train_images.shape == (1347, 1, 8, 8)
    assert data.test_images.shape == (450, 1, 8, 8)
    train = {image.numpy().tobytes() for image in data.train_images}
    test = {image.numpy().tobytes() for image in data.test_images}
    given = load_digits()
    digit_of = {
        (image / 16).astype(np.float32).tobytes(): digit
        for image, digit in zip(given.images, given.target, strict=True)
    }
    assert not train & test
    assert train | test == set(digit_of)
    for image, digit in zip(data.test_images, data.test_targets, strict=True):
        assert digit_of[image.numpy().tobytes()] == digit
    assert data.test_targets[:8].tolist() == [2, 8, 2, 6, 6, 7, 1, 9]
    assert data.train_targets[:8].tolist() == [2, 8, 9, 7, 2, 1, 4, 9]
    assert data.train_images.min() == 0
    assert data.train_images.max() == 1


def test_blocks_have_a_shortcut_only_where_shapes_agree():
    x = torch.ones(1, 4, 4, 4)
    for channels, stride, size in ((4, 1, 4), (4, 2, 2), (6, 1, 4)):
        block = InvertedResidual(4, channels, stride=stride).eval()
        nn.init.zeros_(block.project.weight)  # leaves only what the shortcut brings
        y = block(x)
        assert y.shape == (1, channels, size, size)
        assert torch.equal(y, x) if y.shape == x.shape else not y.any()


def test_training_follows_its_seed_alone(script):
    whole = demo_data()
    data = replace(
        whole,
        train_images=whole.train_images[:256],
        train_targets=whole.train_targets[:256],
    )
    before = torch.random.get_rng_state()
    first, second = (script["train"](data, epochs=1, seed=3) for _ in range(2))
    other = script["train"](data, epochs=1, seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    expected = second.state_dict()
    for key, value in first.state_dict().items():
        assert torch.equal(value, expected[key])
    assert not torch.equal(first.stem.weight, other.stem.weight)
    assert not first.training


def test_shifting_moves_images_by_at_most_one_pixel(script):
    images = demo_data().train_images[:50]
    moved = script["shifted"](images, torch.Generator().manual_seed(0))
    offsets = set()
    for before, after in zip(images[:, 0].numpy(), moved[:, 0].numpy(), strict=True):
        canvas = np.zeros((10, 10), dtype=np.float32)
        canvas[1:9, 1:9] = before
        windows = {
            (y, x): canvas[y : y + 8, x : x + 8] for y in range(3) for x in range(3)
        }
        found = [at for at, window in windows.items() if (window == after).all()]
        assert found
        offsets.update(found)
    assert len(offsets) == 9


def test_script_writes_the_weights(script, tmp_path, monkeypatch):
    arguments = ["--output", str(tmp_path / "w.safetensors"), "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *arguments])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    script["main"]()
    written, shipped = load_file(tmp_path / "w.safetensors"), load_file(DEMO_WEIGHTS)
    assert {key: value.shape for key, value in written.items()} == {
        key: value.shape for key, value in shipped.items()
    }
