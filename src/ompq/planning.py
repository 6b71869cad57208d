"""plan(): the bits of every unit, chosen so that a budget is met."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ompq.allocation.allocator import allocate
from ompq.allocation.infeasibility import check_budget
from ompq.allocation.problem import Problem
from ompq.bit_widths import CODED_BITS, FLOAT_BITS
from ompq.budgets import Budget
from ompq.configs import RATES, OrmSettings, Pin, PlanConfig
from ompq.cost_tables import FILES, Cost
from ompq.costs import can_be_coded, cost_tables, least_rate
from ompq.errors import (
    PlanError,
    ScoreError,
    TargetError,
    TraceError,
    check_type,
    shorten,
)
from ompq.network.attention import with_layers
from ompq.network.graph import find_units, float_network, live_tensors, observe
from ompq.network.units import (
    Choice,
    LayerGraph,
    LiveTensor,
    Unit,
    by_bits,
    select,
)
from ompq.plans import Plan, make_problem
from ompq.progress import ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.samples import Samples, SamplesLike, batch_values, usual_settings
from ompq.score_tables import ScoreTable
from ompq.scores.catalogue import score_name, score_table, with_orm_settings
from ompq.scores.computation import Score, ScoreInputs
from ompq.scores.orthogonality import function_units
from ompq.targets import Target, load_target
from ompq.working_memory import release

_LOG = logging.getLogger(__name__)
_SCORING = "scoring the choices"


@shows_progress("planning", by_message=True)
@usual_settings()
def plan(
    model: nn.Module,
    samples: SamplesLike,
    budget: Budget | str,
    config: PlanConfig = PlanConfig(),
    *,
    cache: str | Path | None = None,
    progress: ProgressLike = None,
) -> Plan:
    """Choose bits for every unit of a network within a budget.

    Args:
        samples: A few unlabelled inputs; 32 to 64 are enough.
        budget: For example ``"1.5MiB"``, ``"3.2bits"``, ``"75GBOPs"``, several joined
            by commas, or a Budget.
        cache: A folder for score tables. A later plan with the same network, samples
            and score reads its table there.
        progress: Called as each stage begins and within it; True shows a bar.

    Raises:
        ExportError: The budget limits the ONNX file, and none can be written.
        InfeasibleBudgetError: No allocation meets the budget.
        ScoreError: The score finds all choices equally good.
        PatternError: A pinned or tied pattern matches no unit.
        TargetError: The target supports none of a unit's choices.
        TraceError: The network cannot be observed or, if strict, stays partly float.
    """
    check_type("config", config, PlanConfig)
    budget, samples = Budget.of(budget), Samples.of(samples)
    target = _target(config)
    budget = budget if target is None else budget.of_file(target.file)
    model = with_layers(model, samples)
    report = callback(progress)
    report(0, 3, "observing the network")
    memory = bool(budget.activations_mib or budget.total_mib)
    graph, alive, problem = unscored_problem(model, samples, config, memory=memory)
    if config.strict and graph.skipped:
        left = [f"{entry.name} ({entry.reason})" for entry in graph.skipped]
        raise TraceError(f"strict: not everything can be planned: {shorten(left, 3)}")
    files = _files(model, samples, graph, problem, budget)
    if files:
        costs = {**problem.costs, **{one.name: one for one in files}}
        problem = replace(problem, costs=costs)
    # Before the score runs: an infeasible budget should be reported at once.
    check_budget(problem, budget)
    report(1, 3, _SCORING)
    given = ScoreInputs(
        graph,
        model,
        samples,
        problem.choices,
        lambda done, total, _message: report(done, total, _SCORING),
        config.output,
    )
    _LOG.info("the network returns %s; output= says otherwise", given.outputs)
    score = _score(given, config)
    scores = score_table(score, given, cache).as_saved()
    release()  # what passes with gradients took
    _check_damage(scores, problem.allowed, score)
    report(2, 3, "solving for the budget")
    problem = replace(problem, damage=scores.damage)
    allocation = allocate(problem, budget, method=config.method)
    report(3, 3, "done")
    return Plan(
        graph=graph,
        choices=problem.choices,
        scores=scores,
        allowed=problem.allowed,
        budget=budget,
        allocation=allocation,
        accounting=config.accounting,
        method=config.method,
        score_name=score_name(score),
        latency=config.latency,
        target=target,
        activations=alive,
        files=files,
        output=str(given.outputs),
    )


def _files(
    model: nn.Module,
    samples: Samples,
    graph: LayerGraph,
    problem: Problem,
    budget: Budget,
) -> tuple[Cost, ...]:
    """Return the sizes of the files that a budget limits, except the packed one."""
    limits = dict(zip(FILES, (budget.onnx_mib, budget.graph_mib), strict=False))
    files: tuple[Cost, ...] = ()
    if names := [name for name, limit in limits.items() if limit]:
        # Needs the extra `onnx`, which other budgets do without.
        from ompq.runtimes.onnx.onnx_sizes import file_costs

        files = file_costs(model, samples, graph, problem, names)
    if budget.gguf_mib:
        from ompq.runtimes.gguf.gguf_sizes import gguf_cost

        files = (*files, gguf_cost(model, graph, problem))
    return files


def chosen_score(config: PlanConfig) -> Score | str:
    """Return the score of the settings, which may change how it measures ORM.

    Raises:
        ValueError: The settings are for ORM, but the score does not measure it.
    """
    if config.orm is None:
        return config.score
    return with_orm_settings(config.score, config.orm)


def _score(given: ScoreInputs, config: PlanConfig) -> Score | str:
    """Return the score; a detector's boxes have no gradients that the default needs."""
    score = chosen_score(config)
    default = score_name(score) == score_name(PlanConfig.score)
    if not (default and given.outputs.detections):
        return score
    _LOG.warning(
        "the network returns detections, which have no useful gradients; falling back "
        "to weight_noise. To judge its logits, plan the part that takes a batch: its "
        "backbone and head, see Detectors in docs/guide.md"
    )
    return "weight_noise"


