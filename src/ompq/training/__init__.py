"""train(): quantization-aware training."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ompq.allocation import Allocation
from ompq.errors import TrainingError, shortened
from ompq.layers import activation_quantizers, quantized_layers
from ompq.quantization import keep_rates, quantization_of, with_quantization
from ompq.recording import copied
from ompq.samples import Progress, cudnn_kernels
from ompq.training.batches import Batches, LabelledBatch, epoch_batches
from ompq.training.config import TrainConfig
from ompq.training.run import Run, Tracker, run_identity


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
    """Return a quantized network that was trained on labelled images.

    Weights are rounded in every pass and gradients go straight through; scales are
    learned with them. Started by ``torchrun`` or ``accelerate launch``, the processes
    share every step, and all return the same network.

    Args:
        quantized: From :func:`ompq.quantize` or, better, :func:`ompq.reconstruct`.
        batches: Training data (:func:`ompq.datasets.training_sets.training_data`), or
            an iterable of inputs and targets that can be read once an epoch, for
            example a ``DataLoader``.
        teacher: The float network, for distillation or to keep its norms.
        validation: Labelled batches; accuracy on them decides which epoch is kept.
        checkpoint: Folder for ``last.safetensors`` and, with validation data,
            ``best.safetensors``. If they exist, the run resumes from them and gives
            the same network and the same files as one that was never interrupted.
        progress: Called with the steps done, the steps in all and a message.

    Raises:
        QuantizationError: ``quantized`` is not quantized.
        TrainingError: The loss is not finite, or weights are to be rounded in a way
            that knows no groups.
        CheckpointError: The checkpoint belongs to another run.
        MissingExtraError: Accelerate is not installed.
    """
    quantization_of(quantized)
    if teacher is None and config.needs_float:
        raise ValueError(
            f"distill={config.distill:g}, batch_norm={config.batch_norm!r}, "
            f"start={config.start!r} need the float network; pass teacher=model"
        )
    _check_groups(quantized, config)
    run = Run(quantized, batches, config, teacher=teacher)
    tracker = Tracker(
        run,
        run_identity(quantized, run.length, config),
        None if checkpoint is None else Path(checkpoint),
        validation=validation,
        progress=progress,
    )
    with _isolated(run), tracker.following():
        for epoch in range(run.step // run.epoch_steps, config.epochs):
            numbers = run.begin_epoch(epoch)
            found = epoch_batches(batches, epoch, config, numbers, run.shard)
            for inputs, targets in found:
                with run.engine.accumulate(run.prepared):
                    placed = run.gradients.placed(inputs)
                    run.compute(placed, targets.to(run.device, non_blocking=True))
                    if run.engine.sync_gradients:
                        run.update()
                        tracker.after_step()
            tracker.end_epoch(epoch)
    result = copied(quantized)
    result.load_state_dict(run.result(tracker.chosen()))
    result = _as_trained(result, run.model)
    keep_rates(result)
    return result


def _check_groups(quantized: nn.Module, config: TrainConfig) -> None:
    layers = quantized_layers(quantized).items()
    grouped = [name for name, layer in layers if layer.group_size]
    if grouped and config.weights != "stored":
        raise TrainingError(
            f"weights={config.weights!r} has one scale per channel, and "
            f"{shortened(grouped)} one for each group of weights: train with "
            "weights='stored', or plan without group_size"
        )


def _as_trained(result: nn.Module, model: nn.Module) -> nn.Module:
    """Take over what a state does not hold: learned widths, and weights on no grid."""
    layers, record = quantized_layers(result), quantization_of(result)
    bits = dict(record.allocation)
    for name, layer in quantized_layers(model).items():
        layers[name].rounding, layers[name].bits = layer.rounding, layer.bits
        bits[name] = bits[name]._replace(weight=layer.bits)
    quantizers = activation_quantizers(result)
    for name, one in activation_quantizers(model).items():
        quantizers[name].outliers = one.outliers
    if bits == dict(record.allocation):
        return result
    return with_quantization(result, replace(record, allocation=Allocation(bits)))


@contextmanager
def _isolated(run: Run) -> Iterator[None]:
    """Restore the global generators, and the settings of GPUs, afterwards."""
    with (
        torch.random.fork_rng([run.device] if run.device.type == "cuda" else []),
        cudnn_kernels(repeatable=run.config.deterministic),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # Shown where parameters could have been unused, and none were.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        yield
