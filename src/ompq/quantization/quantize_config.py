"""The settings of quantize(), and those of published work."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ompq.allocation.problem import Allocation
from ompq.bit_widths import SUM_BITS
from ompq.errors import PlanError, QuantizationError, shortened
from ompq.grids import STREAM_BITS
from ompq.network.units import Choice, LayerGraph, Pin, check_group_size, select
from ompq.plans import Plan, read_bits
from ompq.weight_ranges import DEFAULT_KIND, Kind, RangeMethod

_DEFAULT_ACTIVATION_BITS = 8  # where only weight bits are given


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """How a network is quantized before any reconstruction.

    Attributes:
        weight_grid: Kind of grid for the weights.
        weight_range: How clipping ranges of weights are found: ``search`` minimises the
            error, ``minmax`` covers all weights of a channel, and ``shrink`` is
            BRECQ's search, which scales both ends by one factor.
        weight_power: ``search`` minimises the sum of |error| to this power.
        output_error: Whether weights are rounded with error feedback, for a small
            error of each layer's output, instead of each to nearest. This applies up to
            6 bits, above which nothing is gained, and to fixed widths only after a
            ``search`` with a power of 2.
        equalize: Whether to equalize the ranges of channels that only a depthwise
            convolution reads, or a linear layer after a LayerNorm, so that one step
            suits them all better.
        equalize_from: Minimum weight bits of both layers for equalization before a
            depthwise convolution; with fewer it costs accuracy. After a LayerNorm, the
            error of the linear layer's output decides instead.
        activation_range: How clipping ranges of activations are found: ``fisher``
            minimises the effect on the network's output, ``mse`` the error of the
            tensor itself; ``minmax`` and ``percentile`` cover all or nearly all of its
            values; ``shrink`` is BRECQ's search.
        restore_moments: Whether scales and biases are corrected so that each channel
            keeps its mean and spread in spite of rounding.
        sum_bits: Bits of what residual sums read and return, 8 or 16. With 8, a tensor
            that layers read as well has the bits of these layers. With 16, they round
            it once more (HAWQ-V3). Plans assume 8: budgets for activations, and bytes
            of packed files, do not include what 16 takes on top.
        group_size: Number of inputs of a linear layer, 32, 64 or 128, that share a
            scale in each output channel; None means one scale per channel. A plan has
            its own (:class:`ompq.PlanConfig`).
        batch_size: Maximum number of samples per forward pass.
    """

    weight_grid: Kind = DEFAULT_KIND
    weight_range: Literal["search", "minmax", "shrink"] = "search"
    weight_power: float = 2.0
    output_error: bool = True
    equalize: bool = True
    equalize_from: int = 6
    activation_range: RangeMethod = "fisher"
    restore_moments: bool = True
    sum_bits: int = SUM_BITS
    group_size: int | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        if self.sum_bits not in (SUM_BITS, STREAM_BITS):
            raise ValueError(f"sum_bits={self.sum_bits} must be 8 or 16")


_BRECQ = QuantizeConfig(
    weight_range="shrink",
    equalize=False,
    activation_range="shrink",
    restore_moments=False,
)
# Training rounds to nearest, so it starts from weights that error feedback left alone.
_HAWQ_V3 = QuantizeConfig(sum_bits=STREAM_BITS, output_error=False)
# Published settings by name.
QUANTIZE_PROTOCOLS: Mapping[str, QuantizeConfig] = MappingProxyType(
    {
        "ours": QuantizeConfig(),
        "brecq": _BRECQ,
        "paper-ptq": _BRECQ,
        "hawq-v3": _HAWQ_V3,
        "paper-qat": _HAWQ_V3,
    }
)


def resolve_choices(
    plan: Plan | Allocation | Mapping[str, Pin] | str | Path,
    graph: LayerGraph,
    config: QuantizeConfig,
) -> tuple[LayerGraph, Allocation]:
    """Return the graph with its group size, and the bits of all units."""
    if isinstance(plan, str | Path):
        plan = read_bits(Path(plan))
    if isinstance(plan, Plan):
        plan.check_network(graph)
        planned = plan.graph.group_size
        if config.group_size not in (None, planned):
            raise PlanError(
                f"group_size={config.group_size}, but the plan was made for scales of "
                f"{f'groups of {planned}' if planned else 'whole channels'}: plan with "
                "this group_size, or quantize without it"
            )
        return graph.grouped(planned), plan.allocation
    if not isinstance(plan, Allocation):
        if not isinstance(plan, Mapping):
            raise TypeError(
                f"plan={plan!r} decides no bits; give a plan, a file, or a dict such "
                'as {"*": 4}'
            )
        plan = _match_patterns(plan, graph)
    missing = [name for name in graph.names if name not in plan]
    if missing:
        raise QuantizationError(
            f"the allocation has no bits for {shortened(missing)}; "
            'give them, or "*" for all (32 keeps a layer float)'
        )
    return graph.grouped(config.group_size), plan


def _match_patterns(bits: Mapping[str, Pin], graph: LayerGraph) -> Allocation:
    found: dict[str, Choice] = {}
    for pattern, given in bits.items():
        pair = (given, _DEFAULT_ACTIVATION_BITS) if isinstance(given, int) else given
        if not isinstance(pair, tuple | list) or not 2 <= len(pair) <= 3:
            raise TypeError(
                f"{pattern!r}: {given!r} is no bit width; write 4, (4, 8) for weights "
                "and inputs, or (8, 8, 2.5) for coded weights"
            )
        found |= dict.fromkeys(select(graph.names, pattern), Choice(*pair))
    return Allocation(found)
