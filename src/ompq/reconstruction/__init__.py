"""reconstruct(): learn the rounding block by block so that outputs stay the same."""

import copy
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torch import nn

from ompq.errors import QuantizationError, shortened
from ompq.files import read_checkpoint, write_checkpoint
from ompq.graph import trace
from ompq.layers import quantized_layers
from ompq.quantization import (
    BlockError,
    Quantization,
    quantization_of,
    with_quantization,
)
from ompq.quantization.equalization import equalized
from ompq.quantization.moments import Moments, float_moments
from ompq.reconstruction.blocks import BlockRunner, merged
from ompq.reconstruction.rounding import RoundingConfig, learn_rounding
from ompq.recording import tensors_in
from ompq.samples import Progress, Samples, SamplesLike

logger = logging.getLogger(__name__)
_KIND = "reconstruction"  # of checkpoint
_READ_EVERY = 499  # values of a sample: a prime, so that no row or column is favoured


@dataclass(frozen=True, kw_only=True)
class ReconstructConfig:
    """How blocks are reconstructed.

    Attributes:
        rounding: The optimisation of one block.
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

    rounding: RoundingConfig = RoundingConfig()
    loss: Literal["squared", "fisher"] = "squared"
    merge: int = 1
    batch_size: int = 64
    device_bytes: int = 16 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.merge < 1:
            raise ValueError(f"merge={self.merge} must be at least 1")
        if self.loss not in ("squared", "fisher"):
            raise ValueError(f"loss={self.loss!r} is unknown; use squared or fisher")


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
    does not improve keeps the rounding it had.

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
    model = equalized(model, record.equalized)
    result = copy.deepcopy(quantized).eval()
    groups = merged(model, _learnable(result, record), samples, config.merge)
    blocks = {"+".join(group): group for group in groups}
    identity = _identity(quantized, samples, config)
    done = _resume(result, checkpoint, identity)
    moments = _moments(model, record, groups, samples, config.batch_size)
    size, limit = config.batch_size, config.device_bytes
    runner = BlockRunner(result, model, samples, batch_size=size, limit=limit)
    with closing(runner):
        for number, (name, group) in enumerate(blocks.items()):
            if name in done:
                continue
            cache = runner.gather(group[0], group[-1], fisher=config.loss == "fisher")
            if config.rounding.float_inputs == 0:
                cache.float_inputs = []
            modules = [result.get_submodule(block) for block in group]
            before, after = learn_rounding(
                modules[0] if len(group) == 1 else nn.Sequential(*modules),
                cache,
                replace(config.rounding, seed=config.seed + 7919 * number),
                moments=moments[group],
                progress=_within(progress, number, len(blocks), name),
            )
            del cache  # before the next one is gathered
            done[name] = BlockError(name, before, min(before, after), after < before)
            logger.info("block %s: error %.3g -> %.3g", name, before, done[name].after)
            if checkpoint is not None:
                _save(result, checkpoint, identity, done)
    if progress:
        total = len(blocks) * config.rounding.iterations
        progress(total, total, "reconstructed")
    record = replace(record, errors=tuple(done[name] for name in blocks))
    return with_quantization(result, record).train(quantized.training)


def _check_network(record: Quantization, model: nn.Module, samples: Samples) -> None:
    differing = record.graph.differing(trace(model, samples))
    if differing:
        raise QuantizationError(
            f"the quantized network was made from another one: {len(differing)} units "
            f"differ ({shortened(differing)}); give the float network it was made from"
        )


def _learnable(model: nn.Module, record: Quantization) -> list[str]:
    """Return the blocks that hold quantized layers, in order of execution."""
    layers, names = quantized_layers(model), record.graph.names
    blocks = record.graph.blocks.items()
    return [name for name, held in blocks if any(names[i] in layers for i in held)]


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a projection inside an attention has no module
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
    """Return what must be equal for a checkpoint to continue a run."""
    digest = hashlib.sha256(json.dumps(asdict(config)).encode())
    seen = tensors_in(samples.runs)
    # Some values of each sample tell it from others; all would take seconds to read.
    some = [t.reshape(len(t), -1)[:, ::_READ_EVERY] for t in seen if t.dim()]
    for tensor in (*quantized.state_dict().values(), *some):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


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
