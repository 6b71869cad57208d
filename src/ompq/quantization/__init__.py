"""quantize(): fold, calibrate, round and correct, for a network that works at once."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.allocation.solver import Allocation
from ompq.costs import FLOAT_BITS
from ompq.errors import QuantizationError, shortened
from ompq.graph import (
    Choice,
    LayerGraph,
    Skipped,
    Unit,
    channel_axis,
    find_units,
    folded,
    observe,
)
from ompq.layers import (
    ActivationQuantizer,
    quantized_layer,
    quantized_layers,
    replace_module,
)
from ompq.plans import Plan
from ompq.quantization.calibration import (
    READING,
    input_grams,
    read_ranges,
    weigh_ranges,
)
from ompq.quantization.equalization import Equalized, equalized, find_factors
from ompq.quantization.moments import batch_runs, float_moments, restore_moments
from ompq.quantization.sites import ActivationSite, Link, find_sites
from ompq.quantizers import LARGEST_HALF_BITS, Grid
from ompq.ranges import DEFAULT_KIND, Kind, RangeMethod, activation_grid, search_weight
from ompq.samples import Progress, Samples, SamplesLike, evaluating, model_device

# Called as weight_grid(unit, weight, axis of the output channels).
WeightGrid: TypeAlias = Callable[[Unit, Tensor, int], Grid]

_ROUNDING = "rounding weights"
_RECORD = "ompq_quantization"  # the attribute that says how a network was quantized


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """How a network is quantized before any reconstruction.

    Attributes:
        weight_grid: Kind of grid for the weights.
        weight_power: Ranges of weights minimise the sum of |error| to this power.
        output_error: Whether the ranges of channels of few weights minimise the squared
            error of their outputs instead. Only up to 6 bits, above which nothing is
            gained, and where the power is 2.
        equalize: Whether channels that only a depthwise convolution reads are brought
            nearer to one size, so that one step fits them all better.
        equalize_from: Fewest weight bits of both layers at which they are: with fewer
            bits it costs more accuracy than it gains.
        activation_range: How ranges of activations are found: ``fisher`` costs the
            network's output least, ``mse`` the tensor itself; ``minmax`` and
            ``percentile`` hold all or nearly all of its values.
        restore_moments: Whether scales and biases make up for what rounding does to the
            mean and the spread of each channel.
        batch_size: How many samples run at a time, at most.
    """

    weight_grid: Kind = DEFAULT_KIND
    weight_power: float = 2.0
    output_error: bool = True
    equalize: bool = True
    equalize_from: int = 6
    activation_range: RangeMethod = "fisher"
    restore_moments: bool = True
    batch_size: int = 64


@dataclass(frozen=True)
class BlockError:
    """How far reconstruction improved one block."""

    block: str
    before: float  # ||output − target||² / ||target||² before
    after: float  # the same after; equal to ``before`` when nothing was improved
    # Whether learning lowered the error; if not, the block kept the rounding it had.
    improved: bool


@dataclass(frozen=True)
class Quantization:
    """How a network was quantized."""

    graph: LayerGraph
    allocation: Allocation
    sites: tuple[ActivationSite, ...]  # where activations are quantized
    skipped: tuple[Skipped, ...]  # what stays float, with reasons
    errors: tuple[BlockError, ...] = ()  # how far reconstruction improved each block
    # Layers that compute with integers; none before :func:`ompq.finalize`.
    links: tuple[Link, ...] = ()
    # Channels whose sizes are not those of the float network.
    equalized: tuple[Equalized, ...] = ()


def quantization_of(model: nn.Module) -> Quantization:
    """Return how a network was quantized.

    Raises:
        QuantizationError: It is not quantized.
    """
    found = getattr(model, _RECORD, None)
    if not isinstance(found, Quantization):
        raise QuantizationError(
            f"{type(model).__name__} is not quantized; call ompq.quantize first"
        )
    return found


def with_quantization(model: nn.Module, record: Quantization) -> nn.Module:
    """Store on a network how it was quantized; returns the network."""
    setattr(model, _RECORD, record)
    return model


def quantize(
    model: nn.Module,
    plan: Plan | Allocation,
    samples: SamplesLike,
    config: QuantizeConfig = QuantizeConfig(),
    *,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a quantized copy of a network that works at once.

    Batch norms are folded, weights rounded to nearest, activation ranges calibrated on
    the samples, and each channel given the mean and the spread it had before rounding.

    Args:
        samples: Unlabelled inputs for calibration, 32 to 1,024.
        progress: Called as stages begin, with their number and name; and with the
            same name, batch by batch or unit by unit, as they proceed.

    Raises:
        PlanError: The plan was made for another network.
        QuantizationError: A layer cannot be replaced.
    """
    report = progress or (lambda _done, _total, _message: None)
    report(0, 4, "observing the network")
    samples = Samples.of(samples)
    recording = observe(model, samples)
    graph = find_units(model, recording)
    allocation = _allocation(plan, graph)
    sites, lost = find_sites(model, recording, graph, allocation)
    report(1, 4, READING)
    factors: tuple[Equalized, ...] = ()
    if config.equalize and sites:
        least = config.equalize_from
        factors = find_factors(
            model,
            recording,
            [unit for unit in graph.units if allocation[unit.name].weight >= least],
            samples,
            batch_size=config.batch_size,
            report=lambda done, total: report(done, total, READING),
        )
    model = equalized(model, factors)
    activation_grids = _calibrate(model, samples, sites, config, report)
    report(2, 4, _ROUNDING)
    quantized = assemble(
        model,
        graph,
        allocation,
        sites,
        weight_grid=_range_search(model, graph, allocation, samples, config, report),
        activation_grids=activation_grids,
    )
    skipped = (*graph.skipped, *lost)
    record = Quantization(graph, allocation, tuple(sites), skipped, equalized=factors)
    report(3, 4, "bias correction")
    if config.restore_moments:
        layers = quantized_layers(quantized)
        units = [unit for unit in graph.units if unit.name in layers]
        moments = float_moments(model, units, samples, config.batch_size)
        runs = batch_runs(quantized, samples, config.batch_size)
        with evaluating(quantized):
            restore_moments(layers, moments, runs)
    report(4, 4, "done")
    return with_quantization(quantized, record).train(model.training)


