"""The exact solution of an allocation program, proved by its own bounds.

For any prices ``p >= 0`` weak duality gives a lower bound that takes one minimum a
unit: ``sum_u min_c (damage + p·rows)[u, c] - p·limits``. The search decides unit after
unit and keeps *labels*: partial allocations that no other one dominates and whose
bound, the best over many vectors of prices around those of the linear relaxation, does
not exceed the best allocation known. It begins narrow, which finds a good allocation,
and widens. Where labels had to be cut to the end, branch and bound on the linear
relaxation goes on, for a limited number of nodes; what it leaves open is the gap.

Costs are whole steps, and damage is rounded to steps of one part in 2**52 of what is
undecided: float64 sums both exactly. So neither sums nor ties depend on the order of
addition, and no tolerance of a solver enters the result.
"""

import heapq
from dataclasses import replace
from itertools import islice, product
from math import frexp, ldexp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.program import Columns, Flags, Floats, Program, least_allowed
from ompq.allocation.relaxations import relaxation

NEAR = 128  # choices that the first pass tries besides each unit's best
LABELS = 2**14  # labels of the first pass, over all units
WIDENING = 8  # how many times more each further pass keeps
NARROWEST = 16  # labels that a pass keeps at least
PASSES = 3  # passes before branch and bound; the last takes about a second
NODES = 600  # relaxations that branch and bound may solve, some milliseconds each
NEGLIGIBLE = 1e-9  # a gap, relative to what the limits cost, not worth a branch
PRICES = (32, 64, 128)  # vectors of prices that bound the labels of a pass
BLOCK = 32  # prices tried at a time
COARSE = 10  # a core that is smaller by this power of 2 deserves finer steps
WINDOW = 16  # neighbours that a label is compared with under several budgets
ROUNDINGS = 512  # ways to round a node's mixture that are tried
WHOLE = 1e-6  # a share this near to 0 or 1 is rounding of the solver
EPSILON = float(np.finfo(np.float64).eps)


class Optimum(NamedTuple):
    """The best allocation found, and how much better another could at most be.

    The gap is 0 when that is proved: nothing is better, or, without columns, nothing
    meets the limits. It is infinite when nothing was found and nothing proved.
    """

    columns: Columns | None
    gap: float


def minimum(
    program: Program, *, passes: int = PASSES, nodes: int = NODES, enough: float = 0.0
) -> Optimum:
    """Return the allocation of least damage within the limits.

    Of equally good allocations, the one with the least sum of ``ties`` is returned; of
    those the one that uses least of the limits, first to last; and of those the
    lexicographically first. (Where ties abound, not all may have been compared.)

    Args:
        passes: Passes of the search by labels, each some times longer than the last.
        nodes: Nodes of branch and bound. The problem is NP-hard, so there must be an
            end; it is counted, not timed, so that results do not depend on the machine.
        enough: A gap, relative to what the limits cost, at which the search may stop.
    """
    open_program = program.affordable()
    if open_program is None:
        return Optimum(None, 0.0)
    ideal = least_allowed(program.damage, program.allowed).sum()
    state = _State(open_program, None, np.inf)
    for number in range(passes):
        state, complete = _widened(state, number)
        if complete:
            return Optimum(state.best, 0.0)
        value = np.inf if state.best is None else program.value(state.best)
        if enough and state.gap <= enough * (value - ideal) < np.inf:
            return Optimum(state.best, state.gap)
    if state.gap > NEGLIGIBLE * (value - ideal):
        state = _branched(state, nodes)
    return Optimum(state.best, state.gap)


class _State(NamedTuple):
    """What is still possible, the best allocation so far, and its gap."""

    program: Program
    best: Columns | None
    gap: float


