import builtins

import numpy as np
import pytest
import torch

from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq.errors import ExportError, MissingExtraError, QuantizationError
from ompq.integer.finalization import finalize
from ompq.layers import quantized_layers
from ompq.models.cifar import CifarResNet
from ompq.models.demo_network import demo_data, demo_network
from ompq.onnx.export import export_onnx
from ompq.onnx.model import OnnxGraph
from quantized import quantized
from test_integer import Fire, Shared, Vgg

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

NETWORKS = {
    "resnet": TinyResNet,
    "mobilenet": TinyMobileNet,
    "fire": Fire,
    "vgg": Vgg,
    "cifar": lambda: CifarResNet(8),
}


def session(path, optimized=None):
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return runtime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("activation", [4, 8])
@pytest.mark.parametrize("name", NETWORKS)
def test_file_equals_the_settled_network_to_the_last_code(tmp_path, name, activation):
    size = 32 if name == "cifar" else 8
    samples = images(16, size)
    network = quantized(seeded(NETWORKS[name]()), samples, activation=activation)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=4)
    assert (result.simulated.top1, result.engine.top1) == (1.0, 1.0)
    assert result.simulated.logits < 1e-5
    assert result.engine.codes_equal == 1.0
    assert result.engine.codes > 1000
    assert result.bytes == (tmp_path / "net.onnx").stat().st_size
    # Computed another way: the file on images that the exporter has not seen.
    other = images(5, size, seed=9)
    (logits,) = session(result.path).run(None, {"input": other.numpy()})
    with torch.no_grad():
        expected = finalize(network, samples)(other)
    torch.testing.assert_close(torch.tensor(logits), expected, rtol=1e-5, atol=1e-5)


def test_file_is_small_and_clean(tmp_path):
    data = demo_data()
    samples = data.train_images[:32]
    network = quantized(demo_network(), samples, weight=2)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=2)
    layers = quantized_layers(network)
    codes = sum(-(-layer.weight.numel() * 2 // 8) for layer in layers.values())
    # For each channel a scale, a bias and an offset.
    channels = sum(9 * len(layer.weight_scale) for layer in layers.values())
    stored = sum(weight.bytes for weight in result.weights)
    assert codes + channels <= stored <= codes + channels + 400
    assert result.bytes < stored + 1100 * len(layers)
    assert {weight.container for weight in result.weights} == {"planes 2"}
    model = onnx.load(result.path)
    onnx.checker.check_model(model, full_check=True)
    assert not model.doc_string
    assert not model.graph.doc_string
    assert not any(node.doc_string or node.name for node in model.graph.node)
    assert b"/" + __file__.split("/")[1].encode() not in result.path.read_bytes()
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_runtime_computes_with_fused_8_bit_kernels(tmp_path):
    samples = images(8)
    network = quantized(seeded(TinyResNet()), samples, weight=(3, 4, 8))
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=2)
    session(result.path, tmp_path / "optimized.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 6
    assert kinds.count("QLinearAdd") == 2
    assert kinds.count("QGemm") == 1
    assert not {"Conv", "Add", "Gemm", "Mul", "BitShift", "Weight3"} & set(kinds)


@pytest.mark.parametrize("opset", [18, 23])
def test_other_opsets_work(tmp_path, opset):
    network = quantized(seeded(TinyMobileNet()), images(8))
    result = export_onnx(
        network, tmp_path / "net.onnx", images(8), opset=opset, engine_images=2
    )
    assert onnx.load(result.path).opset_import[0].version == opset
    assert result.simulated.top1 == 1.0


def test_channel_without_planes_is_stored_as_bytes(tmp_path):
    network = quantized(seeded(TinyResNet()), images(8), weight=4)
    layer = quantized_layers(network)["stem"]
    with torch.no_grad():
        layer.weight_scale[0] = 3e-8
        layer.weight[0] *= 3e-8 / 0.05
        layer.bias[0] = 1.0
    result = export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=8)
    assert result.weights[0].container == "int8"
    assert result.engine.codes_equal == 1.0


def test_dead_channel_costs_nothing(tmp_path):
    network = quantized(seeded(TinyResNet()), images(8), weight=4)
    layer = quantized_layers(network)["stem"]
    with torch.no_grad():
        layer.weight_scale[0] = 1e-30
        layer.bias[0] = 1.0
        layer.weight[0] = 0.0
    result = export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=8)
    assert result.weights[0].container == "planes 4"
    assert result.engine.codes_equal == 1.0


