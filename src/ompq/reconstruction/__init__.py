"""reconstruct(): learn the rounding block by block so that outputs stay the same."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from torch import nn

from ompq.attention import with_layers
from ompq.errors import QuantizationError, check_counts, check_known, shortened
from ompq.files import read_checkpoint, run_identity, write_checkpoint
from ompq.graph import trace
from ompq.layers import quantized_layers
from ompq.offload import staying
from ompq.processes import copy_main, process_count, rank
from ompq.quantization import (
    BlockError,
    Quantization,
    keep_rates,
    quantization_of,
    with_quantization,
)
from ompq.quantization.equalization import equalized
from ompq.quantization.moments import Moments, float_moments
from ompq.reconstruction.blocks import BlockCache, BlockRunner, merged
from ompq.reconstruction.brecq import (
    BrecqConfig,
    calibrate_steps,
    float_activations,
    learn_steps,
    learn_weights,
)
from ompq.reconstruction.rounding import RoundingConfig, learn_rounding
from ompq.recording import copied, tensors_in
from ompq.samples import Samples, SamplesLike, cudnn_kernels
from ompq.stages import Progress

logger = logging.getLogger(__name__)
_KIND = "reconstruction"  # of checkpoint
_READ_EVERY = 499  # values of a sample: a prime, so that no row or column is favoured


@dataclass(frozen=True, kw_only=True)
class ReconstructConfig:
    """How blocks are reconstructed.

    Attributes:
        rounding: The optimisation of one block; with a ``BrecqConfig`` it is BRECQ's,
            which learns weights, then activation steps, and leaves a stem alone.
        loss: ``squared`` error of the block's output, or ``fisher``: each element
            weighted by the squared gradient of the network's loss.
        merge: How many neighbouring blocks, at most, are reconstructed jointly, where
            each alone reads what the one before returns; 1 keeps blocks apart.
        batch_size: How many samples run at a time while inputs are gathered.
        device_bytes: Inputs and targets of a block that take more stay in host memory.
            Those that take more than half of it are gathered anew from the network's
            input, which is slower in deep networks.
        seed: Seed of the order of samples.
    """

    rounding: RoundingConfig | BrecqConfig = RoundingConfig()
    loss: Literal["squared", "fisher"] = "squared"
    merge: int = 1
    batch_size: int = 64
    device_bytes: int = 16 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(merge=self.merge)
        check_known("loss", self.loss, ("squared", "fisher"))


_BRECQ = ReconstructConfig(rounding=BrecqConfig())
# The settings of published work, by name.
RECONSTRUCT_PROTOCOLS: Mapping[str, ReconstructConfig] = MappingProxyType(
    {"ours": ReconstructConfig(), "brecq": _BRECQ, "paper-ptq": _BRECQ}
)


def reconstruct(
    quantized: nn.Module,
    model: nn.Module,
    samples: SamplesLike,
    config: ReconstructConfig = ReconstructConfig(),
    *,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a quantized network whose blocks give nearly what the float ones give.

    Blocks are taken in order of execution. Each sees what the quantized blocks before
    it return and learns to return what the float block returns. A block that learning
    does not improve keeps the rounding it had. Several processes share the samples.

    Args:
        quantized: From :func:`ompq.quantize`; left as it is.
        samples: Unlabelled inputs, 32 to 1,024.
        checkpoint: File that is written after each block; if it is there already,
            the run continues from it and gives the same result.
        progress: Called after each block and now and then within one.

    Raises:
        QuantizationError: ``quantized`` is not quantized, or made from another network.
        TraceError: The float network fails on the samples, or is broken.
        CheckpointError: The checkpoint belongs to another run.
    """
    record, samples = quantization_of(quantized), Samples.of(samples)
    _check_network(record, model, samples)
    model = equalized(with_layers(model, samples), record.equalized)
    result = copied(quantized).eval()
    groups = merged(model, _learnable(result, record, config), samples, config.merge)
    identity = _identity(quantized, samples, config)
    done = _resume(result, checkpoint, identity)
    copy_main(result.state_dict().values())
    samples = samples.share(rank(), process_count())
    every = {
        phase: [phase.name(group) for group in groups]
        for phase in _phases(config, model, record, groups, samples)
    }
    total = sum(map(len, every.values()))
    for phase, names in every.items():
        if not done.keys() & set(names):
            phase.begin(result)
            copy_main(result.state_dict().values())
        limits = {"batch_size": config.batch_size, "limit": config.device_bytes}
        runner = BlockRunner(result, model, samples, **limits)
        # Kernels that add up in any order would give blocks other inputs every time.
        with (
            cudnn_kernels(repeatable=True),
            closing(runner),
            float_activations(result, wanted=phase.float_activations),
        ):
            for number, (name, group) in enumerate(zip(names, groups, strict=True)):
                if name in done:
                    continue
                fisher = config.loss == "fisher"
                given = (
                    runner.gather(group[0], group[-1], fisher=fisher),
                    config.seed + 7919 * number,
                    _within(progress, len(done), total, name),
                )
                with staying(_joined(result, group)):
                    done[name] = _improvement(name, *phase.learn(result, group, *given))
                if checkpoint is not None:
                    _save(result, checkpoint, identity, done)
    if progress:
        progress(total * phase.iterations, total * phase.iterations, "reconstructed")
    found = tuple(done[name] for names in every.values() for name in names)
    keep_rates(with_quantization(result, replace(record, errors=found)))
    return result.train(quantized.training)


# Called with the network, the names of neighbouring blocks, what they get and give, a
# seed and progress; returns the error before and after.
_Learn: TypeAlias = Callable[
    [nn.Module, tuple[str, ...], BlockCache, int, Progress | None], tuple[float, float]
]


