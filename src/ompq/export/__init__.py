"""ONNX files that are small, run anywhere and were checked before being written."""