def _check_damage(
    scores: ScoreTable, allowed: NDArray[np.bool_], score: Score | str
) -> None:
    """Raise a ScoreError if no choice is better than another for any unit.

    Then every unit would get its fewest bits, and the budget would stay unused.
    """
    chosen = np.where(allowed, scores.damage, np.nan)
    free = allowed.sum(1) > 1
    alike = np.nanmax(chosen, axis=1) == np.nanmin(chosen, axis=1)
    if free.any() and alike[free].all():
        raise ScoreError(
            f"score {score_name(score)!r} finds every choice of every layer equally "
            "good, so it cannot decide how to spend the budget. Check that the output "
            "depends on the weights, or use another score, such as weight_noise"
        )


def unscored_problem(
    model: nn.Module, samples: SamplesLike, config: PlanConfig, *, memory: bool
) -> tuple[LayerGraph, tuple[LiveTensor, ...], Problem]:
    """Return a network's units, its live tensors, and the problem with zero damage.

    Live tensors, whose bytes a budget may limit, are found only with ``memory``.
    """
    samples, config = Samples.of(samples), _at_target(config)
    model = with_layers(float_network(model), samples)
    recording = observe(model, samples)
    graph = find_units(model, recording, tie=config.tie)
    pins, inputs = _pin_units(graph, config)
    graph = _planned_graph(graph, config, {*pins, *inputs})
    if inputs:
        units = (replace(u, input_bits=inputs.get(u.name, 0)) for u in graph.units)
        graph = replace(graph, units=tuple(units))
    choices, allowed = _choice_table(graph, config, pins)
    alive: tuple[LiveTensor, ...] = ()
    if memory:
        alive = live_tensors(recording, graph, batch_values(samples.first_batch(1)))
    costs = cost_tables(
        graph,
        choices,
        accounting=config.accounting,
        latency=config.latency,
        activations=alive,
    )
    nothing = np.zeros((len(graph), len(choices)))
    return graph, alive, make_problem(graph, choices, nothing, allowed, costs)


def _planned_graph(
    graph: LayerGraph, config: PlanConfig, pinned: Collection[str]
) -> LayerGraph:
    """Return the graph with the ties and groups of the settings.

    A score of blocks, stages or the whole network ties the units of each, instead of
    units whose outputs are added; pinned units stay separate.
    """
    settings = getattr(chosen_score(config), "settings", None)
    if isinstance(settings, OrmSettings) and settings.granularity != "layer":
        every = (
            [n for n in names if n not in pinned]
            for names in function_units(graph, settings)
        )
        graph = graph.untie().tie([names for names in every if names])
    graph = graph.grouped(config.group_size) if config.group_size else graph
    target = _target(config)
    if target is not None and target.settings.get("weight_grid") == "gguf":
        graph = graph.with_super_blocks()
    if target is not None:
        graph = graph.tie(target.siblings(graph.names))
    return graph.tie(config.tied) if config.tied else graph


def _pin_units(
    graph: LayerGraph, config: PlanConfig
) -> tuple[dict[str, list[Choice]], dict[str, int]]:
    """Return the choices of pinned units and the bits of fixed inputs, by name."""
    target, floats = _target(config), (FLOAT_BITS,)
    pins: dict[str, list[Choice]] = {
        unit.name: _pinned_choices(FLOAT_BITS, config.activation_choices)
        for unit in graph.units
        if target is not None and target.operator(unit).weight_bits == floats
    }
    inputs: dict[str, int] = {}
    for pattern, bits in config.pinned.items():
        for name in select(graph.names, pattern):
            if isinstance(bits, int) or bits[0] is not None:
                pins[name] = _pinned_choices(bits, config.activation_choices)
            if not isinstance(bits, int):
                inputs[name] = bits[1] if bits[0] is None else 0
    return pins, inputs


