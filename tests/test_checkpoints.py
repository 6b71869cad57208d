import pytest
import torch

from ompq.checkpoints import Measurements, Store
from ompq.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([True, False]),
    "c": torch.zeros(0),
}


def walk(path, own="me"):
    return Store(path, "walk", own)


def test_stores_are_read_as_written(tmp_path):
    data = {"step": 7, "history": [1.5, None, "käse"]}
    for name, tensors in (("last.safetensors", TENSORS), ("last.json", None)):
        store = walk(tmp_path / "run" / name)
        assert store.read() is None
        store.write(data, tensors)
        kept = store.read()
        assert kept.data == data and kept.tensors.keys() == (tensors or {}).keys()
        assert all(
            torch.equal(kept.tensors[n], one) for n, one in (tensors or {}).items()
        )
    nowhere = walk(None)
    nowhere.write(data)
    assert nowhere.read() is None


@pytest.mark.parametrize("tensors", [TENSORS, None])
def test_other_stores_are_refused(tmp_path, tensors):
    path = tmp_path / "last"
    walk(path).write([], tensors)
    with pytest.raises(CheckpointError, match="last cannot be resumed: .* Remove it"):
        Store(path, "run", "me").read()
    with pytest.raises(
        CheckpointError,
        match=r"another walk \(another network, other data or other settings\); remove",
    ):
        walk(path, "you").read()
    for content in (b"", b"something else", b'{"format": "ompq-walk/3"}', b"\0" * 99):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="last cannot be resumed: it is"):
            walk(path).read()
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="cannot be resumed: it is a folder"):
        walk(path).read()


def test_damage_anywhere_in_a_store_is_noticed(tmp_path):
    path = tmp_path / "last.safetensors"
    data = {"step": 7, "best": 0.5}
    walk(path).write(data, TENSORS)
    whole = path.read_bytes()
    damaged = [whole[:size] for size in range(0, len(whole), 5)]
    for at in range(len(whole)):
        for flip in (0x01, 0x20, 0xFF):
            changed = bytes([whole[at] ^ flip])
            damaged.append(whole[:at] + changed + whole[at + 1 :])
    silent = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            read, tensors = walk(path).read()
        except CheckpointError:
            continue
        # A space that pads the header may change: what it says is still the same.
        same = all(torch.equal(tensors[n], TENSORS[n]) for n in TENSORS)
        silent += not (same and read == data and tensors.keys() == TENSORS.keys())
    assert silent == 0


def test_what_is_kept_is_not_measured_again(tmp_path):
    path = tmp_path / "kept.json"
    assert Measurements(walk(path), float).get("a", lambda: 3.0) == 3.0
    again = Measurements(walk(path), float)
    assert again.get("a", lambda: 4.0) == 3.0
    assert [*again.get_all(["a", "b"], lambda name: 5.0)] == [3.0, 5.0]
    for kept in ([], {"a": "x"}):
        walk(path).write(kept)
        with pytest.raises(CheckpointError, match="cannot be resumed: .* Remove it to"):
            Measurements(walk(path), float)


# What differs in content has another identity, whatever it has in common.
