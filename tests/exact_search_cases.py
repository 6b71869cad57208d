"""Programs to solve: the paper's, and large random ones."""

import numpy as np

from tables import fixture, program

SMALL = fixture("alloc_small.json")

BITS = np.array([2.0, 3.0, 4.0])


def paper_case(case):
    """Return the paper's program of a fixture: bits times coefficients, maximised."""
    bits = np.arange(case["bits_lo"], case["bits_hi"] + 1)
    costs = np.array(SMALL["params"])[:, None] * bits
    damage = -np.array(case["coef"])[:, None] * bits
    return bits, program(damage, [costs], [case["budget_bits"]])


def large(kind, budgets, seed):
    generator = np.random.default_rng(seed)
    bits = np.arange(2.0, 9.0)
    sizes = np.exp(generator.normal(9, 2, (2, 1000, 1))).astype(int) + 10
    damage, rows = {
        "network": lambda: (
            np.exp(generator.normal(0, 2, (1000, 1))) * 4.0**-bits,
            sizes * bits,
        ),
        "linear": lambda: (
            -np.exp(generator.normal(0, 1, (1000, 1))) * bits,
            sizes * bits,
        ),
        "table": lambda: (
            generator.random((1000, 7)),
            generator.integers(1, 1000, (2, 1000, 7)),
        ),
    }[kind]()
    rows = rows[:budgets].astype(float)
    limits = 0.65 * rows.min(2).sum(1) + 0.35 * rows.max(2).sum(1)
    return program(damage, rows, np.floor(limits))
