"""The ONNX graph of an integer network."""

import pytest

from nets import TinyResNet, images, seeded
from ompq.errors import ExportError
from ompq.runtimes.onnx.onnx_files import export_onnx
from ompq.runtimes.onnx.onnx_graph import OnnxGraph
from quantized import quantized


def test_file_whose_codes_are_wrong_is_refused_though_top_1_agrees(
    tmp_path, monkeypatch
):
    network = quantized(seeded(TinyResNet(classes=1)), images(8), weight=8)

    def wrong(self, step, codes):
        if step.name != "stem":
            return original(self, step, codes)
        return self._node("Clip", [codes, "zero/000", "zero/000"], f"{step.name}/clip")

    original = OnnxGraph._clipped
    monkeypatch.setattr("ompq.runtimes.onnx.onnx_graph.OnnxGraph._clipped", wrong)
    with pytest.raises(ExportError, match=": outputs within .* on 8 samples"):
        export_onnx(network, tmp_path / "net.onnx", images(8))
    assert list(tmp_path.iterdir()) == []
