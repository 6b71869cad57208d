"""The exact search: the allocation of least damage, with a proof.

It has its own proof of optimality. For any prices ``p >= 0``, weak
duality gives a lower bound that takes one minimum per unit:
``sum_u min_c (damage + p·rows)[u, c] - p·limits``. The search decides one unit after
the other and keeps *labels*: partial allocations that no other one dominates and whose
bound does not exceed the best known allocation. The bound is the best over many price
vectors around those of the linear relaxation. A first pass keeps few labels and finds a
good allocation; later passes keep more. If even the last pass had to drop labels,
branch and bound on the linear relaxation continues for a limited number of nodes. What
remains unproved is the gap.

Costs are whole steps, and damage is rounded to steps of one part in 2**52 of what is
undecided, so float64 sums both exactly. Neither sums nor ties depend on the order of
addition, and no solver tolerance enters the result.
"""

import heapq
from dataclasses import replace
from itertools import islice, product
from math import frexp, ldexp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.problem import Columns, Flags, Floats, Program, least_allowed
from ompq.allocation.relaxation import relaxation

NEAR = 128  # choices that the first pass tries besides each unit's best
LABELS = 2**14  # labels of the first pass, over all units
WIDENING = 8  # each further pass keeps this many times as many
NARROWEST = 16  # labels kept per unit, at least
PASSES = 3  # passes before branch and bound; the last takes about a second
NODES = 600  # relaxations that branch and bound may solve, some milliseconds each
NEGLIGIBLE = 1e-9  # gap, relative to the damage the limits cause, not worth a branch
PRICES = (32, 64, 128)  # price vectors that bound the labels, for each pass
BLOCK = 32  # price vectors tried at a time
COARSE = 10  # recompute in finer steps if they shrink by more than this power of 2
WINDOW = 16  # neighbours that a label is compared with if there are several limits
ROUNDINGS = 512  # roundings of a node's fractional solution to try
WHOLE = 1e-6  # shares this close to 0 or 1 are whole; the rest is solver tolerance
EPSILON = float(np.finfo(np.float64).eps)


class Optimum(NamedTuple):
    """The best allocation found, and a bound on how much better another could be.

    A gap of 0 is a proof: nothing is better or, if ``columns`` is None, nothing meets
    the limits. The gap is infinite if nothing was found and nothing was proved.
    """

    columns: Columns | None
    gap: float


def minimum(
    program: Program, *, passes: int = PASSES, nodes: int = NODES, enough: float = 0.0
) -> Optimum:
    """Return the allocation of least damage within the limits.

    Ties are broken by the least sum of ``ties``, then by the least use of the limits,
    first to last, then lexicographically. (With very many ties, not all are compared.)

    Args:
        passes: Passes of the label search, each several times longer than the last.
        nodes: Nodes of branch and bound. The problem is NP-hard, so there must be an
            end; it is counted, not timed, so that results do not depend on the machine.
        enough: Stop at this gap, relative to the damage that the limits cause.
    """
    affordable = program.affordable()
    if affordable is None:
        return Optimum(None, 0.0)
    ideal = least_allowed(program.damage, program.allowed).sum()
    state = _State(affordable, None, np.inf)
    for number in range(passes):
        state, complete = _label_pass(state, number)
        if complete:
            return Optimum(state.best, 0.0)
        value = np.inf if state.best is None else program.value(state.best)
        if enough and state.gap <= enough * (value - ideal) < np.inf:
            return Optimum(state.best, state.gap)
    if state.gap > NEGLIGIBLE * (value - ideal):
        state = _branch_and_bound(state, nodes)
    return Optimum(state.best, state.gap)


class _State(NamedTuple):
    """The choices that may still be optimal, the best allocation so far, its gap."""

    program: Program
    best: Columns | None
    gap: float


class _Core(NamedTuple):
    """The program of the undecided units, in whole steps above each unit's minimum.

    A step of damage is ``2**exponent``; every sum of damage is a multiple of ``grain``.
    """

    program: Program
    units: Columns
    exponent: int
    grain: float

    @classmethod
    def of(cls, program: Program) -> "_Core":
        units = np.flatnonzero(program.allowed.sum(1) > 1)
        allowed = program.allowed[units]
        damage, exponent = _in_steps(program.damage[units], allowed)
        ties, _ = _in_steps(program.ties[units], allowed)
        rows = program.rows[:, units] - program.least[:, units, None]
        rows = np.where(allowed, rows, 0.0)
        # A limit that cannot be reached would only loosen the bounds.
        room = program.limits - program.least.sum(1)
        limits = np.minimum(room, rows.max(2, initial=0.0).sum(1))
        grains = np.array([_grain(row) for row in rows])
        limits = np.floor(limits / grains) * grains
        core = replace(
            program, damage=damage, rows=rows, limits=limits, ties=ties, allowed=allowed
        )
        return cls(core, units, exponent, _grain(damage))

    def all_columns(self, columns: Columns, program: Program) -> Columns:
        """Extend columns of the undecided units to all units of the program."""
        full: Columns = program.allowed.argmax(1)
        full[self.units] = columns
        return full

    def gap(self, value: float, bound: float) -> float:
        """Return the gap between a value and a bound, both in steps, as damage."""
        steps = 0.0 if bound > value - self.grain else value - bound
        return ldexp(steps, self.exponent)


