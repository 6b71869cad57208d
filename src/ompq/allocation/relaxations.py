"""The linear relaxation of the allocation program, and the paper's rounding of it."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ompq.allocation.program import Columns, Floats, Program, least_allowed

SHARE_TOLERANCE = 1e-6  # shares of the relaxation are as exact as the solver
MOVE_TOLERANCE = 1e-12  # a move that removes less of the excess may be rounding


class Relaxation(NamedTuple):
    """The linear relaxation: a mixture of choices for each unit, and what limits cost.

    ``shares`` is (U, C), or None if the solver finds the limits too tight; ``prices``
    (K,) is the damage that one more unit of each limit would save.
    """

    shares: Floats | None
    prices: Floats


def relaxation(program: Program) -> Relaxation:
    """Solve the linear relaxation, in which a unit may mix its choices."""
    if not program.open:
        return Relaxation(None, np.zeros(len(program.limits)))
    return _one_limit(program) if len(program.limits) == 1 else _any_limits(program)


class _Step(NamedTuple):
    """From one choice of a unit to a costlier one, on the unit's convex hull."""

    saved: float  # damage saved for each unit of cost
    cost: float
    unit: int
    start: int
    end: int


def _one_limit(program: Program) -> Relaxation:
    """Take the steps that save most for what they cost, until the limit is reached."""
    room = float(program.limits[0] - program.least[0].sum())
    if room < 0:
        return Relaxation(None, np.zeros(1))
    shares = np.zeros(program.damage.shape)
    steps: list[_Step] = []
    for unit in range(len(shares)):
        corners = _corners(program, unit)
        shares[unit, corners[0]] = 1
        steps += _steps(program, unit, corners)
    steps.sort(key=lambda step: -step.saved)  # stable: a unit's steps stay in order
    for step in steps:
        part = min(1.0, room / step.cost)
        shares[step.unit, step.start] = 1 - part
        shares[step.unit, step.end] = part
        room -= step.cost
        if part < 1:
            return Relaxation(shares, np.array([step.saved]))
    return Relaxation(shares, np.zeros(1))


def _corners(program: Program, unit: int) -> list[int]:
    """Return the choices on the lower hull of damage over cost, from the cheapest."""
    cost, damage = program.rows[0, unit], program.damage[unit]
    choices = np.flatnonzero(program.allowed[unit])
    corners: list[int] = []
    for choice in choices[np.lexsort((damage[choices], cost[choices]))].tolist():
        if corners and damage[choice] >= damage[corners[-1]]:
            continue  # costs as much or more and is no better
        while len(corners) > 1 and _above(cost, damage, (*corners[-2:], choice)):
            corners.pop()
        corners.append(choice)
    return corners


def _above(cost: Floats, damage: Floats, three: tuple[int, int, int]) -> bool:
    """Whether the middle one lies on or above the line through the others."""
    first, middle, last = three
    early = (damage[first] - damage[middle]) * (cost[last] - cost[middle])
    late = (damage[middle] - damage[last]) * (cost[middle] - cost[first])
    return bool(early <= late)


def _steps(program: Program, unit: int, corners: list[int]) -> list[_Step]:
    cost, damage = program.rows[0, unit], program.damage[unit]
    found = []
    for start, end in pairwise(corners):
        more = float(cost[end] - cost[start])
        found.append(
            _Step(float(damage[start] - damage[end]) / more, more, unit, start, end)
        )
    return found


def _any_limits(program: Program) -> Relaxation:
    # Imported here: it takes longer than most plans with a single limit.
    from scipy import sparse
    from scipy.optimize import linprog

    units, choices = np.nonzero(program.allowed)
    low = least_allowed(program.damage, program.allowed)
    damage = (program.damage - low[:, None])[units, choices]
    rows = (program.rows - program.least[:, :, None])[:, units, choices]
    # The solver's tolerances are absolute: every row and the objective get range 1.
    unit_damage = damage.max() or 1.0
    unit_rows = np.where(rows.max(1) > 0, rows.max(1), 1.0)
    one_each = sparse.csr_array(
        (np.ones(len(units)), (units, np.arange(len(units)))),
        shape=(len(program.damage), len(units)),
    )
    result = linprog(
        damage / unit_damage,
        A_ub=rows / unit_rows[:, None],
        b_ub=(program.limits - program.least.sum(1)) / unit_rows,
        A_eq=one_each,
        b_eq=np.ones(len(program.damage)),
        method="highs",
    )
    if result.x is None:
        return Relaxation(None, np.zeros(len(rows)))
    shares = np.zeros(program.damage.shape)
    shares[units, choices] = result.x
    prices = np.maximum(-result.ineqlin.marginals, 0) * unit_damage / unit_rows
    return Relaxation(shares, prices)