def _allocation(plan: Plan | Allocation, graph: LayerGraph) -> Allocation:
    if isinstance(plan, Plan):
        plan.check_network(graph)
        return plan.allocation
    missing = [name for name in graph.names if name not in plan]
    if missing:
        raise QuantizationError(f"the allocation has no bits for {shortened(missing)}")
    return plan


def _calibrate(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    config: QuantizeConfig,
    report: Progress,
) -> list[Grid]:
    """Return the grid of each activation site."""
    size, method = config.batch_size, config.activation_range
    ranges = read_ranges(model, samples, sites, batch_size=size, report=report)
    if method == "fisher":
        given = (model, samples, sites, ranges)
        ranges = weigh_ranges(*given, batch_size=size, report=report)
    pairs = zip(sites, ranges, strict=True)
    return [activation_grid(observed, site.bits, method) for site, observed in pairs]


def _range_search(
    model: nn.Module,
    graph: LayerGraph,
    allocation: Allocation,
    samples: Samples,
    config: QuantizeConfig,
    report: Progress,
) -> WeightGrid:
    """Return the function that finds the grid of a unit's weight."""
    grams: dict[str, Tensor] = {}
    if config.output_error and config.weight_power == 2:
        narrow = LARGEST_HALF_BITS
        grams = input_grams(
            model,
            [unit for unit in graph.units if allocation[unit.name].weight <= narrow],
            samples,
            centred=config.restore_moments,
            batch_size=config.batch_size,
            report=lambda done, total: report(done, total, _ROUNDING),
        )
    done = count(1)

    def weight_grid(unit: Unit, weight: Tensor, axis: int) -> Grid:
        found = search_weight(
            weight.float(),
            allocation[unit.name].weight,
            channel_dim=axis,
            kind=config.weight_grid,
            power=config.weight_power,
            gram=grams.get(unit.name),
        )
        report(next(done), len(allocation), _ROUNDING)
        return found

    return weight_grid


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

    ``weight_grid`` returns the grid of a unit's weight, its batch norm folded.
    """
    quantized = copy.deepcopy(model).eval()
    modules = quantized.modules()
    uses = Counter(id(p) for m in modules for p in m.parameters(recurse=False))
    for unit in graph.units:
        if unit.norm:
            _fold(quantized, unit)
        if allocation[unit.name].weight < FLOAT_BITS:
            tied = uses[id(quantized.get_parameter(unit.parameter))] > 1
            _replace(quantized, unit, weight_grid, tied=tied)
    names = quantizer_names(quantized, sites)
    device = model_device(model)
    for name, site, grid in zip(names, sites, activation_grids, strict=True):
        _attach(quantized, name, site, ActivationQuantizer(grid).to(device))
    return quantized


def _fold(model: nn.Module, unit: Unit) -> None:
    module, norm = model.get_submodule(unit.name), model.get_submodule(unit.norm)
    assert isinstance(norm, _BatchNorm)  # the trace found it to be one
    with torch.no_grad():
        weight, bias = folded(module, norm)
        module.weight = nn.Parameter(weight.detach())
        module.bias = nn.Parameter(bias.detach())
    # Batch norms of timm hold the activation that follows, and perhaps a dropout.
    held = OrderedDict(norm.named_children())
    rest = nn.Sequential(held).train(norm.training) if held else nn.Identity()
    replace_module(model, unit.norm, rest)


def _replace(
    model: nn.Module, unit: Unit, weight_grid: WeightGrid, *, tied: bool
) -> None:
    """Round a unit's weight, in a quantized layer where that can be."""
    weight = model.get_parameter(unit.parameter).detach()
    holder, _, leaf = unit.parameter.rpartition(".")
    owner = model.get_submodule(holder)
    grid = weight_grid(unit, weight, channel_axis(owner))
    if unit.kind == "attention" or unit.calls == 0 or tied:
        # Something else than the layer's own forward reads this weight, so it is
        # rounded where it is; the grid stays next to it, for files and runtimes.
        weight.copy_(grid.fake(weight))
        for name in ("scale", "zero_point"):
            values = getattr(grid, name).detach().clone().flatten()
            owner.register_buffer(f"{leaf}_{name}", values)
        return
    try:
        replace_module(model, unit.name, quantized_layer(owner, grid))
    except QuantizationError as error:
        raise QuantizationError(f"{unit.name}: {error}") from error


def quantizer_names(model: nn.Module, sites: Sequence[ActivationSite]) -> list[str]:
    """Return the name of each site's quantizer among the network's modules."""
    found: list[str] = []
    for site in sites:
        kind, places = ("output", site.after) if site.after else ("input", site.before)
        owner = places[0]
        # A module added to a Sequential would run as its last one.
        while isinstance(inner := model.get_submodule(owner), nn.Sequential):
            owner = f"{owner}.{next(iter(inner._modules))}".removeprefix(".")
        base = f"{owner}.{kind}_quantizer".removeprefix(".")
        same = sum(name.startswith(base) for name in found)
        found.append(f"{base}_{same + 1}" if same else base)
    return found


def _attach(
    model: nn.Module, name: str, site: ActivationSite, quantizer: ActivationQuantizer
) -> None:
    """Hook a quantizer to all its places; the first one owns it."""
    for place in site.after:
        model.get_submodule(place).register_forward_hook(quantizer.after)
    for place in site.before:
        module = model.get_submodule(place)
        module.register_forward_pre_hook(quantizer.before, with_kwargs=True)
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).add_module(leaf, quantizer)
