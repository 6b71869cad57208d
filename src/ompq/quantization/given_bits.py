"""The bits that quantize() is given: by a plan, an allocation or patterns."""

from collections.abc import Mapping
from pathlib import Path

from ompq.allocation.problem import Allocation
from ompq.bit_widths import FLOAT_BITS
from ompq.configs import Pin, QuantizeConfig
from ompq.errors import PlanError, QuantizationError, shorten
from ompq.network.units import Choice, LayerGraph, select
from ompq.plans import Plan, read_bits

_DOUBLE = 8  # bytes of a float64
_DEFAULT_ACTIVATION_BITS = 8  # where only weight bits are given


def resolve_choices(
    plan: Plan | Allocation | Mapping[str, Pin] | str | Path,
    graph: LayerGraph,
    config: QuantizeConfig,
) -> tuple[LayerGraph, Allocation, str | None]:
    """Return the graph with its group size, all bits, and what the network returns."""
    if isinstance(plan, str | Path):
        plan = read_bits(plan)
    if isinstance(plan, Plan):
        plan.check_network(graph)
        planned = plan.graph.group_size
        if config.group_size not in (None, planned):
            raise PlanError(
                f"group_size={config.group_size}, but the plan was made for scales of "
                f"{f'groups of {planned}' if planned else 'whole channels'}: plan with "
                "this group_size, or quantize without it"
            )
        output = config.output or plan.output
        _check_storable(graph, plan.allocation)
        return _grouped(graph, planned, config), plan.allocation, output
    if not isinstance(plan, Allocation):
        if not isinstance(plan, Mapping):
            raise TypeError(
                f"plan must be a Plan, an Allocation, a path or a dict such as "
                f'{{"*": 4}}, not {plan!r}'
            )
        plan = _match_patterns(plan, graph)
    missing = [name for name in graph.names if name not in plan]
    if missing:
        raise QuantizationError(
            f"the allocation has no bits for {shorten(missing)}; "
            'give them, or "*" for all (32 keeps a layer float)'
        )
    _check_storable(graph, plan)
    return _grouped(graph, config.group_size, config), plan, config.output


def _grouped(graph: LayerGraph, size: int | None, config: QuantizeConfig) -> LayerGraph:
    graph = graph.grouped(size)
    return graph.with_super_blocks() if config.weight_grid == "gguf" else graph


def _check_storable(graph: LayerGraph, bits: Allocation) -> None:
    """Raise an error for weights whose scales no file could hold."""
    wide = [
        unit.name
        for unit in graph.units
        if unit.element_size == _DOUBLE and bits[unit.name].weight < FLOAT_BITS
    ]
    if wide:
        raise QuantizationError(
            f"the weights of {shorten(wide)} are float64, but files hold their "
            "scales and biases as float32; give the network in float32: model.float()"
        )


def _match_patterns(bits: Mapping[str, Pin], graph: LayerGraph) -> Allocation:
    found: dict[str, Choice] = {}
    for pattern, given in bits.items():
        pair = (given, _DEFAULT_ACTIVATION_BITS) if isinstance(given, int) else given
        if not isinstance(pair, tuple | list) or not 2 <= len(pair) <= 3:
            raise TypeError(
                f"{pattern!r}: {given!r} is not a valid bit width; write 4, (4, 8) for "
                "weights and inputs, or (8, 8, 2.5) for coded weights"
            )
        found |= dict.fromkeys(select(graph.names, pattern), Choice(*pair))
    return Allocation(found)
