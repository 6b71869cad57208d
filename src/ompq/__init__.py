"""Decide how many bits each layer needs, then make the small network."""
