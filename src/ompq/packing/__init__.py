"""Packed files: each weight at its own width, every byte accounted for."""
