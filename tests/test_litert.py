"""LiteRT files compute, code by code, what the integer network computes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ompq
from nets import TinyMobileNet, TinyResNet, images, seeded, values
from ompq.errors import ExportError, MissingExtraError
from ompq.integer.arithmetic import CodeGrid
from ompq.integer.engine import IntegerNetwork
from ompq.runtimes.litert.litert_graph import packed_codes
from ompq.runtimes.litert.litert_network import LitertNetwork
from ompq.runtimes.output_grids import with_output_grids
from ompq.runtimes.xnnpack_kernels import XnnpackSum
from quantized import quantized as of_widths

pytest.importorskip("ai_edge_litert")
SYMMETRIC = ompq.QuantizeConfig(weight_grid="symmetric")


class Windows(nn.Module):
    """Every kind of padding and pooling, depthwise and grouped convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)  # pads more at the start than SAME does
        self.wide = nn.Conv2d(8, 16, 3, 1, 1, groups=8)
        self.point = nn.Conv2d(16, 8, 1)
        self.deep = nn.Conv2d(8, 8, 5, 2, 2, groups=8)
        self.grouped = nn.Conv2d(8, 16, 3, groups=2)
        self.head = nn.Linear(32, 6)

    def forward(self, x):
        x = F.relu6(self.wide(F.relu6(self.stem(x))))
        x = F.max_pool2d(self.point(x), 3, 2, 1)  # of values below 0, too
        x = F.relu(self.grouped(F.pad(F.relu(self.deep(x)), (1, 1, 0, 1))))
        return self.head(F.avg_pool2d(x, 2).flatten(1))


