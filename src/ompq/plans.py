"""plan() and Plan: the bits of every unit, with everything they were decided from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ompq.allocation.solver import (
    METHODS,
    Allocation,
    Budget,
    Explanation,
    Method,
    ParetoPoint,
    Problem,
    allocate,
    check_budget,
    explain,
    pareto,
)
from ompq.costs import (
    FLOAT_BITS,
    Accounting,
    Bytes,
    Cost,
    LatencyTable,
    cost_tables,
    in_bytes,
    latency_table,
    overhead_bytes,
    unit_bytes,
)
from ompq.errors import OmpqError, PlanError, TargetError, TraceError, shortened
from ompq.files import (
    json_list,
    json_number,
    json_object,
    json_table,
    json_text,
    json_whole,
    library_version,
    read_json,
    write_text,
)
from ompq.graph import Choice, LayerGraph, Skipped, select, trace
from ompq.samples import Progress, Samples, SamplesLike
from ompq.scores import (
    Orm,
    OrmSettings,
    Score,
    ScoreTable,
    Sensitivity,
    score_name,
    score_table,
)
from ompq.targets import Target, load_target

FORMAT = "ompq-plan/2"
FORMATS = ("ompq-plan/1", FORMAT)  # the first wrote the ORM as lists of numbers
_ADVICE = "Give a file that ompq plan or Plan.save wrote"


@dataclass(frozen=True)
class Measurement:
    """An allocation whose true damage was measured."""

    name: str  # where it came from: a score, or ``refit 3``
    allocation: Allocation
    divergence: float  # mean KL from the float network, in nats, on held-back samples
    # A digest of these samples, the network and the way of quantizing: only divergences
    # of one judge may be compared.
    judge: str


@dataclass(frozen=True, repr=False)
class Plan:
    """A decision with everything it was made from; needs no model to be re-solved.

    Attributes:
        choices: Columns of the tables.
        scores: Expected damage of each choice of each unit, and its reasons.
        allowed: Which choices each unit may get, (units, choices).
        budget: What the allocation keeps to.
        score_name: What the damage is.
        latency: Milliseconds of each unit at each choice, where known.
        target: Where the network will run, if that was said.
        measured: Allocations that ``refine`` has measured, in that order.
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
    measured: tuple[Measurement, ...] = ()

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
    def columns(self) -> NDArray[np.intp]:
        """The column of each unit's choice, (units,)."""
        return self.problem.columns(self.allocation)

    @cached_property
    def totals(self) -> dict[str, float]:
        """What the allocation costs, by cost, and two averages.

        ``average_bits`` is over the weights of all units, which a budget in bits
        limits; ``bits_per_parameter`` over every parameter and buffer, with what stays
        float, scales and zero points in the count.
        """
        costs = self.problem.costs
        found = {name: cost.total(self.columns) for name, cost in costs.items()}
        parameters = self.graph.float_bytes / 4 + sum(
            u.weights + u.bias_parameters + u.norm_parameters for u in self.graph.units
        )
        return {
            **found,
            "average_bits": found["weight_bits"] / costs["weight_bits"].reference,
            "bits_per_parameter": 8 * found["bytes"] / parameters,
        }

    @property
    def bytes_by_item(self) -> dict[str, int]:
        """Bytes of a packed file, item by item, over all units and what stays float."""
        graph = self.graph
        items = Bytes.by_item(
            [unit_bytes(u, self.allocation[u.name]) for u in graph.units]
        )
        return {**items, "float": graph.float_bytes, "metadata": overhead_bytes(graph)}

    @property
    def no_speed_up(self) -> tuple[Skipped, ...]:
        """The units whose bits make nothing faster on the target, with reasons."""
        target, bits = self.target, self.allocation
        if target is None:
            return ()
        reasons = ((u, target.no_speed_up(u, bits[u.name])) for u in self.graph.units)
        return tuple(Skipped(unit.name, why) for unit, why in reasons if why)

    @property
    def damage(self) -> float:
        """The expected damage of the allocation, as scored."""
        return self.problem.damage_of(self.allocation)

    @property
    def gap(self) -> float:
        """How much less damage another allocation could at most do; 0 is proved."""
        return self.allocation.gap

    @cached_property
    def hash(self) -> str:
        """A short digest of the whole plan: equal plans have equal hashes."""
        text = json.dumps(_to_json(self), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        gap = f", damage within {self.gap:.2g} of the least" if self.gap else ""
        return (
            f"Plan({len(self.graph)} units, {self.budget}: "
            f"{in_bytes(self.totals['bytes'])}, "
            f"{self.totals['average_bits']:.2f} bits a weight{gap})"
        )

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
        """Explain why a unit got its bits."""
        return explain(self.problem, self.budget, self.allocation, unit)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the same plan gives the same bytes."""
        data = {"format": FORMAT, "written_by": library_version(), **_to_json(self)}
        write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: The file is missing, no plan, broken, or of another version.
        """
        try:
            data = read_json(path)
        except ValueError as error:
            raise PlanError(f"{path} is not a plan: {error}. {_ADVICE}") from error
        written = data.get("format") if isinstance(data, dict) else None
        if not isinstance(written, str) or not written.startswith("ompq-plan/"):
            raise PlanError(f"{path} is not a plan. {_ADVICE}")
        if written not in FORMATS:
            raise PlanError(
                f"{path} has the format {written[:40]}, written by ompq "
                f"{str(data.get('written_by', 'of an unknown version'))[:40]}; this is "
                f"ompq {library_version()}, which reads up to {FORMAT}. "
                "Install that version, or plan again"
            )
        try:
            return _from_json(data)
        except (KeyError, ValueError, OmpqError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise PlanError(
                f"{path} is a damaged plan: {what}. Undo your edits or plan again"
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
    return {
        "budget": str(plan.budget),
        "score": plan.score_name,
        "method": plan.method,
        "accounting": plan.accounting,
        "allocation": plan.allocation.to_json(),
        "gap": plan.gap,
        "choices": [list(choice) for choice in plan.choices],
        "allowed": plan.allowed.astype(int).tolist(),
        **plan.scores.to_json(),
        "latency": plan.latency,
        "graph": plan.graph.to_json(),
        **({} if plan.target is None else {"target": plan.target.to_json()}),
        **({"measured": _measured_to_json(plan)} if plan.measured else {}),
    }


def _from_json(data: Mapping[str, Any]) -> Plan:
    graph = LayerGraph.from_json(data["graph"])
    listed = json_list(data["choices"], "choices", 256)
    pairs = [json_list(pair, "choices") for pair in listed]
    choices = tuple(
        Choice(*(json_whole(bits, "choices", 1, FLOAT_BITS) for bits in pair))
        for pair in pairs
        if len(pair) == 2
    )
    if len({*choices}) < max(len(pairs), 1):
        raise ValueError("choices must be different pairs of bits")
    shape = (len(graph), len(choices))
    texts = {
        name: json_text(data[name], name)
        for name in ("budget", "accounting", "method", "score")
    }
    for name, known in (("accounting", get_args(Accounting)), ("method", METHODS)):
        if texts[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}")
    latency = data["latency"]
    loaded = Plan(
        graph=graph,
        choices=choices,
        scores=ScoreTable.from_json(data, len(graph), len(choices)),
        allowed=np.array(json_table(data["allowed"], "allowed", shape), dtype=bool),
        budget=Budget.parse(texts["budget"]),
        allocation=replace(
            Allocation.from_json(data["allocation"]),
            gap=json_number(data.get("gap", 0.0), "gap"),
        ),
        accounting=cast(Accounting, texts["accounting"]),
        method=cast(Method, texts["method"]),
        score_name=texts["score"],
        latency=None if latency is None else latency_table(latency),
        target=Target.from_json(data["target"]) if "target" in data else None,
    )
    # The allocation may have been edited by hand: it must still be one of ours.
    loaded.allocation.check_units(graph.names)
    _ = loaded.columns
    measured = _measured_from_json(loaded, data.get("measured", []))
    return replace(loaded, measured=measured)


def _measured_to_json(plan: Plan) -> list[dict[str, Any]]:
    """Return what was measured as plain data; choices are numbers of columns."""
    return [
        {
            "name": one.name,
            "divergence": one.divergence,
            "judge": one.judge,
            "columns": plan.problem.columns(one.allocation).tolist(),
        }
        for one in plan.measured
    ]


def _measured_from_json(plan: Plan, data: Any) -> tuple[Measurement, ...]:
    """Rebuild measurements of a plan's units."""
    found = []
    for entry in json_list(data, "measured"):
        given = json_object(entry, "measured")
        columns = json_list(given.get("columns"), "columns")
        if len(columns) != len(plan.graph):
            raise ValueError(f"columns must have {len(plan.graph)} entries")
        last = len(plan.choices) - 1
        chosen = [plan.choices[json_whole(c, "columns", 0, last)] for c in columns]
        found.append(
            Measurement(
                json_text(given.get("name"), "name"),
                Allocation(dict(zip(plan.graph.names, chosen, strict=True))),
                json_number(given.get("divergence"), "divergence"),
                json_text(given.get("judge"), "judge"),
            )
        )
    return tuple(found)


Pin = int | tuple[int, int]  # weight bits, or weight and activation bits


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How a plan is made.

    Attributes:
        score: What choosing few bits damages: a callable or the name of a score.
        choices: Weight bits that a unit may get.
        activation_choices: Bits that a unit's input may get; 32 leaves it float.
        pinned: Pattern → bits of the units that are not to be chosen; a later pattern
            overrides an earlier one. 32 keeps a unit float.
        tie: Whether units that meet in one addition share their bits.
        tied: Further patterns; the units that match one share their bits.
        accounting: How bytes are counted: ``packed`` (exact) or ``paper``.
        method: ``exact``, or the paper's ``relax-round`` or ``relax-dfs``.
        latency: Milliseconds of each unit at each choice, for a budget in ms.
        target: Where the network will run: a profile, its file, or the name of one
            that comes with ompq. Units get only what it takes.
        strict: Whether anything that stays float is an error.
    """

    score: Score | str = Sensitivity()
    choices: tuple[int, ...] = (2, 3, 4, 5, 6, 8)
    activation_choices: tuple[int, ...] = (8,)
    pinned: Mapping[str, Pin] = field(default_factory=lambda: MappingProxyType({}))
    tie: bool = True
    tied: tuple[str, ...] = ()
    accounting: Accounting = "packed"
    method: Method = "exact"
    latency: LatencyTable | None = None
    target: Target | str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name, more in (("choices", ()), ("activation_choices", (FLOAT_BITS,))):
            bits = getattr(self, name)
            if not bits or any(b not in (*range(2, 9), *more) for b in bits):
                raise ValueError(f"{name}={bits} must be bits from 2 to 8")


def plan(
    model: nn.Module,
    samples: SamplesLike,
    budget: Budget | str,
    config: PlanConfig = PlanConfig(),
    *,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Choose bits for every unit of a network so that a budget is met.

    Args:
        samples: A few unlabelled inputs; 32 to 64 are enough.
        budget: For example ``"1.5MiB"``, ``"3.2bits"``, ``"75GBOPs"``, several joined
            by commas, or a Budget.
        cache: A folder that keeps score tables: where network, samples and score are
            the same, a later plan reads its table there.

    Raises:
        InfeasibleBudgetError: No allocation meets the budget.
        PatternError: A pinned or tied pattern matches no unit.
        TargetError: The target supports none of a unit's choices.
        TraceError: The network cannot be observed; or, if strict, stays partly float.
    """
    budget, samples = Budget.of(budget), Samples.of(samples)
    report = progress or (lambda _done, _total, _message: None)
    report(0, 3, "observing the network")
    graph = trace(model, samples, tie=config.tie).tie(config.tied)
    if config.strict and graph.skipped:
        names = [f"{entry.name} ({entry.reason})" for entry in graph.skipped]
        raise TraceError(
            f"strict: not everything can be planned: {shortened(names, 3)}"
        )
    choices, allowed = choice_table(graph, config)
    costs = cost_tables(
        graph, choices, accounting=config.accounting, latency=config.latency
    )
    # Before the samples are run: a budget that cannot be met should say so at once.
    nothing = np.zeros((len(graph), len(choices)))
    problem = make_problem(graph, choices, nothing, allowed, costs)
    check_budget(problem, budget)
    report(1, 3, "scoring the choices")
    scores = score_table(config.score, graph, model, samples, choices, cache=cache)
    scores = scores.as_saved()
    report(2, 3, "solving for the budget")
    problem = replace(problem, damage=scores.damage)
    allocation = allocate(problem, budget, method=config.method)
    report(3, 3, "done")
    return Plan(
        graph=graph,
        choices=choices,
        scores=scores,
        allowed=allowed,
        budget=budget,
        allocation=allocation,
        accounting=config.accounting,
        method=config.method,
        score_name=score_name(config.score),
        latency=config.latency,
        target=_target(config),
    )


def choice_table(
    graph: LayerGraph, config: PlanConfig
) -> tuple[tuple[Choice, ...], NDArray[np.bool_]]:
    """Return all choices, and which of them each unit may get, (units, choices)."""
    free = [Choice(w, a) for w in config.choices for a in config.activation_choices]
    pins: dict[str, list[Choice]] = {}
    for pattern, bits in config.pinned.items():
        for name in select(graph.names, pattern):
            pins[name] = _pinned_choices(bits, config.activation_choices)
    extra = {choice for row in pins.values() for choice in row}
    choices = tuple(sorted({*free, *extra}))
    rows = [
        [choice in pins.get(name, free) for choice in choices] for name in graph.names
    ]
    allowed, target = np.array(rows), _target(config)
    if target is not None:
        allowed &= _taken(graph, choices, allowed, target)
    return choices, allowed


def _target(config: PlanConfig) -> Target | None:
    given = config.target
    return load_target(given) if isinstance(given, str) else given


def _taken(
    graph: LayerGraph,
    choices: tuple[Choice, ...],
    allowed: NDArray[np.bool_],
    target: Target,
) -> NDArray[np.bool_]:
    """Return which choices the target takes, (units, choices); some for each unit."""
    takes = np.array(
        [[target.operator(u).takes(choice) for choice in choices] for u in graph.units]
    )
    for unit, own, taken in zip(graph.units, allowed, takes, strict=True):
        if not (own & taken).any():
            given = [str(c) for c, one in zip(choices, own, strict=True) if one]
            found = target.operator(unit)
            raise TargetError(
                f"{target.name} supports none of {unit.name}'s choices "
                f"{shortened(given)}: for {unit.kind} it supports weights of "
                f"{_joined(found.weight_bits)} bits and inputs of "
                f"{_joined(found.activation_bits)} (32 is float)"
            )
    return takes


def _joined(bits: Sequence[int]) -> str:
    return ", ".join(map(str, bits))


def _pinned_choices(bits: Pin, activations: Sequence[int]) -> list[Choice]:
    weight, wanted = (
        (bits, activations) if isinstance(bits, int) else (bits[0], bits[1:])
    )
    if any(b not in (*range(2, 9), FLOAT_BITS) for b in (weight, *wanted)):
        raise ValueError(f"pinned bits {bits} must be from 2 to 8, or 32 for float")
    return [Choice(weight, activation) for activation in wanted]


_ENDS: Mapping[str, Pin] = MappingProxyType({"@first": (8, 8), "@last": (8, 8)})

# The settings of published work, by name. The released code centres its ORM, though
# the paper does not; the paper's text is what these follow.
PLAN_PROTOCOLS: Mapping[str, PlanConfig] = MappingProxyType(
    {
        "paper-ptq": PlanConfig(
            score=Orm(), choices=(2, 3, 4), accounting="paper", method="relax-round"
        ),
        "paper-qat": PlanConfig(
            score=Orm(OrmSettings(exclude=tuple(_ENDS))),
            choices=(4, 5, 6, 7, 8),
            pinned=_ENDS,
            accounting="paper",
            method="relax-dfs",
        ),
    }
)
