"""Networks whose weights alone are quantized, as ONNX; and float ones."""

import numpy as np
import pytest
import torch
from torch import nn

from nets import TinyResNet, TwoInputs, images, seeded
from ompq.errors import ExportError, QuantizationError
from ompq.layers import quantized_layers
from ompq.onnx.export import export_onnx
from ompq.onnx.inspection import inspect_onnx
from ompq.onnx.model import float_model, weights_only_model
from ompq.onnx.verification import open_session, run_session
from quantized import quantized

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")


class Mixer(nn.Module):
    """What integers do not cover: a norm of layers, GELU, products over sequences."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 12, 4, 4)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 24, bias=False), nn.Linear(24, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


@pytest.fixture(scope="module")
def mixer(tmp_path_factory):
    network = quantized(seeded(Mixer()), images(8), weight=(2, 3, 7, 8), activation=32)
    path = tmp_path_factory.mktemp("mixer") / "net.onnx"
    return network, export_onnx(network, path, images(40))


def test_file_agrees_and_weights_have_their_width(mixer):
    network, result = mixer
    assert result.simulated.top1 == 1
    assert result.simulated.logits < 1e-5
    assert result.engine is None
    found = inspect_onnx(result.path)
    layers = quantized_layers(network)
    assert found.bits == {name: layer.bits for name, layer in layers.items()}
    least = sum(one.weight.numel() * one.bits / 8 for one in layers.values())
    assert least <= found.items["weights"] <= least + 2 * len(layers)
    biases = 12 + 2 * 12 + 12 + 5  # of layers, and the norm
    assert found.items["float"] >= 4 * biases
    assert found.bytes == sum(found.items.values())


def test_weights_in_the_file_are_the_networks_to_the_last_bit(mixer):
    from onnx.inliner import inline_local_functions

    network, result = mixer
    model = inline_local_functions(onnx.load(result.path))
    for name in quantized_layers(network):
        model.graph.output.append(
            onnx.helper.make_empty_tensor_value_info(f"{name}/weight")
        )
    session = open_session(model.SerializeToString())
    _, *found = run_session(session, images(1))
    with torch.no_grad():
        for layer, values in zip(
            quantized_layers(network).values(), found, strict=True
        ):
            assert torch.equal(layer.rounded_weight(), values)


def test_file_tells_nothing_of_its_origin(mixer):
    content = mixer[1].path.read_bytes()
    for trace in (b".py", b"stack_trace", b"namespace", b"torch"):
        assert trace not in content
    assert onnx.load(mixer[1].path).producer_name == "ompq"


def test_any_number_of_images_runs(mixer):
    network, result = mixer
    session = open_session(result.path)
    for count in (1, 5):
        (logits,) = run_session(session, images(count))
        with torch.no_grad():
            torch.testing.assert_close(logits, network(images(count)))


def test_float_network_is_written_as_it_is():
    network = seeded(TinyResNet())
    session = open_session(float_model(network, images(4)).SerializeToString())
    (logits,) = run_session(session, images(3))
    with torch.no_grad():
        torch.testing.assert_close(logits, network(images(3)), rtol=1e-4, atol=1e-5)


def test_weight_that_is_not_in_the_graph_is_named(monkeypatch):
    network = quantized(seeded(Mixer()), images(8), weight=4, activation=32)
    monkeypatch.setattr("ompq.onnx.model._places", lambda *_: iter(()))
    with pytest.raises(
        ExportError, match=r"embed: its weight \(12, 3, 4, 4\) is not among the const"
    ):
        weights_only_model(network, images(2), 21)


def test_what_pytorch_cannot_write_and_several_inputs_are_told():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            x = self.layer(x)
            return x if x.sum() > 0 else -x

    rows = torch.ones(4, 3)
    network = quantized(seeded(Branching()), rows, weight=8, activation=32)
    with pytest.raises(ExportError, match="PyTorch cannot write the network as ONNX"):
        weights_only_model(network, rows, 21)

    pair = (torch.ones(4, 3), torch.ones(4, 2))
    network = quantized(seeded(TwoInputs()), pair, weight=8, activation=32)
    with pytest.raises(QuantizationError, match="takes 2 inputs: export covers one"):
        weights_only_model(network, pair, 21)


def test_levels_times_scales_are_exact():
    # Half a scale times twice a level is the scale times the level, rounded once.
    levels = np.arange(-63, 64, dtype=np.float32) / 2
    scale = np.float32(0.0123)
    assert np.array_equal(scale * levels, (scale / 2) * (levels * 2))


@pytest.mark.parametrize("bits", [3, 8])
def test_transposed_convolution_with_other_channels_is_exported(bits, tmp_path):
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.GELU(), nn.ConvTranspose2d(6, 4, 2, 2, groups=2)
    )
    network = quantized(seeded(network), images(8), weight=bits, activation=32)
    result = export_onnx(network, tmp_path / "net.onnx", images(8))
    assert result.simulated.logits < 1e-5
    assert [one.bits for one in result.weights] == [bits, bits]
