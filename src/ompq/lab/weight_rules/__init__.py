"""How published methods round weights in training."""
