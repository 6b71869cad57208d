"""Settings of the whole suite."""

import os

import torch

# Toy networks are too small to share between threads, and the suite runs in processes.
torch.set_num_threads(1)

# Set in the processes of pytest-xdist; a test that wants a width says so itself.
os.environ.pop("COLUMNS", None)
