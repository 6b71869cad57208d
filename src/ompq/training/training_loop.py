"""Quantization-aware training: the training loop, its batches and checkpoints."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ompq.allocation.problem import Allocation
from ompq.configs import TrainConfig
from ompq.errors import TrainingError, check_type, shorten
from ompq.evaluation import targets_on
from ompq.layers import activation_quantizers, quantized_layers
from ompq.network.observation import copy_network
from ompq.progress import ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.quantization.record import keep_rates, quantization_of, with_quantization
from ompq.samples import cudnn_kernels, usual_settings
from ompq.training.step import Loss
from ompq.training.tracking import Tracker
from ompq.training.training_batches import (
    Batches,
    LabelledBatch,
    as_labelled,
    epoch_batches,
)
from ompq.training.training_run import Run


@shows_progress("training")
@usual_settings()
def train(  # noqa: PLR0913
    quantized: nn.Module,
    batches: Batches,
    config: TrainConfig = TrainConfig(),
    *,
    teacher: nn.Module | None = None,
    validation: Iterable[LabelledBatch] | None = None,
    checkpoint: str | Path | None = None,
    loss: Loss | None = None,
    progress: ProgressLike = None,
) -> nn.Module:
    """Fine-tune a quantized network on labelled images and return the result.

    Weights are rounded in every forward pass, with straight-through gradients, and
    scales are learned with them. Under ``torchrun`` or ``accelerate launch`` the
    processes share every step, and all return the same network.

    Args:
        quantized: From :func:`ompq.quantize` or, better, :func:`ompq.reconstruct`.
        batches: Training data (:func:`ompq.datasets.training_data`), or an iterable of
            inputs and targets that can be read once per epoch, such as a
            ``DataLoader``.
        teacher: The float network, for distillation or to keep its norms.
        validation: Labelled batches; accuracy on them, or your own loss, decides which
            epoch is kept.
        checkpoint: Folder for ``last.safetensors`` and, with validation data,
            ``best.safetensors``. If they exist, the run resumes from them and gives
            the same network and the same files as an uninterrupted run.
        loss: Called with the network's output and the targets of a batch, which may be
            anything; returns the mean loss, a scalar. By default targets are class
            indices (N,), and the loss is the cross entropy of logits (N, classes).
        progress: Called with the steps done, the total number of steps and a message;
            True shows a bar.

    Raises:
        DataError: There are too few batches, or targets are not class indices.
        QuantizationError: ``quantized`` is not quantized.
        TrainingError: The loss is not finite, or the rounding method does not support
            groups of weights.
        CheckpointError: The checkpoint belongs to another run.
        MissingExtraError: Accelerate is not installed.
    """
    check_type("config", config, TrainConfig)
    quantization_of(quantized)
    if teacher is None and config.needs_float:
        raise ValueError(
            f"distill={config.distill:g}, batch_norm={config.batch_norm!r}, "
            f"start={config.start!r} need the float network; pass teacher=model"
        )
    layers = quantized_layers(quantized).items()
    grouped = [name for name, layer in layers if layer.group_size]
    if grouped and config.weights != "stored":
        raise TrainingError(
            f"weights={config.weights!r} needs one scale per channel, but there is one "
            f"for each group of weights in {shorten(grouped)}; train with "
            "weights='stored', or plan without group_size"
        )
    run = Run(quantized, batches, config, teacher=teacher, loss=loss)
    tracker = Tracker(
        run,
        "" if checkpoint is None else run.identity(quantized),
        None if checkpoint is None else Path(checkpoint),
        validation=validation,
        progress=None if progress is None else callback(progress),
    )
    with isolated(run), tracker.following():
        for epoch in range(run.step // run.epoch_steps, config.epochs):
            numbers = run.begin_epoch(epoch)
            loader = epoch_batches(batches, epoch, config, numbers, run.shard)
            for batch in loader:
                inputs, targets = as_labelled(batch, class_indices=loss is None)
                with run.engine.accumulate(run.prepared):
                    placed = run.gradients.placed(inputs)
                    run.compute(placed, targets_on(run.device, targets))
                    if run.engine.sync_gradients:
                        run.update()
                        tracker.after_step()
            tracker.end_epoch(epoch)
    result = copy_network(quantized)
    result.load_state_dict(run.result(tracker.chosen()))
    result = _with_learned_widths(result, run.model)
    keep_rates(result)
    return result


def _with_learned_widths(result: nn.Module, model: nn.Module) -> nn.Module:
    """Copy what a state dict does not hold: learned widths and other rounding."""
    layers, record = quantized_layers(result), quantization_of(result)
    bits = dict(record.allocation)
    for name, layer in quantized_layers(model).items():
        layers[name].rounding, layers[name].bits = layer.rounding, layer.bits
        bits[name] = bits[name]._replace(weight=layer.bits)
    quantizers = activation_quantizers(result)
    for name, one in activation_quantizers(model).items():
        quantizers[name].rounding = one.rounding
    if bits == dict(record.allocation):
        return result
    return with_quantization(result, replace(record, allocation=Allocation(bits)))


@contextmanager
def isolated(run: "Run") -> Iterator[None]:
    """Restore the global random generators and GPU settings afterwards."""
    with (
        torch.random.fork_rng([run.device] if run.device.type == "cuda" else []),
        cudnn_kernels(repeatable=run.config.deterministic),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # Warns if parameters could have been unused but none were.
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        yield
