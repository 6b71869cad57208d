"""Explanations: why a unit has its bits, and what another choice would cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ompq.allocation.problem import Columns, Problem, Program
from ompq.allocation.relaxation import relaxation
from ompq.budgets import Budget
from ompq.cost_tables import FILES, Cost, readable
from ompq.errors import PatternError, shorten, suggestion
from ompq.network.units import Choice


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
            f"{len(problem.names)} units are {shorten(problem.names)}"
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
    tied = f", shared with {shorten(found.tied)}" if found.tied else ""
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
        verdict = "no gain" if e.damage >= 0 else "a gain"
        lines.append(
            f"Best exchange: {e.choice} here, {e.after} instead of {e.before} "
            f"for {e.unit}: damage {e.damage:+.4g}, {verdict}."
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
        **dict.fromkeys(("bytes", *FILES), (1024.0, "KiB")),
        "bit_ops": (1e9, "GBOP"),
        "weight_bits": (cost.reference / 100 or 1.0, "hundredth of a bit"),
        "milliseconds": (1.0, "ms"),
    }.get(cost.name, (1.0, "unit"))
    return f"one {unit} more would save about {price * amount:.3g} damage"
