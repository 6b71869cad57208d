"""Integer networks: every step in integers, no float in between."""
