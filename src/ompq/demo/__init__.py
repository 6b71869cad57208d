"""The whole idea on a small network, in one command."""
