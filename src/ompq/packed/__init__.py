"""Packed files: the small network on disk."""
