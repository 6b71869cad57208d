"""The exact solution of an allocation program, proved by its own bounds.

For any prices ``p >= 0`` weak duality gives a lower bound that takes one minimum a
unit: ``sum_u min_c (damage + p·rows)[u, c] - p·limits``. The search decides unit after
unit and keeps *labels*: partial allocations that no other one dominates and whose
bound, the best over many vectors of prices around those of the linear relaxation, does
not exceed the best allocation known. It begins narrow, which finds a good allocation,
and widens until no label had to be cut: then the allocation is optimal.

Damage and costs are first rounded to whole steps whose sums float64 holds exactly, one
part in 2**52 of what is undecided. So neither sums nor ties depend on the order of
addition, and no tolerance of a solver enters the result.
"""

from dataclasses import replace
from math import ldexp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.program import EPSILON, Columns, Core, Flags, Floats, Program
from ompq.allocation.relaxations import relaxation

NEAR = 128  # choices that the first pass tries besides each unit's best
LABELS = 2**14  # labels of the first pass, over all units
WIDENING = 8  # how many times more each further pass keeps
NARROWEST = 16  # labels that a pass keeps at least
PASSES = 4  # passes before the proof is given up; the last takes ten seconds
TIE_PASSES = 3  # passes that go through all equally good allocations
NEGLIGIBLE = 1e-9  # a gap, relative to what the limits cost, not worth a long pass
PRICES = (32, 64, 128, 256)  # vectors of prices that bound the labels of a pass
BLOCK = 32  # prices tried at a time
COARSE = 10  # a core that is smaller by this power of 2 deserves finer steps
WINDOW = 16  # neighbours that a label is compared with under several budgets


class Optimum(NamedTuple):
    """The best allocation found, and how much better another could at most be.

    The gap is 0 when the allocation is proved optimal.
    """

    columns: Columns
    gap: float


def minimum(program: Program, *, passes: int = PASSES) -> Optimum | None:
    """Return the allocation of least damage, or None if nothing meets the limits.

    Of equally good allocations, the one with the least sum of ``ties`` is returned; of
    those the one that uses least of the limits, first to last; and of those the
    lexicographically first. (Where ties abound, not all may have been compared.)

    Args:
        program: What to minimise.
        passes: Passes before the proof is given up: the problem is NP-hard, so there
            must be an end. The gap of the result tells.
    """
    found = _widen(program, passes, cautious=False)
    if found is None or (program.used(found.columns) <= program.limits).all():
        return found
    return _widen(program, passes, cautious=True)


def _widen(program: Program, passes: int, *, cautious: bool) -> Optimum | None:
    program = program.affordable()
    if not program.open:
        return None
    ideal = np.where(program.allowed, program.damage, np.inf).min(1).sum()
    best: Columns | None = None
    number = -1
    while True:
        number += 1
        core = Core.of(program, cautious=cautious)
        bounds = _Bounds.around(core.program, PRICES[min(number, len(PRICES) - 1)])
        ceiling = np.inf if best is None else core.program.value(best)
        if number >= TIE_PASSES:
            ceiling -= core.grain  # too many ties: from here on only better ones count
        found, complete = _pass(core.program, bounds, ceiling, number)
        best = best if found is None else found
        if best is None and complete:
            return None
        if best is None:
            continue
        value = core.program.value(best)
        program = replace(program, allowed=bounds.within(value))
        finer = Core.of(program, cautious=cautious).exponent < core.exponent - COARSE
        if complete and not finer:
            return Optimum(best, 0.0)
        gap = ldexp(core.gap(value, bounds.best), core.exponent)
        small = gap <= NEGLIGIBLE * (program.value(best) - ideal)
        if number + 1 >= (TIE_PASSES if small else passes):
            return Optimum(best, gap)


