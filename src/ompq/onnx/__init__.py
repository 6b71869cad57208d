"""ONNX files that are small, run anywhere, and were verified before being written."""
