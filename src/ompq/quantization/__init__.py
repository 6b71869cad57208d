"""quantize(): fold batch norms, calibrate, round weights and correct their biases."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ompq.allocation import Allocation
from ompq.attention import with_layers
from ompq.costs import (
    FLOAT_BITS,
    SUM_BITS,
    Accounting,
    can_be_coded,
    coded_bytes,
    paper_bytes,
    unit_bytes,
)
from ompq.errors import PlanError, QuantizationError, shortened
from ompq.graph import (
    RECORD,
    bias_key,
    channel_axis,
    find_units,
    float_network,
    folded,
    observe,
)
from ompq.layers import (
    ActivationQuantizer,
    LogQuantizer,
    QuantizedLayer,
    StoredValues,
    quantized_layer,
    quantized_layers,
    replace_module,
)
from ompq.offload import to_host
from ompq.planner import Pin
from ompq.plans import Plan, read_bits
from ompq.quantization.channels import (
    Equalized,
    batch_runs,
    channel_factor,
    equalized,
    find_factors,
    find_pairs,
    float_moments,
    restore_moments,
)
from ompq.quantization.feedback import (
    channel_grams,
    coded_with_feedback,
    input_grams,
    output_error,
    parameter_uses,
    round_with_feedback,
)
from ompq.quantization.sites import (
    READING,
    ActivationSite,
    Link,
    attach_to_operand,
    find_sites,
    quantizer_name,
    read_ranges,
    weigh_ranges,
)
from ompq.quantizers import STREAM_BITS, Grid, like_weight, of_groups
from ompq.ranges import (
    DEFAULT_KIND,
    Kind,
    RangeMethod,
    activation_grid,
    channel_rows,
    log_grid,
    minmax_weight,
    search_weight,
    shrunk_weight,
)
from ompq.rates import (
    LARGEST_HALF,
    code_bytes,
    coded_grid,
    lowered_codes,
    pulled_to,
    to_multiples,
)
from ompq.recording import copied
from ompq.results import Progress, data_frame, html_table, no_progress
from ompq.samples import Samples, SamplesLike, evaluating, model_device
from ompq.units import (
    IN_PLACE,
    Choice,
    LayerGraph,
    ScoreTable,
    Skipped,
    Unit,
    by_bits,
    check_group_size,
    select,
)

# Called as weight_grid(unit, weight, axis of the output channels); returns the grid and
# the weight that the layer stores and rounds to it.
WeightGrid: TypeAlias = Callable[[Unit, Tensor, int], tuple[Grid, Tensor]]

_ROUNDING = "rounding weights"
_DEFAULT_ACTIVATION_BITS = 8  # where only weight bits are given
_LARGEST_FEEDBACK_BITS = 6  # above, rounding to nearest loses next to nothing


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


@dataclass(frozen=True)
class BlockError:
    """How far reconstruction improved one block."""

    block: str
    before: float  # ||output − target||² / ||target||² before reconstruction
    after: float  # the same afterwards; equal to ``before`` if it did not improve
    improved: bool  # whether the error fell; if not, the block kept its rounding


@dataclass(frozen=True, repr=False)
class Quantization:
    """How a network was quantized."""

    graph: LayerGraph
    allocation: Allocation
    sites: tuple[ActivationSite, ...]  # where activations are quantized
    skipped: tuple[Skipped, ...]  # what stays float, with reasons
    errors: tuple[BlockError, ...] = ()  # how far reconstruction improved each block
    # Mean divergence from the float network on the samples, before and after it was
    # tuned as a whole. Packed files do not keep it.
    tuned: BlockError | None = None
    # Layers that compute with integers; empty before :func:`ompq.finalize`.
    links: tuple[Link, ...] = ()
    equalized: tuple[Equalized, ...] = ()  # channels that were rescaled

    def __repr__(self) -> str:
        return f"Quantization({self.allocation!r}, {len(self.skipped)} left float)"

    def to_dict(self) -> list[dict[str, Any]]:
        """Return one row per unit: its bits and its size in a packed file."""
        bits = self.allocation
        return [
            {
                "name": unit.name,
                "kind": unit.kind,
                "bits": str(bits[unit.name]),
                "bytes": unit_bytes(unit, bits[unit.name]).total,
            }
            for unit in self.graph.units
        ]

    def to_dataframe(self) -> Any:
        """Return one row per unit as a pandas DataFrame."""
        return data_frame(self.to_dict())

    def _repr_html_(self) -> str:
        return html_table(repr(self), self.to_dict())


def quantization_of(model: nn.Module) -> Quantization:
    """Return how a network was quantized.

    Raises:
        QuantizationError: The network is not quantized.
    """
    record = getattr(model, RECORD, None)
    if not isinstance(record, Quantization):
        raise QuantizationError(
            f"{type(model).__name__} is not quantized; call ompq.quantize first"
        )
    return record


def with_quantization(model: nn.Module, record: Quantization) -> nn.Module:
    """Store how a network was quantized on the network, and return it."""
    setattr(model, RECORD, record)
    return model


def network_totals(network: nn.Module, plan: Plan) -> dict[str, float]:
    """Return the plan's totals as they are for a network after training.

    Training may change what was planned: FracBits learns the bits, and the weights of
    LQ-Nets and RVQuant take levels or outliers besides their codes. These count as
    stored, scales and biases included, whatever the plan's accounting; the plan's other
    units keep it.
    """
    bits = quantization_of(network).allocation
    if dict(bits) != dict(plan.allocation):  # perhaps with bits that were no choice
        choices = tuple(by_bits({*bits.values()}))
        shape = len(plan.graph), len(choices)
        plan = replace(
            plan,
            choices=choices,
            scores=ScoreTable(np.zeros(shape)),
            allowed=np.ones(shape, dtype=bool),
            allocation=bits,
            files=(),
        )
    totals, layers, more = dict(plan.totals), quantized_layers(network), 0.0
    for unit in plan.graph.units:
        rule = layers[unit.name].rounding if unit.name in layers else None
        if isinstance(rule, StoredValues):
            more += rule.bytes - _replaced_bytes(unit, bits[unit.name], plan.accounting)
    totals["bits_per_parameter"] *= 1 + more / totals["bytes"]
    for name in {"bytes", "total_bytes"} & totals.keys():
        totals[name] += more
    return totals


def _replaced_bytes(unit: Unit, bits: Choice, accounting: Accounting) -> float:
    """Return what a plan counts for what ``StoredValues.bytes`` counts as well."""
    if accounting == "paper":
        return paper_bytes(unit, bits)
    planned = unit_bytes(unit, bits)
    return planned.total - planned.activations - planned.metadata


def quantize(
    model: nn.Module,
    plan: Plan | Allocation | Mapping[str, Pin] | str | Path,
    samples: SamplesLike,
    config: QuantizeConfig = QuantizeConfig(),
    *,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a quantized copy of a network, ready to use.

    Batch norms are folded, weights rounded so that those of a channel make up for each
    other's errors, activation ranges calibrated on the samples, and the mean and spread
    that each channel had before are restored.

    Args:
        plan: A plan; the bits of every layer; a file with either; or a dict, pattern →
            bits, in which later patterns override: ``{"*": 4, "fc": (8, 8)}``.
        samples: Unlabelled inputs for calibration, 32 to 1,024.
        progress: Called with the number and name of each stage as it begins, and with
            the same name after each of its batches or units.

    Raises:
        PlanError: The plan was made for another network.
        QuantizationError: The allocation lacks units.
    """
    report = progress or no_progress
    report(0, 4, "observing the network")
    samples = Samples.of(samples)
    model = with_layers(float_network(model), samples)
    recording = observe(model, samples)
    graph, allocation = _resolve(plan, find_units(model, recording), config)
    sites, unplaced = find_sites(model, recording, graph, allocation, config.sum_bits)
    report(1, 4, READING)
    factors: tuple[Equalized, ...] = ()
    if config.equalize and sites:
        least, batch = config.equalize_from, samples.first_batch(1)
        factors = find_factors(
            model,
            find_pairs(model, recording, graph.units, allocation, least, batch),
            samples,
            batch_size=config.batch_size,
            report=lambda done, total: report(done, total, READING),
        )
    model = equalized(model, factors)
    sites, activation_grids = _calibrate(model, samples, sites, config, report)
    report(2, 4, _ROUNDING)
    grams = _grams(model, graph, allocation, samples, config, report)
    quantized = assemble(
        model,
        graph,
        allocation,
        sites,
        weight_grid=_weight_grids(allocation, grams, factors, config, report),
        activation_grids=activation_grids,
    )
    skipped = (*graph.skipped, *unplaced)
    record = Quantization(graph, allocation, tuple(sites), skipped, equalized=factors)
    report(3, 4, "bias correction")
    if config.restore_moments:
        layers = quantized_layers(quantized)
        units = [unit for unit in graph.units if unit.name in layers]
        moments = float_moments(model, units, samples, config.batch_size)
        runs = batch_runs(quantized, samples, config.batch_size)
        with evaluating(quantized):
            restore_moments(layers, moments, runs)
    keep_rates(with_quantization(quantized, record))
    report(4, 4, "done")
    return to_host(quantized).train(model.training)


