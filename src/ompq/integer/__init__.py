"""The network in integers alone: the arithmetic every export must equal."""
