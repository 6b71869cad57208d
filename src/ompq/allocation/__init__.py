"""Allocation: bits for every unit within a budget."""
