"""Settings of the whole suite."""

import torch

# Toy networks are too small to share between threads, and the suite runs in processes.
torch.set_num_threads(1)