class Branches(nn.Module):
    """Concatenation, slices, dilation."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.one = nn.Conv2d(8, 8, 1)
        self.other = nn.Conv2d(8, 8, 3, 1, 2, dilation=2)
        self.joined = nn.Conv2d(16, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = torch.cat([F.relu(self.one(x)), F.relu(self.other(x))], 1)
        x = F.relu(self.joined(x[:, :, 1:, ::2]))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def perceptron():
    # 33 inputs: LiteRT has no fast kernel for an odd number of 4-bit weights.
    layers = nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 16), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(16, 5))


NETWORKS = {
    "residual": (TinyResNet, images(16, 16)),
    "mobile": (TinyMobileNet, images(16, 16)),
    "windows": (Windows, images(16, 32)),
    "branches": (Branches, images(16, 12)),
    "perceptron": (perceptron, values(16, 24)),
}


def symmetric(name, bits):
    make, samples = NETWORKS[name]
    return ompq.quantize(seeded(make()), {"*": bits}, samples, SYMMETRIC), samples


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_code_is_that_of_the_integer_network(name, bits, tmp_path):
    network, samples = symmetric(name, bits)
    result = ompq.export(network, tmp_path / "net.tflite", samples)
    assert result.engine.codes > 0
    assert result.engine.codes_equal == 1
    assert result.engine.logits == 0
    assert result.bytes == (tmp_path / "net.tflite").stat().st_size
    layers = [w for w in result.weights if w.name != "avg_pool2d"]  # which is ones
    assert {one.container for one in layers} == {f"int{bits}"}
    # The last layer is rounded to 8 bits, so outputs are half a step off.
    assert result.given.logits < 0.1
    if bits == 8:  # 4-bit convolutions are rounded otherwise than in PyTorch
        assert result.simulated.top1 == 1


def test_widths_that_litert_does_not_have_are_stored_in_bytes(tmp_path):
    make, samples = NETWORKS["residual"]
    network = of_widths(seeded(make()), samples)  # 2 to 8 bits, on affine grids
    result = ompq.export(network, tmp_path / "net.tflite", samples)
    assert {one.container for one in result.weights} >= {"int8"}
    assert result.engine.codes_equal == 1


def test_a_file_of_signed_bytes_takes_and_returns_them(tmp_path):
    network, samples = symmetric("residual", 8)
    path = tmp_path / "net.tflite"
    config = ompq.ExportConfig(float_ends=False)
    result = ompq.export(network, path, samples, config)
    assert result.engine.codes_equal == 1
    file = LitertNetwork(path)
    assert file.input["dtype"] == np.int8
    assert file.run(samples.numpy())[0].dtype == np.int8
    whole = ompq.export(network, tmp_path / "float.tflite", samples)
    assert whole.bytes > result.bytes
    floats = LitertNetwork(tmp_path / "float.tflite")
    assert torch.equal(file(samples), floats(samples))
    assert torch.equal(file(samples[:3]), floats(samples)[:3])  # any batch


def test_a_plan_for_litert_needs_no_other_grid_and_four_bits_only_in_linear_layers():
    make, samples = NETWORKS["windows"]
    network = seeded(make())
    for target, bits in (("litert", 8), ("litert-size", 4)):
        config = ompq.PlanConfig(target=target, score="weight_noise")
        plan = ompq.plan(
            network, samples, "4.5bits" if bits == 4 else "7.9bits", config
        )
        quantized = ompq.quantize(network, plan, samples)
        layers = ompq.quantization_of(quantized).allocation
        assert layers["head"].weight == 4
        assert layers["grouped"].weight == bits
        assert quantized.head.narrow  # -7 to 7
        assert float(quantized.head.weight_zero_point[0]) == 7
        assert quantized.get_submodule("grouped").weight_zero_point[0] in (7, 127)


def test_a_file_that_computes_other_codes_is_not_written(tmp_path, monkeypatch):
    network, samples = symmetric("residual", 8)

    def wrong(self, sums, ratio, target):
        return super(XnnpackSum, self).rescale(sums, ratio, target) + 1

    monkeypatch.setattr(XnnpackSum, "rescale", wrong)
    with pytest.raises(ExportError, match=r"block1: LiteRT's codes differ from"):
        ompq.export(network, tmp_path / "net.tflite", samples)
    assert not list(tmp_path.iterdir())


def test_activations_of_few_bits_are_refused(tmp_path):
    make, samples = NETWORKS["residual"]
    network = ompq.quantize(seeded(make()), {"*": (8, 4)}, samples, SYMMETRIC)
    with pytest.raises(ExportError, match="LiteRT computes activations in 8 bits, not"):
        ompq.export(network, tmp_path / "net.tflite", samples)


def test_other_clips_than_those_of_litert_are_refused(tmp_path):
    class Clipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.head = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.head(self.conv(x).clamp(-0.1, 0.2))

    network = ompq.quantize(seeded(Clipped()), {"*": 8}, images(8), SYMMETRIC)
    for quantizer in (m for m in network.modules() if hasattr(m, "keep")):
        quantizer.scale.mul_(4)  # so that the grid does not clip by itself
    with pytest.raises(ExportError, match=r"clips to \[-0.1, 0.2\], but LiteRT only"):
        ompq.export(network, tmp_path / "net.tflite", images(8))


def test_unknown_formats_and_a_missing_runtime_say_what_to_do(tmp_path, monkeypatch):
    network, samples = symmetric("perceptron", 8)
    with pytest.raises(
        ValueError,
        match=r"format='.h5' is unknown; use onnx, tflite, pte, mlpackage, g",
    ):
        ompq.export(network, tmp_path / "net.h5", samples)
    monkeypatch.setitem(__import__("sys").modules, "ai_edge_litert", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[litert\]'"):
        ompq.export(network, tmp_path / "net.tflite", samples)


def test_a_damaged_file_is_an_error(tmp_path):
    path = tmp_path / "net.tflite"
    path.write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"LiteRT cannot load .*net\.tflite"):
        LitertNetwork(path)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_are_packed_the_first_in_the_lowest_bits(bits):
    middle = 1 << (bits - 1)
    codes = np.random.default_rng(0).integers(-middle, middle, 9).astype(np.int8)
    number = int.from_bytes(packed_codes(codes, bits).tobytes(), "little")
    unpacked = [(number >> (bits * at)) % (2 * middle) for at in range(9)]
    assert [one - 2 * middle * (one >= middle) for one in unpacked] == codes.tolist()


def test_linear_layers_of_two_bits_are_computed_in_two_bits(tmp_path):
    layers = nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 18), nn.ReLU()
    samples = values(16, 24)
    made = seeded(nn.Sequential(*layers, nn.Linear(18, 5)))
    network = ompq.quantize(made, {"*": 2}, samples, SYMMETRIC)
    result = ompq.export(network, tmp_path / "net.tflite", samples)
    assert result.engine.codes_equal == 1
    # Rows of 18 inputs do not fill bytes.
    stored = {one.name: one.container for one in result.weights}
    assert stored == {"0": "int2", "2": "int2", "4": "int4"}


def test_a_sum_is_within_a_step_of_real_arithmetic():
    first, second = CodeGrid(0.031, 120, 8), CodeGrid(0.017, 3, 8)
    target = CodeGrid(0.04, 60, 8)
    one, other = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    step = XnnpackSum()
    ratio = step.ratio([first, second], target)
    sums = step.compute([one - first.zero_point, other - second.zero_point])
    exact = (one - 120) * 0.031 / 0.04 + (other - 3) * 0.017 / 0.04 + 60
    assert float((step.rescale(sums, ratio, target) - exact).abs().max()) < 0.501


def test_outputs_get_one_grid_each_and_the_network_is_left_as_it_was():
    network, samples = symmetric("residual", 8)
    before = set(network.state_dict())
    found = with_output_grids(network, ompq.Samples.of(samples))
    assert set(network.state_dict()) == before
    with torch.no_grad():
        rounded, plain = found(samples), network(samples)
    step = (plain.max() - plain.min().clamp(max=0)) / 255
    assert float((rounded - plain).abs().max()) <= float(step) * 0.51
    assert with_output_grids(found, ompq.Samples.of(samples)) is not found
    engine = IntegerNetwork.from_quantized(ompq.finalize(found, samples), samples)
    (position,) = engine.steps.outputs.values()
    assert engine.steps.steps[position].grid.bits == 8
