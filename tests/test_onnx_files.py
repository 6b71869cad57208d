import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

import ompq
from lowering_cases import Fire, Vgg
from nets import TinyMobileNet, TinyResNet, demo_network, images, seeded, values
from ompq.errors import ExportError, MissingExtraError
from ompq.integer.finalization import finalize
from ompq.integer.lowering import lower
from ompq.layers import activation_quantizers, quantized_layers
from ompq.models.builtin_networks import CifarResNet, DemoNetwork, demo_data
from ompq.models.named_models import load_model
from ompq.network.observation import tensors_in
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.runtimes.verification import traced_tolerance
from quantized import quantized
from test_lowering import Shared

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
def test_file_equals_the_finalized_network_to_the_last_code(tmp_path, name, activation):
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


WIDE = ompq.QuantizeConfig(sum_bits=16)


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "cifar"])
def test_residual_streams_of_16_bits_are_exported(tmp_path, name):
    samples = images(16, 32 if name == "cifar" else 8)
    network = ompq.quantize(seeded(NETWORKS[name]()), {"*": (8, 4)}, samples, WIDE)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=4)
    assert not result.floats
    assert (result.simulated.top1, result.engine.top1) == (1.0, 1.0)
    assert (result.simulated.codes_equal, result.engine.codes_equal) == (1.0, 1.0)
    model = onnx.load(result.path)
    wide = onnx.TensorProto.UINT16
    assert any(one.data_type == wide for one in model.graph.initializer)


def test_residual_streams_that_cannot_be_exported(tmp_path):
    samples, path = images(8), tmp_path / "net.onnx"
    network = ompq.quantize(seeded(TinyResNet()), {"*": 8}, samples, WIDE)
    with pytest.raises(ExportError, match=r"opset=20 has no nodes .* use 21 or later"):
        export_onnx(network, path, samples, opset=20)
    bits = {"*": 8, "stem": (8, 32)}
    network = ompq.quantize(seeded(TinyResNet()), bits, samples, WIDE)
    with pytest.raises(ExportError, match=r"only with integers .* sum_bits=8"):
        export_onnx(network, path, samples)
    assert not path.exists()


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
    assert result.bytes < stored + 1250 * len(layers)
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
        return self._node("Clip", [codes, "zero/000", "zero/000"], f"{step.name}/clip")

    monkeypatch.setattr("ompq.runtimes.onnx.onnx_graph.OnnxGraph._clipped", wrong)
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
        lambda self, x: {"logits": -torch.eye(len(x), 5)},
    )
    with pytest.raises(ExportError, match="disagrees with the integer engine"):
        export_onnx(network, tmp_path / "net.onnx", images(64), engine_images=5)
    assert list(tmp_path.iterdir()) == []


def test_codes_of_the_simulated_network_are_compared(tmp_path):
    network = quantized(seeded(TinyResNet()), images(8), weight=8)
    result = export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=2)
    assert result.simulated.codes_equal == 1.0
    # The input, six layers (the last gives logits), two sums, and the average.
    values = 3 * 64 + 3 * 512 + 3 * 256 + 512 + 256 + 16
    assert result.simulated.codes == 2 * values


def test_old_opset_is_refused(tmp_path):
    network = quantized(seeded(TinyResNet()), images(8), weight=8)
    with pytest.raises(ValueError, match="opset=13 is too old: use 18"):
        export_onnx(network, tmp_path / "net.onnx", images(8), opset=13)
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match="onnxruntime is not.*ompq.onnx"):
        export_onnx(torch.nn.Identity(), tmp_path / "net.onnx", images(2))


def test_export_leaves_its_arguments(tmp_path):
    network = quantized(seeded(TinyMobileNet()), images(8)).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=2)
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert network.training
    assert all(layer.integers is None for layer in quantized_layers(network).values())


def vgg():
    network = models.VGG(models.vgg.make_layers([8, "M", 8, "M"]), num_classes=5)
    network.classifier = nn.Sequential(nn.Flatten(), nn.Linear(8 * 7 * 7, 5))
    return network


def resnet(block, layers, **settings):
    return lambda: models.ResNet(block, layers, num_classes=7, **settings)


def lite():
    timm = pytest.importorskip("timm")
    return timm.create_model("efficientnet_lite0", num_classes=7)


