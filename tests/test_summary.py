import json
import zlib

import pytest
import torch

import ompq
from nets import Chain, images, seeded
from ompq.errors import PackedFileError
from ompq.files import read_tensors, write_tensors
from ompq.packed.structure import PACKED_FORMAT
from ompq.packed.summary import summarize


@pytest.fixture
def file(tmp_path):
    model = seeded(Chain())
    plan = ompq.plan(model, images(), "8bits", ompq.PlanConfig(pinned={"@last": 32}))
    path = tmp_path / "net.ompq.safetensors"
    quantized = ompq.quantize(model, plan, images())
    ompq.save(quantized, path, plan=plan, network="net.py:make")
    return path


def test_a_summary_says_what_the_account_says(file):
    found, account = summarize(file), ompq.inspect_file(file)
    assert found.network == "net.py:make" and found.budget == "8bits"
    assert found.file_bytes == account.file_bytes == file.stat().st_size
    assert found.versions == account.about["versions"]
    assert [(one.name, one.kind, one.shape) for one in found.layers] == [
        (one.unit.name, one.unit.kind, one.unit.weight_shape) for one in account.units
    ]
    bits = [(one.weight_bits, one.activation_bits) for one in found.layers]
    assert bits == [(one.bits.bits, one.bits.activation) for one in account.units]
    assert sum(found.tensor_bytes.values()) < found.file_bytes
    assert not found.has_graph
    text = "\n".join(found.lines())
    assert "budget    8bits" in text and "ONNX file not inside" in text
    assert all(one.name in text for one in found.layers)


def test_what_is_no_packed_file_is_told(file, tmp_path):
    with pytest.raises(PackedFileError, match="is not a packed network: there is no s"):
        summarize(tmp_path / "none")
    _, tensors = read_tensors(file, PACKED_FORMAT)
    structure = json.loads(zlib.decompress(bytes(tensors["structure"].tolist())))
    for change in ({"bits": 3}, {"about": {"network": "\x1b[2J"}}, {"graph": {}}):
        text = zlib.compress(json.dumps({**structure, **change}).encode())
        made = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        write_tensors(file, {"format": PACKED_FORMAT}, {**tensors, "structure": made})
        with pytest.raises(PackedFileError, match="is a broken packed file .*; save"):
            summarize(file)
