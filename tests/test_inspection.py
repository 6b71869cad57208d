"""Where the bytes of an exported file go."""

import builtins
import random

import pytest
from torch import nn

from nets import TinyResNet, images, seeded
from ompq.errors import ExportError, MissingExtraError
from ompq.layers import quantized_layers
from ompq.runtimes.benchmark import (
    inputs_of,
)
from ompq.runtimes.inspection import (
    inspect_onnx,
    without_gain,
)
from ompq.runtimes.onnx.onnx_files import export_onnx
from quantized import quantized

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    network = quantized(seeded(TinyResNet()), images(8), weight=(2, 5, 8))
    path = tmp_path_factory.mktemp("export") / "net.onnx"
    return network, export_onnx(network, path, images(8), engine_images=2)


def test_account_sums_up_to_the_file(exported):
    network, result = exported
    found = inspect_onnx(result.path)
    assert found.bytes == sum(found.items.values()) == result.bytes
    layers = quantized_layers(network)
    assert found.bits == {name: layer.bits for name, layer in layers.items()}
    assert found.layers == {weight.name: weight.bytes for weight in result.weights}
    channels = sum(len(layer.weight_scale) for layer in layers.values())
    assert found.items["scales"] == found.items["biases"] == 4 * channels
    weights = sum(layer.weight.numel() * layer.bits / 8 for layer in layers.values())
    assert weights <= found.items["weights"] <= weights + 2 * len(layers)


def test_files_of_others_have_no_account(exported, tmp_path):
    _, result = exported
    model = onnx.load(result.path)
    model.producer_name = "other"
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(ExportError, match=r"other.onnx was written by other, not by"):
        inspect_onnx(tmp_path / "other.onnx")


def test_broken_and_missing_files_are_told(tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xfe broken")
    with pytest.raises(ExportError, match="broken.onnx cannot be read as ONNX"):
        inspect_onnx(tmp_path / "broken.onnx")
    with pytest.raises(ExportError, match="none.onnx cannot be read as ONNX"):
        inspect_onnx(tmp_path / "none.onnx")


def test_missing_extra_is_named(exported, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "onnx":
            raise ImportError(name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match="onnx is not installed"):
        inspect_onnx(exported[1].path)


def test_damaged_files_give_one_clear_error_or_an_account(exported, tmp_path):
    """Bytes of a file at random: nothing but our own error, and no escapes in it."""
    whole = exported[1].path.read_bytes()
    path, order, refused = tmp_path / "net.onnx", random.Random(0), 0
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(order.choice((1, 4, 40))):
            broken[order.randrange(len(broken))] = order.randrange(256)
        path.write_bytes(broken[: order.choice((len(broken), len(broken) // 2))])
        try:
            account = inspect_onnx(path)
            without_gain(path)
            inputs_of(path)
            assert all(name.isprintable() for name in account.layers)
        except ExportError as error:
            assert len(str(error)) < 500
            refused += 1
    assert refused > 100


def test_names_with_escapes_are_refused(exported, tmp_path):
    model = onnx.load(exported[1].path)
    model.graph.initializer[0].name = "\x1b[2Jstem/bytes"
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(ExportError, match="is damaged: names in it are not those of"):
        inspect_onnx(tmp_path / "net.onnx")


def test_layers_of_a_file_that_pytorch_wrote_are_named(tmp_path):
    stem = nn.Conv2d(3, 8, 3)
    model = nn.Sequential(stem, nn.SiLU(), nn.Conv2d(8, 8, 3, groups=8), nn.SiLU())
    network = quantized(seeded(model).eval(), images(8), weight=8, activation=8)
    export_onnx(network, tmp_path / "net.onnx", images(4))
    depthwise, thin = without_gain(tmp_path / "net.onnx")
    assert depthwise.startswith("depthwise or grouped convolutions (2): ")
    assert thin.startswith("convolutions of fewer than 4 channels (0): ")
