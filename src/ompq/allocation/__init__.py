"""Budgets, and the exact programs that turn scores into bits."""
