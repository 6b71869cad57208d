"""Evaluation: accuracy and agreement with the float network, with error bars."""

import base64
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ompq.errors import DataError, ModelError
from ompq.network.graph import RECORD
from ompq.outputs import CLASSES, Outputs, check_output, per_input
from ompq.parallel import process_count, share_out
from ompq.progress import Progress
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
from ompq.tabular import data_frame, html_table

_Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Accuracy of a network, and how it compares with a reference network.

    Accuracy needs logits (N, classes) and class indices (N,). Values that could not be
    measured are None. For dense outputs, as in segmentation, agreement and divergence
    are averaged over all positions. What divergence means depends on what the network
    returns; :attr:`likeness` says it in words.

    Attributes:
        top1: Fraction of images whose largest logit is the target's.
        top5: Fraction whose target is among the five largest; None below five classes.
        interval: Wilson's 95 % confidence interval of ``top1``.
        images_per_second: Speed of the network alone; the first of several batches is
            not timed.
        agreement: Fraction of images with the same top-1 class as the reference.
        divergence: Mean divergence from the reference. Of classes, it is the KL
            divergence of the softmax, in nats; of values, half the squared error over
            the variance of the reference's output; of embeddings, 1 − cosine.
        drop: The reference's top-1 minus ``top1``.
        drop_error: Standard error of ``drop``, paired over the images.
        metrics: The user's metrics by name, averaged over the images.
        reference_metrics: The same metrics of the reference.
        correct: Packed bits, one per image; see :meth:`correctness`.
        fingerprint: Hash of the targets; equal for evaluations on the same images.
        output: What the network returns: classes, values, embedding or detections.
    """

    top1: float | None
    top5: float | None
    count: int
    interval: tuple[float, float] | None
    images_per_second: float
    agreement: float | None = None
    divergence: float | None = None
    drop: float | None = None
    drop_error: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reference_metrics: Mapping[str, float] = field(default_factory=dict)
    correct: bytes = field(default=b"")
    fingerprint: str = field(default="", repr=False)
    output: str = "classes"

    def correctness(self) -> NDArray[np.bool_]:
        """Return which images were classified correctly, (count,)."""
        packed = np.frombuffer(self.correct, dtype=np.uint8)
        return np.unpackbits(packed, count=self.count).astype(bool)

    @property
    def drop_interval(self) -> tuple[float, float]:
        """The drop's 95 % confidence interval, from its paired standard error."""
        if self.drop is None or self.drop_error is None:
            raise ValueError(
                "the drop is not known: evaluate labelled images with a reference"
            )
        half = _Z95 * self.drop_error
        return self.drop - half, self.drop + half

    def drop_from(self, other: "Evaluation") -> tuple[float, float]:
        """Return the other's top-1 minus this one, and its paired standard error."""
        if self.top1 is None or other.top1 is None:
            raise ValueError(
                "there is no top-1 to compare; evaluate on labelled images"
            )
        if (self.count, self.fingerprint) != (other.count, other.fingerprint):
            raise ValueError(
                f"the evaluations used different images ({self.count} and "
                f"{other.count}, or other targets); evaluate both on the same batches"
            )
        return paired(other.correctness(), self.correctness())

    def __repr__(self) -> str:
        facts = {
            "top1": self.top1,
            "drop": self.drop,
            **self.metrics,
            "agreement": self.agreement,
            "divergence": self.divergence,
        }
        known = [f"{k} {v:.4g}" for k, v in facts.items() if v is not None]
        if self.output != "classes" and self.likeness:
            known.append(self.likeness)
        what = "images" if self.output == "classes" else "samples"
        return f"Evaluation({', '.join([*known, f'{self.count} {what}'])})"

    @property
    def likeness(self) -> str:
        """How close the outputs are to the reference's, in words."""
        if self.divergence is None:
            return ""
        if self.output == "values":
            share = 2 * self.divergence
            ratio = f", {-10 * math.log10(share):.1f} dB" if share > 0 else ""
            return f"squared error {100 * share:.3g} % of the output's variance{ratio}"
        if self.output == "embedding":
            return f"cosine {1 - self.divergence:.5f}"
        if self.output == "detections":
            return f"{100 * (1 - self.divergence):.1f} % of the detections alike"
        text = f"divergence {self.divergence:.4g}"
        if self.agreement is None:
            return text
        return f"{100 * self.agreement:.2f} % of the answers, {text}"

    def _repr_html_(self) -> str:
        return html_table("Evaluation", [self._facts()])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the same as :meth:`to_json`."""
        return self.to_json()

    def to_dataframe(self) -> Any:
        """Return one row as a pandas DataFrame."""
        return data_frame([self._facts()])

    def _facts(self) -> dict[str, Any]:
        hidden = ("correct", "fingerprint", "metrics", "reference_metrics")
        shown = {k: v for k, v in vars(self).items() if k not in hidden}
        return {**shown, **self.metrics}

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        packed = base64.b64encode(self.correct).decode("ascii")
        interval = None if self.interval is None else list(self.interval)
        return {**asdict(self), "interval": interval, "correct": packed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evaluation":
        """Rebuild an evaluation from :meth:`to_json`."""
        interval = None if data["interval"] is None else tuple(data["interval"])
        packed = base64.b64decode(data["correct"])
        return cls(**{**data, "interval": interval, "correct": packed})


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of the fraction ``right / count``.

    Example:
        >>> [round(limit, 4) for limit in wilson_interval(8, 10)]
        [0.4902, 0.9433]
    """
    fraction, z2 = right / count, _Z95**2
    centre = (fraction + z2 / (2 * count)) / (1 + z2 / count)
    spread = fraction * (1 - fraction) / count + z2 / (4 * count**2)
    half = _Z95 * math.sqrt(spread) / (1 + z2 / count)
    # At 0 and 1, rounding errors must not leave the fraction itself outside.
    low, high = min(centre - half, fraction), max(centre + half, fraction)
    return max(0.0, low), min(1.0, high)


