"""Deciding by measurement: whole allocations are quantized and compared."""
