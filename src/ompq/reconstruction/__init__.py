"""Reconstruction: rounding learned block by block, without labels."""