def bracket(program: Program, relaxed: Relaxation) -> tuple[Columns, Columns]:
    """Return the choices just below and just above each unit's mixture, (U,) each.

    Choices are ordered by what they spend at the relaxation's prices, which for costs
    that grow with the bits is the order of the bits: the paper's floor and ceiling. A
    unit that mixes nothing has both equal to its choice.
    """
    if relaxed.shares is None:
        raise ValueError("a relaxation without a solution has nothing to round")
    spend = np.tensordot(relaxed.prices, program.rows, 1)  # (U, C)
    at = (relaxed.shares * spend).sum(1)[:, None]
    blur = SHARE_TOLERANCE * np.ptp(spend, axis=1, keepdims=True)
    below = np.where(program.allowed & (spend <= at + blur), spend, -np.inf)
    above = np.where(program.allowed & (spend >= at - blur), spend, np.inf)
    # Of choices that spend the same, the one of least damage.
    down = np.where(below == below.max(1, keepdims=True), program.damage, np.inf)
    up = np.where(above == above.min(1, keepdims=True), program.damage, np.inf)
    return down.argmin(1), up.argmin(1)


def rounded(program: Program) -> Columns | None:
    """Solve the relaxation and round, as the paper does, but never beyond a limit.

    Each unit takes the nearer of its two bracketing choices. While a limit is exceeded,
    the unit moves that does least damage for the excess it removes.

    Returns:
        The columns, (U,), or None if no single move removes what is too much.
    """
    relaxed = relaxation(program)
    if relaxed.shares is None:
        return None
    down, up = bracket(program, relaxed)
    spend = np.tensordot(relaxed.prices, program.rows, 1)
    at = (relaxed.shares * spend).sum(1)
    units = np.arange(len(down))
    nearer_down = at - spend[units, down] <= spend[units, up] - at
    return _repaired(program, np.where(nearer_down, down, up))


def _repaired(program: Program, columns: Columns) -> Columns | None:
    units = np.arange(len(columns))
    span = np.maximum((program.rows.max(2) - program.least).sum(1), 1e-300)
    excess = _excess(program.used(columns)[:, None, None], program.limits, span)
    while excess.sum() > 0:
        change = program.rows - program.rows[:, units, columns][:, :, None]
        after = program.used(columns)[:, None, None] + change  # (K, U, C)
        removed = excess - _excess(after, program.limits, span)
        helps = program.allowed & (removed > MOVE_TOLERANCE)
        if not helps.any():
            return None
        harm = program.damage - program.damage[units, columns][:, None]
        rate = np.where(helps, harm / np.where(helps, removed, 1.0), np.inf)
        unit, choice = np.unravel_index(rate.argmin(), rate.shape)
        columns = np.where(units == unit, choice, columns)
        excess = _excess(program.used(columns)[:, None, None], program.limits, span)
    return columns


def _excess(used: Floats, limits: Floats, span: Floats) -> Floats:
    """Return how far costs (K, U, C) exceed the limits, in shares of spans, (U, C)."""
    over = np.maximum(used - limits[:, None, None], 0) / span[:, None, None]
    excess: Floats = over.sum(0)
    return excess


def floor_or_ceiling(program: Program) -> Program:
    """Return the program in which each unit has the paper's two choices.

    They bracket the unit's mixture in the relaxation; a unit that mixes nothing may
    stay or take the next cheaper choice, so that there is something to search. Without
    a solution of the relaxation every choice stays.
    """
    relaxed = relaxation(program)
    if relaxed.shares is None:
        return program
    down, up = bracket(program, relaxed)
    units = np.arange(len(down))
    spend = np.tensordot(relaxed.prices, program.rows, 1)
    cheaper = program.allowed & (spend < spend[units, down][:, None])
    kept = np.zeros_like(program.allowed)
    kept[units, down] = kept[units, up] = True
    step_down = np.where(cheaper, spend, -np.inf).argmax(1)
    free = (down == up) & cheaper.any(1)
    kept[units[free], step_down[free]] = True
    return replace(program, allowed=kept)
