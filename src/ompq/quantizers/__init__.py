"""The arithmetic of uniform quantization: grids, ranges, noise, calibration."""
