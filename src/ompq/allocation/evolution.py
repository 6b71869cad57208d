"""Genetic search for an allocation, as BRECQ does it: a rival of the exact program."""

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.program import Columns, Program

POPULATION, MUTATION, ROUNDS = 50, 0.1, 100  # BRECQ's
PARENTS = 10  # not published; as in the search that BRECQ takes over (Guo et al., 2020)
Members = NDArray[np.intp]  # allocations, one a row, (M, units)


def evolved(
    program: Program,
    *,
    population: int = POPULATION,
    mutation: float = MUTATION,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Columns | None:
    """Return the best allocation that a genetic search finds, (units,).

    The ten best so far are the parents. Half of each generation crosses two of them,
    unit by unit; in the other half each unit of one of them changes with the
    probability ``mutation``. An allocation that exceeds a limit gets cheaper choices
    at random units until it does not. None if nothing keeps to the limits.
    """
    generator = np.random.default_rng(seed)
    shape = population, len(program.damage)
    counts = program.allowed.sum(1)
    options = np.argsort(~program.allowed, axis=1, kind="stable")  # allowed ones first

    def drawn() -> Members:
        places = (generator.random(shape) * counts).astype(np.intp)
        return np.take_along_axis(options, places.T, 1).T

    crossed = np.arange(population)[:, None] < population // 2
    rate = np.where(crossed, 0.5, mutation)
    parents = _best(program, _repaired(program, drawn(), generator))
    for _ in range(rounds if len(parents) else 0):
        one, other = parents[generator.integers(len(parents), size=(2, population))]
        changed = generator.random(shape) < rate
        children = np.where(changed, np.where(crossed, other, drawn()), one)
        children = _repaired(program, children, generator)
        parents = _best(program, np.concatenate([parents, children]))
    return parents[0] if len(parents) else None


def _best(program: Program, members: Members) -> Members:
    """Return the parents: those of least damage, each once."""
    distinct = np.unique(members, axis=0)
    damage = program.damage[np.arange(distinct.shape[1]), distinct].sum(1)
    best: Members = distinct[np.argsort(damage, kind="stable")[:PARENTS]]
    return best


def _repaired(
    program: Program, members: Members, generator: np.random.Generator
) -> Members:
    """Lower random units until no limit is exceeded; leave out what cannot be."""
    rows, limits = program.rows, program.limits[:, None]
    units = np.arange(members.shape[1])
    used = rows[:, units, members].sum(2)  # (K, M)
    order = generator.permuted(np.broadcast_to(units, members.shape), axis=1)
    for unit in order.T:
        over = np.flatnonzero((used > limits).any(0))
        if not len(over):
            break
        own = unit[over]
        now = rows[:, own, members[over, own]]  # (K, over)
        after = (used[:, over] - now)[:, :, None] + rows[:, own]  # (K, over, C)
        # Of the choices that leave least of what is too much, the one of least damage.
        excess = np.maximum(after - limits[:, :, None], 0).sum(0)
        excess = np.where(program.allowed[own], excess, np.inf)
        least = excess == excess.min(1, keepdims=True)
        column = np.where(least, program.damage[own], np.inf).argmin(1)
        members[over, own] = column
        used[:, over] = after[:, np.arange(len(over)), column]
    kept: Members = members[(used <= limits).all(0)]
    return kept