def test_codes_are_clipped_where_the_grid_ends_beyond(tmp_path):
    samples = 4 * images(8)
    network = quantized(seeded(Shared()), samples, weight=8)
    with torch.no_grad():
        network.first.output_quantizer.scale.fill_(0.04)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=8)
    assert result.engine.codes_equal == 1.0
    assert result.simulated.logits < 1e-5
    nodes = onnx.load(result.path).graph.node
    assert [node.op_type for node in nodes].count("Clip") == 1


def test_logits_may_be_clipped(tmp_path):
    class Clipped(TinyResNet):
        def forward(self, x):
            return super().forward(x).clamp(max=0.3)

    network = quantized(seeded(Clipped()), images(8), weight=8)
    result = export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=2)
    (logits,) = session(result.path).run(None, {"input": images(8).numpy()})
    assert logits.max() == np.float32(0.3)


def test_wrong_file_is_not_left_behind(tmp_path, monkeypatch):
    samples = demo_data().train_images[:32]
    network = quantized(demo_network(), samples, weight=8)

    def wrong(self, step, codes):
        if step.name != "blocks.0":
            return codes
        return self._node("Clip", [codes, "zero/0", "zero/0"], f"{step.name}/clip")

    monkeypatch.setattr("ompq.onnx.model.OnnxGraph._clipped", wrong)
    with pytest.raises(
        ExportError,
        match="disagrees with the simulated network: top-1 .* At least 99.5%.*Nothing",
    ):
        export_onnx(network, tmp_path / "net.onnx", samples)
    assert list(tmp_path.iterdir()) == []


def test_engine_that_disagrees_stops_the_export(tmp_path, monkeypatch):
    network = quantized(seeded(TinyResNet()), images(8), weight=8)
    monkeypatch.setattr(
        "ompq.integer.engine.IntegerNetwork.run",
        lambda self, x: -torch.eye(len(x), 5),
    )
    with pytest.raises(ExportError, match="disagrees with the integer engine"):
        export_onnx(network, tmp_path / "net.onnx", images(64), engine_images=5)
    assert list(tmp_path.iterdir()) == []


def test_file_whose_codes_are_wrong_is_refused_though_top_1_agrees(
    tmp_path, monkeypatch
):
    network = quantized(seeded(TinyResNet(classes=1)), images(8), weight=8)

    def wrong(self, step, codes):
        if step.name != "stem":
            return original(self, step, codes)
        return self._node("Clip", [codes, "zero/0", "zero/0"], f"{step.name}/clip")

    original = OnnxGraph._clipped
    monkeypatch.setattr("ompq.onnx.model.OnnxGraph._clipped", wrong)
    with pytest.raises(ExportError, match="top-1 equal on 100.00% of 8 images, logits"):
        export_onnx(network, tmp_path / "net.onnx", images(8))
    assert list(tmp_path.iterdir()) == []


def test_codes_of_the_simulated_network_are_compared(tmp_path):
    network = quantized(seeded(TinyResNet()), images(8), weight=8)
    result = export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=2)
    assert result.simulated.codes_equal == 1.0
    # The input, six layers (the last gives logits), two sums, and the average.
    values = 3 * 64 + 3 * 512 + 3 * 256 + 512 + 256 + 16
    assert result.simulated.codes == 2 * values


def test_old_opset_and_unknown_operation_are_refused(tmp_path):
    network = quantized(seeded(TinyResNet()), images(8), weight=8)
    with pytest.raises(ValueError, match="opset=13 is too old: use 18"):
        export_onnx(network, tmp_path / "net.onnx", images(8), opset=13)
    swish = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.SiLU())
    swish.append(torch.nn.Conv2d(4, 2, 1))
    with pytest.raises(QuantizationError, match="silu in 1 has no integer form"):
        export_onnx(
            quantized(seeded(swish), images(8), weight=8), tmp_path / "a", images(8)
        )
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_named(tmp_path, monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "onnxruntime":
            raise ImportError(name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match="onnxruntime is not.*ompq.onnx"):
        export_onnx(torch.nn.Identity(), tmp_path / "net.onnx", images(2))


def test_export_leaves_its_arguments(tmp_path):
    network = quantized(seeded(TinyMobileNet()), images(8)).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=2)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert network.training
    assert all(layer.integers is None for layer in quantized_layers(network).values())
