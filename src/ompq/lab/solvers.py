"""Solvers of published work: BRECQ's genetic search, and depth-first search."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.problem import Columns, Program
from ompq.allocation.relaxation import bracket, relaxation

POPULATION, MUTATION, ROUNDS = 50, 0.1, 100  # as published by BRECQ
PARENTS = 10  # not published; from the search that BRECQ builds on (Guo et al., 2020)
Members = NDArray[np.intp]  # one allocation per row, (M, units)


@dataclass(frozen=True)
class Genetic:
    """BRECQ's genetic search.

    The ten best so far are the parents. Half of each generation crosses two parents,
    unit by unit; in the other half each unit of one parent mutates with probability
    0.1. An allocation that exceeds a limit gets cheaper choices in random units until
    it fits; BRECQ publishes neither this nor its number of parents.

    Attributes:
        rounds: Number of generations.
        seed: Seed of the first members, crossings and mutations.
    """

    rounds: int = ROUNDS
    seed: int = 0

    def __call__(self, program: Program) -> Columns | None:
        """Return the best allocation found, (units,), or None if none fits."""
        return _evolve(program, self.rounds, np.random.default_rng(self.seed))


GENETIC = Genetic()


def _evolve(
    program: Program, rounds: int, generator: np.random.Generator
) -> Columns | None:
    shape = POPULATION, len(program.damage)
    counts = program.allowed.sum(1)
    options = np.argsort(~program.allowed, axis=1, kind="stable")  # allowed ones first

    def random_members() -> Members:
        places = (generator.random(shape) * counts).astype(np.intp)
        return np.take_along_axis(options, places.T, 1).T

    crossed = np.arange(POPULATION)[:, None] < POPULATION // 2
    rate = np.where(crossed, 0.5, MUTATION)
    parents = _best(program, _within_limits(program, random_members(), generator))
    for _ in range(rounds if len(parents) else 0):
        one, other = parents[generator.integers(len(parents), size=(2, POPULATION))]
        changed = generator.random(shape) < rate
        children = np.where(changed, np.where(crossed, other, random_members()), one)
        children = _within_limits(program, children, generator)
        parents = _best(program, np.concatenate([parents, children]))
    return parents[0] if len(parents) else None


def _best(program: Program, members: Members) -> Members:
    """Return the distinct members of least damage, as the next parents."""
    distinct = np.unique(members, axis=0)
    damage = program.damage[np.arange(distinct.shape[1]), distinct].sum(1)
    best: Members = distinct[np.argsort(damage, kind="stable")[:PARENTS]]
    return best


def _within_limits(
    program: Program, members: Members, generator: np.random.Generator
) -> Members:
    """Lower random units until the limits are met; drop members that never do."""
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
        # Minimise the excess, then the damage.
        excess = np.maximum(after - limits[:, :, None], 0).sum(0)
        excess = np.where(program.allowed[own], excess, np.inf)
        least = excess == excess.min(1, keepdims=True)
        column = np.where(least, program.damage[own], np.inf).argmin(1)
        members[over, own] = column
        used[:, over] = after[:, np.arange(len(over)), column]
    kept: Members = members[(used <= limits).all(0)]
    return kept


def search_depth_first(program: Program) -> Columns | None:
    """Search the floors and ceilings of the linear relaxation, as the paper says.

    Units are decided one after the other, the ceiling first. A branch ends where even
    the cheapest rest exceeds a limit, and the best complete allocation is kept. The
    time doubles with every unit whose floor and ceiling differ: ``relax-dfs`` finds
    allocations as good or better exactly.
    """
    relaxed = relaxation(program)
    if relaxed.shares is None:
        return None
    down, up = bracket(program, relaxed)
    units = np.arange(len(down))
    cheapest = np.minimum(program.rows[:, units, down], program.rows[:, units, up])
    # The least that the units from each one on take, (K, U + 1).
    rest = np.cumsum(cheapest[:, ::-1], 1)[:, ::-1]
    rest = np.append(rest, np.zeros((len(rest), 1)), 1)
    best, least = None, np.inf
    stack: list[list[int]] = [[]]
    while stack:
        chosen = stack.pop()
        decided = len(chosen)
        used = program.rows[:, units[:decided], chosen].sum(1)
        if (used + rest[:, decided] > program.limits).any():
            continue
        if decided < len(units):
            options = dict.fromkeys((int(down[decided]), int(up[decided])))
            stack += [[*chosen, option] for option in options]
        elif (damage := program.value(np.array(chosen))) < least:
            best, least = np.array(chosen, dtype=np.intp), damage
    return best