def _grain(table: Floats) -> float:
    """Return the largest whole number that divides every entry."""
    return float(max(np.gcd.reduce(table.astype(np.int64), None), 1))


def _in_steps(table: Floats, allowed: Flags) -> tuple[Floats, int]:
    """Return a table in steps above each unit's minimum, and the step's exponent.

    No sum of one entry per unit exceeds 2**52 steps.
    """
    table = table - least_allowed(table, allowed)[:, None]
    table = np.where(allowed, table, 0.0)
    exponent = frexp(table.max(1, initial=0.0).sum())[1] - 52
    return np.rint(np.ldexp(table, -exponent)), exponent


def _label_pass(state: _State, number: int) -> tuple[_State, bool]:
    """Run one pass of the label search; also return whether it was exhaustive."""
    core = _Core.of(state.program)
    bounds = _Bounds.around(core.program, PRICES[min(number, len(PRICES) - 1)])
    if bounds is None:
        return state, True
    # The first pass only tries choices that are nearly best at the relaxation's prices.
    tried = bounds.nearest(NEAR) if number == 0 else core.program.allowed
    choices = max(int(tried.sum()) - len(tried), 1)
    width = max(LABELS * WIDENING**number // choices, NARROWEST)
    ceiling = np.inf
    if state.best is not None:
        ceiling = core.program.value(state.best[core.units])
    narrow = replace(core.program, allowed=tried)
    found, complete = _search(narrow, bounds, ceiling, width)
    complete &= bool((tried == core.program.allowed).all())
    best = state.best if found is None else core.all_columns(found, state.program)
    if best is None:
        return state, complete
    value = core.program.value(best[core.units])
    allowed = state.program.allowed.copy()
    allowed[core.units] = bounds.within(value)
    program = replace(state.program, allowed=allowed)
    gap = core.gap(value, bounds.best)
    if _Core.of(program).exponent < core.exponent - COARSE:  # finer steps may differ
        gap, complete = gap + ldexp(len(core.units), core.exponent), False
    return _State(program, best, gap), complete


def _branch_and_bound(state: _State, nodes: int) -> _State:
    """Continue by branch and bound, always at the open node of least bound."""
    core = _Core.of(state.program)
    program, best = core.program, state.best
    value = np.inf if best is None else program.value(best[core.units])
    queue = [(-np.inf, 0, program.allowed)]
    number = 0
    while queue and queue[0][0] <= value - core.grain and number < nodes:
        number += 1
        _, _, allowed = heapq.heappop(queue)
        node = replace(program, allowed=allowed)
        found, children, bound = _node(node, value - core.grain)
        if found is not None:
            best, value = core.all_columns(found, state.program), program.value(found)
        for child, child_allowed in enumerate(children):
            heapq.heappush(queue, (bound, 2 * number + child, child_allowed))
    bound = queue[0][0] if queue else np.inf
    if best is None:
        return state._replace(gap=0.0 if bound == np.inf else np.inf)
    return _State(state.program, best, min(state.gap, core.gap(value, bound)))


def _node(node: Program, ceiling: float) -> tuple[Columns | None, list[Flags], float]:
    """Solve one node of branch and bound.

    Returns an allocation no worse than the ceiling, if rounding finds one; the allowed
    choices of two child nodes, or none if the node is done; and their lower bound.
    """
    bounds = _Bounds.around(node, 1)
    if bounds is None or bounds.best > ceiling:
        return None, [], np.inf
    shares = bounds.shares
    mixed = np.flatnonzero(shares.max(1) < 1 - WHOLE)
    allowed = node.allowed & bounds.within(ceiling)
    if not allowed.any(1).all():
        return None, [], np.inf
    shares = np.where(allowed, shares, -1.0)
    found = _round_solution(replace(node, allowed=allowed), shares, mixed, ceiling)
    unit = int(np.where(allowed.sum(1) > 1, 1 - shares.max(1), -1.0).argmax())
    order = np.flatnonzero(allowed[unit])
    order = order[np.argsort(node.damage[unit, order], kind="stable")]
    if len(order) == 1:  # every unit is decided
        return found, [], np.inf
    # Split the least decided unit's choices where half of its share lies on each side.
    below = np.cumsum(np.maximum(shares[unit, order], 0))[:-1]
    cut = 1 + int(np.abs(below - 0.5).argmin())
    children = []
    for part in (order[:cut], order[cut:]):
        child = allowed.copy()
        child[unit] = False
        child[unit, part] = True
        children.append(child)
    return found, children, bounds.best


def _round_solution(
    node: Program, shares: Floats, mixed: Columns, ceiling: float
) -> Columns | None:
    """Return the best rounding of a fractional solution within limits and ceiling."""
    columns: Columns = shares.argmax(1)
    every = product(*(np.flatnonzero(node.allowed[unit]).tolist() for unit in mixed))
    picks = np.array([*islice(every, ROUNDINGS)], dtype=np.intp)  # (P, mixed)
    whole = np.setdiff1d(np.arange(len(columns)), mixed)
    used = node.rows[:, whole, columns[whole]].sum(1)[:, None]
    used = used + node.rows[:, mixed, picks].sum(2)  # (K, P)
    damage = node.damage[whole, columns[whole]].sum()
    damage = damage + node.damage[mixed, picks].sum(1)
    fits = (used <= node.limits[:, None]).all(0) & (damage <= ceiling)
    if not fits.any():
        return None
    columns[mixed] = picks[np.where(fits, damage, np.inf).argmin()]
    return columns


class _Bounds(NamedTuple):
    """Lower bounds by weak duality, for P price vectors."""

    prices: Floats  # (P, K)
    totals: Floats  # damage plus priced cost, infinite where not allowed, (P, U, C)
    least: Floats  # the minimum of the totals of each unit, (P, U)
    offset: Floats  # minus the price of all limits and an allowance for rounding, (P,)
    shares: Floats  # the solution of the linear relaxation, (U, C)

    @classmethod
    def around(cls, program: Program, count: int) -> "_Bounds | None":
        """Return bounds for prices around the relaxation's; None if infeasible."""
        relaxed = relaxation(program)
        if relaxed.shares is None:
            return None
        prices = _price_vectors(program, relaxed.prices, count)
        priced = np.tensordot(prices, program.rows, 1)
        totals = np.where(program.allowed, program.damage + priced, np.inf)
        least = totals.min(2)
        worth = prices @ program.limits
        # Each sum has at most U + K terms, each rounded once.
        terms = least.shape[1] + len(program.rows) + 4
        allowance = 4 * EPSILON * terms * (least.sum(1) + np.abs(worth))
        return cls(prices, totals, least, -worth - allowance, relaxed.shares)

    @property
    def best(self) -> float:
        return float((self.least.sum(1) + self.offset).max())

    def nearest(self, count: int) -> Flags:
        """Return each unit's best choice and the next ``count`` overall, (U, C)."""
        extra = self.totals[0] - self.least[0][:, None]
        near: Flags = np.isfinite(extra)
        if extra.size:
            last = min(len(extra) + count, extra.size) - 1
            near &= extra <= np.partition(extra, last, axis=None)[last]
        return near

    def within(self, ceiling: float) -> Flags:
        """Return the choices that an allocation up to the ceiling may have, (U, C)."""
        extra = self.totals - self.least[:, :, None]
        room = ceiling - self.least.sum(1) - self.offset
        kept: Flags = (extra <= room[:, None, None]).all(0)
        return kept


def _price_vectors(program: Program, central: Floats, count: int) -> Floats:
    """Return the relaxation's prices and random ones around them, (count, K).

    Any prices give a valid bound. Those near the relaxation's give the best ones, but
    which is best differs between labels. The seed affects only the running time.
    """
    generator = np.random.default_rng(0)
    spread = generator.random((count - 1, 1)) ** 3
    noise = generator.standard_normal((count - 1, len(central))) * spread
    typical = program.damage.max(1).sum() / np.maximum(program.rows.max(2).sum(1), 1.0)
    around = central * np.exp(noise)
    others = np.where(central > 0, around, typical * np.abs(noise) / 10)
    return np.concatenate([central[None], others])


class _Labels(NamedTuple):
    """S partial allocations."""

    damage: Floats  # sums over the decided units, (S,)
    used: Floats  # (K, S)
    ties: Floats  # (S,)
    columns: NDArray[np.uint8]  # (S, U)

    def take(self, which: Columns) -> "_Labels":
        damage, used, ties, columns = self
        return _Labels(damage[which], used[:, which], ties[which], columns[which])

    def best_first(self) -> Columns:
        """Return the labels in the order of damage, ties, costs and columns, (S,)."""
        keys = np.stack([*self.used[::-1], self.ties, self.damage])
        order = np.lexsort(keys)
        if (np.diff(keys[:, order]) == 0).all(0).any():
            words = self.columns.view(f"S{self.columns.shape[1]}")[:, 0]
            order = np.lexsort((words, *keys))
        return order

    def undominated(self) -> Columns:
        """Return the labels that no other label beats in rank at no higher costs.

        They come in the order of their costs. With several limits only neighbours are
        compared, which finds most of them.
        """
        order = self.best_first()
        good = np.ones(len(order), dtype=bool)
        if len(self.used) == 1:
            used = self.used[0, order]
            good[1:] = used[1:] < np.minimum.accumulate(used)[:-1]
            # What is worse is kept only if it uses less.
            return order[good][::-1]
        ranks = np.empty(len(order), dtype=np.intp)
        ranks[order] = np.arange(len(order))
        order = np.lexsort((ranks, *self.used[::-1]))
        ranks, rows = ranks[order], self.used[:, order]
        for shift in range(1, min(WINDOW + 1, len(order))):
            cheaper = (rows[:, :-shift] <= rows[:, shift:]).all(0)
            good[shift:] &= ~(cheaper & (ranks[:-shift] < ranks[shift:]))
        return order[good]


def _search(
    program: Program, bounds: _Bounds, ceiling: float, width: int
) -> tuple[Columns | None, bool]:
    """Return the best allocation up to the ceiling, and whether no label was dropped.

    Keeps at most ``width`` labels after each unit.
    """
    several = np.flatnonzero(program.allowed.sum(1) > 1)
    labels = _first_label(program)
    # Units that can spend most come first; the others fill the room that these leave.
    spend = np.tensordot(bounds.prices[0], program.rows[:, several], 1)
    rest = bounds.least[:, several].sum(1) + bounds.offset
    complete = True
    for unit in several[np.argsort(-spend.max(1, initial=0.0), kind="stable")]:
        rest = rest - bounds.least[:, unit]
        labels = _branch(labels, program, unit)
        hopeful, bound = _hopeful(labels, bounds.prices, rest, ceiling)
        labels = labels.take(hopeful)
        kept = labels.undominated()
        if len(kept) > width:
            complete = False
            kept = kept[np.argpartition(bound[kept], width)[:width]]
        labels = labels.take(kept)
    if not len(labels.damage):
        return None, complete
    return labels.columns[labels.best_first()[0]].astype(np.intp), complete


def _first_label(program: Program) -> _Labels:
    """Return one label with the decided units, or none if they exceed a limit."""
    units = np.flatnonzero(program.allowed.sum(1) == 1)
    columns = program.allowed.argmax(1).astype(np.uint8)
    label = _Labels(
        program.damage[units, columns[units]].sum(keepdims=True),
        program.rows[:, units, columns[units]].sum(1, keepdims=True),
        program.ties[units, columns[units]].sum(keepdims=True),
        columns[None],
    )
    return label.take(np.flatnonzero((label.used <= program.limits[:, None]).all(0)))


def _branch(labels: _Labels, program: Program, unit: int) -> _Labels:
    """Extend every label by every choice of one unit that fits the limits."""
    choices = np.flatnonzero(program.allowed[unit])
    more = program.rows[:, unit, choices]  # (K, choices)
    used = (labels.used[:, :, None] + more[:, None]).reshape(len(more), -1)
    fits = np.flatnonzero((used <= program.limits[:, None]).all(0))
    parents, picked = np.divmod(fits, len(choices))
    columns = labels.columns[parents]
    columns[:, unit] = choices[picked]
    return _Labels(
        labels.damage[parents] + program.damage[unit, choices[picked]],
        used[:, fits],
        labels.ties[parents] + program.ties[unit, choices[picked]],
        columns,
    )


def _hopeful(
    labels: _Labels, prices: Floats, rest: Floats, ceiling: float
) -> tuple[Columns, Floats]:
    """Return the labels whose bounds do not exceed the ceiling, and these bounds."""
    alive = np.arange(len(labels.damage))
    bound = np.full(len(alive), -np.inf)
    for start in range(0, len(prices), BLOCK):
        part = slice(start, start + BLOCK)
        least = (prices[part] @ labels.used[:, alive] + rest[part, None]).max(0)
        bound = np.maximum(bound, least + labels.damage[alive])
        below = bound <= ceiling
        alive, bound = alive[below], bound[below]
    return alive, bound
