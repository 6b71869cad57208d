"""Evaluation: accuracy and agreement with the float network, with error bars."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.errors import DataError, ModelError, check_type
from ompq.evaluation_result import Evaluation, paired, wilson_interval
from ompq.network.graph import RECORD
from ompq.outputs import CLASSES, Outputs, check_output, per_input
from ompq.parallel import process_count, share_out
from ompq.progress import ProgressLike, callback
from ompq.progress_bar import shows_progress
from ompq.samples import (
    Batch,
    Samples,
    batch_length,
    call,
    class_rows as class_rows,
    evaluating,
    first_tensor,
    model_device,
    to_device,
    token_ids,
)

_BATCH_SIZE = 64  # samples without batches of their own; as in calibration

# Called with the network's output and the targets of a batch. Returns the batch's mean,
# or (mean, weight) where the weight is not the number of inputs.
Metric: TypeAlias = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a decoder: exp of the mean cross entropy of its tokens.

    Targets are the token ids themselves, (N, length): each position predicts the next
    token. Targets of -100 are ignored.
    """

    def __call__(self, output: Any, targets: Any) -> tuple[float, int]:
        """Return the mean cross entropy of a batch and its number of tokens."""
        logits = first_tensor(output)
        if not isinstance(targets, Tensor) or targets.shape != logits.shape[:-1]:
            raise DataError(
                "perplexity needs token ids as targets, of shape "
                f"{tuple(logits.shape[:-1])} for logits of {tuple(logits.shape)}"
            )
        rows, following = class_rows(logits[:, :-1].float()), targets[:, 1:].flatten()
        total = F.cross_entropy(rows, following.long(), reduction="sum")
        count = int((following != -100).sum())
        return float(total) / max(count, 1), count

    @staticmethod
    def of_mean(mean: float) -> float:
        """Return the perplexity from the mean cross entropy of all batches."""
        return math.exp(mean)


METRICS: dict[str, Metric] = {"perplexity": Perplexity()}  # by name


@shows_progress("evaluating")
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Any]] | Samples | Tensor | dict[str, Tensor],
    *,
    reference: nn.Module | None = None,
    metrics: Mapping[str, Metric] | None = None,
    output: str | None = None,
    progress: ProgressLike = None,
) -> Evaluation:
    """Evaluate a network on labelled batches, or compare it with a float network.

    Several processes (:func:`ompq.distributed`) share the batches.

    Args:
        model: The network. Its output, or the first tensor of it, must be logits
            (N, classes), unless there are metrics or a reference.
        batches: Pairs of inputs and targets (N,), for example a ``DataLoader``. Targets
            that only metrics read may be anything. With a reference, they may also be
            samples, which have no targets: one tensor, a dict, or ``ompq.Samples``.
            Token ids are their own targets.
        reference: The float network, for agreement, divergence and accuracy drop.
        metrics: Name → function that returns one number for the network's output and
            the targets, both on its device; it is averaged over the images. For a
            decoder, ``{"perplexity": ompq.Perplexity()}``.
        output: What the network returns, which decides how it is compared with the
            reference: ``classes``, ``values``, ``embedding`` or ``detections``; with
            several outputs one for each, joined by commas. None means as quantized, or
            as recognised.
        progress: Called after each batch; True shows a bar.

    Raises:
        DataError: There are no batches, or targets do not match inputs or outputs.
        ModelError: The outputs are not logits, or not finite.
    """
    check_type("metrics", metrics or {}, Mapping)
    total = len(batches) if isinstance(batches, Sized) else None
    if isinstance(batches, Samples | Tensor | dict):
        samples = Samples.of(batches)
        total = samples.batch_count(_BATCH_SIZE)
        batches = _unlabelled(samples, reference)
    any_targets = bool(metrics) or reference is not None
    networks = (model,) if reference is None else (model, reference)
    processes, report = process_count(), callback(progress)
    outputs, batches = _outputs(networks, batches, output)

    def share(number: int) -> tuple[list[_Part], str]:
        """Measure one process's batches; return them with a hash of all targets."""
        parts, digest = [], hashlib.sha256()
        for index, batch in enumerate(batches):
            inputs, targets = _pair(batch, index, any_targets=any_targets)
            if isinstance(targets, Tensor):
                digest.update(targets.numpy(force=True).tobytes())
            if index % processes == number:
                given = inputs, targets, metrics or {}, outputs
                parts.append(_compare_batch(networks, *given))
                if progress is not None:
                    report(index + 1, total, f"evaluating{_top1_so_far(parts)}")
        return parts, digest.hexdigest()

    with evaluating(*networks):
        shares = share_out(range(processes), share)
    if len({digest for _, digest in shares}) > 1:
        raise DataError(
            "the processes read different batches: do not shuffle them, or seed the "
            "loader's generator"
        )
    joined = _join_parts([parts for parts, _ in shares], metrics or {})
    return replace(joined, output=str(outputs))


