"""What a job reports: progress, the times of its stages, evaluations, other results.

Results are the sections of a report, and tables for notebooks.
"""

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from math import isfinite
from time import perf_counter
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from ompq.errors import MissingExtraError, check_known

_Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution
_MAX_ROWS = 100  # of a table in a notebook

# Called as progress(done, total, message); total is None if it is not known.
Progress: TypeAlias = Callable[[int, int | None, str], None]

# Called with a stage's name; yields the callback for the stage's progress.
Bar: TypeAlias = Callable[[str], AbstractContextManager[Progress]]


def no_progress(_done: int, _total: int | None, _message: str) -> None:
    """Ignore progress."""


@contextmanager
def silent(_name: str) -> Iterator[Progress]:
    """Open a stage without showing its progress."""
    yield no_progress


@dataclass(frozen=True)
class Stages:
    """The stages of one job and the time each took."""

    bar: Bar = silent  # opened around each stage to show its progress
    # Stage → seconds; stages of the same name add up.
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[Progress]:
        """Show the progress of a stage and record its time."""
        start = perf_counter()
        with self.bar(name) as progress:
            yield progress
        self._add(name, start)

    @contextmanager
    def named_by_messages(self, name: str) -> Iterator[Progress]:
        """Like :meth:`stage`, for a function whose progress messages name its stages.

        Calls that repeat a message report progress within that stage.
        """
        current, start = "", perf_counter()
        with self.bar(name) as bar:

            def progress(done: int, total: int | None, message: str) -> None:
                nonlocal current, start
                if message == current:
                    bar(done, total, message)
                    return
                if current:
                    self._add(current, start)
                current, start = message, perf_counter()
                # Stages differ too much in length for their count to predict the rest.
                if done == total:
                    current = ""
                else:
                    bar(0, None, message)

            yield progress
        if current:
            self._add(current, start)

    def _add(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Accuracy of a network, and how it compares with a reference network.

    Accuracy needs logits (N, classes) and class indices (N,). Values that could not be
    measured are None. For dense outputs, as in segmentation, agreement and divergence
    are averaged over all positions.

    Attributes:
        top1: Fraction of images whose largest logit is the target's.
        top5: Fraction whose target is among the five largest; None below five classes.
        interval: Wilson's 95 % confidence interval of ``top1``.
        images_per_second: Speed of the network alone; the first of several batches is
            not timed.
        agreement: Fraction of images with the same top-1 class as the reference.
        divergence: Mean KL divergence of the network's softmax from the reference's,
            in nats.
        drop: The reference's top-1 minus ``top1``.
        drop_error: Standard error of ``drop``, paired over the images.
        metrics: The user's metrics by name, averaged over the images.
        reference_metrics: The same metrics of the reference.
        correct: Packed bits, one per image; see :meth:`correctness`.
        fingerprint: Hash of the targets; equal for evaluations on the same images.
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
        return f"Evaluation({', '.join([*known, f'{self.count} images'])})"

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


def html_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table with every value escaped.

    Example:
        >>> html_table("bits", [{"layer": "fc", "bits": 4}])
        '<b>bits</b><table><tr><th>layer</th><th>bits</th></tr>\
<tr><td>fc</td><td>4</td></tr></table>'
    """
    heads = "".join(f"<th>{escape(str(key))}</th>" for key in rows[0]) if rows else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(one))}</td>' for one in row.values())}</tr>"
        for row in rows[:_MAX_ROWS]
    )
    left = len(rows) - _MAX_ROWS
    more = f"<p>and {left} more</p>" if left > 0 else ""
    return f"<b>{escape(title)}</b><table><tr>{heads}</tr>{body}</table>{more}"


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("pandas", "notebook") from error
    return pandas.DataFrame(list(rows))


@dataclass(frozen=True)
class Accuracy:
    """Top-1 of one network, a fraction of ``count`` images, with its 95 % interval.

    With ``answers`` it is the fraction that the network answers as the float one does.
    In a figure, networks whose names agree up to the first comma, such as
    ``mixed, 1.5 MiB`` and ``mixed, 2 MiB``, are joined to one line.
    """

    name: str
    top1: float
    low: float
    high: float
    count: int
    size_bytes: float | None = None
    note: str = ""
    answers: bool = False  # whether it is agreement with the float network

    @classmethod
    def of(
        cls, name: str, result: Evaluation, size_bytes: float, note: str = ""
    ) -> "Accuracy":
        """Return the accuracy from an evaluation on labelled images."""
        assert result.top1 is not None and result.interval is not None
        return cls(name, result.top1, *result.interval, result.count, size_bytes, note)

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.top1 <= self.high <= 1:
            raise ValueError(
                f"{self.name}: top1={self.top1} and its interval "
                f"{self.low} to {self.high} must be ascending fractions, 0 to 1"
            )


@dataclass(frozen=True)
class BlockError:
    """Error of a block's output before and after reconstruction.

    ``kept`` is False if the result was worse than before and therefore discarded.
    """

    name: str
    before: float
    after: float
    kept: bool = True

    def __post_init__(self) -> None:
        if not all(isfinite(e) and e >= 0 for e in (self.before, self.after)):
            raise ValueError(
                f"{self.name}: errors {self.before} and {self.after} "
                "must be finite and not negative"
            )


@dataclass(frozen=True)
class Histogram:
    """The distribution of a weight's or an activation's values."""

    name: str
    edges: tuple[float, ...]  # ascending ends of the bins; one more than counts
    counts: tuple[float, ...]
    # Label and position of vertical lines, such as a clipping range.
    lines: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise ValueError(
                f"{self.name}: {len(self.counts)} counts and {len(self.edges)} edges; "
                "a histogram needs one edge more than counts"
            )
        if any(a >= b for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"{self.name}: the edges must be ascending")


@dataclass(frozen=True)
class LayerEffect:
    """Measured effect of quantizing one layer: divergence from the float network."""

    name: str
    bits: str
    alone: float  # if only this layer is quantized
    without: float  # if this layer's weights stay float, and all else is quantized
    all: float  # if all layers are quantized


@dataclass(frozen=True)
class AuditedBits:
    """An allocation that :func:`ompq.audit` measured, and how its score predicts."""

    name: str  # the score that chose it, or the caller's name
    divergence: float
    regret: float  # its relative excess over the smallest divergence measured
    bytes: float
    fits: bool = True  # whether it meets the budget
    top1: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()  # the user's, by name
    seconds: float | None = None  # that the score took
    # Rank correlations with their 95 % intervals: value, low, high.
    spearman: tuple[float, float, float] | None = None
    kendall: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class AuditedRanks:
    """What an audit compares over random allocations, as points and in words."""

    name: str
    text: str
    points: tuple[tuple[float, float], ...] = ()  # of which the ranks are drawn


@dataclass(frozen=True)
class StageTime:
    """The time that a stage took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Agreement:
    """How well an exported file agrees with the quantized network."""

    name: str
    top1: float  # fraction of inputs with the same largest logit
    count: int
    codes_equal: float | None = None  # fraction of equal codes, if compared
    largest_step: int | None = None  # largest difference of codes, if compared
    note: str = ""


@dataclass(frozen=True)
class Remark:
    """A remark about a layer or an operation."""

    name: str
    text: str


@dataclass(frozen=True)
class Versions:
    """The versions, seeds, devices and so on behind the results, by name."""

    items: Mapping[str, str] = field(default_factory=dict)


_Audited: TypeAlias = AuditedBits | AuditedRanks
_Measured: TypeAlias = Accuracy | BlockError | Histogram | _Audited | Agreement
Section: TypeAlias = _Measured | LayerEffect | StageTime | Remark | Versions
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Section)}


def sections_to_json(sections: Iterable[Section]) -> list[dict[str, Any]]:
    """Return plain data for JSON.

    Example:
        >>> sections_to_json([StageTime("plan", 2.5)])
        [{'section': 'StageTime', 'name': 'plan', 'seconds': 2.5}]
    """
    return [{"section": type(one).__name__, **asdict(one)} for one in sections]


def sections_from_json(data: Iterable[Mapping[str, Any]]) -> list[Section]:
    """Rebuild sections from :func:`sections_to_json`.

    Raises:
        ValueError: An entry is not a section, or lacks a field.
    """
    sections: list[Section] = []
    for entry in data:
        fields = {key: _tuples(value) for key, value in entry.items()}
        kind = fields.pop("section", None)
        check_known("section", kind, _KINDS)
        try:
            sections.append(_KINDS[kind](**fields))
        except TypeError as error:
            raise ValueError(f"an invalid {kind} section: {error}") from error
    return sections


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
