"""quantize(): fold batch norms, calibrate, round weights and correct their biases."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ompq.activation_ranges import activation_grid, log_grid
from ompq.allocation.problem import Allocation
from ompq.configs import Pin, QuantizeConfig
from ompq.errors import check_type
from ompq.grids import Grid
from ompq.layers import quantized_layers
from ompq.network.attention import with_layers
from ompq.network.graph import find_units, float_network, observe
from ompq.network.observation import copy_network
from ompq.network.units import Unit
from ompq.offload import offloading, to_host
from ompq.outputs import Outputs, divergences_of
from ompq.plans import Plan, read_bits
from ompq.progress import Progress, ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.quantization.activation_sites import ActivationSite, find_sites
from ompq.quantization.assembly import assemble
from ompq.quantization.budget_filling import fill_budget, size_limit
from ompq.quantization.calibration import READING, read_ranges, weigh_ranges
from ompq.quantization.corrected_targets import CorrectionPass
from ompq.quantization.equalization import (
    Equalized,
    equalize_channels,
    find_factors,
    find_pairs,
)
from ompq.quantization.given_bits import resolve_choices
from ompq.quantization.moments import batch_runs, float_moments, restore_moments
from ompq.quantization.record import Quantization, keep_rates, with_quantization
from ompq.quantization.weight_grids import ROUNDING, find_weight_grids, weight_grams
from ompq.samples import (
    Report,
    Samples,
    SamplesLike,
    evaluating,
    fitting_batch,
    usual_settings,
)
from ompq.working_memory import release

logger = logging.getLogger(__name__)
BIASES = "bias correction"


@shows_progress("quantizing", by_message=True)
@usual_settings()
def quantize(
    model: nn.Module,
    plan: Plan | Allocation | Mapping[str, Pin] | str | Path,
    samples: SamplesLike,
    config: QuantizeConfig = QuantizeConfig(),
    *,
    progress: ProgressLike = None,
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
            the same name after each of its batches or units; True shows a bar.

    Raises:
        PlanError: The plan was made for another network.
        QuantizationError: The allocation lacks units.
    """
    report = callback(progress)
    report(0, 4, "observing the network")
    check_type("config", config, QuantizeConfig)
    samples, (plan, config) = Samples.of(samples), _at_target(plan, config)
    model = with_layers(float_network(model), samples)
    recording = observe(model, samples)
    graph, allocation, output = resolve_choices(
        plan, find_units(model, recording), config
    )
    most = config.batch_size
    config = replace(config, batch_size=fitting_batch(model, samples, most))
    outputs = Outputs.of(model, samples, output, batch_size=config.batch_size)
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
    model = equalize_channels(model, factors)
    sites, activation_grids = _calibrate(model, samples, sites, config, outputs, report)
    report(2, 4, ROUNDING)
    grams = weight_grams(model, graph, allocation, samples, config, report)
    record = Quantization(
        graph,
        allocation,
        tuple(sites),
        (*graph.skipped, *unplaced),
        equalized=factors,
        output=str(outputs),
        limit=(limit := size_limit(plan)),
    )

    def rounded(bits: Allocation) -> nn.Module:
        weight_grid = find_weight_grids(bits, grams, factors, config, report)
        made = assemble(
            model,
            graph,
            bits,
            sites,
            weight_grid=weight_grid,
            activation_grids=activation_grids,
        )
        report(3, 4, BIASES)
        made = _with_moments(
            CorrectionPass(model, made, graph.units, grams, weight_grid),
            samples,
            config,
            record.output,
            report,
        )
        keep_rates(with_quantization(made, record))
        return made

    quantized = fill_budget(rounded, graph, allocation, limit)
    report(4, 4, "done")
    return to_host(quantized).train(model.training)


# Corrected targets are fitted on seven of eight samples, 512 at most, and networks
# compared on the ones after these, 256 at most. Fewer than 32 would hardly tell
# networks apart.
_FITTED, _JUDGED, _FEWEST = 512, 256, 32


def _with_moments(
    correction: CorrectionPass,
    samples: Samples,
    config: QuantizeConfig,
    output: str,
    report: Progress,
) -> nn.Module:
    """Return the network whose channels have the moments that they have in float.

    If the settings ask for corrected targets, a second network has them, and the one
    that is nearer to the float network on other samples is returned.
    """

    def tell(done: int, total: int | None) -> None:
        report(done, total, BIASES)

    size, plain = config.batch_size, correction.quantized
    if not config.restore_moments:
        return plain
    fitted = min(_FITTED, len(samples) * 7 // 8)
    judging = len(samples) - fitted >= _FEWEST
    tried = config.corrected_targets and correction.grams and not offloading()
    corrected = copy_network(plain) if tried and judging else None
    _restore_moments(plain, correction.model, correction.units, samples, size, tell)
    if corrected is None:
        return plain
    replace(correction, quantized=corrected).run(samples[:fitted], size, tell)
    before, after = divergences_of(
        (plain, corrected), correction.model, samples[fitted:][:_JUDGED], output
    )
    logger.info("corrected targets: divergence %.4g -> %.4g", before, after)
    return corrected if after < before else plain


def _restore_moments(
    quantized: nn.Module,
    model: nn.Module,
    units: Sequence[Unit],
    samples: Samples,
    batch_size: int,
    report: Report,
) -> None:
    """Give the channels of a quantized network the moments that they have in float."""
    release()  # what matrices of inputs took
    layers = quantized_layers(quantized)
    units = [unit for unit in units if unit.name in layers]
    moments = float_moments(model, units, samples, batch_size)
    with evaluating(quantized):
        runs = batch_runs(quantized, samples, batch_size)
        restore_moments(layers, moments, runs, report)


def _at_target(plan: Any, config: QuantizeConfig) -> tuple[Any, QuantizeConfig]:
    """Return a plan, and the settings with what its target requires.

    Settings that were changed from their defaults stay as they are.
    """
    plan = read_bits(Path(plan)) if isinstance(plan, str | Path) else plan
    target = plan.target if isinstance(plan, Plan) else None
    required = {} if target is None else dict(target.settings)
    usual = {
        n: v
        for n, v in required.items()
        if getattr(config, n) == getattr(QuantizeConfig, n)
    }
    usual.pop("group_size", None)  # a plan has its own
    return plan, replace(config, **usual)


def _calibrate(
    model: nn.Module,
    samples: Samples,
    sites: Sequence[ActivationSite],
    config: QuantizeConfig,
    outputs: Outputs,
    report: Progress,
) -> tuple[list[ActivationSite], list[Grid]]:
    """Return the activation sites, with their shifts, and their grids."""
    method = config.activation_range
    options: Any = {"batch_size": config.batch_size, "report": report}
    ranges = read_ranges(model, samples, sites, **options)
    if method == "fisher":
        ranges = weigh_ranges(model, samples, sites, ranges, outputs, **options)
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
