"""Networks of which PyTorch writes the graph: any operation, weights only, float."""

import copy
import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from nets import Branching, Recurrent, TinyResNet, images, seeded, values
from ompq.configs import QuantizeConfig
from ompq.errors import ExportError
from ompq.layers import quantized_layers
from ompq.quantization.pipeline import quantize
from ompq.quantization.record import quantization_of
from ompq.runtimes.inspection import inspect_onnx
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.runtimes.onnx.traced_graph import float_model, traced_model
from ompq.runtimes.verification import open_session, require_codes, run_session
from ompq.samples import Samples
from quantized import quantized

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


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


def test_what_pytorch_cannot_write_is_told_in_one_line(capfd):
    rows = torch.ones(4, 3)
    network = quantized(seeded(Branching()), rows, weight=8, activation=32)
    says = (
        r"PyTorch cannot write the network as ONNX: Failed to export the model with "
        r"torch\.export\. A network whose path depends on values, such as a detector, "
        r"can be exported by the part that takes a batch"
    )
    with pytest.raises(ExportError, match=says):
        traced_model(network, rows, 21)
    assert capfd.readouterr().err == ""


def test_old_torch_is_named_with_the_version_needed(monkeypatch):
    monkeypatch.delattr("torch.onnx.ops")
    with pytest.raises(ExportError, match=r"cannot write this network; PyTorch 2\.8"):
        float_model(seeded(TinyResNet()), images(2))


class Gated(nn.Module):
    """Convolutions, one rounded at once, with SiLU and a gate between them."""

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 3), nn.SiLU()
        self.body, self.relu = nn.Conv2d(8, 8, 3), nn.ReLU()
        self.gate, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.body(self.act(self.stem(x)))).mean((2, 3))
        return self.head(x * self.gate(x).sigmoid())


class Branches(nn.Module):
    """Two inputs, by keyword or not: a signal (N, 2, 20) and a row (N, 3)."""

    def __init__(self):
        super().__init__()
        self.signal, self.row = nn.Conv1d(2, 6, 5), nn.Linear(3, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, signal, row):
        return self.head(self.signal(signal).tanh().mean(2) + self.row(row).tanh())


