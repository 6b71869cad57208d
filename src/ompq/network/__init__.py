"""What a network is made of: observed calls, units, blocks, groups."""