def _peek(batches: Iterable[Any]) -> tuple[Samples, Iterable[Any]]:
    """Return the inputs of the first batches, and all batches once more."""
    first: list[Batch] = []
    read: list[Any] = []
    rest = iter(batches)
    for batch in rest:
        read.append(batch)
        first.append(_pair(batch, len(first), any_targets=True)[0])
        if sum(map(batch_length, first)) >= _BATCH_SIZE:
            break
    return Samples(tuple(first)), chain(read, rest)


def _outputs(
    networks: Sequence[nn.Module], batches: Iterable[Any], output: str | None
) -> tuple[Outputs, Iterable[Any]]:
    """Return how to compare two networks' outputs, and all batches, not yet read.

    Outputs are what is given, what the network was quantized for, or recognised.
    """
    if len(networks) < 2:
        return CLASSES, batches
    first, batches = _peek(batches)
    if output is None:
        output = getattr(getattr(networks[0], RECORD, None), "output", None)
    check_output(output)
    outputs = Outputs.of(networks[1], first, output) if len(first) else CLASSES
    return outputs, batches


class _Part(NamedTuple):
    """The measurements of one batch."""

    images: int
    columns: dict[str, NDArray[Any]]  # one value per image, (N,) each
    metrics: dict[str, tuple[float, float]]  # mean and weight
    reference_metrics: dict[str, tuple[float, float]]
    seconds: float


def _compare_batch(
    networks: Sequence[nn.Module],
    inputs: Batch,
    targets: Any,
    metrics: Mapping[str, Metric],
    outputs: Outputs,
) -> _Part:
    """Compare a batch's outputs with its targets and with the reference's."""
    (output, seconds), *others = (_time_call(one, inputs) for one in networks)
    device = model_device(networks[0])
    targets, images = targets_on(device, targets), batch_length(inputs)
    logits = _finite(first_tensor(output).float())
    found: dict[str, Tensor] = {}
    if is_class_indices(targets, images) and outputs.kinds[0] == "classes":
        if logits.dim() == 2:
            found = _accuracy(logits, targets, others[0][0] if others else None)
        elif not metrics and not others:
            raise ModelError(
                f"the network returned shape {tuple(logits.shape)}; accuracy needs "
                "logits of shape (images, classes): give metrics or a reference"
            )
    for expected, _ in others:
        found |= _closeness(outputs, output, expected, images)

    def values(output: Any) -> dict[str, tuple[float, float]]:
        found = ((name, one(output, targets)) for name, one in metrics.items())
        return {
            name: value if isinstance(value, tuple) else (_number(name, value), images)
            for name, value in found
        }

    return _Part(
        images,
        {name: column.cpu().numpy() for name, column in found.items()},
        values(output),
        values(others[0][0]) if others else {},
        seconds,
    )


def _top1_so_far(parts: Sequence[_Part]) -> str:
    known = [part.columns["right"] for part in parts if "right" in part.columns]
    count = sum(map(len, known))
    return f": top-1 {sum(map(np.sum, known)) / count:.1%}" if count else ""


