"""What several files of tests share: see test_codec.py."""

import numpy as np

RANDOM = np.random.default_rng(0)
