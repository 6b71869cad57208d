"""The parts of an allocation problem, to be changed one by one."""

import numpy as np

from ompq.cost_tables import Cost
from ompq.network.units import Choice


def parts(**changes):
    given = {
        "names": ("a", "b"),
        "choices": (Choice(2, 8), Choice(4, 8), Choice(8, 8)),
        "damage": np.zeros((2, 3)),
        "costs": {"bytes": Cost("bytes", np.ones((2, 3)))},
        "allowed": np.ones((2, 3), dtype=bool),
        "groups": np.arange(2),
    }
    return {**given, **changes}
