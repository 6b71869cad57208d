"""From an allocation to a network that computes with those bits."""