class _Core(NamedTuple):
    """The undecided units in whole steps above each one's least; the rest is spent.

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
        # Room beyond what can be spent is worth nothing and would blur the bounds.
        room = program.limits - program.least.sum(1)
        limits = np.minimum(room, rows.max(2, initial=0.0).sum(1))
        grains = np.array([_grain(row) for row in rows])
        limits = np.floor(limits / grains) * grains
        return cls(
            replace(
                program, damage=damage, rows=rows, limits=limits, ties=ties,
                allowed=allowed,
            ),
            units,
            exponent,
            _grain(damage),
        )  # fmt: skip

    def widened(self, columns: Columns, program: Program) -> Columns:
        """Return columns for all units of the program that this is the core of."""
        full: Columns = program.allowed.argmax(1)
        full[self.units] = columns
        return full

    def gap(self, value: float, bound: float) -> float:
        """Return by how much an allocation could be better than a value in steps."""
        open_steps = 0.0 if bound > value - self.grain else value - bound
        return ldexp(open_steps, self.exponent)


def _grain(table: Floats) -> float:
    """Return the largest whole number that divides every entry."""
    return float(max(np.gcd.reduce(table.astype(np.int64), None), 1))


def _in_steps(table: Floats, allowed: Flags) -> tuple[Floats, int]:
    """Return a table above each unit's least, whose sums take 2**52 steps at most."""
    table = table - least_allowed(table, allowed)[:, None]
    table = np.where(allowed, table, 0.0)
    exponent = frexp(table.max(1, initial=0.0).sum())[1] - 52
    return np.rint(np.ldexp(table, -exponent)), exponent


