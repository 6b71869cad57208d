"""The linear relaxation: fractional shares of choices, and how they are rounded."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ompq.allocation.problem import Columns, Floats, Program, least_allowed

SHARE_TOLERANCE = 1e-6  # accuracy of the solver's shares
MOVE_TOLERANCE = 1e-12  # removing less of the excess than this may be rounding error


class Relaxation(NamedTuple):
    """Solution of the linear relaxation, in which a unit may mix its choices."""

    shares: Floats | None  # (U, C); None if it is proved that nothing meets the limits
    prices: Floats  # damage that one more step of each limit would save, (K,)


def relaxation(program: Program) -> Relaxation:
    """Solve the linear relaxation."""
    no_prices = np.zeros(len(program.limits))
    no_choice = not program.allowed.any(1).all()
    if no_choice or (program.least.sum(1) > program.limits).any():
        return Relaxation(None, no_prices)
    if not len(program.damage):
        return Relaxation(program.damage, no_prices)
    solve = _with_one_limit if len(program.limits) == 1 else _with_several_limits
    return solve(program)


def _with_one_limit(program: Program) -> Relaxation:
    """Greedily take the steps that save most damage per cost, up to the limit."""
    units = np.arange(len(program.damage))
    cheapest = program.rows[0] == program.least[0][:, None]
    cheapest &= program.allowed
    column = np.where(cheapest, program.damage, np.inf).argmin(1)
    rate, cost, unit, start, end = _hull_steps(program, column)
    room = program.limits[0] - program.least[0].sum()
    taken = int(np.searchsorted(np.cumsum(cost), room, side="right"))
    column[unit[:taken]] = end[:taken]  # in order, so that a unit's last step counts
    shares = np.zeros(program.damage.shape)
    shares[units, column] = 1.0
    if taken == len(unit):
        return Relaxation(shares, np.zeros(1))
    part = (room - cost[:taken].sum()) / cost[taken]
    shares[unit[taken], start[taken]] = 1 - part
    shares[unit[taken], end[taken]] = part
    return Relaxation(shares, rate[taken : taken + 1])


def _hull_steps(
    program: Program, at: Columns
) -> tuple[Floats, Floats, Columns, Columns, Columns]:
    """Return the edges of all lower convex hulls of damage over cost, best first.

    ``at`` holds the columns at which the hulls begin, (U,). Returns, (S,) each: damage
    saved per cost, cost, unit, and the columns at which the edge starts and ends.
    """
    units = np.arange(len(at))
    cost = np.where(program.allowed, program.rows[0], -np.inf)
    steps, rate = [np.zeros((5, 0))], np.full(len(at), np.inf)
    while True:
        more = cost - cost[units, at][:, None]
        saved = program.damage[units, at][:, None] - program.damage
        useful = (more > 0) & (saved > 0)
        rates = np.where(useful, saved / np.where(useful, more, 1.0), 0.0)
        rate = np.minimum(rate, rates.max(1))  # stays convex despite rounding
        going = np.flatnonzero(rates.max(1) > 0)
        if not len(going):
            break
        best = useful & (rates == rates.max(1)[:, None])
        end = np.where(best, more, 0.0).argmax(1)
        spent = more[going, end[going]]
        steps.append(np.stack([rate[going], spent, going, at[going], end[going]]))
        at = np.where(rates.max(1) > 0, end, at)
    edges = np.concatenate(steps, 1)
    edges = edges[:, np.argsort(-edges[0], kind="stable")]
    unit, start, stop = edges[2:].astype(np.intp)
    return edges[0], edges[1], unit, start, stop


def _with_several_limits(program: Program) -> Relaxation:
    units, choices = np.nonzero(program.allowed)
    low = least_allowed(program.damage, program.allowed)
    damage = (program.damage - low[:, None])[units, choices]
    rows = (program.rows - program.least[:, :, None])[:, units, choices]
    # The solver's tolerances are absolute, so scale every row and the objective to 1.
    damage_scale = damage.max() or 1.0
    row_scales = np.where(rows.max(1) > 0, rows.max(1), 1.0)
    room = (program.limits - program.least.sum(1)) / row_scales
    rows = rows / row_scales[:, None]
    x, prices = _linear_program(damage / damage_scale, rows, room, units)
    if x is None:
        # Raise all limits together as little as possible. If even the cheapest choices
        # exceed the limits at the prices of that program, the limits are too low.
        raised = np.append(rows, -np.ones((len(rows), 1)), axis=1)
        objective = np.append(np.zeros(len(units)), 1.0)
        x, prices = _linear_program(objective, raised, room, units)
        cheapest = np.full(units.max() + 1, np.inf)
        np.minimum.at(cheapest, units, prices @ rows)
        allowance = 1e-14 * (len(cheapest) + 4) * (cheapest.sum() + prices @ room)
        if x is None or cheapest.sum() - prices @ room > allowance:
            return Relaxation(None, np.zeros(len(rows)))
    shares = np.zeros(program.damage.shape)
    shares[units, choices] = x[: len(units)]
    return Relaxation(shares, prices * damage_scale / row_scales)


def _linear_program(
    objective: Floats, rows: Floats, room: Floats, units: Columns
) -> tuple[Floats | None, Floats]:
    """Return the solution, or None if there is none, and the prices of the rows.

    The first variables are choices of ``units``; further ones belong to no unit.
    """
    # Importing scipy takes longer than most plans with a single limit.
    from scipy import sparse
    from scipy.optimize import linprog

    one_each = sparse.csr_array(
        (np.ones(len(units)), (units, np.arange(len(units)))),
        shape=(units.max() + 1, len(objective)),
    )
    result = linprog(
        objective,
        A_ub=rows,
        b_ub=room,
        A_eq=one_each,
        b_eq=np.ones(units.max() + 1),
        method="highs",
    )
    if result.x is None:
        return None, np.zeros(len(rows))
    return result.x, np.maximum(-result.ineqlin.marginals, 0)


def bracket(program: Program, relaxed: Relaxation) -> tuple[Columns, Columns]:
    """Return the choices just below and just above each unit's mixture, (U,) each.

    Choices are ordered by their cost at the relaxation's prices. If costs grow with the
    bits, these are the paper's floor and ceiling. Both are the same for a unit that
    does not mix choices.
    """
    if relaxed.shares is None:
        raise ValueError("a relaxation without a solution has nothing to round")
    spend = np.tensordot(relaxed.prices, program.rows, 1)  # (U, C)
    at = (relaxed.shares * spend).sum(1)[:, None]
    tolerance = SHARE_TOLERANCE * np.ptp(spend, axis=1, keepdims=True)
    below = np.where(program.allowed & (spend <= at + tolerance), spend, -np.inf)
    above = np.where(program.allowed & (spend >= at - tolerance), spend, np.inf)
    # Of choices that cost the same, take the one of least damage.
    down = np.where(below == below.max(1, keepdims=True), program.damage, np.inf)
    up = np.where(above == above.min(1, keepdims=True), program.damage, np.inf)
    return down.argmin(1), up.argmin(1)


def round_relaxation(program: Program) -> Columns | None:
    """Solve the relaxation and round, as the paper does, but keep to the limits.

    Each unit takes the nearer of its two bracketing choices. While a limit is exceeded,
    one unit at a time changes to the choice of least damage per excess removed. Returns
    None if the excess remains and no single change reduces it.
    """
    relaxed = relaxation(program)
    if relaxed.shares is None:
        return None
    down, up = bracket(program, relaxed)
    spend = np.tensordot(relaxed.prices, program.rows, 1)
    at = (relaxed.shares * spend).sum(1)
    units = np.arange(len(down))
    nearer_down = at - spend[units, down] <= spend[units, up] - at
    columns = np.where(nearer_down, down, up)
    ranges = np.maximum((program.rows.max(2) - program.least).sum(1), 1e-300)

    def excess(used: Floats) -> Floats:
        """Return the total relative excess, (U, C), of costs (K, U, C)."""
        over = np.maximum(used - program.limits[:, None, None], 0)
        total: Floats = (over / ranges[:, None, None]).sum(0)
        return total

    while (now := excess(program.used(columns)[:, None, None])).sum() > 0:
        change = program.rows - program.rows[:, units, columns][:, :, None]
        after = program.used(columns)[:, None, None] + change  # (K, U, C)
        removed = now - excess(after)
        helps = program.allowed & (removed > MOVE_TOLERANCE)
        if not helps.any():
            return None
        harm = program.damage - program.damage[units, columns][:, None]
        rate = np.where(helps, harm / np.where(helps, removed, 1.0), np.inf)
        unit, choice = np.unravel_index(rate.argmin(), rate.shape)
        columns = np.where(units == unit, choice, columns)
    return columns


def floor_or_ceiling(program: Program) -> Program:
    """Restrict each unit to the paper's two choices, which bracket its mixture.

    A unit that does not mix choices may also take the next cheaper one, so that there
    is something to search. An infeasible program is returned unchanged.
    """
    relaxed = relaxation(program)
    if relaxed.shares is None:
        return program
    down, up = bracket(program, relaxed)
    units = np.arange(len(down))
    spend = np.tensordot(relaxed.prices, program.rows, 1)
    cheaper = program.allowed & (spend < spend[units, down][:, None])
    allowed = np.zeros_like(program.allowed)
    allowed[units, down] = allowed[units, up] = True
    next_cheaper = np.where(cheaper, spend, -np.inf).argmax(1)
    unmixed = (down == up) & cheaper.any(1)
    allowed[units[unmixed], next_cheaper[unmixed]] = True
    return replace(program, allowed=allowed)
