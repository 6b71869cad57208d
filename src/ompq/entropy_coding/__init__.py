"""Codes of weights in few bytes: the entropy coder, packed bits, rates."""
