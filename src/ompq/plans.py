"""Plan: a decision with everything it was made from, saved and solved again."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ompq.allocation.solving import (
    Allocation,
    Budget,
    Explanation,
    Method,
    ParetoPoint,
    Problem,
    allocate,
    explain,
    pareto,
)
from ompq.costs import Accounting, Bytes, Cost, LatencyTable, cost_tables, unit_bytes
from ompq.errors import PlanError, TargetError, shortened
from ompq.files import read_json, write_text
from ompq.graph.units import Choice, LayerGraph, Skipped
from ompq.samples import Progress
from ompq.scores import ScoreTable
from ompq.targets import Target

FORMAT = "ompq-plan/1"
_ADVICE = "Give a file that ompq plan or Plan.save wrote"


@dataclass(frozen=True)
class Plan:
    """A decision with everything it was made from; needs no model to be re-solved.

    Attributes:
        graph: The network's units.
        choices: Columns of the tables.
        scores: Expected damage of each choice of each unit, and its reasons.
        allowed: Which choices each unit may get, (units, choices).
        budget: What the allocation keeps to.
        allocation: Unit name → bits.
        accounting: How bytes are counted.
        method: How the allocation was found.
        score_name: What the damage is.
        latency: Milliseconds of each unit at each choice, where known.
        target: Where the network will run, if that was said.
    """

    graph: LayerGraph
    choices: tuple[Choice, ...]
    scores: ScoreTable
    allowed: NDArray[np.bool_]
    budget: Budget
    allocation: Allocation
    accounting: Accounting = "packed"
    method: Method = "exact"
    score_name: str = ""
    latency: LatencyTable | None = None
    target: Target | None = None

    @cached_property
    def problem(self) -> Problem:
        """The integer program: damage, costs, ties and pins."""
        costs = cost_tables(
            self.graph, self.choices, accounting=self.accounting, latency=self.latency
        )
        return make_problem(
            self.graph, self.choices, self.scores.damage, self.allowed, costs
        )

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """The column of each unit's choice, (units,)."""
        return np.array(
            [self.choices.index(self.allocation[n]) for n in self.graph.names]
        )

    @cached_property
    def totals(self) -> dict[str, float]:
        """What the allocation costs, by cost; and its average weight bits."""
        rows = np.arange(len(self.graph))
        found = {
            name: cost.constant + float(cost.table[rows, self.columns].sum())
            for name, cost in self.problem.costs.items()
        }
        weights = self.problem.costs["weight_bits"].reference
        return {**found, "average_bits": found["weight_bits"] / weights}

    @property
    def bytes_by_item(self) -> dict[str, int]:
        """Bytes of a packed file, item by item, over all units and what stays float."""
        rows = [unit_bytes(u, self.allocation[u.name]) for u in self.graph.units]
        items = {
            name: sum(getattr(row, name) for row in rows)
            for name in Bytes.__dataclass_fields__
        }
        return {**items, "float": 4 * self.graph.float_parameters}

    @property
    def no_speed_up(self) -> tuple[Skipped, ...]:
        """The units whose bits make nothing faster on the target, with reasons."""
        target, bits = self.target, self.allocation
        if target is None:
            return ()
        reasons = {
            u.name: target.no_speed_up(u, bits[u.name]) for u in self.graph.units
        }
        return tuple(Skipped(name, why) for name, why in reasons.items() if why)

    @property
    def damage(self) -> float:
        """The expected damage of the allocation, as scored."""
        rows = np.arange(len(self.graph))
        return float(self.scores.damage[rows, self.columns].sum())

    @cached_property
    def hash(self) -> str:
        """A short digest of the whole plan: equal plans have equal hashes."""
        return hashlib.sha256(self._text().encode()).hexdigest()[:16]

    def with_budget(self, budget: Budget | str) -> "Plan":
        """Solve again for another budget; needs neither model nor samples."""
        budget = Budget.of(budget)
        allocation = allocate(self.problem, budget, method=self.method)
        return replace(self, budget=budget, allocation=allocation)

    def pareto(
        self,
        cost: str = "bytes",
        points: int = 100,
        *,
        progress: Progress | None = None,
    ) -> tuple[ParetoPoint, ...]:
        """Return the curve of damage against a cost, by re-solving."""
        return pareto(self.problem, cost, points, progress=progress)

    def explain(self, unit: str) -> Explanation:
        """Tell why a unit got its bits."""
        return explain(self.problem, self.budget, self.allocation, unit)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the same plan gives the same bytes."""
        write_text(path, self._text())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: The file is missing, no plan, or of another version.
        """
        try:
            data = read_json(path)
        except ValueError as error:
            raise PlanError(f"{path} is no plan: {error}. {_ADVICE}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(f"{path} is no plan of format {FORMAT}. {_ADVICE}")
        try:
            return _from_json(data)
        except (KeyError, TypeError, ValueError, IndexError, TargetError) as error:
            raise PlanError(
                f"{path} is a broken plan: {error!r}. Undo your edits or plan anew"
            ) from error

    def check_network(self, graph: LayerGraph) -> None:
        """Make sure that the plan was made for this network.

        Raises:
            PlanError: It was not; says which units differ.
        """
        differing = self.graph.differing(graph)
        if differing:
            raise PlanError(
                f"the plan was made for another network: {len(differing)} units differ "
                f"({shortened(differing)})"
            )

    def _text(self) -> str:
        return json.dumps(_to_json(self), indent=1, ensure_ascii=False) + "\n"


def make_problem(
    graph: LayerGraph,
    choices: tuple[Choice, ...],
    damage: NDArray[np.float64],
    allowed: NDArray[np.bool_],
    costs: Mapping[str, Cost],
) -> Problem:
    """Put the integer program together: ties come from the graph."""
    order = {name: number for number, name in enumerate(graph.groups)}
    return Problem(
        names=graph.names,
        choices=choices,
        damage=damage,
        costs=costs,
        allowed=allowed,
        groups=np.array([order[unit.group] for unit in graph.units]),
    )


def _to_json(plan: Plan) -> dict[str, Any]:
    scores = plan.scores
    return {
        "format": FORMAT,
        "budget": str(plan.budget),
        "score": plan.score_name,
        "method": plan.method,
        "accounting": plan.accounting,
        "allocation": plan.allocation.to_json(),
        "choices": [list(choice) for choice in plan.choices],
        "allowed": plan.allowed.astype(int).tolist(),
        "damage": scores.damage.tolist(),
        "gamma": _list(scores.gamma),
        "importance": _list(scores.importance),
        "orm": _list(scores.orm),
        "orm_labels": list(scores.orm_labels),
        "latency": plan.latency,
        "graph": plan.graph.to_json(),
        # Plans without a target read, and hash, as they did before there were any.
        **({} if plan.target is None else {"target": plan.target.to_json()}),
    }


def _from_json(data: Mapping[str, Any]) -> Plan:
    scores = ScoreTable(
        damage=np.array(data["damage"], dtype=np.float64),
        orm=_array(data["orm"]),
        orm_labels=tuple(data["orm_labels"]),
        gamma=_array(data["gamma"]),
        importance=_array(data["importance"]),
    )
    loaded = Plan(
        graph=LayerGraph.from_json(data["graph"]),
        choices=tuple(Choice(*choice) for choice in data["choices"]),
        scores=scores,
        allowed=np.array(data["allowed"], dtype=bool),
        budget=Budget.parse(data["budget"]),
        allocation=Allocation.from_json(data["allocation"]),
        accounting=data["accounting"],
        method=data["method"],
        score_name=data["score"],
        latency=data["latency"],
        target=Target.from_json(data["target"]) if "target" in data else None,
    )
    # The allocation may have been edited by hand: it must still be one of ours.
    missing = [n for n in loaded.graph.names if n not in loaded.allocation]
    if missing:
        raise ValueError(f"no bits for {shortened(missing)}")
    _ = loaded.columns, loaded.problem
    return loaded


def _list(array: NDArray[np.float64] | None) -> Any:
    return None if array is None else array.tolist()


def _array(values: Any) -> NDArray[np.float64] | None:
    return None if values is None else np.array(values, dtype=np.float64)
