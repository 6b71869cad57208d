import numpy as np
import pytest

from ompq.entropy_coding.compressed_bytes import squeeze, with_squeezed
from ompq.errors import PackedFileError

RANDOM = np.random.default_rng(0)


def test_numbers_are_compressed_without_loss():
    scales = RANDOM.integers(250, 256, 3000, dtype=np.uint8)
    biases = RANDOM.normal(0, 0.3, 3000).astype("<f2")
    arrays = {"codes": np.arange(5), "halves": biases}
    given = {"multiples": squeeze(scales), "halves": squeeze(biases)}
    assert len(given["multiples"]) < 0.45 * scales.nbytes
    assert len(given["halves"]) < 0.9 * biases.nbytes
    stored = {f"{n}.lzma": np.frombuffer(data, "u1") for n, data in given.items()}
    found = with_squeezed({"codes": arrays["codes"], **stored})
    assert set(found) == {"codes", "multiples", "halves"}
    for name, values in {**arrays, "multiples": scales}.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(found[name], values)
    assert squeeze(RANDOM.integers(0, 256, 3000, dtype=np.uint8)) is None
    assert squeeze(scales[:5]) is None


def test_damaged_numbers_are_refused(monkeypatch):
    data = squeeze(RANDOM.normal(0, 0.3, 3000).astype("<f2"))
    odd = squeeze(np.zeros(333, np.uint8))
    for broken in (data[:-1], data + b"\0", odd):
        with pytest.raises(PackedFileError, match="halves are damaged: they do not"):
            with_squeezed({"halves.lzma": np.frombuffer(broken, "u1")})
    with pytest.raises(PackedFileError, match="halves are damaged: Corrupt input"):
        with_squeezed({"halves.lzma": np.frombuffer(b"\x7f" + data, "u1")})
    bomb = squeeze(np.zeros(1 << 24, np.uint8))
    monkeypatch.setattr(
        "ompq.entropy_coding.compressed_bytes._LARGEST_SQUEEZED", 1 << 20
    )
    with pytest.raises(PackedFileError, match="multiples are damaged: they do not"):
        with_squeezed({"multiples.lzma": np.frombuffer(bomb, "u1")})