FAMILIES = {
    "resnet18": (resnet(models.resnet.BasicBlock, [1, 2, 1, 1]), 32),
    "resnet50": (
        resnet(models.resnet.Bottleneck, [1, 1, 1, 1], width_per_group=32),
        32,
    ),
    "mobilenet_v2": (lambda: models.mobilenet_v2(num_classes=7, width_mult=0.5), 32),
    "vgg": (vgg, 28),
    "squeezenet": (lambda: models.squeezenet1_1(num_classes=7), 64),
    "efficientnet_lite": (lite, 32),
    "cifar_resnet": (lambda: load_model("cifar:resnet20", "none").module, 16),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_network_computes_the_same_in_all_forms(name, tmp_path):
    make, size = FAMILIES[name]
    samples = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    network = finalize(quantized(seeded(make()), samples), samples)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=1)
    assert result.given.logits == result.simulated.logits
    assert (result.simulated.top1, result.simulated.logits < 1e-6) == (1, True)
    assert (result.engine.codes_equal, result.engine.codes > 10_000) == (1, True)


def test_demo_network_computes_the_same_in_all_forms(tmp_path):
    samples = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    network = finalize(quantized(seeded(DemoNetwork()), samples), samples)
    result = export_onnx(network, tmp_path / "net.onnx", samples, engine_images=2)
    assert result.engine.codes_equal == 1


