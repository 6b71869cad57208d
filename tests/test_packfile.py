import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from ompq.errors import PackedFileError
from ompq.packing.format import FORMAT, read_file, write_file

HEADER = {"network": "net", "allocation": {"fc": [3, 8]}, "share": 0.1, "plan": None}


def tensors():
    return {
        "weights": torch.arange(200, dtype=torch.uint8),
        "scales": torch.tensor([0.5, -0.0, float("nan"), float("inf")]),
        "empty": torch.empty(0),
        "scalar": torch.tensor(1 << 40),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net.ompq.safetensors"
    write_file(path, HEADER, tensors())
    return path


def test_header_and_tensors_come_back(file):
    header, found = read_file(file)
    assert header == HEADER
    assert {k: v.dtype for k, v in found.items()} == {
        k: v.dtype for k, v in tensors().items()
    }
    for name, tensor in tensors().items():
        raw = [t.reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*raw), name
    assert found["scalar"].shape == ()


def test_file_is_plain_safetensors(file):
    assert set(load_file(file)) == set(tensors())
    size = int.from_bytes(file.read_bytes()[:8], "little")
    metadata = json.loads(file.read_bytes()[8 : 8 + size])["__metadata__"]
    assert list(metadata) == ["ompq"]
    assert json.loads(metadata["ompq"])["format"] == FORMAT == "ompq-packed/1"


def test_same_contents_give_the_same_bytes(file, tmp_path):
    for number in range(3):
        write_file(tmp_path / str(number), HEADER, tensors())
        assert (tmp_path / str(number)).read_bytes() == file.read_bytes()


def test_any_flipped_bit_is_noticed(file):
    whole = file.read_bytes()
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1 << (at % 8)
        file.write_bytes(broken)
        with pytest.raises(PackedFileError, match="net.ompq.safetensors"):
            read_file(file)


def test_any_missing_end_is_noticed(file):
    whole = file.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(PackedFileError, match="cannot be read .* cut short"):
            read_file(file)


def test_damaged_values_say_so(file):
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    with pytest.raises(PackedFileError, match="is damaged: .* digest; copy it again"):
        read_file(file)


@pytest.mark.parametrize(
    "text", ["", "reconstruction/1", "[]", '{"format": 3}', "[" * 9999]
)
def test_foreign_safetensors_files_are_refused(text, tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"ompq": text} if text else None)
    with pytest.raises(PackedFileError, match="safetensors file but no packed network"):
        read_file(path)


def test_newer_format_says_what_to_do(tmp_path):
    path = tmp_path / "new"
    save_file({"a": torch.zeros(1)}, path, {"ompq": '{"format": "ompq-packed/2"}'})
    with pytest.raises(
        PackedFileError, match="format version 2; .* ompq-packed/1: install a newer one"
    ):
        read_file(path)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("the file was executed",)


def test_pickles_are_never_executed(tmp_path):
    path = tmp_path / "pickle.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PackedFileError, match="no safetensors file"):
        read_file(path)


def test_missing_files_and_folders_are_refused(tmp_path):
    with pytest.raises(PackedFileError, match="there is no file .*nothing"):
        read_file(tmp_path / "nothing")
    words = r"is a folder; give the packed .* .*network\.ompq\.safetensors"
    with pytest.raises(PackedFileError, match=words):
        read_file(tmp_path)
