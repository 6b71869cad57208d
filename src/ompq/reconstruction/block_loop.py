"""reconstruct(): learn how to round, block by block, so that outputs are preserved."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn

from ompq.checkpoints import Store
from ompq.configs import (
    ReconstructConfig,
    RoundingConfig,
)
from ompq.errors import QuantizationError, check_type, shorten
from ompq.layers import QuantizedLayer, quantized_layers
from ompq.network.attention import with_layers
from ompq.network.graph import trace
from ompq.network.observation import copy_network, tensors_in
from ompq.offload import offloading, staying
from ompq.outputs import divergences_of
from ompq.parallel import copy_main, process_count, rank
from ompq.progress import Progress, ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.quantization.budget_filling import keep_budget, pass_on
from ompq.quantization.equalization import equalize_channels
from ompq.quantization.moments import Moments, float_moments
from ompq.quantization.record import (
    BlockError,
    Quantization,
    quantization_of,
    with_quantization,
)
from ompq.reconstruction.block_data import BlockRunner, merge_blocks
from ompq.reconstruction.phases import Phase, ReconstructionMethod, float_activations
from ompq.reconstruction.rounding import learn_rounding
from ompq.reconstruction.tuning import tune, worth_tuning
from ompq.samples import (
    Samples,
    SamplesLike,
    cudnn_kernels,
    evaluating,
    fitting_batch,
    run_batch,
    usual_settings,
)

logger = logging.getLogger(__name__)


@shows_progress("reconstructing")
@usual_settings()
def reconstruct(
    quantized: nn.Module,
    model: nn.Module,
    samples: SamplesLike,
    config: ReconstructConfig = ReconstructConfig(),
    *,
    checkpoint: str | Path | None = None,
    progress: ProgressLike = None,
) -> nn.Module:
    """Return a quantized network whose blocks closely match the float blocks.

    Blocks are reconstructed in order of execution. Each reads the outputs of the
    quantized blocks before it and learns to return what the float block returns. If
    learning does not improve a block, it keeps its previous rounding. Networks with
    activations of few bits are tuned as a whole afterwards. If the network's output
    has not come nearer to the float network's, nothing is kept. Of 256 samples or more,
    an eighth is held out to judge all this. When there are several processes, they
    share the samples.

    Args:
        quantized: Result of :func:`ompq.quantize`; it is not modified.
        samples: Unlabelled inputs, 32 to 1,024.
        checkpoint: File that is written after each block. If it already exists, the
            run resumes from it and gives the same result.
        progress: Called after each block and at intervals within it; True shows a
            bar.

    Raises:
        QuantizationError: ``quantized`` is not quantized, or was not made from
            ``model``.
        TraceError: The float network fails on the samples, or is broken.
        CheckpointError: The checkpoint belongs to another run.
    """
    record, samples = quantization_of(quantized), Samples.of(samples)
    _check_network(record, model, samples)
    model = equalize_channels(with_layers(model, samples), record.equalized)
    result, told = copy_network(quantized).eval(), callback(progress)
    groups = merge_blocks(
        model, _learnable(result, record, config), samples, config.merge
    )
    about = config, quantized.state_dict(), samples.runs
    done = _resume(result, store := Store.of(checkpoint, "reconstruction", *about))
    copy_main(result.state_dict().values())
    held_out = _held_out(config, samples)
    samples = samples.share(rank(), process_count())
    phases = _phases(config, model, result, groups, samples)
    total = sum(len(phase.groups) for phase in phases)
    for phase in phases:
        phase.prepare(result, done)
        runner = BlockRunner(
            result,
            model,
            samples,
            batch_size=fitting_batch(model, samples, config.batch_size),
            limit=config.device_bytes,
        )
        # Nondeterministic kernels would give blocks different inputs in every run.
        with (
            cudnn_kernels(repeatable=True),
            closing(runner),
            float_activations(result, wanted=phase.float_activations),
        ):
            for number, (name, group) in enumerate(phase.named.items()):
                if name not in done:
                    cache = runner.gather(
                        group[0],
                        group[-1],
                        loss=config.loss,
                        fisher_rank=config.fisher_rank,
                        moments=phase.moments.get(group, {}),
                    )
                    cache.held_out = held_out
                    block, seed = _join(result, group), config.seed + 7919 * number
                    report = _block_progress(told, len(done), total, name)
                    with staying(block):
                        learned = phase.learn(block, cache, phase.config, seed, report)
                    done[name] = _block_error(name, *learned)
                    store.write([*map(asdict, done.values())], result.state_dict())
                pass_on(
                    _layers(result, [group]),
                    _layers(result, phase.groups[number + 1 :]),
                )
    told(total * phase.iterations, total * phase.iterations, "reconstructed")
    if held_out and not _is_closer(result, quantized, model, samples[-held_out:]):
        result, done = copy_network(quantized).eval(), _unchanged(done)
    keep_budget(with_quantization(result, _with_errors(record, done)))
    return result.train(quantized.training)


# One in so many samples is held out to judge what is learned. Fewer than 32 would
# hardly tell networks apart, so that fewer than 256 samples all do both.
_HELD_OUT, _FEWEST = 8, 256
_WHOLE, _TUNING = ("",), "whole network"  # the network itself as a group, and its name


def _phases(
    config: ReconstructConfig,
    model: nn.Module,
    quantized: nn.Module,
    groups: Sequence[tuple[str, ...]],
    samples: Samples,
) -> Sequence[Phase]:
    """Return the passes over the network, in order."""
    rounding, tuning = config.rounding, config.tuning
    if not isinstance(rounding, RoundingConfig):
        method: ReconstructionMethod = rounding
        return method.phases(groups, samples)
    record = quantization_of(quantized)
    moments = _moments(model, record, groups, samples, config.batch_size)
    count = rounding.iterations
    phases = [Phase(groups, count, learn_rounding, rounding, moments=moments)]
    if tuning and worth_tuning(quantized, tuning) and _can_be_tuned(model, samples):
        count = tuning.steps(len(samples))
        phases.append(Phase([_WHOLE], count, tune, tuning, _TUNING))
    return phases


def _held_out(config: ReconstructConfig, samples: Samples) -> int:
    """Return how many samples of each process judge what is learned from the others."""
    count = len(samples) // process_count()
    enough = count >= _FEWEST and isinstance(config.rounding, RoundingConfig)
    return count // _HELD_OUT if enough else 0


def _with_errors(record: Quantization, done: Mapping[str, BlockError]) -> Quantization:
    errors = tuple(error for name, error in done.items() if name != _TUNING)
    return replace(record, errors=errors, tuned=done.get(_TUNING))


def _unchanged(done: Mapping[str, BlockError]) -> dict[str, BlockError]:
    """Return the errors of blocks of which nothing that was learned is kept."""
    return {
        name: replace(error, after=error.before, improved=False)
        for name, error in done.items()
    }


def _is_closer(
    learned: nn.Module, rounded: nn.Module, model: nn.Module, samples: Samples
) -> bool:
    """Return whether a network diverges less than another one from the float one."""
    output = quantization_of(rounded).output
    after, before = divergences_of((learned, rounded), model, samples, output)
    logger.info("divergence of held-out samples: %.4g -> %.4g", before, after)
    return after < before


def _can_be_tuned(model: nn.Module, samples: Samples) -> bool:
    """Return whether all of a network fits the device and it has a single output."""
    if offloading():
        return False
    with evaluating(model):
        output = run_batch(model, samples.first_batch(1))
    return sum(tensor.is_floating_point() for tensor in tensors_in(output)) == 1


def _block_error(name: str, before: float, after: float) -> BlockError:
    error = BlockError(name, before, min(before, after), after < before)
    logger.info("block %s: error %.3g -> %.3g", name, before, error.after)
    return error


def _layers(
    network: nn.Module, groups: Sequence[tuple[str, ...]]
) -> list[QuantizedLayer]:
    """Return the quantized layers of some groups of blocks."""
    blocks = [network.get_submodule(name) for group in groups for name in group]
    return [one for block in blocks for one in quantized_layers(block).values()]


def _join(network: nn.Module, group: tuple[str, ...]) -> nn.Module:
    modules = [network.get_submodule(block) for block in group]
    return modules[0] if len(group) == 1 else nn.Sequential(*modules)


def _check_network(record: Quantization, model: nn.Module, samples: Samples) -> None:
    differing = record.graph.differing(trace(model, samples))
    if differing:
        raise QuantizationError(
            f"the quantized network was made from another one: {len(differing)} units "
            f"differ ({shorten(differing)}); pass the float network it was made from"
        )


def _learnable(
    model: nn.Module, record: Quantization, config: ReconstructConfig
) -> list[str]:
    """Return the blocks with quantized layers, in order of execution.

    Some methods leave out a stem, a first layer that is a block of its own.
    """
    check_type("config", config, ReconstructConfig)
    layers, names = quantized_layers(model), record.graph.names
    blocks = [
        block
        for block, units in record.graph.blocks.items()
        if any(names[i] in layers for i in units)
    ]
    skips = getattr(config.rounding, "skips_stem", False)
    return blocks[1:] if skips and blocks[:1] == [names[0]] else blocks


def _moments(
    model: nn.Module,
    record: Quantization,
    groups: Sequence[tuple[str, ...]],
    samples: Samples,
    batch_size: int,
) -> dict[tuple[str, ...], dict[str, Moments]]:
    """Return the float moments of each group's units, by their names within it."""
    # The weights of a recurrent layer are units without a module.
    modules = dict(model.named_modules(remove_duplicate=False))
    units = [unit for unit in record.graph.units if unit.name in modules]
    with cudnn_kernels(repeatable=True):
        size = fitting_batch(model, samples, batch_size)
        moments = float_moments(model, units, samples, size)
    result: dict[tuple[str, ...], dict[str, Moments]] = {}
    for group in groups:
        inside = result.setdefault(group, {})
        for number, block in enumerate(group):
            for index in record.graph.blocks[block]:
                name = record.graph.names[index]
                inner = name.removeprefix(block).removeprefix(".")
                if name in moments:
                    key = inner if len(group) == 1 else f"{number}.{inner}"
                    inside[key] = moments[name]
    return result


def _block_progress(progress: Progress, number: int, total: int, name: str) -> Progress:
    """Return a callback that reports one block's steps as part of the whole run."""

    def report(done: int, block_total: int | None, message: str) -> None:
        steps = block_total or 1
        progress(number * steps + done, total * steps, f"{name} {message}")

    return report


def _resume(model: nn.Module, store: Store) -> dict[str, BlockError]:
    if (kept := store.read()) is None:
        return {}
    model.load_state_dict(kept.tensors)
    done = [BlockError(**entry) for entry in kept.data]
    return {error.block: error for error in done}