class Encoder(nn.Module):
    """Tokens (N, T) to classes, through layers that are copies of one another."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


BRANCHES = (images(8).flatten()[:320].reshape(8, 2, 20), images(8)[:, :, 0, 0])
ANY = {
    "gated": (Gated, images(8)),
    "two inputs": (Branches, BRANCHES),
    "keywords": (Branches, dict(zip(("signal", "row"), BRANCHES, strict=True))),
    "tokens": (Encoder, torch.arange(48).reshape(8, 6) % 11),
    "recurrent": (Recurrent, torch.arange(56).reshape(8, 7) % 20),
    "mixer": (Mixer, images(8)),
}


@pytest.mark.parametrize("activation", [4, 8])
@pytest.mark.parametrize("name", ANY)
def test_any_network_is_exported_and_agrees(name, activation, tmp_path):
    if activation == 4 and name not in ("gated", "mixer"):
        pytest.skip("the same graphs, with one node more")
    make, samples = ANY[name]
    network = quantized(seeded(make()), samples, activation=activation)
    result = export_onnx(network, tmp_path / "net.onnx", samples)
    assert result.engine is None
    assert result.reason
    assert {one.bits for one in result.weights} <= set(range(2, 9))
    assert result.simulated.logits < 2 / (2**activation - 1) <= result.limit
    assert result.simulated.logits < 1e-4 or activation == 8
    units = quantization_of(network).graph.units
    assert [one.name for one in result.weights] == [unit.name for unit in units]


def test_floats_are_listed_and_the_rest_runs_in_kernels_of_8_bits(tmp_path):
    network = quantized(seeded(Gated()), images(8), weight=(8, 4))
    result = export_onnx(network, tmp_path / "net.onnx", images(8))
    # The first convolution ends in a SiLU, so nothing rounds what it gives.
    assert result.floats == {"Conv": 1, "Sigmoid": 2, "Mul": 2, "ReduceMean": 1}
    assert dataclasses.asdict(result)["floats"] == result.floats  # as in --json
    assert result.reason.startswith("silu in act has no integer kernel")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(result.path), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert (kinds.count("QLinearConv"), kinds.count("QGemm")) == (1, 2)


def test_weak_comparison_is_told(tmp_path, monkeypatch, caplog):
    network = quantized(seeded(Gated()), images(8), activation=4)
    monkeypatch.setattr("ompq.runtimes.verification._LAST_DIGITS", 1.0)
    result = export_onnx(network, tmp_path / "net.onnx", images(8))
    assert result.limit > 0.5
    assert f"be verified to within {result.limit:.2g} of their size" in caplog.text


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_a_wrong_scale_in_one_node_is_found(factor, tmp_path, monkeypatch):
    network = quantized(seeded(Gated()), images(8), activation=8)
    made = traced_model(network, images(8), 21)
    grids = [n for n in made.model.graph.node if n.op_type == "QuantizeLinear"]
    assert len(grids) > 2
    good = {one.name: one for one in made.model.graph.initializer}
    for at, node in enumerate(grids):
        changed = copy.deepcopy(made.model)
        scale = onnx.numpy_helper.to_array(good[node.input[1]]) * np.float32(factor)
        changed.graph.initializer.append(onnx.numpy_helper.from_array(scale, "wrong"))
        [n for n in changed.graph.node if n.op_type == "QuantizeLinear"][at].input[
            1
        ] = "wrong"
        message = r"codes that differ from the network's by [\d.]+ on average"
        with pytest.raises(ExportError, match=message):
            require_codes(changed, made.network, Samples.of(images(8)))
    wrong = replace(made, model=changed)
    monkeypatch.setattr("ompq.runtimes.onnx.onnx_files.traced_model", lambda *_: wrong)
    with pytest.raises(ExportError, match="Nothing was written"):
        export_onnx(network, tmp_path / "net.onnx", images(8))
    assert not (tmp_path / "net.onnx").exists()


def test_weight_that_is_not_in_the_graph_is_named(monkeypatch):
    network = quantized(seeded(Mixer()), images(8), weight=4, activation=32)
    monkeypatch.setattr("ompq.runtimes.onnx.traced_graph._hold", lambda *_: None)
    with pytest.raises(ExportError, match="embed: its weight is not in the graph.*pin"):
        traced_model(network, images(2), 21)


def test_tied_weight_is_stored_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens).mean(1).tanh())

    tokens = torch.arange(48).reshape(8, 6) % 40
    network = quantized(seeded(Tied()), tokens, weight=4, activation=32)
    result = export_onnx(network, tmp_path / "net.onnx", tokens)
    assert result.simulated.logits < 1e-5
    shapes = [tuple(t.dims) for t in onnx.load(result.path).graph.initializer]
    assert shapes.count((40, 8)) == 1


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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dims", "kernel", "groups"), [(1, 3, 1), (2, 2, 2)])
def test_transposed_convolution_between_codes_is_exact(
    dims, kernel, groups, bits, tmp_path
):
    # A runtime rounds float weights there to 8 bits, in its own way.
    conv, back = (
        (nn.Conv1d, nn.ConvTranspose1d)
        if dims == 1
        else (nn.Conv2d, nn.ConvTranspose2d)
    )
    model = seeded(
        nn.Sequential(
            conv(3, 8, 3), nn.ReLU(), back(8, 6, kernel, groups=groups), conv(6, 4, 3)
        )
    )
    samples = images(8) if dims == 2 else images(8).flatten(2)
    network = quantized(model, samples, weight=bits, activation=8)
    result = export_onnx(network, tmp_path / "net.onnx", samples)
    assert result.simulated.logits < 1e-5
    assert [one.bits for one in result.weights] == [bits] * 3


@pytest.mark.parametrize("activation", [8, 32])
def test_groups_are_blocks_of_the_file(activation, tmp_path):
    layers = (nn.Linear(192, 80), nn.GELU(), nn.Linear(80, 40), nn.Linear(40, 5))
    model, samples = seeded(nn.Sequential(nn.Flatten(), *layers)), images(16)
    bits = {"1": (3, activation), "3": (8, activation), "4": (6, activation)}
    network = quantize(model, bits, samples, QuantizeConfig(group_size=64))
    result = export_onnx(network, tmp_path / "net.onnx", samples)
    assert result.simulated.top1 == 1 and result.simulated.logits < 1e-4
    proto = onnx.load(result.path)
    blocks = {
        node.output[0]: {one.name: one.i for one in node.attribute}
        for node in proto.graph.node
        if any(one.name == "block_size" for one in node.attribute)
    }
    assert blocks == {f"{n}/weight": {"axis": 1, "block_size": 64} for n in "13"}
    shapes = {one.name: tuple(one.dims) for one in proto.graph.initializer}
    assert shapes["3/scale"] == shapes["3/zeros"] == (40, 2)
    names = [f"{n}/weight" for n in "13"]
    proto.graph.output.extend(map(onnx.helper.make_empty_tensor_value_info, names))
    _, *found = run_session(open_session(proto.SerializeToString()), samples[:1])
    for name, weight in zip("13", found, strict=True):
        assert torch.equal(weight, quantized_layers(network)[name].rounded_weight())
    assert inspect_onnx(result.path).bits["1"] == 3
    words = "groups of 64 weights have scales of their own, which opset=20 cannot"
    with pytest.raises(ExportError, match=words):
        traced_model(network, samples, 20)


class Pooled(nn.Module):
    """Has one ReLU for several places, and a pool between codes and a convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.third, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        y = self.pool(self.relu(self.first(x)))
        y = self.third(self.relu(self.second(y)))
        return self.head(nn.functional.silu(y).mean((2, 3)))


