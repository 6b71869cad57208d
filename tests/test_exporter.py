"""export() takes the format from the file's name, or as it is told."""

import pytest

import ompq
from nets import Chain, images, seeded
from ompq.runtimes import exporter
from ompq.runtimes.integer_files import IntegerRuntime
from quantized import quantized


@pytest.fixture(scope="module")
def network():
    return quantized(seeded(Chain()), images())


@pytest.mark.parametrize(
    ("name", "format", "writer"),
    [
        ("net.onnx", None, "export_onnx"),
        ("net.tflite", None, "tflite"),
        ("net.pte", None, "pte"),
        ("net.gguf", None, "write_gguf"),
        ("net.bin", "gguf", "write_gguf"),
        ("net.onnx", "tflite", "tflite"),
    ],
)
def test_the_suffix_or_the_format_chooses_the_writer(
    name, format, writer, network, monkeypatch
):
    monkeypatch.setattr(
        IntegerRuntime, "write", lambda runtime, *_given: runtime.format
    )
    for one in ("export_onnx", "write_gguf"):
        monkeypatch.setattr(exporter, one, lambda *_given, one=one, **_more: one)
    assert ompq.export(network, name, images(), format=format) == writer


@pytest.mark.parametrize("name", ["net", "net.onxx"])
def test_other_suffixes_are_refused(name, network, tmp_path):
    with pytest.raises(ValueError, match=r"use onnx, tflite, pte, mlpackage, g"):
        ompq.export(network, tmp_path / name, images())
    assert not [*tmp_path.iterdir()]
