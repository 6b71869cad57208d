"""Evaluation: accuracy, agreement with the float network, and how sure that is."""

import base64
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ompq.errors import DataError, ModelError
from ompq.samples import (
    Batch,
    Progress,
    Samples,
    batch_length,
    call,
    evaluating,
    first_tensor,
    model_device,
    to_device,
)

_Z95 = 1.959963984540054  # the normal distribution's 97.5 % point

Metric: TypeAlias = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Evaluation:
    """What a network does on labelled images.

    Attributes:
        top1: Fraction of images whose largest logit is the target's.
        top5: Fraction whose target is among the five largest; None below five classes.
        interval: Wilson's 95 % confidence interval of ``top1``.
        images_per_second: Speed of the network alone, its first batch left out where
            there are more.
        agreement: Fraction of images with the reference's top-1.
        divergence: Mean KL divergence of the softmax, reference from network, in nats.
        drop: The reference's top-1 less this one.
        drop_error: Standard error of ``drop``, both being on the same images.
        metrics: The user's metrics by name, averaged over the images.
        correct: Which images were right, packed bits; see :meth:`correctness`.
        fingerprint: Hash of the targets: equal for evaluations on the same images.
    """

    top1: float
    top5: float | None
    count: int
    interval: tuple[float, float]
    images_per_second: float
    agreement: float | None = None
    divergence: float | None = None
    drop: float | None = None
    drop_error: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    correct: bytes = field(default=b"", repr=False)
    fingerprint: str = field(default="", repr=False)

    def correctness(self) -> NDArray[np.bool_]:
        """Return which images were right, (count,)."""
        packed = np.frombuffer(self.correct, dtype=np.uint8)
        return np.unpackbits(packed, count=self.count).astype(bool)

    def drop_from(self, other: "Evaluation") -> tuple[float, float]:
        """Return the other's top-1 less this one, and the paired standard error."""
        if (self.count, self.fingerprint) != (other.count, other.fingerprint):
            raise ValueError(
                f"the evaluations saw different images ({self.count} and "
                f"{other.count}, or other targets); evaluate both on the same batches"
            )
        return _paired(other.correctness(), self.correctness())

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        packed = base64.b64encode(self.correct).decode("ascii")
        return {**asdict(self), "interval": list(self.interval), "correct": packed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evaluation":
        """Rebuild an evaluation from :meth:`to_json`."""
        low, high = data["interval"]
        packed = base64.b64decode(data["correct"])
        return cls(**{**data, "interval": (low, high), "correct": packed})


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Tensor]],
    *,
    reference: nn.Module | None = None,
    metrics: Mapping[str, Metric] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a network on labelled batches.

    Args:
        model: The network; its outputs, or the first tensor of them, are logits
            (N, classes).
        batches: Pairs of inputs and targets (N,), for example a ``DataLoader``.
        reference: The float network, for agreement, divergence and drop.
        metrics: Name → function of logits (N, classes) and targets (N,), both on the
            network's device; averaged over the images.

    Raises:
        DataError: There is no batch, or targets do not fit the inputs or outputs.
        ModelError: The outputs are no logits, or not finite.
    """
    total = len(batches) if isinstance(batches, Sized) else None
    found: dict[str, list[NDArray[Any]]] = {}
    counts, seconds, values = [], [], []
    right = 0
    with evaluating(model) if reference is None else evaluating(model, reference):
        for index, batch in enumerate(batches):
            inputs, targets = _pair(batch, index)
            logits, elapsed = _timed_logits(model, inputs)
            targets = targets.to(logits.device)
            _check_range(targets, logits.shape[1])
            expected = None
            if reference is not None:
                expected = _timed_logits(reference, inputs)[0].to(logits.device)
            for name, column in _columns(logits, targets, expected).items():
                found.setdefault(name, []).append(column.cpu().numpy())
            named = (metrics or {}).items()
            values.append({n: _number(n, one(logits, targets)) for n, one in named})
            counts.append(len(targets))
            seconds.append(elapsed)
            right += int(found["right"][-1].sum())
            if progress is not None:
                top1 = right / max(sum(counts), 1)
                progress(index + 1, total, f"evaluating: top-1 {top1:.1%}")
    if not sum(counts):
        raise DataError("batches are empty: give at least one image with its target")
    # The first batch warms up caches and kernels.
    timed = slice(1, None) if len(counts) > 1 else slice(None)
    return replace(
        _summary({name: np.concatenate(parts) for name, parts in found.items()}),
        images_per_second=sum(counts[timed]) / max(sum(seconds[timed]), 1e-9),
        metrics={
            name: float(np.average([each[name] for each in values], weights=counts))
            for name in metrics or {}
        },
    )


def _columns(
    logits: Tensor, targets: Tensor, expected: Tensor | None
) -> dict[str, Tensor]:
    """Return what is known of each image of a batch, (N,) each."""
    top1 = logits.argmax(1)
    columns = {"target": targets.long(), "right": top1 == targets}
    if logits.shape[1] >= 5:
        columns["top5"] = (logits.topk(5).indices == targets[:, None]).any(1)
    if expected is not None:
        columns["reference_right"] = expected.argmax(1) == targets
        columns["agreement"] = expected.argmax(1) == top1
        columns["divergence"] = kl_divergence(expected, logits)
    return columns


def _number(metric: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"a tensor of shape {tuple(value.shape)}"
        raise ValueError(
            f"metric {metric!r} returned {what}, not one number: let it return the "
            "mean over the batch"
        ) from error


def _timed_logits(model: nn.Module, inputs: Batch) -> tuple[Tensor, float]:
    """Return the logits (N, classes) in float32 and the seconds they took."""
    device = model_device(model)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    inputs = to_device(inputs, device)
    wait(device)
    start = time.perf_counter()
    output = call(model, inputs)
    wait(device)
    seconds = time.perf_counter() - start
    logits = first_tensor(output).float()
    if logits.dim() != 2:
        raise ModelError(
            f"the network returned shape {tuple(logits.shape)}; "
            "accuracy needs logits of shape (images, classes)"
        )
    bad = int((~torch.isfinite(logits)).any(1).sum())
    if bad:
        raise ModelError(
            f"the network returned NaN or infinity for {bad} of {len(logits)} images"
        )
    return logits, seconds


def logits_of(model: nn.Module, samples: Samples, *, batch_size: int = 64) -> Tensor:
    """Return the network's logits for all samples, (N, classes), on the CPU."""
    device = model_device(model)
    with evaluating(model):
        found = [
            first_tensor(call(model, to_device(batch, device))).float().cpu()
            for batch in samples.batches(batch_size)
        ]
    return torch.cat([logits.flatten(1) for logits in found])


