"""Scores: the damage expected of each choice of bits, unit by unit."""
