"""Sections: the measurements that a report shows, as plain data."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, TypeAlias, get_args

from ompq.errors import check_known
from ompq.evaluation_result import Evaluation
from ompq.untrusted_json import convert_json


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
class BlockErrorSection:
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
class AgreementSection:
    """How well an exported file agrees with the quantized network."""

    name: str
    top1: float  # fraction of inputs with the same largest logit
    count: int
    codes_equal: float | None = None  # fraction of equal codes, if compared
    largest_step: int | None = None  # largest difference of codes, if compared
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RuntimeSection:
    """An exported file, or the float network, in a runtime."""

    name: str
    runtime: str  # for example ``onnxruntime 1.31.1``
    bytes: int  # of the file
    load_seconds: float
    memory_bytes: int  # that loading and running takes
    milliseconds: Mapping[str, float]  # of a run, by samples per run
    speed_up: Mapping[str, float]  # against float in ONNX Runtime, likewise
    agreement: float | None = None  # fraction of inputs with the same answer
    divergence: float | None = None
    top1: float | None = None  # if there were labels
    count: int = 0  # inputs that were compared


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
_Measured: TypeAlias = (
    Accuracy
    | BlockErrorSection
    | Histogram
    | _Audited
    | AgreementSection
    | RuntimeSection
)
Section: TypeAlias = _Measured | LayerEffect | StageTime | Remark | Versions


def _kind(section: type[Any]) -> str:
    """Return the name of a kind of section in files, which outlives the class's."""
    return section.__name__.removesuffix("Section")


_KINDS: dict[str, type[Any]] = {_kind(one): one for one in get_args(Section)}


def sections_to_json(sections: Iterable[Section]) -> list[dict[str, Any]]:
    """Return plain data for JSON.

    Example:
        >>> sections_to_json([StageTime("plan", 2.5)])
        [{'section': 'StageTime', 'name': 'plan', 'seconds': 2.5}]
    """
    return [{"section": _kind(type(one)), **asdict(one)} for one in sections]


def sections_from_json(data: Any) -> list[Section]:
    """Rebuild sections from :func:`sections_to_json`.

    Raises:
        ValueError: An entry is not a section, or lacks a field.
    """
    sections: list[Section] = []
    for entry in convert_json(data, list[dict[str, Any]], "sections"):
        kind: Any = entry.get("section")
        check_known("section", kind, _KINDS)
        fields = {key: value for key, value in entry.items() if key != "section"}
        sections.append(convert_json(fields, _KINDS[kind], kind))
    return sections
