import pytest
import torch

from ompq.errors import CheckpointError
from ompq.files import read_checkpoint, write_checkpoint


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "run" / "last.safetensors"
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": shared, "b": shared.T, "c": shared}
    write_checkpoint(path, tensors, {"step": "7"}, kind="walk", identity="me")
    found, text = read_checkpoint(path, kind="walk", identity="me")
    assert found.keys() == tensors.keys() and text["step"] == "7"
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert [file.name for file in path.parent.iterdir()] == ["last.safetensors"]


def test_others_are_refused(tmp_path):
    path = tmp_path / "last.safetensors"
    write_checkpoint(path, {"a": torch.ones(1)}, {}, kind="walk", identity="me")
    with pytest.raises(CheckpointError, match="is no checkpoint of a run"):
        read_checkpoint(path, kind="run", identity="me")
    with pytest.raises(CheckpointError, match=r"another run \(other network, data or"):
        read_checkpoint(path, kind="walk", identity="you")
    path.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="last.safetensors is no checkpoint: "):
        read_checkpoint(path, kind="walk", identity="me")
