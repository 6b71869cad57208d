import json
import zlib

import pytest
import torch

from nets import Chain, images, seeded
from ompq.allocation.solver import Allocation
from ompq.errors import PackedFileError
from ompq.graph import Choice
from ompq.packing import load, save
from ompq.packing.format import (
    quantized_units,
    read_contents,
    read_file,
    write_contents,
    write_file,
    zero_step,
)
from ompq.quantization import quantization_of, quantize


@pytest.fixture(scope="module")
def saved():
    bits = Allocation({"conv": Choice(3, 8), "head": Choice(8, 8)})
    return quantize(seeded(Chain()), bits, images(16)).eval()


@pytest.fixture
def file(saved, tmp_path):
    path = tmp_path / "net.ompq.safetensors"
    save(saved, path, network="net.py:make")
    return path


def test_contents_come_back(saved, file, tmp_path):
    contents = read_contents(file)
    assert contents.record == quantization_of(saved)
    assert contents.about["network"] == "net.py:make"
    assert [one.grid.bits for one in contents.units] == [3, 8]
    for one in contents.units:
        layer = saved.get_submodule(one.unit.name)
        assert torch.equal(one.grid.scale, layer.weight_scale)
        assert torch.equal(one.grid.zero_point, layer.weight_zero_point)
        assert torch.equal(one.bias, layer.bias)
    again = tmp_path / "again"
    write_contents(again, contents)
    assert again.read_bytes() == file.read_bytes()


def test_zero_points_fit_into_a_byte():
    for bits in range(2, 9):
        largest = (1 << bits) - 1 if bits <= 6 else 1 << (bits - 1)
        assert largest / zero_step(bits) <= 255


def test_float_units_are_no_quantized_units(saved):
    record = quantization_of(saved)
    bits = Allocation({"conv": Choice(32, 32), "head": Choice(8, 8)})
    changed = type(record)(record.graph, bits, record.sites, record.skipped)
    assert [unit.name for unit in quantized_units(changed)] == ["head"]


def structure_of(tensors):
    return json.loads(zlib.decompress(tensors["structure"].numpy().tobytes()))


def with_structure(tensors, **entries):
    text = json.dumps({**structure_of(tensors), **entries}).encode()
    packed = bytearray(zlib.compress(text))
    return {**tensors, "structure": torch.frombuffer(packed, dtype=torch.uint8)}


def unit_changed(tensors, **entries):
    graph = structure_of(tensors)["graph"]
    graph["units"][0] |= entries
    return with_structure(tensors, graph=graph)


def bits_of(header, value):
    return {**header, "allocation": {**header["allocation"], "conv": value}}


BROKEN = {
    "missing": (
        lambda h, t: (h, {k: v for k, v in t.items() if k != "biases"}),
        "KeyError",
    ),
    "type": (
        lambda h, t: (h, {**t, "scales": t["scales"].double()}),
        "scales must be a vector of torch.float32",
    ),
    "shape": (
        lambda h, t: (h, {**t, "scales": t["scales"][None]}),
        "scales must be a vector",
    ),
    "length": (
        lambda h, t: (h, {**t, "weights": t["weights"][1:].clone()}),
        "weights has 84 entries instead of 85",
    ),
    "points": (
        lambda h, t: (h, {**t, "activation_scales": torch.ones(9)}),
        "ValueError",
    ),
    "structure": (
        lambda h, t: (h, {**t, "structure": torch.zeros(9, dtype=torch.uint8)}),
        "while decompressing",
    ),
    "list": (
        lambda h, t: (h, with_structure(t, graph=[])),
        "LayerGraph must be an object",
    ),
    "text for points": (
        lambda h, t: (h, with_structure(t, points="x")),
        "ValueError",
    ),
    "shapes": (
        lambda h, t: (h, unit_changed(t, weight_shape=[-6, 3, 3, 3])),
        "weight_shape must be a whole number .*, not -6",
    ),
    "unit": (
        lambda h, t: (h, unit_changed(t, surprise=1)),
        "Unit does not know surprise",
    ),
    "no bits": (
        lambda h, t: ({k: v for k, v in h.items() if k != "allocation"}, t),
        "KeyError",
    ),
    "1 bit": (lambda h, t: (bits_of(h, [1, 8]), t), "weights has 85 entries"),
    "text": (lambda h, t: (bits_of(h, ["3", 8]), t), "(TypeError|ValueError)"),
    "other": (lambda h, t: ({**h, "allocation": {"x": [3, 8]}}, t), "KeyError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_made_wrong_are_refused(case, file):
    change, message = BROKEN[case]
    write_file(file, *change(*read_file(file)))
    with pytest.raises(PackedFileError, match=f"broken packed file .*{message}"):
        load(file, Chain)


def test_deflated_structure_cannot_fill_the_memory(file, monkeypatch):
    monkeypatch.setattr("ompq.packing.format._LARGEST_STRUCTURE", 100)
    with pytest.raises(PackedFileError, match="broken packed file"):
        read_contents(file)