def _resolve(
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


def _calibrate(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    config: QuantizeConfig,
    report: Progress,
) -> tuple[list[ActivationSite], list[Grid]]:
    """Return the activation sites, with their shifts, and their grids."""
    method = config.activation_range
    options: Any = {"batch_size": config.batch_size, "report": report}
    ranges = read_ranges(model, samples, sites, **options)
    if method == "fisher":
        ranges = weigh_ranges(model, samples, sites, ranges, **options)
    found, grids = [], []
    for site, observed in zip(sites, ranges, strict=True):
        if site.powers:
            grid, shift = log_grid(observed, site.bits, method)
            site = replace(site, powers=shift is not None, shift=shift or 0.0)
        else:
            grid = activation_grid(observed, site.bits, method)
        found.append(site)
        grids.append(grid)
    return found, grids


def _grams(
    model: nn.Module,
    graph: LayerGraph,
    allocation: Allocation,
    samples: Samples,
    config: QuantizeConfig,
    report: Progress,
) -> dict[str, Tensor]:
    """Return input Gram matrices of the units that are rounded with error feedback."""
    return input_grams(
        model,
        [unit for unit in graph.units if _is_fed_back(allocation[unit.name], config)],
        samples,
        centred=config.restore_moments,
        batch_size=config.batch_size,
        report=lambda done, total: report(done, total, _ROUNDING),
    )


def _is_fed_back(choice: Choice, config: QuantizeConfig) -> bool:
    """Return whether a weight is rounded with error feedback."""
    if not config.output_error:
        return False
    if choice.rate:
        return choice.rate <= _LARGEST_FEEDBACK_BITS
    squared = config.weight_range == "search" and config.weight_power == 2
    return squared and choice.weight <= _LARGEST_FEEDBACK_BITS


def _weight_grids(
    allocation: Allocation,
    grams: Mapping[str, Tensor],
    factors: Sequence[Equalized],
    config: QuantizeConfig,
    report: Progress,
) -> WeightGrid:
    """Return the function that finds the grid of a unit's weight."""
    done = count(1)

    def weight_grid(unit: Unit, weight: Tensor, axis: int) -> tuple[Grid, Tensor]:
        report(next(done), len(allocation), _ROUNDING)
        choice, kind = allocation[unit.name], config.weight_grid
        gram = grams.get(unit.name)
        if choice.rate:
            # A single step suits the channels best as they were before equalization.
            factor = channel_factor(unit, weight, axis, factors)
            return _coded_weight(unit, choice, weight, axis, factor, gram)
        bits = choice.weight
        options: Any = {"channel_dim": axis, "group_size": unit.group_size}
        if config.weight_range == "shrink":
            grid = shrunk_weight(weight, bits, **options)
        elif config.weight_range == "minmax":
            grid = minmax_weight(weight, bits, kind=kind, **options)
        else:
            options |= {"kind": kind, "power": config.weight_power}
            if gram is not None and not unit.group_size:
                options["gram"] = channel_grams(gram, unit.out_channels)
            grid = search_weight(weight.float(), bits, **options)
        if unit.group_size:
            grid = _byte_scales(grid, weight, unit)
        if gram is None:
            return grid, weight
        # Scales of groups must stay what a packed file holds.
        return round_with_feedback(weight, grid, gram, refit=not unit.group_size)

    return weight_grid


def _byte_scales(grid: Grid, weight: Tensor, unit: Unit) -> Grid:
    """Round the scales of groups so that each takes one byte in a packed file."""
    size = unit.group_size
    scale = of_groups(grid.scale, size)
    # An all-zero group has an arbitrary scale, which must not become the largest.
    nonzero = channel_rows(weight, 0, size).any(1).view_as(scale)
    if nonzero.any():
        scale = torch.where(nonzero, scale, scale[nonzero].max())
    scale = like_weight(to_multiples(scale), unit.weight_shape, group_size=size)
    return replace(grid, scale=scale)


def _coded_weight(
    unit: Unit,
    choice: Choice,
    weight: Tensor,
    axis: int,
    factor: Tensor,
    gram: Tensor | None,
) -> tuple[Grid, Tensor]:
    """Return a grid that meets a unit's rate, and the weight that rounds to it."""
    if not can_be_coded(unit, choice):
        raise QuantizationError(
            f"{unit.name}: its {unit.weights} weights are too few to be coded at "
            f"{choice.rate:g} bits; raise the rate or give it a fixed width"
        )
    given, limit = weight / factor, coded_bytes(unit.weights, choice.rate)
    found = [coded_grid(given, limit, channel_dim=axis)]
    if gram is not None:
        # At one bit a weight, feedback may move more weights off zero than it is worth.
        rounding = partial(coded_with_feedback, gram=gram)
        found.append(coded_grid(given, limit, channel_dim=axis, rounding=rounding))
        found.sort(key=lambda each: output_error(each[0].fake(each[1]) - given, gram))
    grid, moved = found[0]
    return replace(grid, scale=grid.scale * factor), moved * factor


def assemble(
    model: nn.Module,
    graph: LayerGraph,
    allocation: Mapping[str, Choice],
    sites: Sequence[ActivationSite],
    *,
    weight_grid: WeightGrid,
    activation_grids: Sequence[Grid],
) -> nn.Module:
    """Return a quantized copy of a float network, in eval mode.

    ``weight_grid`` is called with a unit's weight after folding its batch norm.
    """
    quantized = copied(model).eval()
    aliases = _aliases(quantized)
    uses = parameter_uses(quantized)
    for module in quantized.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # Its fused kernel would read the stored weights, which are not rounded.
            module.activation_relu_or_gelu = 0
    counts = [uses[id(quantized.get_parameter(unit.parameter))] for unit in graph.units]
    for unit, users in zip(graph.units, counts, strict=True):
        if unit.norm:
            _fold_norm(quantized, unit)
        if (choice := allocation[unit.name]).weight < FLOAT_BITS:
            tied = users > 1 and not unit.norm
            _quantize_unit(quantized, unit, choice, weight_grid, tied=tied)
    for alias, name in aliases.items():
        replace_module(quantized, alias, quantized.get_submodule(name))
    names = quantizer_names(quantized, sites)
    device = model_device(model)
    for name, site, grid in zip(names, sites, activation_grids, strict=True):
        quantizer = (
            LogQuantizer(grid, site.shift) if site.powers else ActivationQuantizer(grid)
        )
        _attach(quantized, name, site, quantizer.to(device))
    return quantized


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return further names of modules that have several, with the first of each."""
    first: dict[nn.Module, str] = {}
    named = model.named_modules(remove_duplicate=False)
    pairs = [(name, first.setdefault(module, name)) for name, module in named]
    return {name: other for name, other in pairs if name != other}


def _fold_norm(model: nn.Module, unit: Unit) -> None:
    module, norm = model.get_submodule(unit.name), model.get_submodule(unit.norm)
    with torch.no_grad():
        weight, bias = folded(module, norm)
        module.weight = nn.Parameter(weight.detach())
        module.bias = nn.Parameter(bias.detach())
    # A batch norm of timm contains the activation after it, and sometimes a dropout.
    children = OrderedDict(norm.named_children())
    rest = nn.Sequential(children).train(norm.training) if children else nn.Identity()
    replace_module(model, unit.norm, rest)


def _quantize_unit(
    model: nn.Module, unit: Unit, choice: Choice, weight_grid: WeightGrid, *, tied: bool
) -> None:
    """Replace a unit by a quantized layer, or else round its weight in place."""
    weight = model.get_parameter(unit.parameter).detach()
    if weight.element_size() < 4:
        raise QuantizationError(
            f"{unit.name}: its weight is {weight.dtype}, which is too coarse for a "
            "grid; quantize the network in float32: model.float()"
        )
    holder, _, leaf = unit.parameter.rpartition(".")
    owner, group_size = model.get_submodule(holder), unit.shared_by(choice)
    on_device = weight.to(model_device(model))
    grid, stored = weight_grid(unit, on_device, channel_axis(owner))
    weight.copy_(stored)
    scale, zero_point = grid.scale.to(weight.device), grid.zero_point.to(weight.device)
    grid = replace(grid, scale=scale, zero_point=zero_point)
    if unit.kind in IN_PLACE or unit.calls == 0 or tied:
        # Other code than the layer's own forward reads this weight, so it is rounded in
        # place; its grid is kept in buffers beside it, for files and runtimes.
        weight.copy_(grid.fake(weight))
        for name in ("scale", "zero_point"):
            values = of_groups(getattr(grid, name).detach(), group_size)
            owner.register_buffer(f"{leaf}_{name}", values.clone())
        return
    layer = quantized_layer(owner, grid, group_size)
    layer.rate = choice.rate
    replace_module(model, unit.name, layer)


@torch.no_grad()
def keep_rates(quantized: nn.Module) -> None:
    """Make units fit their planned sizes in a packed file, in place.

    Scales of groups and of coded units become multiples of one number, and biases of
    coded units 16-bit floats. While codes exceed their limit, those that matter least
    for the bits they save move towards zero. A network that already fits stays as it
    is.
    """
    record, layers = quantization_of(quantized), quantized_layers(quantized)
    state = quantized.state_dict(keep_vars=True)
    for layer in layers.values():
        if layer.group_size:
            layer.weight_scale.copy_(to_multiples(layer.weight_scale))
    for unit in record.graph.units:
        rate = record.allocation[unit.name].rate
        bias = state.get(bias_key(unit))
        if rate and bias is not None:
            bias.copy_(bias.clamp(-LARGEST_HALF, LARGEST_HALF).half())
        if rate and unit.name in layers:
            _keep_rate(layers[unit.name], coded_bytes(unit.weights, rate))


def _keep_rate(layer: QuantizedLayer, limit: int) -> None:
    grid, codes = layer.grid_like_weight(), layer.codes()
    scale = to_multiples(layer.weight_scale)
    if scale.equal(layer.weight_scale) and code_bytes(codes) <= limit:
        return
    position = layer.weight / grid.scale + grid.zero_point
    codes = lowered_codes(codes, position, 1.0, size=code_bytes, limit=limit)
    layer.weight_scale.copy_(scale)
    steps = pulled_to(codes, position) - grid.zero_point
    layer.weight.copy_(layer.grid_like_weight().scale * steps)


def quantizer_names(model: nn.Module, sites: Sequence[ActivationSite]) -> list[str]:
    """Return the name of each site's quantizer among the network's modules."""
    found: list[str] = []
    for site in sites:
        if site.operand:
            found.append(quantizer_name(site))
            continue
        kind, places = ("output", site.after) if site.after else ("input", site.before)
        owner = places[0]
        # A module added to a Sequential would become its last layer.
        while isinstance(inner := model.get_submodule(owner), nn.Sequential):
            owner = f"{owner}.{next(iter(inner._modules))}".removeprefix(".")
        base = f"{owner}.{kind}_quantizer".removeprefix(".")
        same = sum(name.startswith(base) for name in found)
        found.append(f"{base}_{same + 1}" if same else base)
    return found


def _attach(
    model: nn.Module, name: str, site: ActivationSite, quantizer: ActivationQuantizer
) -> None:
    """Hook a quantizer to all modules of its site; the first becomes its parent."""
    if site.operand:
        attach_to_operand(model, site, quantizer)
        return
    for place in site.after:
        model.get_submodule(place).register_forward_hook(quantizer.after)
    for place in site.before:
        module = model.get_submodule(place)
        module.register_forward_pre_hook(quantizer.before, with_kwargs=True)
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).add_module(leaf, quantizer)