class Dense(nn.Module):
    """Ends in convolutions: a map of classes, and a second output beside it."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.map, self.edges = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 8, 3, groups=4)
        self.head = nn.Linear(8, 9)

    def forward(self, x):
        x = self.body(x)
        return self.form(self.map(x), self.edges(x), self.head(x.mean((2, 3))))


FORMS = {
    "map": lambda dense, edges, rows: dense,
    "grouped": lambda dense, edges, rows: edges,
    "clipped": lambda dense, edges, rows: torch.clamp(dense, -0.2, 0.3),
    "cut": lambda dense, edges, rows: rows[:, :5],
    "padded": lambda dense, edges, rows: nn.functional.pad(dense, (1, 0))[:, :, 1:],
    "pooled": lambda dense, edges, rows: nn.functional.max_pool2d(edges, 3, 2, 1),
    "row": lambda dense, edges, rows: edges.flatten(1),
    "pair": lambda dense, edges, rows: (rows, dense),
    "nested": lambda dense, edges, rows: [rows, (dense, edges)],
    "dict": lambda dense, edges, rows: {"out": dense, "a/b": rows},
    "twice": lambda dense, edges, rows: (rows, rows.relu(), rows[:, 1:]),
}
OUTPUTS = {
    "pair": ["logits", "output_2"],
    "nested": ["logits", "output_2", "output_3"],
    "dict": ["out", "a_b"],
    "twice": ["logits", "output_2", "output_3"],
}


@pytest.mark.parametrize(
    ("name", "activation"), [*((name, 8) for name in FORMS), ("nested", 32)]
)
def test_every_output_is_exported_and_exact(name, activation, tmp_path):
    network = quantized(
        seeded(Dense(FORMS[name])), images(8), weight=(4, 8), activation=activation
    )
    result = export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=2)
    opened = session(result.path)
    assert [one.name for one in opened.get_outputs()] == OUTPUTS.get(name, ["logits"])
    found = opened.run(None, {"input": images(5, seed=9).numpy()})
    if activation == 8:
        network = finalize(network, images(8))
    with torch.no_grad():
        expected = list(tensors_in(network(images(5, seed=9))))
    for one, other in zip(found, expected, strict=True):
        difference = (torch.tensor(one) - other).abs().max()
        assert difference <= (1e-5 if activation == 32 else 0)


def test_linear_layer_of_sixteen_bits_of_sums_is_exact(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 7))
    network = quantized(seeded(network), images(8), weight=8)
    result = export_onnx(network, tmp_path / "net.onnx", images(40))
    assert result.simulated.logits == 0.0


def saturated(rows, codes):
    """Sum products as AVX2 does with signed weights: pairs in 16 bits."""
    products = rows.astype(np.int64) * codes
    pairs = products[..., 0::2] + products[..., 1::2]
    return np.clip(pairs, -(1 << 15), (1 << 15) - 1).sum(-1)


def wrong_channels(path):
    """Return, for each layer of a file, how many channels would saturate."""
    graph = onnx.load(path).graph
    arrays = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    wrong = {}
    for node in graph.node:
        kind = node.op_type
        at = 1 if kind == "ConvInteger" else 0
        layer, _, part = node.input[at].rpartition("/") if node.input else ("",) * 3
        weight = arrays.get(node.input[at]) if part == "bytes" else None
        if weight is None or weight.shape[1:2] == (1,) or weight.dtype == np.uint8:
            continue  # depthwise, or not added in 16 bits
        # The largest weights of one sign side by side, and the brightest input.
        rows = np.sort(weight.reshape(len(weight), -1), axis=1)
        rows = np.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))
        exact = 255 * rows.astype(np.int64).sum(-1)
        wrong[layer] = int((saturated(rows, 255) != exact).sum())
    return wrong


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "dense"])
def test_no_processor_saturates(name, tmp_path, caplog):
    made = {**NETWORKS, "dense": lambda: Dense(FORMS["nested"])}[name]()
    network = quantized(seeded(made), images(8), weight=8)
    safe = export_onnx(network, tmp_path / "a.onnx", images(8), engine_images=2)
    assert safe.saturation_safe and not caplog.records
    assert set(wrong_channels(safe.path).values()) == {0}
    assert {one.container for one in safe.weights} == {"int8", "uint8"}
    assert safe.simulated.logits == 0.0
    path = tmp_path / "b.onnx"
    try:
        unsafe = export_onnx(
            network, path, images(8), engine_images=2, saturation_safe=False
        )
    except ExportError as error:  # as it should be on a processor without VNNI
        assert "the file disagrees with the simulated network" in str(error)
        assert not path.exists()
    else:
        assert not unsafe.saturation_safe
        assert any(wrong_channels(path).values())
    assert "8-bit products saturate on processors without VNNI" in caplog.text


def test_output_of_an_image_is_exact_with_unsigned_weights(tmp_path):
    network = quantized(seeded(nn.Sequential(nn.Conv2d(3, 4, 3))), images(8), weight=8)
    result = export_onnx(network, tmp_path / "net.onnx", images(8))
    assert result.weights[0].container == "uint8"
    assert result.simulated.logits == 0.0


def test_lopsided_weights_of_six_bits_are_safe_and_small(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 64))
    network = quantized(seeded(network), images(8), weight=6)
    layer = quantized_layers(network)["1"]
    with torch.no_grad():
        layer.weight_zero_point.zero_()
        layer.weight.abs_()
    result = export_onnx(network, tmp_path / "net.onnx", images(8))
    assert result.weights[0].container == "planes 4+2"
    assert lower(finalize(network, images(8)), images(8)).saturating() == []


def test_no_more_than_five_frames_to_a_node(tmp_path):
    network = quantized(seeded(Dense(FORMS["nested"])), images(8), weight=(4, 8))
    package, depths = Path(ompq.__file__).parent, []

    def profile(frame, event, _arg):
        if event != "call" or frame.f_code.co_name != "_node":
            return
        own = []
        while frame is not None:
            name = frame.f_code.co_name
            inside = package in Path(frame.f_code.co_filename).parents
            own += [name] if inside and not name.startswith("<") else []
            frame = frame.f_back
        depths.append(own)

    sys.setprofile(profile)
    try:
        export_onnx(network, tmp_path / "net.onnx", images(8), engine_images=2)
    finally:
        sys.setprofile(None)
    assert len(depths) > 20
    assert max(depths, key=len)[-1] == "export_onnx"
    assert max(map(len, depths)) <= 5, max(depths, key=len)


@pytest.mark.parametrize("end", [nn.Flatten(0), nn.Identity()])
def test_a_network_that_returns_a_number_for_each_sample(end, tmp_path):
    network = seeded(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1), end))
    samples = values(8, 6)
    quantized = ompq.quantize(network, {"*": (8, 8)}, samples)
    result = ompq.export(quantized, tmp_path / "net.onnx", samples)
    assert not result.simulated.ranked
    assert "outputs" in str(result.simulated) and "top-1" not in str(result.simulated)


@torch.no_grad()
def test_few_samples_show_what_last_digits_change():
    # Halfway between two codes, noise decides which one it is. One noise may decide
    # like no noise for a single sample; it must not be taken for the network's.
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 3, bias=False))
    network = ompq.quantize(network, {"0": (8, 4)}, torch.rand(32, 1))
    (quantizer,) = activation_quantizers(network).values()
    for code in range(4, 12):
        sample = (code + 0.5) * quantizer.scale.reshape(1, 1)
        allowed = traced_tolerance(network, ompq.Samples.of(sample)).logits
        assert allowed > 2 / 15  # what is allowed if no code changes