@dataclass(frozen=True, eq=False)
class _Phase:
    """One way through all blocks."""

    iterations: int
    learn: _Learn
    suffix: str = ""  # of the names under which its errors are reported
    begin: Callable[[nn.Module], None] = lambda _network: None
    float_activations: bool = False  # whether activations stay float during this phase

    def name(self, group: tuple[str, ...]) -> str:
        return "+".join(group) + self.suffix


def _phases(
    config: ReconstructConfig,
    model: nn.Module,
    record: Quantization,
    groups: Sequence[tuple[str, ...]],
    samples: Samples,
) -> list[_Phase]:
    """Return the ways through all blocks, in their order."""
    rounding = config.rounding
    if isinstance(rounding, BrecqConfig):
        return _brecq_phases(rounding, samples)
    moments = _moments(model, record, groups, samples, config.batch_size)

    def learn(network, group, cache, seed, progress):  # type: ignore[no-untyped-def]
        if rounding.float_inputs == 0:
            cache.float_inputs = []
        return learn_rounding(
            _joined(network, group),
            cache,
            rounding,
            seed=seed,
            moments=moments[group],
            progress=progress,
        )

    return [_Phase(rounding.iterations, learn)]


def _brecq_phases(config: BrecqConfig, samples: Samples) -> list[_Phase]:
    """Return BRECQ's two: rounding with float activations, then activation steps."""

    def weights(network, group, cache, seed, progress):  # type: ignore[no-untyped-def]
        cache.float_inputs = []
        return learn_weights(_joined(network, group), cache, config, seed, progress)

    def steps(network, group, cache, seed, progress):  # type: ignore[no-untyped-def]
        cache.inputs, cache.float_inputs = cache.float_inputs, []
        return learn_steps(_joined(network, group), cache, config, seed, progress)

    return [
        _Phase(config.iterations, weights, ", weights", float_activations=True),
        _Phase(
            config.activation_iterations,
            steps,
            ", activations",
            lambda network: calibrate_steps(network, samples),
        ),
    ]


def _improvement(name: str, before: float, after: float) -> BlockError:
    error = BlockError(name, before, min(before, after), after < before)
    logger.info("block %s: error %.3g -> %.3g", name, before, error.after)
    return error


def _joined(network: nn.Module, group: tuple[str, ...]) -> nn.Module:
    modules = [network.get_submodule(block) for block in group]
    return modules[0] if len(group) == 1 else nn.Sequential(*modules)


def _check_network(record: Quantization, model: nn.Module, samples: Samples) -> None:
    differing = record.graph.differing(trace(model, samples))
    if differing:
        raise QuantizationError(
            f"the quantized network was made from another one: {len(differing)} units "
            f"differ ({shortened(differing)}); give the float network it was made from"
        )


def _learnable(
    model: nn.Module, record: Quantization, config: ReconstructConfig
) -> list[str]:
    """Return the blocks that hold quantized layers, in order of execution."""
    layers, names = quantized_layers(model), record.graph.names
    found = [
        block
        for block, held in record.graph.blocks.items()
        if any(names[i] in layers for i in held)
    ]
    stem = isinstance(config.rounding, BrecqConfig) and found[:1] == [names[0]]
    return found[1:] if stem else found


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a weight of a recurrent layer has no module
        return None


def _moments(
    model: nn.Module,
    record: Quantization,
    groups: Sequence[tuple[str, ...]],
    samples: Samples,
    batch_size: int,
) -> dict[tuple[str, ...], dict[str, Moments]]:
    """Return, for each group, the float moments of its units by their names in it."""
    units = [unit for unit in record.graph.units if _module(model, unit.name)]
    with cudnn_kernels(repeatable=True):
        found = float_moments(model, units, samples, batch_size)
    result: dict[tuple[str, ...], dict[str, Moments]] = {}
    for group in groups:
        of = result.setdefault(group, {})
        for number, block in enumerate(group):
            for index in record.graph.blocks[block]:
                name = record.graph.names[index]
                inner = name.removeprefix(block).removeprefix(".")
                if name in found:
                    of[inner if len(group) == 1 else f"{number}.{inner}"] = found[name]
    return result


def _within(
    progress: Progress | None, number: int, total: int, name: str
) -> Progress | None:
    if progress is None:
        return None

    def report(done: int, of: int | None, message: str) -> None:
        steps = of or 1
        progress(number * steps + done, total * steps, f"{name} {message}")

    return report


def _identity(quantized: nn.Module, samples: Samples, config: ReconstructConfig) -> str:
    # Some values of each sample tell it from others; all would take seconds to read.
    seen = tensors_in(samples.runs)
    some = (t.reshape(len(t), -1)[:, ::_READ_EVERY] for t in seen if t.dim())
    return run_identity(asdict(config), (*quantized.state_dict().values(), *some))


def _save(
    model: nn.Module, path: str | Path, identity: str, done: Mapping[str, BlockError]
) -> None:
    text = {"done": json.dumps([asdict(error) for error in done.values()])}
    write_checkpoint(path, model.state_dict(), text, kind=_KIND, identity=identity)


def _resume(
    model: nn.Module, path: str | Path | None, identity: str
) -> dict[str, BlockError]:
    if path is None or not Path(path).exists():
        return {}
    tensors, text = read_checkpoint(path, kind=_KIND, identity=identity)
    model.load_state_dict(tensors)
    done = [BlockError(**entry) for entry in json.loads(text["done"])]
    return {error.block: error for error in done}
