"""Quantization-aware training: the planned network learns to live with its bits."""
