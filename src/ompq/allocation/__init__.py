"""Choose the bits that do least damage within a budget, and explain the choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Literal, get_args

import numpy as np

from ompq.allocation.program import Allocation, Columns, Problem, Program, least_allowed
from ompq.allocation.search import (
    NODES,
    Optimum,
    evolved,
    floor_or_ceiling,
    minimum,
    relaxation,
    rounded,
)
from ompq.costs import PURPOSES, Budget, Cost, enough, readable
from ompq.errors import (
    InfeasibleBudgetError,
    PatternError,
    check_known,
    shortened,
    suggestion,
)
from ompq.results import Progress
from ompq.units import Choice

__all__ = [
    "METHODS",
    "Allocation",
    "Explanation",
    "Method",
    "ParetoPoint",
    "Problem",
    "allocate",
    "check_budget",
    "explain",
    "halfway",
    "pareto",
    "reachable",
]

Method = Literal["exact", "relax", "relax-round", "relax-dfs", "genetic"]
METHODS: tuple[str, ...] = get_args(Method)

# The paper searches depth-first in small networks, such as ResNet-18, and rounds in
# those with more decisions than this, such as MobileNetV2 and ResNet-50.
DEPTH_FIRST = 32
CURVE_GAP = 1e-5  # relative gap that no one would see in a plotted Pareto curve


@dataclass(frozen=True)
class ParetoPoint:
    """The best allocation under one limit."""

    limit: float
    cost: float  # what the allocation costs; at most the limit
    damage: float
    allocation: Allocation


def allocate(
    problem: Problem, budget: Budget | str, *, method: Method = "exact", seed: int = 0
) -> Allocation:
    """Return the allocation of least damage within a budget.

    Its ``gap`` bounds how much better another allocation could be; 0 proves it optimal.

    Args:
        method: ``exact``, or a published method. The paper's ``relax-round`` rounds the
            linear relaxation, ``relax-dfs`` searches its floors and ceilings, and
            ``relax`` picks the first for large networks, the second for small ones.
            ``genetic`` is BRECQ's search. All of them keep to the budget; one that
            finds nothing, because limits conflict, falls back to ``exact``.
        seed: Seed of the genetic search.

    Raises:
        BudgetError: The budget cannot be read, or limits a cost that is not there.
        InfeasibleBudgetError: No allocation meets the budget.

    Example:
        A 4-bit unit of 100 weights takes 50 bytes, a 2-bit one 25:

        >>> two = (Choice(2, 8), Choice(4, 8))
        >>> size = Cost("bytes", np.array([[25.0, 50.0], [25.0, 50.0]]))
        >>> problem = Problem(
        ...     names=("a", "b"),
        ...     choices=two,
        ...     damage=np.array([[3.0, 1.0], [9.0, 1.0]]),
        ...     costs={"bytes": size},
        ...     allowed=np.ones((2, 2), dtype=bool),
        ...     groups=np.arange(2),
        ... )
        >>> dict(allocate(problem, "80B"))
        {'a': Choice(weight=2, activation=8), 'b': Choice(weight=4, activation=8)}
    """
    check_known("method", method, METHODS)
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    solve = partial(_solve, limits=limits, method=method, seed=seed)
    allocation = _best_of(problem, [*map(solve, problem.cases(limits))])
    if allocation is None:
        raise conflict(problem, limits)
    return allocation


def _best_of(problem: Problem, found: Sequence[Allocation | None]) -> Allocation | None:
    """Return the best allocation of all cases of a problem, with the overall gap."""
    damages = [(problem.damage_of(one), one) for one in found if one is not None]
    if not damages:
        return None
    damage, best = min(damages, key=lambda pair: pair[0])
    bound = min(damage - one.gap for damage, one in damages)
    return replace(best, gap=max(damage - bound, 0.0))


def _solve(
    problem: Problem,
    limits: Mapping[str, float],
    method: Method = "exact",
    *,
    seed: int = 0,
    quick: bool = False,
) -> Allocation | None:
    """Return the best allocation within the limits, or None if there is none.

    A limit on memory holds at every moment of a forward pass, but few moments matter.
    Constraints are added only for those at which a solution exceeds the limit.
    """
    nodes, enough = (0, CURVE_GAP) if quick else (NODES, 0.0)
    problem, limits = _with_moments(problem, limits)
    linear = {n: m for n, m in limits.items() if problem.costs[n].memory is None}
    # Costs that are not short decimals are rounded to steps. Start with limits raised
    # by what rounding may have added; tighten them if the true total is too high.
    exact = all(problem.costs[name].scale is not None for name in linear)
    for slack in (0.0,) if exact else (0.5, 0.0, -0.5):
        program = problem.program(linear, slack)
        found = _by_published_method(program, method, seed)
        found = found or minimum(program, nodes=nodes, enough=enough)
        if found.columns is None:
            if found.gap > 0:
                raise conflict(problem, linear, proved=False)
            return None
        allocation = replace(problem.allocation(found.columns), gap=found.gap)
        if all(problem.total(name, allocation) <= linear[name] for name in linear):
            more = _with_moments(problem, limits, allocation)
            if len(more[1]) == len(limits):
                return allocation
            return _solve(*more, method, seed=seed, quick=quick)
    return None


def _with_moments(
    problem: Problem, limits: Mapping[str, float], allocation: Allocation | None = None
) -> tuple[Problem, Mapping[str, float]]:
    """Add a linear cost and limit for one more moment of each limited memory.

    Without an allocation, that is the moment of the peak with the fewest bits. With
    one, it is the moment of its peak, and nothing is added if the peak fits.
    """
    costs, more_limits = dict(problem.costs), dict(limits)
    for name, limit in limits.items():
        cost, moment = problem.costs[name], None
        if cost.memory is None:
            continue
        if allocation is not None:
            columns = problem.columns(allocation)
            if cost.total(columns) <= limit:
                continue
            moment = cost.memory.peak(columns)[1]
        linear = Cost.of_memory(name, cost.memory, cost.base, moment)
        costs[f"{name} {moment}"] = replace(linear, memory=None)
        more_limits[f"{name} {moment}"] = limit
    if more_limits == limits:  # keeps what the problem has cached
        return problem, limits
    return replace(problem, costs=costs), more_limits


def _by_published_method(program: Program, method: Method, seed: int) -> Optimum | None:
    """Solve with a published method; None for ``exact`` or if it finds nothing."""
    columns = None
    if method == "relax":
        method = "relax-dfs" if len(program.damage) <= DEPTH_FIRST else "relax-round"
    if method == "relax-round":
        columns = rounded(program)
    elif method == "relax-dfs":
        columns = minimum(floor_or_ceiling(program)).columns
    elif method == "genetic":
        columns = evolved(program, seed=seed)
    if columns is None:
        return None
    shares = relaxation(program).shares
    bound = -inf if shares is None else float((shares * program.damage).sum())
    return Optimum(columns, max(program.value(columns) - bound, 0.0))


def pareto(
    problem: Problem,
    cost: str = "bytes",
    points: int = 100,
    *,
    progress: Progress | None = None,
) -> tuple[ParetoPoint, ...]:
    """Return the least damage at increasing limits on one cost.

    Args:
        points: Number of limits, evenly spaced between the cheapest allocation and the
            one of least damage. Limits with the same solution share a point, so fewer
            points may be returned.
    """
    if points < 2:
        raise ValueError(f"points={points} is too few for a curve; use at least 2")
    smallest, largest = reachable(problem, cost)
    found = [_best_under(problem, cost, largest)]
    limits = np.linspace(smallest, found[0].cost, points)[-2::-1].tolist()
    for done, limit in enumerate(limits, 2):
        if limit < found[-1].cost:  # otherwise the last point solves this limit, too
            point = _best_under(problem, cost, limit)
            found = [p for p in found if p.damage < point.damage] + [point]
        if progress is not None:
            progress(done, points, f"solving for {cost}")
    return tuple(found[::-1])


def _best_under(problem: Problem, cost: str, limit: float) -> ParetoPoint:
    def solve(limit: float) -> Allocation | None:
        each = partial(_solve, limits={cost: limit}, quick=True)
        return _best_of(problem, [*map(each, problem.cases([cost]))])

    while (allocation := solve(limit)) is None:
        # Rounding put the lowest limit just below the cheapest allocation.
        limit = float(np.nextafter(limit, np.inf))
    used = problem.total(cost, allocation)
    return ParetoPoint(limit, used, problem.damage_of(allocation), allocation)


LEAST_BITS = 2  # fewest bits of a weight that is not coded
# Costs that coding the weights would reduce.
_WEIGHT_COSTS = ("bytes", "graph_bytes", "total_bytes", "weight_bits")
WORST = 5  # number of largest units to name, besides pinned ones


def reachable(problem: Problem, cost: str) -> tuple[float, float]:
    """Return the least and the most that any allocation costs."""
    check_known("cost", cost, problem.costs)
    table = problem.costs[cost].table
    if problem.costs[cost].memory is not None:
        # The table is that of one moment, where most units have the same cost at every
        # choice. Break these ties by the bits of the activations.
        table = table + 1e-3 * np.array([c.activation for c in problem.choices])
    table = problem.by_group(table)
    totals = []
    for case in problem.cases([cost]):
        least = np.where(case.group_allowed, table, np.inf).argmin(1)
        most = np.where(case.group_allowed, table, -np.inf).argmax(1)
        total = case.costs[cost].total
        totals += [total(columns[problem.group_of]) for columns in (least, most)]
    return min(totals), max(totals)


def halfway(problem: Problem, cost: str) -> float:
    """Return the mean of the least and the most that any allocation costs.

    With the choices W4A4 and W8A8 this is HAWQ-V3's medium limit.
    """
    return sum(reachable(problem, cost)) / 2


def check_budget(problem: Problem, budget: Budget | str) -> None:
    """Raise an InfeasibleBudgetError if a budget cannot be met."""
    limits = Budget.of(budget).limits(problem.costs)
    check_each(problem, limits)
    if len(limits) > 1:
        programs = (case.program(limits, slack=0.5) for case in problem.cases(limits))
        # Any allocation within the limits will do, whatever its damage.
        found = [minimum(replace(p, damage=np.zeros_like(p.damage))) for p in programs]
        if all(optimum.columns is None for optimum in found):
            proved = all(optimum.gap == 0 for optimum in found)
            raise conflict(problem, limits, proved=proved)


def check_each(problem: Problem, limits: Mapping[str, float]) -> None:
    """Raise an InfeasibleBudgetError if a limit cannot be met even on its own."""
    for name, limit in limits.items():
        smallest, _ = reachable(problem, name)
        if smallest > limit:
            raise _infeasible(problem, name, limit, smallest)


def conflict(
    problem: Problem, limits: Mapping[str, float], *, proved: bool = True
) -> InfeasibleBudgetError:
    """Return the error for limits that cannot be met together.

    It names one cost and its least value within the other limits.
    """
    for name, limit in reversed([*limits.items()]):
        others = {key: value for key, value in limits.items() if key != name}
        if not others:
            break
        table = problem.by_group(problem.costs[name].table)
        least = [
            minimum(replace(case.program(others), damage=table), nodes=0).columns
            for case in problem.cases(limits)
        ]
        totals = [
            problem.total(name, problem.allocation(columns))
            for columns in least
            if columns is not None
        ]
        if totals:
            smallest = min(totals)
            texts = [
                readable(problem.costs[other], amount)[0] + PURPOSES.get(other, "")
                for other, amount in others.items()
            ]
            together = f" with {' and '.join(texts)}"
            return _infeasible(problem, name, limit, smallest, together, proved=proved)
    name, limit = next(iter(limits.items()))
    together = " with the other limits" if len(limits) > 1 else ""
    smallest = reachable(problem, name)[0]
    return _infeasible(problem, name, limit, smallest, together, proved=proved)


def _infeasible(
    problem: Problem,
    name: str,
    limit: float,
    smallest: float,
    together: str = "",
    *,
    proved: bool = True,
) -> InfeasibleBudgetError:
    largest = reachable(problem, name)[1]
    texts = readable(problem.costs[name], limit, smallest, largest)
    units, described = _largest_units(problem, name)
    most = f"Most is taken by {described}. " if units else ""
    verdict = "cannot be met" if proved else "was not met within the search's limit"
    purpose = PURPOSES.get(name, "")
    return InfeasibleBudgetError(
        f"a budget of {texts[0]}{purpose} {verdict}{together}: allocations take from "
        f"{texts[1]} to {texts[2]}. {most}{_advice(problem, name, smallest)}",
        cost=name,
        limit=limit,
        smallest=smallest,
        largest=largest,
        units=units,
    )


def _advice(problem: Problem, name: str, smallest: float) -> str:
    """Return a sentence that says what would make a budget feasible."""
    cost, choices = problem.costs[name], problem.choices
    weights_count = name in _WEIGHT_COSTS
    ways = [f"Raise it to {enough(cost, smallest)} or more"]
    already_coded = any(choice.rate for choice in choices)
    if already_coded and weights_count:
        ways.append("allow lower rates (--rates, rates=...)")
    elif min(choice.weight for choice in choices) > LEAST_BITS or not weights_count:
        ways.append("allow fewer bits")
    # Units with few weights cannot have low rates, pinned or not.
    if not problem.allowed[:, [not choice.rate for choice in choices]].all():
        ways.append("remove pins")
    text = " or ".join(filter(None, [", ".join(ways[:-1]), ways[-1]]))
    if already_coded or not weights_count or "weight_bits" not in problem.costs:
        return text
    # A coded weight may take as little as one bit. Pinned units keep their bits.
    allowed = problem.group_allowed[problem.group_of]
    pinned = (allowed.sum(1) == 1) & (len(choices) > 1)
    bits = problem.costs["weight_bits"].table
    weights = bits[:, 0] / choices[0].bits
    excess = (least_allowed(bits, allowed) - weights)[~pinned]
    saved = excess.sum() / (1 if name == "weight_bits" else 8)
    if not saved:
        return text
    coded = readable(cost, max(smallest - saved, 0.0))[0]
    return (
        f'{text}. A plan with coded weights (--coded, storage="coded") may take about '
        f"{coded} or less"
    )


def _largest_units(problem: Problem, name: str) -> tuple[tuple[str, ...], str]:
    """Name and describe the units that cost most, and pinned ones, at their least."""
    cost = problem.costs[name]
    if cost.memory is not None and cost.base is None:  # activations belong to no unit
        return (), ""
    table = np.where(problem.group_allowed, problem.by_group(cost.table), np.inf)
    least: dict[int, float] = {}
    pinned: dict[int, str] = {}
    for members, group in zip(problem.members, table, strict=True):
        column = int(group.argmin())
        for unit in members:
            least[unit] = float(cost.table[unit, column])
            if np.isfinite(group).sum() == 1 and least[unit] > cost.table[unit].min():
                pinned[unit] = f", pinned to {problem.choices[column]}"
    ordered = sorted(least, key=lambda unit: -least[unit])
    named = [u for place, u in enumerate(ordered) if place < WORST or u in pinned]
    texts = [
        f"{problem.names[u]} ({readable(cost, least[u])[0]}{pinned.get(u, '')})"
        for u in named
    ]
    return tuple(problem.names[u] for u in named), shortened(texts)


@dataclass(frozen=True)
class Option:
    """One choice for a unit and the units tied to it."""

    choice: Choice
    damage: float
    costs: Mapping[str, float]  # by name, for the costs that the budget limits
    # By how much limits would be exceeded if all other units kept their bits.
    over: Mapping[str, float]
    allowed: bool


@dataclass(frozen=True)
class Exchange:
    """Another choice of this unit together with another choice of one other unit."""

    choice: Choice  # what this unit would get
    unit: str  # the other unit
    before: Choice  # what the other unit has
    after: Choice  # what the other unit would get
    damage: float  # change of the total damage; never negative at the optimum


@dataclass(frozen=True)
class Explanation:
    """Why a unit got its bits; ``str`` gives it in words."""

    unit: str
    tied: tuple[str, ...]  # units that share its bits
    choice: Choice
    options: tuple[Option, ...]  # every choice, in the order of the columns
    limits: Mapping[str, float]  # the budget, by cost
    used: Mapping[str, float]  # what the allocation uses of the budget
    # Marginal damage saved by one more unit of each limit: the dual prices of the
    # linear relaxation.
    prices: Mapping[str, float]
    better: Option | None  # the next allowed choice of less damage, if there is one
    worse: Option | None  # the next allowed choice of more damage, if there is one
    exchange: Exchange | None  # the best exchange with one other unit within the budget
    text: str = field(default="", repr=False)  # the explanation in words

    def __str__(self) -> str:
        return self.text


def explain(
    problem: Problem, budget: Budget | str, allocation: Mapping[str, Choice], unit: str
) -> Explanation:
    """Explain why a unit got its bits.

    Raises:
        PatternError: There is no such unit.
        PlanError: The allocation does not belong to the problem.
        TypeError: The unit is not given by its name.
    """
    if not isinstance(unit, str):
        raise TypeError(
            f"unit is of type {type(unit).__name__}, not a name; give for example "
            f"{problem.names[0]!r}"
        )
    if unit not in problem.names:
        raise PatternError(
            f"{unit!r} is not a unit{suggestion(unit, problem.names)}; the "
            f"{len(problem.names)} units are {shortened(problem.names)}"
        )
    limits = Budget.of(budget).limits(problem.costs)
    chosen = problem.columns(allocation)
    costs = {name: cost.beside(chosen) for name, cost in problem.costs.items()}
    problem = replace(problem, costs=costs)
    program = problem.program(limits)
    columns = chosen[[units[0] for units in problem.members]]
    position = problem.names.index(unit)
    group = int(problem.group_of[position])
    options = _options(problem, program, columns, group, tuple(limits))
    current = options[columns[group]]
    allowed = sorted((o for o in options if o.allowed), key=lambda o: o.damage)
    prices = relaxation(program).prices * program.scales
    found = Explanation(
        unit=unit,
        tied=tuple(problem.names[u] for u in problem.members[group] if u != position),
        choice=current.choice,
        options=options,
        limits=limits,
        used={name: problem.total(name, allocation) for name in limits},
        prices=dict(zip(limits, prices.tolist(), strict=True)),
        better=next((o for o in reversed(allowed) if o.damage < current.damage), None),
        worse=next((o for o in allowed if o.damage > current.damage), None),
        exchange=_best_exchange(problem, program, columns, group),
    )
    return replace(found, text="\n".join(_lines(found, current, problem.costs)))


def _options(
    problem: Problem,
    program: Program,
    columns: Columns,
    group: int,
    names: tuple[str, ...],
) -> tuple[Option, ...]:
    tables = {name: problem.by_group(problem.costs[name].table) for name in names}
    found = []
    unit = problem.names[problem.members[group][0]]
    for column in range(len(problem.choices)):
        changed = columns.copy()
        changed[group] = column
        over = (program.used(changed) - program.limits) / program.scales
        found.append(
            Option(
                choice=problem.chosen(unit, column),
                damage=float(program.damage[group, column]),
                costs={n: float(t[group, column]) for n, t in tables.items()},
                over={n: float(o) for n, o in zip(names, over, strict=True) if o > 0},
                allowed=bool(program.allowed[group, column]),
            )
        )
    return tuple(found)


def _best_exchange(
    problem: Problem, program: Program, columns: Columns, group: int
) -> Exchange | None:
    groups = np.arange(len(columns))
    harm = program.damage - program.damage[groups, columns][:, None]
    change = program.rows - program.rows[:, groups, columns][:, :, None]
    others = program.allowed.copy()
    others[group] = False
    others[groups, columns] = False
    room = (program.limits - program.used(columns))[:, None, None]
    best: tuple[float, int, int, int] | None = None
    for column in np.flatnonzero(program.allowed[group]).tolist():
        after = change + change[:, group, column][:, None, None]
        fits = others & (after <= room).all(0)
        if column == columns[group] or not fits.any():
            continue
        net = np.where(fits, harm + harm[group, column], np.inf)
        other, target = divmod(int(net.argmin()), net.shape[1])
        candidate = (float(net[other, target]), column, other, target)
        best = candidate if best is None else min(best, candidate)
    if best is None:
        return None
    damage, column, other, target = best
    own, unit = (problem.names[problem.members[g][0]] for g in (group, other))
    return Exchange(
        choice=problem.chosen(own, column),
        unit=unit,
        before=problem.chosen(unit, int(columns[other])),
        after=problem.chosen(unit, target),
        damage=damage,
    )


def _lines(found: Explanation, current: Option, costs: Mapping[str, Cost]) -> list[str]:
    tied = f", shared with {shortened(found.tied)}" if found.tied else ""
    lines = [f"{found.unit}: {found.choice}{tied}", ""]
    amounts = [
        readable(costs[name], *(option.costs[name] for option in found.options))
        for name in found.limits
    ]
    for option, *cells in zip(found.options, *amounts, strict=True):
        mark = ">" if option is current else " "
        spent = "".join(f"{cell:>16}" for cell in cells)
        note = "" if option.allowed else "   not allowed"
        lines.append(
            f"{mark} {option.choice!s:<7} damage {option.damage:<12.5g}{spent}{note}"
        )
    lines.append("")
    for name, limit in found.limits.items():
        used, most = readable(costs[name], found.used[name], limit)
        lines.append(f"{name}: {used} of {most} used; {_price(found, costs[name])}.")
    if found.better:
        over = [readable(costs[n], v)[0] for n, v in found.better.over.items()]
        fits = f", {' and '.join(over)} too much" if over else ", and it would fit"
        lines.append(f"Next better: {_difference(found.better, current, costs)}{fits}.")
    if found.worse:
        lines.append(f"Next worse: {_difference(found.worse, current, costs)}.")
    if found.exchange:
        e = found.exchange
        verdict = "refused" if e.damage >= 0 else "that would help"
        lines.append(
            f"Exchange {verdict}: {e.choice} here and {e.after} instead of {e.before} "
            f"for {e.unit}: damage {e.damage:+.4g}."
        )
    return lines


def _difference(option: Option, current: Option, costs: Mapping[str, Cost]) -> str:
    parts = [f"damage {option.damage - current.damage:+.4g}"]
    for name, value in option.costs.items():
        change = value - current.costs[name]
        sign = "-" if change < 0 else "+"
        parts.append(f"{sign}{readable(costs[name], abs(change))[0]}")
    return f"{option.choice} ({', '.join(parts)})"


def _price(found: Explanation, cost: Cost) -> str:
    price = found.prices[cost.name]
    if price <= 0:
        return "this limit is not binding"
    amount, unit = {
        **dict.fromkeys(("bytes", "onnx_bytes", "graph_bytes"), (1024.0, "KiB")),
        "bit_ops": (1e9, "GBOP"),
        "weight_bits": (cost.reference / 100 or 1.0, "hundredth of a bit"),
        "milliseconds": (1.0, "ms"),
    }.get(cost.name, (1.0, "unit"))
    return f"one {unit} more would save about {price * amount:.3g} damage"