def _choice_table(
    graph: LayerGraph, config: PlanConfig, pins: Mapping[str, list[Choice]]
) -> tuple[tuple[Choice, ...], NDArray[np.bool_]]:
    """Return all choices, and which of them each unit may get, (units, choices)."""
    free = free_choices(config)
    extra = {choice for row in pins.values() for choice in row}
    choices = tuple(by_bits({*free, *extra}))
    rows = [
        [choice in pins.get(name, free) for choice in choices] for name in graph.names
    ]
    allowed, target = np.array(rows), _target(config)
    codable = np.array([[can_be_coded(u, c) for c in choices] for u in graph.units])
    _check_rates(graph, choices, allowed, codable, warn=config.rates != RATES)
    allowed &= codable
    if target is not None:
        allowed &= _taken(graph, choices, allowed, target)
    return choices, allowed


def _check_rates(
    graph: LayerGraph,
    choices: tuple[Choice, ...],
    allowed: NDArray[np.bool_],
    codable: NDArray[np.bool_],
    *,
    warn: bool,
) -> None:
    """Refuse rates that leave a unit no choice; warn of those that few may have."""
    for unit, own, possible in zip(graph.units, allowed, codable, strict=True):
        if not (own & possible).any():
            rates = [f"{c.rate:g}" for c, one in zip(choices, own, strict=True) if one]
            raise PlanError(
                f"{unit.name}: its {unit.weights:,} weights are too few to be coded at "
                f"{' or '.join(dict.fromkeys(rates))} bits; give it a rate above "
                f"{least_rate(unit):.3g}, or a width"
            )
    if not warn:
        return
    for column, choice in enumerate(choices):
        without = np.flatnonzero(allowed[:, column] & ~codable[:, column])
        if len(without) > len(graph) / 2:
            _LOG.warning(
                "%d of %d layers have too few weights to be coded at %g bits and get "
                "another rate: %s",
                len(without),
                len(graph),
                choice.rate,
                shorten([graph.units[unit].name for unit in without]),
            )


def free_choices(config: PlanConfig) -> list[Choice]:
    """Return the choices of units that are not pinned."""
    weights = [(width, 0.0) for width in config.choices if isinstance(width, int)]
    if config.storage == "coded":
        weights += [(CODED_BITS, float(rate)) for rate in config.rates]
    inputs = config.activation_choices
    pairs = [Choice(*pair) for pair in config.choices if not isinstance(pair, int)]
    return [*pairs, *(Choice(w, a, rate) for w, rate in weights for a in inputs)]


def _target(config: PlanConfig) -> Target | None:
    given = config.target
    if given is None or isinstance(given, Target):
        return given
    if not isinstance(given, str | Path):
        raise TypeError(
            f"target={given!r} is not a target profile; give the name of one, its "
            "file, or an ompq.Target"
        )
    return load_target(str(given))


def _at_target(config: PlanConfig) -> PlanConfig:
    """Return the settings with what the target requires and nothing else was given."""
    target, changes = _target(config), dict[str, Any]()
    if target is None:
        return config
    inputs = target.operators["default"].activation_bits
    usual = config.activation_choices == PlanConfig.activation_choices
    if usual and not {*inputs} & {*config.activation_choices}:
        changes["activation_choices"] = inputs
    if config.group_size is None:
        changes["group_size"] = target.settings.get("group_size")
    return replace(config, **changes)


def _taken(
    graph: LayerGraph,
    choices: tuple[Choice, ...],
    allowed: NDArray[np.bool_],
    target: Target,
) -> NDArray[np.bool_]:
    """Return the choices that the target supports, (units, choices)."""
    takes = np.array(
        [
            [target.takes(u, choice.with_input(u.input_bits)) for choice in choices]
            for u in graph.units
        ]
    )
    for unit, own, taken in zip(graph.units, allowed, takes, strict=True):
        if not (own & taken).any():
            given = [str(c) for c, one in zip(choices, own, strict=True) if one]
            found = target.operator(unit)
            weights, inputs = (
                ", ".join(map(str, bits))
                for bits in (found.weight_bits, found.activation_bits)
            )
            raise TargetError(
                f"{target.name} supports none of {unit.name}'s choices "
                f"{shorten(given)}: for {unit.kind} it supports weights of {weights} "
                f"bits and inputs of {inputs} (32 is float)"
                + ("" if target.coded else ", and none that are coded")
                + _row_problem(unit, target)
            )
    return takes


def _row_problem(unit: Unit, target: Target) -> str:
    needed = target.row_multiples
    if all(unit.row_length % count == 0 for count in needed.values()):
        return ""
    counts = ", ".join(f"{count} ({bits} bits)" for bits, count in needed.items())
    return (
        f"; its rows have {unit.row_length} weights and must be multiples of {counts}. "
        "Pin it to 32 bits to leave it in float"
    )


def _pinned_choices(bits: Pin, activations: Sequence[int]) -> list[Choice]:
    if isinstance(bits, int):
        return [Choice(bits, activation) for activation in activations]
    return [Choice(*bits)]