def test_runtimes_are_left_no_float_weight_to_round(tmp_path):
    x = torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    network = quantize(seeded(Pooled()), {"*": (3, 8)}, x)
    result = export_onnx(network, tmp_path / "n.onnx", x)
    graph = onnx.load(tmp_path / "n.onnx").graph
    made = {name: node for node in graph.node for name in node.output}
    given = [node.input for node in graph.node if node.op_type == "Conv"]
    kinds = [[made[name].op_type for name in names[:2]] for names in given]
    read, pooled = ["DequantizeLinear"] * 2, ["MaxPool", "DequantizeLinear"]
    assert kinds[:2] == [read, pooled]
    assert kinds[2][0] == "DequantizeLinear"  # its output is not rounded at once
    assert result.simulated.logits < 1e-2


def exported(network, samples, tmp_path, *, bits=8, pins=()):
    """Quantize a network, write it as ONNX, and return what was found."""
    widths = {"*": (8, bits), **dict(pins)}
    return export_onnx(quantize(network, widths, samples), tmp_path / "n.onnx", samples)


def images_and_rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 4, 6, 6, generator=generator), values(40, 16)


def convolutions(shared):
    """Return a network in which two convolutions have one weight, or are one layer."""
    layers = [nn.Conv2d(4, 8, 3), *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))]
    if shared == "weight":
        layers[2].weight = layers[1].weight
    layers[2] = layers[1] if shared == "layer" else layers[2]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    return seeded(nn.Sequential(*(m for x in layers for m in (x, nn.ReLU())), *ends))


def linears(shared):
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    if shared == "weight":
        second.weight = first.weight
    second = first if shared == "layer" else second
    return seeded(
        nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(16, 5)), 1
    )


@pytest.mark.parametrize("make", [convolutions, linears])
@pytest.mark.parametrize("shared", ["weight", "layer", "pinned"])
def test_weights_of_several_calls_and_float_weights_between_codes(
    make, shared, tmp_path
):
    samples = images_and_rows()[make is linears]
    network = make(shared)
    pins = {"2": (32, 8)} if shared == "pinned" else {}
    result = exported(network, samples, tmp_path, pins=pins)
    assert result.simulated.logits < 1e-5
    assert result.simulated.codes_equal == 1


class DoubleInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 5)
        self.inside = nn.Linear(16, 16).double()

    def forward(self, x):
        return self.last(self.inside(self.first(x).relu().double()).relu().float())


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(9, 16, mode="sum"), nn.Linear(16, 5)

    def forward(self, x):
        return self.last(self.words(x))


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 5)

    def forward(self, x):
        output = self.layer(x)
        return output.square().mean(), output


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 8), "1": nn.Linear(8, 5)})
        self.name = name

    def forward(self, x):
        return self.layers["1"](self.layers[self.name](x).tanh())


ODD = {
    "double": DoubleInside,
    "bag": Bag,
    "scalar": Loss,
    "keyword": lambda: Named("class"),
    "quote": lambda: Named('a"b'),
    "parallel": lambda: nn.DataParallel(
        nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))
    ),
}


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("name", ODD)
def test_odd_networks_are_written(name, bits, tmp_path):
    samples = images_and_rows()[1]
    if name == "bag":
        samples = torch.arange(120).reshape(40, 3) % 9
    pins = {"inside": (32, bits)} if name == "double" else {}
    result = exported(seeded(ODD[name]()), samples, tmp_path, bits=bits, pins=pins)
    assert result.simulated.logits < 1e-5


def test_what_onnx_runtime_does_not_compute_is_told_in_one_line(tmp_path):
    class Half(DoubleInside):
        def __init__(self):
            super().__init__()
            self.inside.bfloat16()

        def forward(self, x):
            x = self.inside(self.first(x).relu().bfloat16()).float()
            return self.last(x.relu())

    network, samples = seeded(Half()), images_and_rows()[1]
    words = r"ONNX Runtime cannot compute this network: .*layers of other types by mod"
    with pytest.raises(ExportError, match=words):
        exported(network, samples, tmp_path, pins={"inside": (32, 8)})
    assert [*tmp_path.iterdir()] == []


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_modules_are_named(tmp_path):
    part = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()).eval()
    inner = torch.jit.script(part)
    network = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(), inner, nn.Flatten(), nn.Linear(128, 5)
    )
    samples = images_and_rows()[0]
    with pytest.raises(ExportError, match="^2: PyTorch cannot write TorchScript modu"):
        exported(network.eval(), samples, tmp_path)


def test_layers_that_get_no_faster_are_named_at_once(tmp_path, caplog):
    samples = images_and_rows()[1]
    network = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))
    exported(seeded(network), samples, tmp_path, pins={"2": (8, 32)})
    assert "no faster than float: 2; their weights become floats when" in caplog.text
    caplog.clear()
    exported(seeded(network), samples, tmp_path)
    assert "no faster" not in caplog.text
