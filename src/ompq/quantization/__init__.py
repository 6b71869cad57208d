"""quantize(): a working quantized network at once: fold, swap, calibrate, correct."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    normalised_by,
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
from ompq.quantization.moments import (
    FOR_MOMENTS,
    Moments,
    Runs,
    output_moments,
    restore_moments,
)
from ompq.quantization.sites import ActivationSite, Link, find_sites
from ompq.quantizers import LARGEST_HALF_BITS, Grid
from ompq.ranges import DEFAULT_KIND, Kind, RangeMethod, activation_grid, search_weight
from ompq.samples import (
    Progress,
    Samples,
    SamplesLike,
    call,
    evaluating,
    model_device,
    to_device,
)

# Called as weight_grid(unit, weight, axis of the output channels).
WeightGrid: TypeAlias = Callable[[Unit, Tensor, int], Grid]


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

    Args:
        model: The float network; left as it is.
        graph: Its units.
        allocation: Unit name → bits.
        sites: Where activations are quantized.
        weight_grid: Returns the grid of a unit's weight, which is folded already.
        activation_grids: The grid of each point.

    Raises:
        QuantizationError: A layer cannot be replaced.
    """
    quantized = copy.deepcopy(model).eval()
    tied = _shared(quantized)
    for unit in graph.units:
        _fold(quantized, unit)
        if allocation[unit.name].weight < FLOAT_BITS:
            shared = id(quantized.get_parameter(unit.parameter)) in tied
            _swap(quantized, unit, weight_grid, shared=shared)
    names = quantizer_names(quantized, sites)
    device = model_device(model)
    for name, site, grid in zip(names, sites, activation_grids, strict=True):
        _attach(quantized, name, site, ActivationQuantizer(grid).to(device))
    return quantized


def quantizer_names(model: nn.Module, sites: Sequence[ActivationSite]) -> list[str]:
    """Return the name of each point's quantizer among the network's modules."""
    found: list[str] = []
    for site in sites:
        kind, places = ("output", site.after) if site.after else ("input", site.before)
        owner = places[0]
        # What is added to a Sequential would run as its last module.
        while isinstance(inner := model.get_submodule(owner), nn.Sequential):
            owner = f"{owner}.{next(iter(inner._modules))}".removeprefix(".")
        base = f"{owner}.{kind}_quantizer".removeprefix(".")
        same = sum(name.startswith(base) for name in found)
        found.append(f"{base}_{same + 1}" if same else base)
    return found


def _fold(model: nn.Module, unit: Unit) -> None:
    if not unit.norm:
        return
    module, norm = model.get_submodule(unit.name), model.get_submodule(unit.norm)
    assert isinstance(norm, _BatchNorm)  # the trace found it to be one
    with torch.no_grad():
        weight, bias = folded(module, norm)
        module.weight = nn.Parameter(weight.detach())
        module.bias = nn.Parameter(bias.detach())
    replace_module(model, unit.norm, _without_norm(norm))


def _without_norm(norm: nn.Module) -> nn.Module:
    """Return what is left of a batch norm that was folded.

    Those of timm hold the activation that follows, and perhaps a dropout.
    """
    held = OrderedDict(norm.named_children())
    return nn.Sequential(held).train(norm.training) if held else nn.Identity()


def _swap(
    model: nn.Module, unit: Unit, weight_grid: WeightGrid, *, shared: bool
) -> None:
    weight = model.get_parameter(unit.parameter).detach()
    holder, _, leaf = unit.parameter.rpartition(".")
    owner = model.get_submodule(holder)
    grid = weight_grid(unit, weight, channel_axis(owner))
    if unit.kind == "attention" or unit.calls == 0 or shared:
        # Something else than the layer's own forward reads this weight, so it is
        # rounded where it is; the grid stays next to it, for files and runtimes.
        weight.copy_(grid.fake(weight))
        owner.register_buffer(f"{leaf}_scale", grid.scale.detach().clone().flatten())
        owner.register_buffer(
            f"{leaf}_zero_point", grid.zero_point.detach().clone().flatten()
        )
        return
    try:
        replace_module(model, unit.name, quantized_layer(owner, grid))
    except QuantizationError as error:
        raise QuantizationError(f"{unit.name}: {error}") from error


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules hold."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {one for one, count in holders.items() if count > 1}


def _attach(
    model: nn.Module, name: str, site: ActivationSite, quantizer: ActivationQuantizer
) -> None:
    """Hang one quantizer on all its places; the first one owns it."""
    for place in site.after:
        model.get_submodule(place).register_forward_hook(quantizer.after)
    for place in site.before:
        model.get_submodule(place).register_forward_pre_hook(
            quantizer.before, with_kwargs=True
        )
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).add_module(leaf, quantizer)


