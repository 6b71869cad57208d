"""Quantization: a float network becomes one that computes with few bits."""