def kl_divergence(expected: Tensor, logits: Tensor) -> Tensor:
    """Return KL(softmax(expected) || softmax(logits)) of each row, (N,)."""
    log_p = expected.double().log_softmax(1)
    log_q = logits.double().log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _pair(batch: Any, index: int) -> tuple[Batch, Tensor]:
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not pair or not isinstance(batch[1], Tensor):
        raise DataError(
            f"batch {index} is {type(batch).__name__}; it must be (inputs, targets)"
        )
    inputs, targets = batch
    if targets.shape != (batch_length(inputs),) or targets.is_floating_point():
        raise DataError(
            f"batch {index} has {batch_length(inputs)} inputs and targets of shape "
            f"{tuple(targets.shape)}, {targets.dtype}; give one class index per input"
        )
    return inputs, targets


def _check_range(targets: Tensor, outputs: int) -> None:
    outside = targets[(targets < 0) | (targets >= outputs)]
    if len(outside):
        raise DataError(
            f"target {int(outside[0])} is out of range: "
            f"the network has {outputs} outputs, 0 to {outputs - 1}"
        )


def _summary(columns: Mapping[str, NDArray[Any]]) -> Evaluation:
    right = columns["right"]
    drop, drop_error = None, None
    if "reference_right" in columns:
        drop, drop_error = _paired(columns["reference_right"], right)

    def mean(name: str) -> float | None:
        return float(columns[name].mean()) if name in columns else None

    return Evaluation(
        top1=float(right.mean()),
        top5=mean("top5"),
        count=len(right),
        interval=wilson_interval(int(right.sum()), len(right)),
        images_per_second=0.0,
        agreement=mean("agreement"),
        divergence=mean("divergence"),
        drop=drop,
        drop_error=drop_error,
        correct=np.packbits(right).tobytes(),
        fingerprint=hashlib.sha256(columns["target"].tobytes()).hexdigest()[:16],
    )


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a fraction.

    Example:
        >>> [round(limit, 4) for limit in wilson_interval(8, 10)]
        [0.4902, 0.9433]
    """
    fraction, z2 = right / count, _Z95**2
    centre = (fraction + z2 / (2 * count)) / (1 + z2 / count)
    spread = fraction * (1 - fraction) / count + z2 / (4 * count**2)
    half = _Z95 * math.sqrt(spread) / (1 + z2 / count)
    # At the ends, rounding must not leave the fraction itself outside.
    low, high = min(centre - half, fraction), max(centre + half, fraction)
    return max(0.0, low), min(1.0, high)


def _paired(better: NDArray[np.bool_], worse: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the mean difference of two 0/1 arrays and its standard error."""
    difference = better.astype(float) - worse.astype(float)
    return float(difference.mean()), float(difference.std() / math.sqrt(len(worse)))
