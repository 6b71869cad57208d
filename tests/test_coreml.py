"""Core ML packages hold every weight as it was rounded; they are not run."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import ompq
from nets import TinyResNet, images, seeded
from ompq.errors import ExportError, MissingExtraError
from ompq.layers import quantized_layers
from ompq.runtimes.coreml import coreml_files

pytest.importorskip("coremltools")
pytestmark = pytest.mark.slow
BITS = {
    "*": 8,
    "stem": 2,
    "block1.conv1": 6,
    "block1.conv2": 4,
    "block2.conv1": 5,
    "block2.conv2": 3,
}


def read(path):
    """Return what a package computes weights from, by the kind of operation."""
    import coremltools
    from coremltools.converters.mil.frontend.milproto.load import load

    model = coremltools.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    program = load(spec, spec.specificationVersion, model.weights_dir)
    return [
        (
            operation.op_type,
            {name: value.val for name, value in operation.inputs.items()},
        )
        for operation in program.functions["main"].operations
        if operation.op_type.startswith("constexpr")
    ]


def by_hand(kind, given):
    """Return the weight of an operation, computed with numpy."""
    if kind == "constexpr_blockwise_shift_scale":
        codes = given["data"].astype(np.float32)
        if given["offset"] is not None:
            codes = codes - given["offset"].astype(np.float32)
        return codes * given["scale"].astype(np.float32)
    indices = given["indices"].astype(int)
    palettes = given["lut"].reshape(len(indices), -1)
    rows = [palette[row] for palette, row in zip(palettes, indices, strict=True)]
    return np.stack(rows).astype(np.float32)


def quantized(bits=None):
    samples = images(8, 16)
    return ompq.quantize(seeded(TinyResNet()), bits or BITS, samples), samples


def test_every_weight_of_a_package_is_the_one_that_was_rounded(tmp_path):
    network, samples = quantized()
    path = tmp_path / "net.mlpackage"
    result = ompq.export(network, path, samples)
    assert result.format == "mlpackage"
    assert "not run" in result.runtime
    assert result.engine is None
    assert result.simulated.logits < 5e-3  # scales are float16
    assert result.bytes == sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    stored = {one.name: one.container for one in result.weights}
    assert {"palette2", "palette3", "uint8"} <= set(stored.values())
    found = [by_hand(*one) for one in read(path)]
    assert len(found) == len(stored)
    for layer in quantized_layers(network).values():
        weight = layer.rounded_weight().detach().numpy()
        apart = [
            np.abs(one - weight).max() for one in found if one.shape == weight.shape
        ]
        assert min(apart) < 1e-3 * np.abs(weight).max()
    with pytest.raises(ExportError, match="is not an empty folder; give a new one"):
        ompq.export(network, path, samples)


def test_palettes_and_integers_take_the_bytes_that_formulas_tell():
    samples = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    network = ompq.quantize(seeded(nn.Sequential(nn.Linear(64, 4))), {"*": 3}, samples)
    (layer,) = quantized_layers(network).values()
    palettes = coreml_files._palette_sizes(layer, 0)
    assert palettes["palette", 3] == 64 * 4 * 3 // 8 + 4 * 8 * 2
    layer.weight_zero_point.fill_(3)
    integers = coreml_files._integer_sizes(layer)
    assert integers == {("uint", 4): 128 + 4 * 3, ("uint", 8): 256 + 4 * 3}
    layer.bits = 4
    layer.weight_zero_point.fill_(3.5)  # codes count double, so they need 5 bits
    assert set(coreml_files._integer_sizes(layer)) == {("uint", 8)}


def test_a_plan_for_core_ml_keeps_activations_in_floats():
    network, samples = seeded(TinyResNet()), images(8, 16)
    config = ompq.PlanConfig(target="coreml", score="weight_noise")
    plan = ompq.plan(network, samples, "3.5bits", config)
    widths = {(one.weight, one.activation) for one in plan.allocation.values()}
    assert {activation for _, activation in widths} == {32}
    assert len(widths) > 1


def test_what_coremltools_cannot_convert_is_an_error(tmp_path, monkeypatch):
    network, samples = quantized({"*": 8})

    def refuse(*_given, **_more):
        raise ValueError("unknown operation")

    monkeypatch.setattr("coremltools.convert", refuse)
    with pytest.raises(ExportError, match="cannot convert the network: unknown opera"):
        ompq.export(network, tmp_path / "net.mlpackage", samples)


def test_weights_that_are_read_back_otherwise_are_an_error(tmp_path, monkeypatch):
    network, samples = quantized({"*": 8})
    own = coreml_files._integers

    def wrong(layer, bits):
        found = own(layer, bits)
        return {**found, "scale": found["scale"] * np.float16(1.5)}

    monkeypatch.setattr(coreml_files, "_integers", wrong)
    path = tmp_path / "net.mlpackage"
    with pytest.raises(ExportError, match="the weight read back from the package is"):
        ompq.export(network, path, samples)
    assert not [*path.iterdir()]


def test_weights_that_the_converter_changed_are_an_error(tmp_path, monkeypatch):
    network, samples = quantized({"*": 8})
    monkeypatch.setattr(coreml_files, "_program", lambda model: model._mil_program)
    network.stem.weight.data.mul_(0)
    own = coreml_files._converted
    other, _ = quantized({"*": 4})
    plain = coreml_files._with_float_layers(other)
    monkeypatch.setattr(
        coreml_files, "_converted", lambda tools, _net, x: own(tools, plain, x)
    )
    with pytest.raises(ExportError, match="stem: coremltools changed its weight while"):
        ompq.export(network, tmp_path / "net.mlpackage", samples)


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    network, samples = quantized({"*": 8})
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ompq\[coreml\]'"):
        ompq.export(network, tmp_path / "net.mlpackage", samples)
