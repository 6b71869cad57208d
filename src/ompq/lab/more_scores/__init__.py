"""Scores of published work, and of experiments of ours."""
