"""The result of an evaluation: accuracy and agreement, with error bars."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ompq.notebook_tables import data_frame, html_table
from ompq.untrusted_json import Count, convert_json

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
    count: Count
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
        if self.count > 8 * len(packed):  # in a file that was edited
            raise ValueError(
                f"the evaluation of {self.count} images says of only "
                f"{8 * len(packed)} whether they were right; evaluate again"
            )
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
        return f"Evaluation({', '.join([*known, f'{self.count} samples'])})"

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
            return f"{100 * (1 - self.divergence):.1f} % of the detections agree"
        text = f"divergence {self.divergence:.4g}"
        if self.agreement is None:
            return text
        return f"{100 * self.agreement:.2f} % of the answers, {text}"

    def _repr_html_(self) -> str:
        return html_table(f"Evaluation, {self.count:,} samples", self._told())

    def _told(self) -> list[dict[str, str]]:
        """Return what was measured, line by line, with intervals where known."""

        def percent(value: float, low: float, high: float) -> str:
            return f"{100 * value:.2f} % ({100 * low:.2f} to {100 * high:.2f})"

        told = {}
        if self.top1 is not None and self.interval is not None:
            told["top-1"] = percent(self.top1, *self.interval)
        if self.top5 is not None:
            told["top-5"] = f"{100 * self.top5:.2f} %"
        if self.drop is not None and self.drop_error is not None:
            low, high = (100 * limit for limit in self.drop_interval)
            told["loss of top-1"] = (
                f"{100 * self.drop:.2f} points ({low:.2f} to {high:.2f})"
            )
        for name, value in self.metrics.items():
            reference = self.reference_metrics.get(name)
            beside = "" if reference is None else f" (float: {reference:.4g})"
            told[name] = f"{value:.4g}{beside}"
        if self.likeness:
            told["like the float network"] = self.likeness
        return [{"": name, "measured": value} for name, value in told.items()]

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
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evaluation":
        """Rebuild an evaluation; a ValueError says what is wrong."""
        return convert_json(data, cls, "evaluation")


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
