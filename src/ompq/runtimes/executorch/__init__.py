"""ExecuTorch files (.pte)."""
