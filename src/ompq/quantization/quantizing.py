"""quantize(): a working quantized network at once: fold, swap, calibrate, correct."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from torch import Tensor, nn

from ompq.allocation.solving import Allocation
from ompq.errors import QuantizationError, shortened
from ompq.graph.folding import normalised_by
from ompq.graph.observation import record
from ompq.graph.tracing import trace
from ompq.graph.units import LayerGraph, Skipped, Unit
from ompq.plans import Plan
from ompq.quantization.assembly import WeightGrid, assemble
from ompq.quantization.equalizing import Equalized, equalized, find_factors
from ompq.quantization.grams import input_grams
from ompq.quantization.layers import quantized_layers
from ompq.quantization.moments import (
    FOR_MOMENTS,
    Moments,
    output_moments,
    restore_moments,
)
from ompq.quantization.placement import Link, Point, find_points
from ompq.quantization.ranges import READING, read_ranges, weigh_ranges
from ompq.quantizers.calibration import RangeMethod, activation_grid
from ompq.quantizers.grids import LARGEST_HALF_BITS, Grid
from ompq.quantizers.ranges import DEFAULT_KIND, Kind, search_weight
from ompq.samples import (
    Progress,
    Samples,
    call,
    evaluating,
    first_samples,
    model_device,
    to_device,
)

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
        points: Where activations are quantized.
        skipped: What stays float, with reasons.
        errors: What reconstruction did, block by block.
        links: Layers that compute with whole numbers; none before the network is
            settled.
        equalized: Channels whose sizes are not those of the float network.
    """

    graph: LayerGraph
    allocation: Allocation
    points: tuple[Point, ...]
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
    samples: Samples,
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
    graph = trace(model, samples)
    allocation = _allocation(plan, graph)
    device = model_device(model)
    recording = record(model, to_device(first_samples(samples, 1), device))
    points, lost = find_points(model, recording, graph, allocation)
    report(1, 4, READING)
    factors: tuple[Equalized, ...] = ()
    if config.equalize and points:
        factors = find_factors(
            model,
            recording,
            graph,
            samples,
            report=lambda done, total: report(done, total, READING),
        )
    model = equalized(model, factors)
    size = config.batch_size
    ranges = read_ranges(model, samples, points, batch_size=size, report=report)
    if config.activation_range == "fisher":
        ranges = weigh_ranges(model, samples, points, ranges, report=report)
    report(2, 4, _ROUNDING)
    grams = _grams(model, graph, allocation, samples, config, report)
    quantized = assemble(
        model,
        graph,
        allocation,
        points,
        weight_grid=_searching(allocation, config, grams, report),
        activation_grids=[
            activation_grid(statistics, point.bits, config.activation_range)
            for point, statistics in zip(points, ranges, strict=True)
        ],
    )
    skipped = (*graph.skipped, *lost)
    with_quantization(
        quantized,
        Quantization(graph, allocation, tuple(points), skipped, equalized=factors),
    )
    report(3, 4, "restoring moments")
    if config.restore_moments:
        _restore_moments(quantized, model, samples)
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


def _restore_moments(quantized: nn.Module, model: nn.Module, samples: Samples) -> None:
    """Give each unit the mean and the spread that it has in the float network."""
    layers = quantized_layers(quantized)
    units = [u for u in quantization_of(quantized).graph.units if u.name in layers]
    moments = float_moments(model, units, samples)
    batch = to_device(first_samples(samples, FOR_MOMENTS), model_device(model))
    with evaluating(quantized):
        restore_moments(layers, moments, lambda: call(quantized, batch))


def float_moments(
    model: nn.Module, units: Sequence[Unit], samples: Samples
) -> dict[str, Moments]:
    """Return the moments of what units give after their batch norms, by name."""
    batch = to_device(first_samples(samples, FOR_MOMENTS), model_device(model))
    modules = {u.name: model.get_submodule(normalised_by(model, u)) for u in units}
    with evaluating(model):
        return output_moments(modules, lambda: call(model, batch))
