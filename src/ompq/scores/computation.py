"""How a score is computed: its inputs, its table checked, and a cache on disk."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from torch import nn

from ompq.checkpoints import Store
from ompq.content_identity import identity
from ompq.errors import CheckpointError, ScoreError, shorten
from ompq.files import library_version
from ompq.network.attention import with_layers
from ompq.network.units import Choice, LayerGraph, Table
from ompq.outputs import Outputs
from ompq.progress import Progress, no_progress
from ompq.samples import Samples, model_device
from ompq.score_tables import ScoreTable
from ompq.untrusted_json import Number, convert_json, record_type

logger = logging.getLogger(__name__)
_KIND = "score table"


@dataclass(frozen=True)
class ScoreInputs:
    """What a score is given.

    Attributes:
        graph: The network's units: rows of the table.
        model: The network.
        samples: Unlabelled inputs.
        choices: Columns of the table.
        progress: Called as ``progress(done, total, message)``.
        output: What the network returns, as in PlanConfig; None recognises it.
    """

    graph: LayerGraph
    model: nn.Module
    samples: Samples
    choices: Sequence[Choice]
    progress: Progress = no_progress
    output: str | None = None

    def __post_init__(self) -> None:
        # Units were found in a network whose attentions have layers.
        object.__setattr__(self, "model", with_layers(self.model, self.samples))

    @cached_property
    def outputs(self) -> Outputs:
        """How to compare what the network returns."""
        return Outputs.of(self.model, self.samples, self.output)


Score: TypeAlias = Callable[[ScoreInputs], ScoreTable | Any]


class Needs(NamedTuple):
    """What computing a score takes.

    Attributes:
        passes: Runs of the network over the samples, in words.
        gradients: Whether the network must be differentiable.
        labels: Whether labelled batches are used if they are given, as ``batches``.
        seconds: For ResNet-18, 64 images of 224 × 224 pixels and six widths: CPU time
            divided by two, as measured on two cores that did other work as well.
    """

    passes: str
    gradients: bool = False
    labels: bool = False
    seconds: float = 0.0


def compute_table(score: Score, given: ScoreInputs) -> ScoreTable:
    """Return a score's table, timed, with nine digits of each number.

    Raises:
        ScoreError: It is not a finite table of units × choices.
    """
    start = perf_counter()
    result = score(given)
    table = result if isinstance(result, ScoreTable) else ScoreTable(_array(result))
    wanted = (len(given.graph), len(given.choices))
    if table.damage.shape != wanted:
        raise ScoreError(
            f"the score returned shape {table.damage.shape}; "
            f"{wanted[0]} units × {wanted[1]} choices need {wanted}"
        )
    broken = [
        name
        for name, row in zip(given.graph.names, table.damage, strict=True)
        if not np.isfinite(row).all()
    ]
    if broken:
        raise ScoreError(f"the score is NaN or infinite for {shorten(broken)}")
    return replace(
        table,
        damage=_round(table.damage),
        orm=None if table.orm is None else np.round(table.orm, 9),  # of 0 to 1
        gamma=_round(table.gamma),
        importance=_round(table.importance),
        seconds=perf_counter() - start,
    )


@overload
def _round(values: Table) -> Table: ...


@overload
def _round(values: Table | None) -> Table | None: ...


def _round(values: Table | None) -> Table | None:
    """Keep nine digits: further ones depend on how threads share sums."""
    if values is None:
        return None
    digits = [float(f"{value:.9g}") for value in values.flat]
    return np.array(digits, dtype=np.float64).reshape(values.shape)


def _array(result: Any) -> Table:
    try:
        return np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ScoreError(
            f"the score returned {type(result).__name__}, "
            "not a table of units × choices"
        ) from error


def cached_table(folder: str | Path, score: Score, given: ScoreInputs) -> ScoreTable:
    """Return the table kept in a folder, or compute it and keep it there.

    A damaged file is replaced, with a warning. Tables of users' own scores, and of
    scores with labelled batches, are not kept: it is not known what they depend on.
    """
    own = not type(score).__module__.startswith("ompq.")
    if own or getattr(score, "batches", None) is not None:
        logger.warning(
            "the score table is not kept in %s: only those of ompq's own scores, "
            "without labels, are",
            folder,
        )
        return compute_table(score, given)
    about = _about(score, given)
    key = identity(about)
    path = Path(folder) / f"{type(score).__name__}-{key[:16]}.json"
    shape, store = (len(given.graph), len(given.choices)), Store(path, _KIND, key)
    try:
        if (kept := store.read()) is not None:
            return _restored(kept.data, shape)
    except (CheckpointError, ValueError, KeyError) as error:
        logger.warning("%s; computing it again", error)
    new = compute_table(score, given)
    saved = {"about": about, "seconds": round(new.seconds or 0.0, 3), **new.to_json()}
    store.write(saved)
    return replace(_restored(saved, shape), seconds=new.seconds)


def _restored(data: Any, shape: tuple[int, int]) -> ScoreTable:
    given = convert_json(data, record_type(seconds=Number), "a score table")
    return replace(ScoreTable.from_json(data, *shape), seconds=given.seconds)


def _about(score: Score, given: ScoreInputs) -> dict[str, Any]:
    """Return everything that a table depends on."""
    model = given.model
    # The modules' text tells networks apart that have the same weights.
    weights = dict(model.named_parameters()), dict(model.named_buffers())
    return {
        "written_by": library_version(),
        "score": repr(score),
        "choices": [choice.to_json() for choice in given.choices],
        "device": model_device(model).type,
        "network": identity(given.graph.to_json(), repr(model), *weights),
        "samples": identity(given.samples.runs),
        "output": str(given.outputs),
    }