def paired(better: NDArray[np.bool_], worse: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the mean difference of two 0/1 arrays and its standard error."""
    difference = better.astype(float) - worse.astype(float)
    return float(difference.mean()), float(difference.std() / math.sqrt(len(worse)))


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


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Any]] | Samples,
    *,
    reference: nn.Module | None = None,
    metrics: Mapping[str, Metric] | None = None,
    output: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate a network on labelled batches, or compare it with a float network.

    Several processes (:func:`ompq.distributed`) share the batches.

    Args:
        model: The network. Its output, or the first tensor of it, must be logits
            (N, classes), unless there are metrics or a reference.
        batches: Pairs of inputs and targets (N,), for example a ``DataLoader``. Targets
            that only metrics read may be anything. With a reference, they may also be
            ``ompq.Samples``, which have no targets; token ids are their own targets.
        reference: The float network, for agreement, divergence and accuracy drop.
        metrics: Name → function that returns one number for the network's output and
            the targets, both on its device; it is averaged over the images. For a
            decoder, ``{"perplexity": ompq.Perplexity()}``.
        output: What the network returns, which decides how it is compared with the
            reference: ``classes``, ``values``, ``embedding`` or ``detections``; with
            several outputs one for each, joined by commas. None means as quantized, or
            as recognised.

    Raises:
        DataError: There are no batches, or targets do not match inputs or outputs.
        ModelError: The outputs are not logits, or not finite.
    """
    total = len(batches) if isinstance(batches, Sized) else None
    if isinstance(batches, Samples):
        total = batches.batch_count(_BATCH_SIZE)
        batches = _unlabelled(batches, reference)
    any_targets = bool(metrics) or reference is not None
    networks = (model,) if reference is None else (model, reference)
    processes = process_count()
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
                parts.append(_measured(networks, *given))
                if progress is not None:
                    progress(index + 1, total, f"evaluating{_top1_so_far(parts)}")
        return parts, digest.hexdigest()

    with evaluating(*networks):
        shares = share_out(range(processes), share)
    if len({digest for _, digest in shares}) > 1:
        raise DataError(
            "the processes read different batches: do not shuffle them, or seed the "
            "loader's generator"
        )
    joined = _joined([parts for parts, _ in shares], metrics or {})
    return replace(joined, output=str(outputs))


def _peeked(batches: Iterable[Any]) -> tuple[Samples, Iterable[Any]]:
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
    first, batches = _peeked(batches)
    output = output or getattr(getattr(networks[0], RECORD, None), "output", None)
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


def _measured(
    networks: Sequence[nn.Module],
    inputs: Batch,
    targets: Any,
    metrics: Mapping[str, Metric],
    outputs: Outputs,
) -> _Part:
    """Compare a batch's outputs with its targets and with the reference's."""
    (output, seconds), *others = (_timed(one, inputs) for one in networks)
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


def _joined(
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


def _timed(model: nn.Module, inputs: Batch) -> tuple[Any, float]:
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
            f"batch {index} is {type(batch).__name__}; it must be (inputs, targets)"
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