_ROUNDING = "rounding weights"
_RECORD = "ompq_quantization"  # the attribute that says how a network was quantized


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """How a network is quantized before any reconstruction.

    Attributes:
        weight_grid: Kind of grid for the weights.
        weight_power: Ranges of weights minimise the sum of |error| to this power.
        output_error: Whether the ranges of channels of few weights minimise the squared
            error of their outputs on some samples instead. Only up to 6 bits, above
            which nothing is gained, and where the power is 2.
        equalize: Whether channels that only a depthwise convolution reads are brought
            nearer to one size, so that one step fits them all better.
        equalize_from: Fewest weight bits of both layers at which they are: with fewer
            bits it costs more accuracy than it gains.
        activation_range: How ranges of activations are found: ``fisher`` costs the
            network's output least, ``mse`` the tensor itself; ``minmax`` and
            ``percentile`` hold all or nearly all of its values.
        restore_moments: Whether scales and biases make up for what rounding does to the
            mean and the spread of each channel.
        batch_size: How many samples run at a time.
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
    """What reconstruction did to one block.

    Attributes:
        block: The block's name.
        before: ||output − target||² / ||target||² before.
        after: The same after; equal to ``before`` when nothing was improved.
        improved: Whether learning lowered the error; if not, the block kept the
            rounding it had.
    """

    block: str
    before: float
    after: float
    improved: bool


@dataclass(frozen=True)
class Quantization:
    """How a network was quantized.

    Attributes:
        graph: Units of the float network.
        allocation: Unit name → bits.
        sites: Where activations are quantized.
        skipped: What stays float, with reasons.
        errors: What reconstruction did, block by block.
        links: Layers that compute with whole numbers; none before the network is
            settled.
        equalized: Channels whose sizes are not those of the float network.
    """

    graph: LayerGraph
    allocation: Allocation
    sites: tuple[ActivationSite, ...]
    skipped: tuple[Skipped, ...]
    errors: tuple[BlockError, ...] = ()
    links: tuple[Link, ...] = ()
    equalized: tuple[Equalized, ...] = ()


def quantization_of(model: nn.Module) -> Quantization:
    """Return how a network was quantized.

    Raises:
        QuantizationError: It was not.
    """
    found = getattr(model, _RECORD, None)
    if not isinstance(found, Quantization):
        raise QuantizationError(
            f"{type(model).__name__} is not quantized; call ompq.quantize first"
        )
    return found


def with_quantization(model: nn.Module, record: Quantization) -> nn.Module:
    """Write down on a network how it was quantized; returns the network."""
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

    Batch norms are folded, channels brought to sizes that suit one step, weights
    rounded to nearest, ranges of activations read off the samples, and each channel
    given the mean and the spread it had before rounding.

    Args:
        model: The float network.
        plan: Which bits each unit gets.
        samples: Unlabelled inputs for the ranges, 32 to 1,024.
        config: Grids and ranges.
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
        wide = config.equalize_from
        factors = find_factors(
            model,
            recording,
            [u for u in graph.units if allocation[u.name].weight >= wide],
            samples,
            batch_size=config.batch_size,
            report=lambda done, total: report(done, total, READING),
        )
    model = equalized(model, factors)
    size = config.batch_size
    ranges = read_ranges(model, samples, sites, batch_size=size, report=report)
    if config.activation_range == "fisher":
        ranges = weigh_ranges(
            model, samples, sites, ranges, batch_size=size, report=report
        )
    report(2, 4, _ROUNDING)
    grams = _grams(model, graph, allocation, samples, config, report)
    quantized = assemble(
        model,
        graph,
        allocation,
        sites,
        weight_grid=_searching(allocation, config, grams, report),
        activation_grids=[
            activation_grid(statistics, site.bits, config.activation_range)
            for site, statistics in zip(sites, ranges, strict=True)
        ],
    )
    skipped = (*graph.skipped, *lost)
    with_quantization(
        quantized,
        Quantization(graph, allocation, tuple(sites), skipped, equalized=factors),
    )
    report(3, 4, "restoring moments")
    if config.restore_moments:
        _restore_moments(quantized, model, samples, config.batch_size)
    report(4, 4, "done")
    return quantized.train(model.training)


def _allocation(plan: Plan | Allocation, graph: LayerGraph) -> Allocation:
    if isinstance(plan, Plan):
        plan.check_network(graph)
        return plan.allocation
    missing = [name for name in graph.names if name not in plan]
    if missing:
        raise QuantizationError(f"the allocation has no bits for {shortened(missing)}")
    return plan


def _grams(
    model: nn.Module,
    graph: LayerGraph,
    allocation: Allocation,
    samples: Samples,
    config: QuantizeConfig,
    report: Progress,
) -> dict[str, Tensor]:
    if not config.output_error or config.weight_power != 2:
        return {}
    coarse = [u for u in graph.units if allocation[u.name].weight <= LARGEST_HALF_BITS]
    return input_grams(
        model,
        coarse,
        samples,
        centred=config.restore_moments,
        batch_size=config.batch_size,
        report=lambda done, total: report(done, total, _ROUNDING),
    )


def _searching(
    allocation: Allocation,
    config: QuantizeConfig,
    grams: Mapping[str, Tensor],
    report: Progress,
) -> WeightGrid:
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
        return found.grid

    return weight_grid


def _restore_moments(
    quantized: nn.Module, model: nn.Module, samples: Samples, batch_size: int
) -> None:
    """Give each unit the mean and the spread that it has in the float network."""
    layers = quantized_layers(quantized)
    units = [u for u in quantization_of(quantized).graph.units if u.name in layers]
    moments = float_moments(model, units, samples, batch_size)
    with evaluating(quantized):
        restore_moments(layers, moments, _runs(quantized, samples, batch_size))


def float_moments(
    model: nn.Module, units: Sequence[Unit], samples: Samples, batch_size: int
) -> dict[str, Moments]:
    """Return the moments of what units give after their batch norms, by name."""
    modules = {u.name: model.get_submodule(normalised_by(model, u)) for u in units}
    with evaluating(model):
        return output_moments(modules, _runs(model, samples, batch_size))


def _runs(model: nn.Module, samples: Samples, batch_size: int) -> Runs:
    device = model_device(model)
    return [
        partial(call, model, to_device(batch, device))
        for batch in Samples.of(samples.first_batch(FOR_MOMENTS)).batches(batch_size)
    ]