def _join_parts(
    shares: Sequence[Sequence[_Part]], metrics: Mapping[str, Metric]
) -> Evaluation:
    """Return the evaluation of all batches, which processes measured in turns."""
    turns = zip_longest(*shares)
    parts = [part for turn in turns for part in turn if part is not None]
    count = sum(part.images for part in parts)
    if not count:
        raise DataError("batches are empty: give at least one image with its target")
    # Not timed: the first batch of a process, which warms up caches and kernels.
    timed = [part for share in shares for part in (share[1:] or share)]
    seconds = sum(part.seconds for part in timed) / len(shares)
    columns = {
        name: np.concatenate([part.columns[name] for part in parts])
        for name in parts[0].columns
    }

    def average(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        means = {}
        for name in found[0]:
            values, weights = zip(*(one[name] for one in found), strict=True)
            mean = float(np.average(values, weights=weights))
            means[name] = getattr(metrics[name], "of_mean", float)(mean)
        return means

    return replace(
        _summary(columns, count),
        images_per_second=sum(part.images for part in timed) / max(seconds, 1e-9),
        metrics=average([part.metrics for part in parts]),
        reference_metrics=average([part.reference_metrics for part in parts]),
    )


def _accuracy(logits: Tensor, targets: Tensor, expected: Any) -> dict[str, Tensor]:
    """Return which images of a batch are classified correctly, (N,) each."""
    outputs = logits.shape[1]
    outside = targets[(targets < 0) | (targets >= outputs)]
    if len(outside):
        raise DataError(
            f"target {int(outside[0])} is out of range: "
            f"the network has {outputs} outputs, 0 to {outputs - 1}"
        )
    columns = {"target": targets.long(), "right": logits.argmax(1) == targets}
    if outputs >= 5:
        columns["top5"] = (logits.topk(5).indices == targets[:, None]).any(1)
    if expected is not None:
        answers = first_tensor(expected).to(logits.device).argmax(1)
        columns["reference_right"] = answers == targets
    return columns


def _closeness(
    outputs: Outputs, output: Any, expected: Any, count: int
) -> dict[str, Tensor]:
    """Return how close a batch's outputs are to the reference's, (N,) each."""
    ours, others = outputs.read(output), outputs.read(expected)
    others = [one.to(own.device) for own, one in zip(ours, others, strict=False)]
    found = {"divergence": outputs.divergences(others, ours, count)}
    if outputs.kinds[0] == "classes":
        rows, wanted = class_rows(ours[0]), class_rows(others[0])
        same = (rows.argmax(1) == wanted.argmax(1)).double()
        found["agreement"] = per_input(same, count)
    return found


def _number(metric: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"a tensor of shape {tuple(value.shape)}"
        raise ValueError(
            f"metric {metric!r} returned {what}, not one number: return the mean over "
            "the batch"
        ) from error
    if math.isnan(number):  # neither better nor worse than any other
        raise ValueError(
            f"metric {metric!r} returned NaN for a batch: leave out what is undefined "
            "there, such as classes that do not occur"
        )
    return number


def _time_call(model: nn.Module, inputs: Batch) -> tuple[Any, float]:
    """Return the network's output, and the seconds it took."""
    device = model_device(model)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    inputs = to_device(inputs, device)
    wait(device)
    start = time.perf_counter()
    output = call(model, inputs)
    wait(device)
    return output, time.perf_counter() - start


def _finite(logits: Tensor) -> Tensor:
    # [..., None] adds a second dimension where there is one number per input.
    wrong = ~torch.isfinite(logits[..., None])
    bad = int(wrong.flatten(1).any(1).sum()) if logits.dim() else 0
    if bad:
        raise ModelError(
            f"the network returned NaN or infinity for {bad} of {len(logits)} images"
        )
    return logits


def targets_on(device: torch.device, targets: Any) -> Any:
    """Return targets, which may be nested, on a device."""
    if isinstance(targets, Tensor):
        return targets.to(device, non_blocking=True)
    if isinstance(targets, tuple | list):
        return type(targets)(targets_on(device, one) for one in targets)
    if isinstance(targets, dict):
        return {name: targets_on(device, one) for name, one in targets.items()}
    return targets


def _unlabelled(
    samples: Samples, reference: nn.Module | None
) -> Iterator[tuple[Batch, Tensor | None]]:
    if reference is None and token_ids(samples.first_batch(1)) is None:
        raise DataError("samples have no targets: give a reference to compare with")
    return ((batch, token_ids(batch)) for batch in samples.batches(_BATCH_SIZE))


def is_class_indices(targets: Any, count: int) -> bool:
    """Return whether targets are one class index per input."""
    return (
        isinstance(targets, Tensor)
        and targets.shape == (count,)
        and not targets.is_floating_point()
    )


def _pair(batch: Any, index: int, *, any_targets: bool) -> tuple[Batch, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(
            f"batch {index} is {type(batch).__name__}; it must be (inputs, targets). "
            "Inputs alone are ompq.Samples.of(inputs), and need a reference"
        )
    inputs, targets = batch
    count = batch_length(inputs)
    if not any_targets and not is_class_indices(targets, count):
        what = type(targets).__name__
        if isinstance(targets, Tensor):
            what = f"targets of shape {tuple(targets.shape)}, {targets.dtype}"
        raise DataError(
            f"batch {index} has {count} inputs and {what}; give one class index per "
            "input, or a metric of your own"
        )
    return inputs, targets


def _summary(columns: Mapping[str, NDArray[Any]], count: int) -> Evaluation:
    def mean(name: str) -> float | None:
        return float(columns[name].mean()) if name in columns else None

    found = Evaluation(
        top1=mean("right"),
        top5=mean("top5"),
        count=count,
        interval=None,
        images_per_second=0.0,
        agreement=mean("agreement"),
        divergence=mean("divergence"),
    )
    right = columns.get("right")
    if right is None:
        return found
    drop, drop_error = None, None
    if "reference_right" in columns:
        drop, drop_error = paired(columns["reference_right"], right)
    return replace(
        found,
        interval=wilson_interval(int(right.sum()), count),
        drop=drop,
        drop_error=drop_error,
        correct=np.packbits(right).tobytes(),
        fingerprint=hashlib.sha256(columns["target"].tobytes()).hexdigest()[:16],
    )
