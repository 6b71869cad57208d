"""Methods that the paper compares itself with."""
