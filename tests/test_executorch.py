"""ExecuTorch files compute, code by code, what the integer network computes."""

import sys

import numpy as np
import pytest
import torch

import ompq
from nets import images, seeded
from ompq.errors import ExportError, MissingExtraError
from ompq.runtimes.executorch.executorch_network import ExecutorchNetwork
from ompq.runtimes.runnable_files import open_runnable
from ompq.runtimes.xnnpack_kernels import XnnpackSum
from test_litert import NETWORKS

pytest.importorskip("executorch")
pytestmark = pytest.mark.slow
MIDTREAD = ompq.QuantizeConfig(weight_grid="midtread")


def quantized(name, bits):
    make, samples = NETWORKS[name]
    return ompq.quantize(seeded(make()), bits, samples, MIDTREAD), samples


def containers(result):
    return {one.name: one.container for one in result.weights}


def test_every_code_of_a_residual_network_is_that_of_the_integer_network(tmp_path):
    network, samples = quantized("residual", {"*": 8})
    path = tmp_path / "net.pte"
    result = ompq.export(network, path, samples)
    assert result.engine.codes > 0
    assert result.engine.codes_equal == 1
    assert result.engine.logits == 0
    assert result.simulated.top1 == 1
    assert result.given.logits < 0.1  # outputs are rounded to 8 bits
    assert result.bytes == path.stat().st_size
    assert result.runtime.startswith("executorch 1.")
    assert set(containers(result).values()) == {"int8"}
    file = ExecutorchNetwork(path)
    assert torch.equal(file(samples)[3:5], file(samples[3:5]))  # any batch
    assert b"/ompq/" not in path.read_bytes()  # where it was written


def test_linear_layers_and_convolutions_of_one_pixel_have_four_bits(tmp_path):
    network, samples = quantized("windows", {"*": 4})
    result = ompq.export(network, tmp_path / "net.pte", samples)
    assert result.engine.codes_equal == 1
    stored = containers(result)
    assert {name for name in stored if stored[name] == "int4"} == {"point", "head"}
    sizes = {one.name: one.bytes for one in result.weights}
    assert sizes["point"] == 8 * 16 // 2 + 8 * 8  # and a scale and a bias a channel
    assert sizes["stem"] == 8 * 3 * 9 + 8 * 8


def test_concatenation_and_slices_keep_codes(tmp_path):
    network, samples = quantized("branches", {"*": 8})
    result = ompq.export(network, tmp_path / "net.pte", samples)
    assert result.engine.codes_equal == 1


def test_a_file_of_signed_bytes_takes_and_returns_them(tmp_path):
    network, samples = quantized("perceptron", {"*": 4})
    config = ompq.ExportConfig(float_ends=False, network="file.py:net")
    result = ompq.export(network, tmp_path / "net.pte", samples, config)
    assert result.engine.codes_equal == 1
    # 33 inputs do not fit pairs.
    assert containers(result) == {"0": "int4", "2": "int8", "4": "int4"}
    file, about = open_runnable(tmp_path / "net.pte")
    assert about.network == "file.py:net"
    assert "executorch" in about.versions
    with torch.no_grad():
        assert float((file(samples) - network(samples)).abs().max()) < 0.05
    codes = torch.zeros(2, 24, dtype=torch.int8).numpy()
    assert file.run(codes)[0].dtype == np.int8
    again = ompq.export(network, tmp_path / "again.pte", samples, config)
    assert again.path.read_bytes() == result.path.read_bytes()


def test_a_plan_for_executorch_has_four_bits_only_where_it_computes_with_them():
    make, samples = NETWORKS["windows"]
    network = seeded(make())
    for target, bits in (("executorch", 8), ("executorch-size", 4)):
        config = ompq.PlanConfig(target=target, score="weight_noise")
        limit = 7.5 if bits == 8 else 7.15  # all that could have 4 bits has them
        plan = ompq.plan(network, samples, f"{limit}bits", config)
        found = ompq.quantize(network, plan, samples)
        layers = ompq.quantization_of(found).allocation
        assert layers["head"].weight == 4
        assert layers["point"].weight == bits
        assert layers["grouped"].weight == 8
        assert float(found.head.weight_zero_point[0]) == 8  # -8 to 7
        assert not found.head.narrow


def test_a_file_that_computes_other_codes_is_not_written(tmp_path, monkeypatch):
    network, samples = quantized("residual", {"*": 8})

    def wrong(self, sums, ratio, target):
        return super(XnnpackSum, self).rescale(sums, ratio, target) + 1

    monkeypatch.setattr(XnnpackSum, "rescale", wrong)
    with pytest.raises(ExportError, match=r"block1: ExecuTorch's codes differ from"):
        ompq.export(network, tmp_path / "net.pte", samples)
    assert not list(tmp_path.iterdir())


def test_activations_of_few_bits_are_refused(tmp_path):
    make, samples = NETWORKS["perceptron"]
    network = ompq.quantize(seeded(make()), {"*": (8, 4)}, samples, MIDTREAD)
    with pytest.raises(ExportError, match=r"in 8 bits, not in 4; plan with --target e"):
        ompq.export(network, tmp_path / "net.pte", samples)


def test_a_tensor_on_two_grids_is_refused(tmp_path):
    class Clipped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.one, self.other = torch.nn.Conv2d(4, 4, 1), torch.nn.Conv2d(4, 4, 1)

        def forward(self, x):
            x = self.conv(x)
            return self.one(x) + self.other(x.clamp(-0.1, 0.2))

    samples = images(8)
    network = ompq.quantize(seeded(Clipped()), {"*": 8}, samples, MIDTREAD)
    with pytest.raises(ExportError, match=r"two grids, or clipped .* ExecuTorch does"):
        ompq.export(network, tmp_path / "net.pte", samples)


def test_a_missing_runtime_says_what_to_install(tmp_path, monkeypatch):
    network, samples = quantized("perceptron", {"*": 8})
    monkeypatch.setitem(sys.modules, "executorch.exir", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[executorch\]'"):
        ompq.export(network, tmp_path / "net.pte", samples)
    monkeypatch.setitem(sys.modules, "executorch.runtime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[executorch\]'"):
        ExecutorchNetwork(tmp_path / "net.pte")


def test_a_damaged_file_is_an_error(tmp_path):
    path = tmp_path / "net.pte"
    path.write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"ExecuTorch cannot load .*net\.pte"):
        ExecutorchNetwork(path)
