"""Small allocation problems, and the slow way to solve them."""

import itertools
import json
from fractions import Fraction
from math import fsum
from pathlib import Path

import numpy as np

from ompq.allocation.problem import Problem, Program
from ompq.cost_tables import Cost
from ompq.network.units import Choice
from ompq.samples import Samples
from ompq.scores.computation import ScoreInputs

COSTS = {
    "bytes": Cost("bytes", np.zeros((1, 1)), reference=8e6),
    "bit_ops": Cost("bit_ops", np.zeros((1, 1))),
    "weight_bits": Cost("weight_bits", np.zeros((1, 1)), reference=100.0),
    "milliseconds": Cost("milliseconds", np.zeros((1, 1))),
}


CHOICES = (Choice(2, 8), Choice(4, 8), Choice(8, 8))


FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name):
    return json.loads((FIXTURES / name).read_text())


def score_inputs(graph, model, samples, choices, **more):
    return ScoreInputs(graph, model, Samples.of(samples), choices, **more)


def program(damage, rows, limits, *, ties=None, allowed=None):
    damage = np.asarray(damage, dtype=float)
    rows = np.asarray(rows, dtype=float)
    return Program(
        damage=damage,
        rows=rows,
        limits=np.asarray(limits, dtype=float),
        ties=rows[0] if ties is None else np.asarray(ties, dtype=float),
        allowed=np.ones(damage.shape, dtype=bool) if allowed is None else allowed,
        scales=np.ones(len(rows)),
    )


def exhaustive(it):
    """Return the best key and columns of a program by trying everything, or None.

    The key is exact: damage, ties, rows, columns.
    """
    options = [np.flatnonzero(row).tolist() for row in it.allowed]
    units = range(len(options))
    best = None
    for columns in itertools.product(*options):
        used = [fsum(row[u, columns[u]] for u in units) for row in it.rows]
        if all(u <= limit for u, limit in zip(used, it.limits, strict=True)):
            tables = [it.damage, it.ties, *it.rows]
            sums = [sum(Fraction(t[u, columns[u]]) for u in units) for t in tables]
            key = (*sums, columns)
            best = key if best is None else min(best, key)
    return best


def problem(
    damage, *, weights, macs=None, bits=(2, 3, 4), allowed=None, groups=None, **costs
):
    """Return a problem whose bytes are exactly weights × bits / 8."""
    damage = np.asarray(damage, dtype=float)
    weights = np.asarray(weights, dtype=float)[:, None]
    bits = np.asarray(bits, dtype=float)
    tables = {
        "bytes": Cost("bytes", weights * bits / 8, 0.0, 4 * weights.sum()),
        "weight_bits": Cost("weight_bits", weights * bits, reference=weights.sum()),
    }
    if macs is not None:
        table = np.asarray(macs, dtype=float)[:, None] * bits * 8
        tables["bit_ops"] = Cost("bit_ops", table)
    return Problem(
        names=tuple(f"unit{i}" for i in range(len(damage))),
        choices=tuple(Choice(int(b), 8) for b in bits),
        damage=damage,
        costs={**tables, **costs},
        allowed=np.ones(damage.shape, dtype=bool) if allowed is None else allowed,
        groups=np.arange(len(damage)) if groups is None else np.asarray(groups),
    )


def network(units=50, bits=(2, 3, 4, 5, 6, 8), seed=0):
    """Return a problem like a network's: sizes and importances spread widely."""
    generator = np.random.default_rng(seed)
    weights = np.exp(generator.normal(9, 1.5, units)).astype(int) + 100
    importance = np.exp(generator.normal(0, 1, units))
    return problem(
        importance[:, None] * 4.0 ** -np.array(bits),
        weights=weights,
        macs=weights * generator.choice([49, 196, 784], units),
        bits=bits,
    )
