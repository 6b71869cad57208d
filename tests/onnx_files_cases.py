"""What several files of tests share: see test_onnx_files.py."""

import pytest

onnx = pytest.importorskip("onnx")