def _widened(state: _State, number: int) -> tuple[_State, bool]:
    """Search by labels, wider each pass; return also whether nothing is left."""
    core = _Core.of(state.program)
    bounds = _Bounds.around(core.program, PRICES[min(number, len(PRICES) - 1)])
    if bounds is None:
        return state, True
    # The first pass looks only at choices that the prices find almost right.
    tried = bounds.nearest(NEAR) if number == 0 else core.program.allowed
    choices = max(int(tried.sum()) - len(tried), 1)
    width = max(LABELS * WIDENING**number // choices, NARROWEST)
    ceiling = np.inf
    if state.best is not None:
        ceiling = core.program.value(state.best[core.units])
    narrow = replace(core.program, allowed=tried)
    found, complete = _search(narrow, bounds, ceiling, width)
    complete &= bool((tried == core.program.allowed).all())
    best = state.best if found is None else core.widened(found, state.program)
    if best is None:
        return state, complete
    value = core.program.value(best[core.units])
    allowed = state.program.allowed.copy()
    allowed[core.units] = bounds.within(value)
    program = replace(state.program, allowed=allowed)
    gap = core.gap(value, bounds.best)
    if _Core.of(program).exponent < core.exponent - COARSE:  # finer steps may tell more
        gap, complete = gap + ldexp(len(core.units), core.exponent), False
    return _State(program, best, gap), complete


def _branched(state: _State, nodes: int) -> _State:
    """Go on by branch and bound, the node of least bound first."""
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
            best, value = core.widened(found, state.program), program.value(found)
        for child, kept in enumerate(children):
            heapq.heappush(queue, (bound, 2 * number + child, kept))
    bound = queue[0][0] if queue else np.inf
    if best is None:
        return state._replace(gap=0.0 if bound == np.inf else np.inf)
    return _State(state.program, best, min(state.gap, core.gap(value, bound)))


def _node(node: Program, ceiling: float) -> tuple[Columns | None, list[Flags], float]:
    """Return an allocation up to the ceiling if one is at hand, two halves, a bound."""
    bounds = _Bounds.around(node, 1)
    if bounds is None or bounds.best > ceiling:
        return None, [], np.inf
    shares = bounds.shares
    mixed = np.flatnonzero(shares.max(1) < 1 - WHOLE)
    allowed = node.allowed & bounds.within(ceiling)
    if not allowed.any(1).all():
        return None, [], np.inf
    shares = np.where(allowed, shares, -1.0)
    found = _rounded(replace(node, allowed=allowed), shares, mixed, ceiling)
    unit = int(np.where(allowed.sum(1) > 1, 1 - shares.max(1), -1.0).argmax())
    order = np.flatnonzero(allowed[unit])
    order = order[np.argsort(node.damage[unit, order], kind="stable")]
    if len(order) == 1:  # all decided
        return found, [], np.inf
    half = np.cumsum(np.maximum(shares[unit, order], 0))[:-1]
    cut = 1 + int(np.abs(half - 0.5).argmin())
    children = []
    for part in (order[:cut], order[cut:]):
        kept = allowed.copy()
        kept[unit] = False
        kept[unit, part] = True
        children.append(kept)
    return found, children, bounds.best


def _rounded(
    node: Program, shares: Floats, mixed: Columns, ceiling: float
) -> Columns | None:
    """Return the best allocation that differs from the mixture where that is mixed."""
    columns: Columns = shares.argmax(1)
    every = product(*(np.flatnonzero(node.allowed[unit]).tolist() for unit in mixed))
    picks = np.array([*islice(every, ROUNDINGS)], dtype=np.intp)  # (P, mixed)
    rest = np.ones(len(columns), dtype=bool)
    rest[mixed] = False
    units = np.flatnonzero(rest)
    used = node.rows[:, units, columns[units]].sum(1)[:, None]
    used = used + node.rows[:, mixed, picks].sum(2)  # (K, P)
    damage = node.damage[units, columns[units]].sum()
    damage = damage + node.damage[mixed, picks].sum(1)
    fits = (used <= node.limits[:, None]).all(0) & (damage <= ceiling)
    if not fits.any():
        return None
    columns[mixed] = picks[np.where(fits, damage, np.inf).argmin()]
    return columns


class _Bounds(NamedTuple):
    """Lower bounds by weak duality, for P vectors of prices.

    ``prices`` is (P, K); ``totals`` (P, U, C) is damage plus priced cost, infinite
    where not allowed; ``least`` (P, U) its minimum; ``offset`` (P,) what the limits
    are worth, with an allowance for rounding; ``shares`` (U, C) the relaxation's.
    """

    prices: Floats
    totals: Floats
    least: Floats
    offset: Floats
    shares: Floats

    @classmethod
    def around(cls, program: Program, count: int) -> "_Bounds | None":
        """Return bounds, or None if nothing meets the limits."""
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
        """Return the best choice of each unit, and the next best ``count`` of all."""
        extra = self.totals[0] - self.least[0][:, None]
        near: Flags = np.isfinite(extra)
        if extra.size:
            last = min(len(extra) + count, extra.size) - 1
            near &= extra <= np.partition(extra, last, axis=None)[last]
        return near

    def within(self, ceiling: float) -> Flags:
        """Return the choices that an allocation as good as the ceiling may have."""
        extra = self.totals - self.least[:, :, None]
        room = ceiling - self.least.sum(1) - self.offset
        kept: Flags = (extra <= room[:, None, None]).all(0)
        return kept


def _price_vectors(program: Program, central: Floats, count: int) -> Floats:
    """Return the relaxation's prices and others around them, (count, K).

    Any prices bound; those near the relaxation's do so best, and which of them is best
    differs from label to label. The seed is fixed; only the time depends on it.
    """
    generator = np.random.default_rng(0)
    spread = generator.random((count - 1, 1)) ** 3
    noise = generator.standard_normal((count - 1, len(central))) * spread
    typical = program.damage.max(1).sum() / np.maximum(program.rows.max(2).sum(1), 1.0)
    around = central * np.exp(noise)
    others = np.where(central > 0, around, typical * np.abs(noise) / 10)
    return np.concatenate([central[None], others])


class _Labels(NamedTuple):
    """Partial allocations: S sums of damage, rows (K, S) and ties; columns (S, U)."""

    damage: Floats
    used: Floats
    ties: Floats
    columns: NDArray[np.uint8]

    def take(self, which: Columns) -> "_Labels":
        damage, used, ties, columns = self
        return _Labels(damage[which], used[:, which], ties[which], columns[which])

    def best_first(self) -> Columns:
        """Return the labels in the order of damage, ties, rows and columns, (S,)."""
        keys = np.stack([*self.used[::-1], self.ties, self.damage])
        order = np.lexsort(keys)
        if (np.diff(keys[:, order]) == 0).all(0).any():
            words = self.columns.view(f"S{self.columns.shape[1]}")[:, 0]
            order = np.lexsort((words, *keys))
        return order

    def undominated(self) -> Columns:
        """Return labels that no other one equals or betters in rank and every row.

        They are in the order of their rows. Under several budgets only neighbours are
        compared, which finds most.
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
    """Return the best allocation up to the ceiling, and whether no label was cut."""
    several = np.flatnonzero(program.allowed.sum(1) > 1)
    labels = _first_label(program)
    # Units with much to spend come first: what follows fills the gaps they leave.
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
    """Return the label of the units with one choice; none if they exceed a limit."""
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
    """Return every label with every choice of one unit that the limits leave."""
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
    """Return the labels that may end below the ceiling, and their lower bounds."""
    alive = np.arange(len(labels.damage))
    bound = np.full(len(alive), -np.inf)
    for start in range(0, len(prices), BLOCK):
        part = slice(start, start + BLOCK)
        least = (prices[part] @ labels.used[:, alive] + rest[part, None]).max(0)
        bound = np.maximum(bound, least + labels.damage[alive])
        below = bound <= ceiling
        alive, bound = alive[below], bound[below]
    return alive, bound
