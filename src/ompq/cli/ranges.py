"""Which budgets can be met, and what uniform bits would take."""

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from torch import nn

from ompq.allocation.solver import Problem, reachable
from ompq.cli.tables import Column, fitted
from ompq.costs import FLOAT_BITS, cost_tables
from ompq.graph import Choice, trace
from ompq.plans import PlanConfig, choice_table, make_problem
from ompq.samples import SamplesLike


def shape_problem(
    model: nn.Module, samples: SamplesLike, config: PlanConfig
) -> Problem:
    """Return the integer program of a network without any score."""
    graph = trace(model, samples, tie=config.tie).tie(config.tied)
    choices, allowed = choice_table(graph, config)
    costs = cost_tables(
        graph, choices, accounting=config.accounting, latency=config.latency
    )
    nothing = np.zeros((len(graph), len(choices)))
    return make_problem(graph, choices, nothing, allowed, costs)


def range_rows(problem: Problem) -> list[dict[str, Any]]:
    """Return what is reachable, smallest first, with uniform bits in between.

    Each row holds its name (``mark``), and the costs of which a budget may be made.
    """
    limits = {name: reachable(problem, name) for name in problem.costs}
    widths = [choice for choice in problem.choices if choice.weight < FLOAT_BITS]
    uniform = [(f"all {choice}", _uniform(problem, choice)) for choice in widths]
    marks = [
        ("smallest", {name: low for name, (low, _) in limits.items()}),
        *uniform,
        ("largest", {name: high for name, (_, high) in limits.items()}),
    ]
    return [{"mark": mark, **_in_units(problem, costs)} for mark, costs in marks]


def range_table(problem: Problem, width: int) -> RenderableType:
    """Return the reachable budgets as a table; each entry can be given as a budget."""
    rows = range_rows(problem)
    # Uniform bits are mostly the ends themselves: those need no second line.
    costs = [{**row, "mark": ""} for row in rows[1:-1]]
    ends = [row for row in (rows[0], rows[-1]) if {**row, "mark": ""} not in costs]
    rows = sorted([*rows[1:-1], *ends], key=lambda row: row["bytes"])
    columns = [
        Column("", [row["mark"] for row in rows], "left"),
        Column("size", size_budgets([row["bytes"] for row in rows])),
        Column("of float", [as_budget(row["percent"], "%") for row in rows]),
        Column("average", [as_budget(row["average_bits"], "bits") for row in rows]),
        Column("BOPs", operation_budgets([row["bit_ops"] for row in rows])),
    ]
    if "milliseconds" in rows[0]:
        cells = [as_budget(row["milliseconds"], "ms") for row in rows]
        columns.append(Column("latency", cells))
    return fitted(columns, width)


def _uniform(problem: Problem, wanted: Choice) -> dict[str, float]:
    """Return the costs when each unit gets one choice, or the nearest it may get."""
    distance = [
        64 * abs(choice.weight - wanted.weight)
        + abs(choice.activation - wanted.activation)
        for choice in problem.choices
    ]
    columns: NDArray[np.int64] = np.where(
        problem.allowed, np.array(distance), np.iinfo(np.int64).max
    ).argmin(axis=1)
    rows = np.arange(len(columns))
    return {
        name: cost.constant + float(cost.table[rows, columns].sum())
        for name, cost in problem.costs.items()
    }


def _in_units(problem: Problem, costs: dict[str, float]) -> dict[str, float]:
    bits, size = problem.costs["weight_bits"], problem.costs["bytes"]
    others = {name: value for name, value in costs.items() if name != "weight_bits"}
    return {
        **others,
        "percent": 100 * costs["bytes"] / size.reference,
        "average_bits": costs["weight_bits"] / bits.reference,
    }


def size_budgets(sizes: Sequence[float]) -> list[str]:
    """Return sizes as budgets in one unit that suits them all."""
    unit, factor = ("MiB", 2**20) if max(sizes) >= 2**20 else ("KiB", 2**10)
    return [as_budget(size / factor, unit) for size in sizes]


def operation_budgets(numbers: Sequence[float]) -> list[str]:
    """Return bit operations as budgets in one unit that suits them all."""
    unit, factor = ("GBOPs", 1e9) if max(numbers) >= 1e9 else ("MBOPs", 1e6)
    return [as_budget(number / factor, unit) for number in numbers]


def as_budget(value: float, unit: str) -> str:
    """Return a budget of four digits, rounded up so that it can be met."""
    if value <= 0:
        return f"0{unit}"
    digits = max(0, 3 - floor(log10(value)))
    scaled = value * 10**digits
    return f"{ceil(scaled - 1e-9) / 10**digits:.{digits}f}{unit}"
