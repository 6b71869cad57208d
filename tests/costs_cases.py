"""What several files of tests share: see test_costs.py."""

import numpy as np

from ompq.cost_tables import Cost

COSTS = {
    "bytes": Cost("bytes", np.zeros((1, 1)), reference=8e6),
    "bit_ops": Cost("bit_ops", np.zeros((1, 1))),
    "weight_bits": Cost("weight_bits", np.zeros((1, 1)), reference=100.0),
    "milliseconds": Cost("milliseconds", np.zeros((1, 1))),
}
