"""LiteRT files (.tflite)."""
