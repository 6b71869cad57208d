"""Data sets by name, and the images in them."""
