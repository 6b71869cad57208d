"""TrainConfig: how a quantized network is trained."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a quantized network is trained.

    Attributes:
        epochs: Passes over the training data.
        batch_size: Images a step, over all processes. Batches that are made already
            keep the size they have.
        learning_rate: Of weights and biases at the start; it falls to 0 as a cosine.
        warmup: Steps in which the rate rises to where the cosine begins.
        momentum: Of stochastic gradient descent.
        weight_decay: Of weights; scales, biases and norms have none.
        weight_steps: Whether the scales of weights are learned (LSQ) or stay.
        activations: What is learned of activations: their ``step`` (LSQ), the end of
            their range (``clip``, PACT), or nothing (``fixed``).
        step_rate: Learning rate of scales, as a multiple of that of weights.
        batch_norm: ``folded`` trains the weight and bias that the norm was folded
            into; ``fold-and-train`` (HAWQ-V3) keeps the norm and folds it anew at
            each step, and needs the float network.
        freeze_norm_epoch: From this epoch on norms use, and keep, their running
            statistics; before it they use those of the batch.
        distill: Weight of the float network's answers against the labels, 0 to 1;
            above 0 it needs the float network.
        temperature: Of the softmax that the answers are compared after.
        label_smoothing: Probability that the labels leave to other classes.
        gradient_norm: Longer gradients are cut to this length; 0 never cuts.
        accumulate: Batches whose gradients are added up to one step.
        precision: ``float32``, or ``bfloat16`` for what autocast computes in it.
        channels_last: Whether on a GPU images and weights lie in memory channel by
            channel of a pixel, as GPUs like it.
        compile: Whether ``torch.compile`` fuses the network.
        cuda_graph: Whether one process on a GPU records a step once and replays it,
            which pays for small networks.
        checkpoint_steps: Steps between checkpoints; 0 writes one an epoch.
        keep: With validation: ``best`` returns the epoch (or the start) with the best
            accuracy, ``last`` the last one.
        report_steps: Steps between reports of progress; the loss is looked at then.
        tensorboard: Folder for TensorBoard's scalars; None writes none.
        deterministic: Whether a GPU computes the same bits in every run; otherwise it
            takes the fastest algorithms.
        seed: Decides the order of images, augmentation and dropout.
    """

    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 1e-3
    warmup: int = 0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    learn_weight_scales: bool = True
    activations: Literal["step", "clip", "fixed"] = "step"
    step_rate: float = 0.1
    batch_norm: Literal["folded", "fold-and-train"] = "folded"
    freeze_norm_epoch: int = 1
    distill: float = 0.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    gradient_norm: float = 0.0
    accumulate: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = True
    compile: bool = False
    cuda_graph: bool = False
    checkpoint_steps: int = 0
    keep: Literal["best", "last"] = "best"
    report_steps: int = 50
    tensorboard: str | None = None
    deterministic: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            needed = _needed(name, value, type(field.default))
            if needed:
                raise ValueError(f"{name}={value!r} must be {needed}")


_WORDS = {
    "activations": ("step", "clip", "fixed"),
    "batch_norm": ("folded", "fold-and-train"),
    "precision": ("float32", "bfloat16"),
    "keep": ("best", "last"),
}
_POSITIVE = ("learning_rate", "temperature")
_SHARES = ("momentum", "distill", "label_smoothing")
_LEAST = {"epochs": 1, "batch_size": 1, "accumulate": 1, "report_steps": 1}


def _needed(name: str, value: Any, kind: type) -> str:
    """Return what a field must be, if it is not; values may come from a file."""
    if name in _WORDS:
        words = _WORDS[name]
        return "" if value in words else f"one of {', '.join(words)}"
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    if kind not in (int, float):
        return "" if value is None or isinstance(value, str) else "a folder's name"
    return _needed_number(name, value, kind)


def _needed_number(name: str, value: Any, kind: type) -> str:
    number = isinstance(value, int if kind is int else int | float)
    if not number or isinstance(value, bool):
        return "a whole number" if kind is int else "a number"
    if name in _SHARES:
        return "" if 0 <= value <= 1 else "from 0 to 1"
    if name in _POSITIVE:
        return "" if 0 < value < math.inf else "above 0, and finite"
    least = _LEAST.get(name, 0)
    return "" if least <= value < math.inf else f"at least {least}"


# The settings of published work, by name.
TRAIN_PROTOCOLS: Mapping[str, TrainConfig] = MappingProxyType(
    {
        "paper-qat": TrainConfig(
            epochs=90,
            batch_size=128,
            learning_rate=1e-4,
            weight_decay=1e-4,
            batch_norm="fold-and-train",
            freeze_norm_epoch=0,
        )
    }
)
