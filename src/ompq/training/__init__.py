"""train(): quantization-aware training."""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ompq.quantization import quantization_of
from ompq.samples import Progress, cudnn_kernels
from ompq.training.batches import Batches, LabelledBatch, epoch_batches
from ompq.training.config import TrainConfig
from ompq.training.norms import fold_norms
from ompq.training.run import Keeper, Run, run_identity


def train(  # noqa: PLR0913
    quantized: nn.Module,
    batches: Batches,
    config: TrainConfig = TrainConfig(),
    *,
    teacher: nn.Module | None = None,
    validation: Iterable[LabelledBatch] | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a quantized network that has learned from labelled images.

    Weights are rounded in every pass and gradients go straight through; scales are
    learned with them. Started by ``torchrun`` or ``accelerate launch``, the processes
    share every step, and all return the same network.

    Args:
        quantized: From :func:`ompq.quantize` or, better, :func:`ompq.reconstruct`;
            left as it is.
        batches: Training data (:func:`ompq.training_data`), or an iterable of inputs
            and targets that can be read once an epoch, a ``DataLoader`` for example.
        config: Epochs, rates, what is learned.
        teacher: The float network, to learn from its answers or to keep its norms.
        validation: Labelled batches; accuracy on them decides which epoch is kept.
        checkpoint: Folder that gets ``last.safetensors`` and, with validation,
            ``best.safetensors``. If they are there already, the run continues from
            them and gives the same result.
        progress: Called now and then with the steps done.

    Raises:
        QuantizationError: ``quantized`` is not quantized.
        TrainingError: The loss is not finite.
        CheckpointError: The checkpoint belongs to another run.
        MissingExtraError: Several processes without Accelerate.
    """
    quantization_of(quantized)
    if teacher is None and (config.distill or config.batch_norm == "fold-and-train"):
        raise ValueError(
            f"distill={config.distill:g}, batch_norm={config.batch_norm!r} need the "
            "float network; pass teacher=model"
        )
    run = Run(quantized, batches, config, teacher=teacher)
    keeper = Keeper(
        run,
        run_identity(quantized, run.length, config),
        None if checkpoint is None else Path(checkpoint),
        validation=validation,
        progress=progress,
    )
    with _generators(run), keeper.watching():
        for epoch in range(run.step // run.epoch_steps, config.epochs):
            run.begin_epoch(epoch)
            numbers = range(_batches_done(run, epoch), run.length)
            for inputs, targets in epoch_batches(
                batches, epoch, config, numbers=numbers, shard=run.shard
            ):
                if run.advance(inputs, targets):
                    keeper.after_step()
            keeper.end_epoch(epoch)
    return _result(quantized, run, keeper.chosen())


def _batches_done(run: Run, epoch: int) -> int:
    return (run.step - epoch * run.epoch_steps) * run.config.accumulate


@contextmanager
def _generators(run: Run) -> Iterator[None]:
    """Leave the global generators, and how GPUs compute, as they were."""
    with (
        torch.random.fork_rng([run.device] if run.device.type == "cuda" else []),
        cudnn_kernels(repeatable=run.config.deterministic),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # Told where parameters could have been unused, and none were.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        yield


def _result(quantized: nn.Module, run: Run, state: Mapping[str, Tensor]) -> nn.Module:
    run.model.load_state_dict(state)
    fold_norms(run.model)
    result = copy.deepcopy(quantized)
    result.load_state_dict(run.model.state_dict())
    return result