def _pass(
    program: Program, bounds: "_Bounds", ceiling: float, number: int
) -> tuple[Columns | None, bool]:
    """Search once, with a width that makes each pass some times longer."""
    # The first pass looks only at choices that the prices find almost right.
    tried = bounds.nearest(NEAR) if number == 0 else program.allowed
    choices = max(int(tried.sum()) - len(tried), 1)
    width = max(LABELS * WIDENING**number // choices, NARROWEST)
    found, complete = _search(replace(program, allowed=tried), bounds, ceiling, width)
    return found, complete and bool((tried == program.allowed).all())


class _Bounds(NamedTuple):
    """Lower bounds by weak duality, for P vectors of prices.

    ``prices`` is (P, K); ``totals`` (P, U, C) is damage plus priced cost, infinite
    where not allowed; ``least`` (P, U) its minimum; ``offset`` (P,) what the limits
    are worth, with an allowance for rounding.
    """

    prices: Floats
    totals: Floats
    least: Floats
    offset: Floats

    @classmethod
    def around(cls, program: Program, count: int) -> "_Bounds":
        prices = _price_vectors(program, count)
        priced = np.tensordot(prices, program.rows, 1)
        totals = np.where(program.allowed, program.damage + priced, np.inf)
        least = totals.min(2)
        worth = prices @ program.limits
        # Each sum has at most U + K terms, each rounded once.
        terms = least.shape[1] + len(program.rows) + 4
        allowance = 4 * EPSILON * terms * (least.sum(1) + np.abs(worth))
        return cls(prices, totals, least, -worth - allowance)

    @property
    def best(self) -> float:
        return float((self.least.sum(1) + self.offset).max())

    def nearest(self, count: int) -> Flags:
        """Return the best choice of each unit, and the next best ``count`` of all."""
        extra = self.totals[0] - self.least[0][:, None]
        last = min(len(extra) + count, extra.size) - 1
        near: Flags = np.isfinite(extra)
        near &= extra <= np.partition(extra, last, axis=None)[last]
        return near

    def within(self, ceiling: float) -> Flags:
        """Return the choices that an allocation as good as the ceiling may have."""
        extra = self.totals - self.least[:, :, None]
        room = ceiling - self.least.sum(1) - self.offset
        kept: Flags = (extra <= room[:, None, None]).all(0)
        return kept


def _price_vectors(program: Program, count: int) -> Floats:
    """Return the relaxation's prices and others around them, (count, K).

    Any prices bound; those near the relaxation's do so best, and which of them is best
    differs from label to label. The seed is fixed; only the time depends on it.
    """
    prices = relaxation(program).prices
    generator = np.random.default_rng(0)
    spread = generator.random((count - 1, 1)) ** 3
    noise = generator.standard_normal((count - 1, len(prices))) * spread
    typical = program.damage.max(1).sum() / np.maximum(program.rows.max(2).sum(1), 1.0)
    others = np.where(prices > 0, prices * np.exp(noise), typical * np.abs(noise) / 10)
    return np.concatenate([prices[None], others])


class _Labels(NamedTuple):
    """Partial allocations: S sums of damage, rows (K, S) and ties; columns (S, F).

    The columns are those of the F undecided units; of the rest they say nothing.
    """

    damage: Floats
    used: Floats
    ties: Floats
    columns: NDArray[np.uint8]

    def take(self, which: Columns) -> "_Labels":
        damage, used, ties, columns = self
        return _Labels(damage[which], used[:, which], ties[which], columns[which])

    def ranks(self) -> Columns:
        """Return each label's place by damage, ties, rows and columns, (S,)."""
        keys = np.stack([*self.used[::-1], self.ties, self.damage])
        order = np.lexsort(keys)
        if (np.diff(keys[:, order]) == 0).all(0).any():
            words = self.columns.view(f"S{self.columns.shape[1]}")[:, 0]
            order = np.lexsort((words, *keys))
        ranks = np.empty(len(order), dtype=np.intp)
        ranks[order] = np.arange(len(order))
        return ranks

    def undominated(self) -> Columns:
        """Return labels that no other one equals or betters in rank and every row.

        Under several budgets only neighbours are compared, which finds most.
        """
        ranks = self.ranks()
        order: Columns = np.lexsort((ranks, *self.used[::-1])).astype(np.intp)
        ranks, used = ranks[order], self.used[:, order]
        good = np.minimum.accumulate(ranks) == ranks
        if len(used) > 1:
            good = np.ones(len(order), dtype=bool)
            for shift in range(1, min(WINDOW + 1, len(order))):
                cheaper = (used[:, :-shift] <= used[:, shift:]).all(0)
                good[shift:] &= ~(cheaper & (ranks[:-shift] < ranks[shift:]))
        kept: Columns = order[good]
        return kept


def _search(
    program: Program, bounds: _Bounds, ceiling: float, width: int
) -> tuple[Columns | None, bool]:
    """Return the best allocation up to the ceiling, and whether no label was cut."""
    several = program.allowed.sum(1) > 1
    undecided = np.flatnonzero(several)
    labels = _decided(program, ~several)
    # Units with much to spend come first: what follows fills the gaps they leave.
    spend = np.tensordot(bounds.prices[0], program.rows, 1).max(1)[undecided]
    rest = bounds.least[:, undecided].sum(1) + bounds.offset
    complete = True
    for place in np.argsort(-spend, kind="stable"):
        rest = rest - bounds.least[:, undecided[place]]
        labels = _branch(labels, program, undecided[place], place)
        hopeful, bound = _hopeful(labels, bounds.prices, rest, ceiling)
        labels = labels.take(hopeful)
        kept = labels.undominated()
        if len(kept) > width:
            complete = False
            kept = kept[np.argpartition(bound[kept], width)[:width]]
        labels = labels.take(kept)
    if not len(labels.damage):
        return None, complete
    columns = program.allowed.argmax(1)
    columns[undecided] = labels.columns[labels.ranks().argmin()]
    return columns, complete


def _decided(program: Program, decided: Flags) -> _Labels:
    """Return the label of the units with one choice; none if they exceed a limit."""
    units = np.flatnonzero(decided)
    columns = program.allowed.argmax(1)[units]
    label = _Labels(
        program.damage[units, columns].sum(keepdims=True),
        program.rows[:, units, columns].sum(1, keepdims=True),
        program.ties[units, columns].sum(keepdims=True),
        np.zeros((1, len(decided) - len(units)), dtype=np.uint8),
    )
    return label.take(np.flatnonzero((label.used <= program.limits[:, None]).all(0)))


def _branch(labels: _Labels, program: Program, unit: int, place: int) -> _Labels:
    """Return every label with every choice of one unit that the limits leave."""
    choices = np.flatnonzero(program.allowed[unit])
    more = program.rows[:, unit, choices]  # (K, choices)
    used = (labels.used[:, :, None] + more[:, None]).reshape(len(more), -1)
    fits = np.flatnonzero((used <= program.limits[:, None]).all(0))
    parents, picked = np.divmod(fits, len(choices))
    columns = labels.columns[parents]
    columns[:, place] = choices[picked]
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
