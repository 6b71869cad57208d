"""Post-training repair: each block learns its rounding."""
