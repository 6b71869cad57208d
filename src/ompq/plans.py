"""Plans: an allocation with all it was computed from. Reading one needs no torch."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ompq.allocation.allocator import (
    EXACT,
    ParetoPoint,
    Solver,
    allocate,
    pareto,
    solver_name,
)
from ompq.allocation.explanation import Explanation, explain
from ompq.allocation.infeasibility import halfway
from ompq.allocation.problem import Allocation, Problem
from ompq.amounts import digits, in_bytes
from ompq.bit_widths import FLOAT_BITS
from ompq.budgets import Budget
from ompq.configs import Accounting, LatencyTable, parse_output
from ompq.cost_tables import Cost
from ompq.costs import (
    bytes_by_item,
    cost_tables,
    latency_table,
    paper_bytes,
    unit_bytes,
)
from ompq.errors import OmpqError, PlanError, check_known, shorten
from ompq.files import library_version, shown, write_text
from ompq.network.units import (
    Choice,
    LayerGraph,
    LiveTensor,
    Skipped,
    live_tensors_from_json,
)
from ompq.notebook_tables import data_frame, html_bar, html_table
from ompq.progress import Progress
from ompq.registry import Names
from ompq.score_tables import ScoreTable
from ompq.targets import Target
from ompq.untrusted_json import (
    Count,
    Number,
    convert_json,
    number_table,
    read_json,
    record_type,
    row_type,
)

FORMAT = "ompq-plan/2"
# Cost → the field of a budget that limits it, and its unit.
_MEDIUM = {
    "bytes": ("size_mib", 2**20),
    "bit_ops": ("bit_ops", 1),
    "milliseconds": ("latency_ms", 1),
}
_FLOAT_INPUTS = "inputs are float, so runtimes compute in float (GGUF apart)"
_ADVICE = "Give a file that ompq plan or Plan.save wrote"


@dataclass(frozen=True)
class Measurement:
    """An allocation whose true damage was measured."""

    name: str  # where it came from: a score, or ``refit 3``
    allocation: Allocation
    divergence: float  # mean KL from the float network, in nats, on held-out samples
    # Digest of the samples, the network and the quantization settings. Divergences can
    # be compared only if their judges are equal.
    judge: str
    # Standard error of the difference from the divergence of the bits that refinement
    # began with, sample by sample; their own is 0.
    error: float = 0.0


def refinement_summary(plan: "Plan") -> str:
    """Say in a line what measuring allocations has found."""
    rows = [one for one in plan.measured if one.judge == plan.measured[-1].judge]
    first, best = rows[0], min(rows, key=lambda one: one.divergence)
    text = (
        f"{len(rows)} allocations measured: divergence {digits(first.divergence)} at "
        f"first, {digits(best.divergence)} at best ({best.name})"
    )
    if best.allocation == first.allocation or plan.allocation != first.allocation:
        return text
    return f"{text}; the difference may be chance, so the bits stay"


@dataclass(frozen=True, repr=False)
class Plan:
    """An allocation with all it was computed from; can be re-solved without the model.

    Attributes:
        choices: The columns of all tables.
        scores: Expected damage of each choice of each unit, and what explains it.
        allowed: Which choices each unit may get, (units, choices).
        budget: The limits that the allocation keeps.
        score_name: Name of the score that the damage comes from.
        latency: Milliseconds of each unit at each choice, where known.
        target: Where the network will run, if given.
        measured: Allocations that ``refine`` has measured, in order.
        activations: Lifetimes of the activations, if a budget limits their memory.
        files: Sizes of files other than the packed one, if a budget limits them.
        output: What the network returns, as its outputs were judged.
    """

    graph: LayerGraph
    choices: tuple[Choice, ...]
    scores: ScoreTable
    allowed: NDArray[np.bool_]
    budget: Budget
    allocation: Allocation
    accounting: Accounting = "packed"
    method: Solver | str = EXACT
    score_name: str = ""
    latency: LatencyTable | None = None
    target: Target | None = None
    measured: tuple[Measurement, ...] = ()
    activations: tuple[LiveTensor, ...] = ()
    files: tuple[Cost, ...] = ()
    output: str = "classes"

    @cached_property
    def problem(self) -> Problem:
        """The allocation problem: damage, costs, ties and pins."""
        costs = cost_tables(
            self.graph,
            self.choices,
            accounting=self.accounting,
            latency=self.latency,
            activations=self.activations,
            files=self.files,
        )
        return make_problem(
            self.graph, self.choices, self.scores.damage, self.allowed, costs
        )

    @cached_property
    def columns(self) -> NDArray[np.intp]:
        """The column of each unit's choice, (units,)."""
        return self.problem.columns(self.allocation)

    @cached_property
    def totals(self) -> dict[str, float]:
        """Total of each cost, and two averages.

        ``average_bits`` is the average over the weights of all units, which a budget in
        bits limits. ``bits_per_parameter`` averages the whole file, including scales,
        zero points and what stays float, over all parameters and buffers.
        """
        costs = self.problem.costs
        totals = {name: cost.total(self.columns) for name, cost in costs.items()}
        parameters = self.graph.float_bytes / 4 + sum(
            u.weights + u.bias_parameters + u.norm_parameters for u in self.graph.units
        )
        return {
            **totals,
            "average_bits": totals["weight_bits"] / costs["weight_bits"].reference,
            "bits_per_parameter": 8 * totals["bytes"] / parameters,
        }

    @property
    def quantize_settings(self) -> dict[str, Any]:
        """Fields of :class:`ompq.QuantizeConfig` that the plan's networks need."""
        target = {} if self.target is None else self.target.settings
        own = {"group_size": self.graph.group_size or None, "output": self.output}
        return {**target, **own}

    @property
    def bytes_by_item(self) -> dict[str, int]:
        """Bytes of the packed file by item: weights, scales, what stays float, ..."""
        return bytes_by_item(self.graph, self.allocation, self.choices)

    @property
    def no_speed_up(self) -> tuple[Skipped, ...]:
        """The units that get no faster with their bits, with reasons.

        Without a target these are the ones with float inputs.
        """
        target, bits = self.target, self.allocation
        if target is None:
            reasons = [
                (unit, _FLOAT_INPUTS * (bits[unit.name].activation >= FLOAT_BITS))
                for unit in self.graph.units
                if bits[unit.name].weight < FLOAT_BITS
            ]
        else:
            reasons = [
                (unit, target.no_speed_up(unit, bits[unit.name]))
                for unit in self.graph.units
            ]
        return tuple(Skipped(unit.name, why) for unit, why in reasons if why)

    @property
    def damage(self) -> float:
        """The expected damage of the allocation, as scored."""
        return self.problem.damage_of(self.allocation)

    @property
    def gap(self) -> float:
        """Bound on how much less damage another allocation could do; 0 if optimal."""
        return self.allocation.gap

    @cached_property
    def hash(self) -> str:
        """A short digest of the whole plan: equal plans have equal hashes."""
        text = json.dumps(_to_json(self), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return a summary as plain data: budget, totals, bits, what stays float."""
        return {
            "hash": self.hash,
            "budget": str(self.budget),
            "limits": dict(self.budget.limits(self.problem.costs)),
            "totals": self.totals,
            "bytes_by_item": self.bytes_by_item,
            "float_bytes": self.problem.costs["bytes"].reference,
            "damage": self.damage,
            "gap": self.gap,
            "score": self.score_name,
            "method": solver_name(self.method),
            "accounting": self.accounting,
            "group_size": self.graph.group_size or None,
            "allocation": self.allocation.to_json(),
            "measured": [
                {
                    "name": one.name,
                    "divergence": one.divergence,
                    "error": one.error,
                }
                for one in self.measured
            ],
            "units": unit_rows(self),
            "target": None if self.target is None else self.target.name,
            "no_speed_up": [one.to_json() for one in self.no_speed_up],
            "skipped": [one.to_json() for one in self.graph.skipped],
        }

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per unit."""
        return data_frame(unit_rows(self))

    def _repr_html_(self) -> str:
        rows = [
            {
                "layer": row["name"],
                "kind": row["kind"],
                "bits": html_bar(row["weight_bits"] / 8, f"{row['weight_bits']:g}"),
                "input bits": row["activation_bits"],
                "bytes": f"{row['bytes']:,.0f}",
                "damage": f"{row['damage']:.3g}",
            }
            for row in unit_rows(self)
        ]
        return html_table(repr(self), rows)

    def __repr__(self) -> str:
        gap = f", damage within {self.gap:.2g} of the least" if self.gap else ""
        return (
            f"Plan({len(self.graph)} units, {self.budget}: "
            f"{in_bytes(self.totals['bytes'])}, "
            f"{self.totals['average_bits']:.2f} bits a weight{gap})"
        )

    def with_budget(self, budget: Budget | str) -> "Plan":
        """Solve again for another budget, without the model or samples."""
        budget = Budget.of(budget)
        allocation = allocate(self.problem, budget, method=self.method)
        return replace(self, budget=budget, allocation=allocation)

    def halfway(self, cost: str = "bytes") -> "Plan":
        """Solve again for the mean of the least and the most that the choices cost.

        With the choices W4A4 and W8A8 these are HAWQ-V3's medium limits.

        Args:
            cost: ``bytes``, ``bit_ops`` or ``milliseconds``.
        """
        check_known("cost", cost, _MEDIUM)
        field, one = _MEDIUM[cost]
        return self.with_budget(Budget(**{field: halfway(self.problem, cost) / one}))

    def pareto(
        self,
        cost: str = "bytes",
        points: int = 100,
        *,
        progress: Progress | None = None,
    ) -> tuple[ParetoPoint, ...]:
        """Return the least damage at increasing limits on one cost."""
        return pareto(self.problem, cost, points, progress=progress)

    def explain(self, unit: str) -> Explanation:
        """Explain why a unit got its bits."""
        return explain(self.problem, self.budget, self.allocation, unit)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. Equal plans give identical files."""
        data = {"format": FORMAT, "written_by": library_version(), **_to_json(self)}
        text = json.dumps(data, indent=1, ensure_ascii=False)
        write_text(path, text + "\n", check=Plan.load)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: The file is missing, damaged, not a plan, or of a later version.
        """
        try:
            data = read_json(path)
        except ValueError as error:
            raise PlanError(f"{path} is not a plan: {error}. {_ADVICE}") from error
        written = data.get("format") if isinstance(data, dict) else None
        if not isinstance(written, str) or not written.startswith("ompq-plan/"):
            raise PlanError(f"{path} is not a plan. {_ADVICE}")
        if written != FORMAT:
            raise PlanError(
                f"{path} has the format {written[:40]}, written by ompq "
                f"{str(data.get('written_by', 'of an unknown version'))[:40]}; this is "
                f"ompq {library_version()}, which reads {FORMAT}. "
                "Install that version, or plan again"
            )
        try:
            return _from_json(data)
        except (ValueError, OmpqError) as error:
            raise PlanError(
                f"{path} is a damaged plan: {shown(str(error))}. Undo your edits or "
                "plan again"
            ) from error

    def meets_budget(self, bits: Mapping[str, Choice] | None = None) -> bool:
        """Return whether the plan's bits, or other bits, are within its budget."""
        columns = self.columns if bits is None else self.problem.columns(bits)
        costs = self.problem.costs
        limits = self.budget.limits(costs).items()
        return all(costs[name].total(columns) <= limit for name, limit in limits)

    def check_network(self, graph: LayerGraph) -> None:
        """Check that the plan was made for this network.

        Raises:
            PlanError: It was not. The message names the units that differ.
        """
        differing = self.graph.differing(graph)
        if differing:
            raise PlanError(
                f"the plan was made for another network: {len(differing)} units differ "
                f"({shorten(differing)})"
            )


def check_plan(plan: object) -> None:
    """Raise a TypeError unless this is a plan."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is of type {type(plan).__name__}, not a plan; give what ompq.plan "
            "returned, or ompq.Plan.load(file)"
        )


def unit_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one row per unit: its properties, bits, damage and bytes."""
    gamma, importance = plan.scores.gamma, plan.scores.importance
    widths = {choice.bits for choice in plan.choices}
    paper = plan.accounting == "paper"
    rows = []
    for i, unit in enumerate(plan.graph.units):
        bits = plan.allocation[unit.name]
        allowed = zip(plan.choices, plan.allowed[i], strict=True)
        allowed_bits = {choice.bits for choice, may in allowed if may}
        row = {
            "name": unit.name,
            "kind": unit.kind,
            "shape": list(unit.weight_shape),
            "parameters": unit.weights,
            "macs": unit.macs,
            "block": unit.block,
            "group": unit.group,
            "gamma": None if gamma is None else float(gamma[i]),
            "importance": None if importance is None else float(importance[i]),
            "damage": float(plan.scores.damage[i, plan.columns[i]]),
            "weight_bits": bits.bits,
            "coded": bits.rate > 0,
            "activation_bits": bits.activation,
            "pinned": len(allowed_bits) == 1 and len(widths) > 1,
            "bytes": paper_bytes(unit, bits) if paper else unit_bytes(unit, bits).total,
        }
        rows.append(row)
    return rows


# Bits that go by a name, as ``prefix:name``: what returns them, by the prefix.
NAMED_BITS: Names[Callable[[str], Allocation]] = Names("named bits", {})


def read_bits(path: str | Path) -> Plan | Allocation:
    """Read a plan, or a bare allocation: unit → bits.

    Args:
        path: A file, or the name of bits that come with ompq or an extension, such as
            ``published:ptq-resnet18-4.0``.

    Raises:
        PlanError: The file is neither, or there are no bits of this name.
    """
    prefix, colon, name = str(path).partition(":")
    if colon and prefix in NAMED_BITS:
        return NAMED_BITS[prefix](name)
    try:
        data = read_json(path)
        if isinstance(data, dict) and "format" not in data:
            return Allocation.from_json(data)
    except (ValueError, TypeError, AttributeError, PlanError) as error:
        raise PlanError(
            f"{path} cannot be read as a plan or an allocation: {error}. Give a file "
            "that ompq plan wrote, or bits copied from a report"
        ) from error
    return Plan.load(path)


def make_problem(
    graph: LayerGraph,
    choices: tuple[Choice, ...],
    damage: NDArray[np.float64],
    allowed: NDArray[np.bool_],
    costs: Mapping[str, Cost],
) -> Problem:
    """Return the allocation problem; units of one group of the graph are tied."""
    group_numbers = {name: number for number, name in enumerate(graph.groups)}
    return Problem(
        names=graph.names,
        choices=choices,
        damage=damage,
        costs=costs,
        allowed=allowed,
        groups=np.array([group_numbers[unit.group] for unit in graph.units]),
        inputs={u.name: u.input_bits for u in graph.units if u.input_bits},
    )


def _to_json(plan: Plan) -> dict[str, Any]:
    optional = {
        "target": plan.target and plan.target.to_json(),
        "measured": [
            {
                "name": one.name,
                "divergence": one.divergence,
                "judge": one.judge,
                "error": one.error,
                "columns": plan.problem.columns(one.allocation).tolist(),
            }
            for one in plan.measured
        ],
        "activations": [one.to_json() for one in plan.activations],
        "files": [cost.to_json() for cost in plan.files],
        "output": "" if plan.output == "classes" else plan.output,
    }
    return {
        "budget": str(plan.budget),
        "score": plan.score_name,
        "method": solver_name(plan.method),
        "accounting": plan.accounting,
        "allocation": plan.allocation.to_json(),
        "gap": plan.gap,
        "choices": [choice.to_json() for choice in plan.choices],
        "allowed": plan.allowed.astype(int).tolist(),
        **plan.scores.to_json(),
        "latency": plan.latency,
        "graph": plan.graph.to_json(),
        **{name: value for name, value in optional.items() if value},
    }


_MEASURED = record_type(
    name=str, divergence=Number, judge=str, error=(Number, 0.0), columns=list[Count]
)
_PLAN = record_type(
    graph=dict[str, Any],
    choices=Annotated[list[Any], Meta(min_length=1, max_length=256)],
    allowed=list[Any],
    allocation=dict[str, Any],
    gap=(Number, 0.0),
    budget=str,
    accounting=str,
    method=str,
    score=str,
    latency=dict[str, Any] | None,
    target=(dict[str, Any] | None, None),
    measured=(row_type(_MEASURED, ...), ()),
    activations=(list[Any], []),
    files=(list[Any], []),
    output=(str, "classes"),
)


def _from_json(data: Any) -> Plan:
    given = convert_json(data, _PLAN, "plan")
    graph = LayerGraph.from_json(given.graph)
    choices = tuple(Choice.from_json(one, "choices") for one in given.choices)
    if len({*choices}) < len(choices):
        raise ValueError("choices must be different pairs of bits")
    shape = (len(graph), len(choices))
    check_known("accounting", given.accounting, get_args(Accounting))
    allocation = Allocation.from_json(given.allocation)
    allowed = convert_json(given.allowed, number_table(*shape), "allowed")
    loaded = Plan(
        graph=graph,
        choices=choices,
        scores=ScoreTable.from_json(data, *shape),
        allowed=np.array(allowed, dtype=bool),
        budget=Budget.parse(given.budget),
        allocation=replace(allocation, gap=given.gap),
        accounting=given.accounting,
        method=given.method,
        score_name=given.score,
        latency=None if given.latency is None else latency_table(given.latency),
        target=None if given.target is None else Target.from_json(given.target),
        activations=live_tensors_from_json(given.activations, len(graph)),
        files=tuple(Cost.from_json(one, shape) for one in given.files),
        output=parse_output(given.output),
    )
    # The file may have been edited by hand, so check the units and their bits.
    loaded.allocation.check_units(graph.names)
    _ = loaded.columns
    return replace(
        loaded, measured=tuple(_measurement(loaded, m) for m in given.measured)
    )


def _measurement(plan: Plan, given: Any) -> Measurement:
    columns = np.array(given.columns)
    if len(columns) != len(plan.graph) or columns.max() >= len(plan.choices):
        raise ValueError(
            f"columns must be {len(plan.graph)} numbers below {len(plan.choices)}"
        )
    allocation = plan.problem.unit_allocation(columns)
    return Measurement(
        given.name, allocation, given.divergence, given.judge, given.error
    )
