"""plan(): network, samples and budget in; bits for every unit out, with the reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ompq.allocation.solving import Budget, Method, allocate, check_budget
from ompq.costs import FLOAT_BITS, Accounting, LatencyTable, cost_tables
from ompq.errors import TargetError, TraceError, shortened
from ompq.graph.tracing import trace
from ompq.graph.units import Choice, LayerGraph, select
from ompq.plans import Plan, make_problem
from ompq.samples import Progress, Samples
from ompq.scores import (
    Orm,
    OrmDistortion,
    OrmSettings,
    Score,
    score_name,
    score_table,
)
from ompq.targets import Target, load_target

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

    score: Score | str = OrmDistortion()
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
    samples: Samples,
    budget: Budget | str,
    config: PlanConfig = PlanConfig(),
    *,
    progress: Progress | None = None,
) -> Plan:
    """Choose bits for every unit of a network so that a budget is met.

    Args:
        model: Any PyTorch network.
        samples: A few unlabelled inputs; 32 to 64 are enough.
        budget: For example ``"1.5MiB"``, ``"3.2bits"``, ``"75GBOPs"``, several joined
            by commas, or a Budget.
        config: Choices, score, pins and so on.
        progress: Called as stages complete.

    Raises:
        InfeasibleBudgetError: No allocation meets the budget.
        PatternError: A pinned or tied pattern matches no unit.
        TargetError: The target takes none of a unit's choices.
        TraceError: The network cannot be observed; or, if strict, stays partly float.
    """
    budget = Budget.of(budget)
    report = progress or (lambda _done, _total, _message: None)
    report(0, 3, "observing the network")
    graph = trace(model, samples, tie=config.tie).tie(config.tied)
    if config.strict and graph.skipped:
        names = [f"{entry.name} ({entry.reason})" for entry in graph.skipped]
        raise TraceError(f"strict: not everything is planned: {shortened(names, 3)}")
    choices, allowed = choice_table(graph, config)
    costs = cost_tables(
        graph, choices, accounting=config.accounting, latency=config.latency
    )
    # Before the samples are run: a budget that cannot be met should say so at once.
    nothing = np.zeros((len(graph), len(choices)))
    check_budget(make_problem(graph, choices, nothing, allowed, costs), budget)
    report(1, 3, "scoring the choices")
    scores = score_table(config.score, graph, model, samples, choices)
    report(2, 3, "solving for the budget")
    problem = make_problem(graph, choices, scores.damage, allowed, costs)
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
    """Return all choices, and which of them each unit may get, (units, choices).

    Raises:
        TargetError: The target takes none of a unit's choices.
    """
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
                f"{target.name} takes none of {unit.name}'s choices "
                f"{shortened(given)}: for {unit.kind} it takes weights of "
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
