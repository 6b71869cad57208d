"""Scores: the damage expected of each choice of bits, unit by unit."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ompq.graph import Choice, LayerGraph
from ompq.processes import from_main
from ompq.samples import Samples, SamplesLike, locked
from ompq.scores.baselines import Random, SmallestFirst
from ompq.scores.blend import Blend
from ompq.scores.cache import cached_table
from ompq.scores.fisher import Fisher
from ompq.scores.gradient import Gradient
from ompq.scores.hessian import Hessian
from ompq.scores.labels import LabelledBatches
from ompq.scores.orm import Orm, OrmSettings, function_units, measure_orm
from ompq.scores.orm_distortion import OrmDistortion
from ompq.scores.orm_shift import OrmShift
from ompq.scores.output_divergence import OutputDivergence
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.table import Needs, Score, ScoreTable, checked
from ompq.scores.weight_noise import WeightNoise

__all__ = [
    "SCORES",
    "Blend",
    "Fisher",
    "Gradient",
    "Hessian",
    "Needs",
    "Orm",
    "OrmDistortion",
    "OrmSettings",
    "OrmShift",
    "OutputDivergence",
    "Random",
    "Score",
    "ScoreTable",
    "Sensitivity",
    "SmallestFirst",
    "WeightNoise",
    "function_units",
    "measure_orm",
    "named_score",
    "score_name",
    "score_table",
]

# Each has a `summary` in one line and says what it `needs`.
SCORES: dict[str, Score] = {
    "blend": Blend(),
    "fisher": Fisher(),
    "gradient": Gradient(),
    "hessian": Hessian(),
    "orm": Orm(),
    "orm_distortion": OrmDistortion(),
    "orm_shift": OrmShift(),
    "output_divergence": OutputDivergence(),
    "random": Random(),
    "sensitivity": Sensitivity(),
    "smallest_first": SmallestFirst(),
    "weight_noise": WeightNoise(),
}


# A score that quantizes stands below this package, and is imported when it is named.
_BELOW = dict.fromkeys(("block_loss", "reconstruction"), "ompq.reconstruction_score")


def named_score(name: str) -> Score:
    """Return the score of a name.

    Raises:
        ValueError: The name is unknown.
    """
    if name in _BELOW:
        import_module(_BELOW[name])
    if name not in SCORES:
        known = ", ".join(dict.fromkeys([*SCORES, *_BELOW]))
        raise ValueError(f"score={name!r} is unknown; use {known} or a callable")
    return SCORES[name]


def score_name(score: Score | str) -> str:
    """Return the name that a score goes by, with its settings, or its own name."""
    if isinstance(score, str):
        return score
    for name, known in SCORES.items():
        if type(known) is type(score) and is_dataclass(score):
            changed = ", ".join(_changed(score, known))
            return f"{name}({changed})" if changed else name
    return getattr(score, "__qualname__", None) or repr(score)


def _changed(given: Any, usual: Any) -> Iterator[str]:
    """Yield what differs between two values of a dataclass, as it is written."""
    for name in (field.name for field in fields(given) if field.repr):
        ours, theirs = getattr(given, name), getattr(usual, name)
        if is_dataclass(ours) and type(ours) is type(theirs):
            yield from _changed(ours, theirs)
        elif ours != theirs:
            yield f"{name}={ours!r}"


def score_table(  # noqa: PLR0913 - the last two are optional
    score: Score | str,
    graph: LayerGraph,
    model: nn.Module,
    samples: SamplesLike,
    choices: Sequence[Choice],
    *,
    batches: LabelledBatches | None = None,
    cache: str | Path | None = None,
) -> ScoreTable:
    """Compute a score, given as a callable or by name.

    Args:
        score: A name of :data:`SCORES` or a callable.
        graph: The network's units.
        model: The network.
        samples: Inputs.
        choices: Columns of the table.
        batches: Inputs and class numbers, for the scores that use labels.
        cache: A folder that keeps tables, and from which known ones are read.

    Raises:
        ValueError: The name is unknown.
        ScoreError: The result is no finite table of units × choices.
    """
    chosen: Any = named_score(score) if isinstance(score, str) else score
    if batches is not None and getattr(chosen, "needs", Needs("")).labels:
        chosen = replace(chosen, batches=batches)
    given = Samples.of(samples)
    # Scores swap weights for rounded ones while the network runs.
    with locked(model):
        if cache is None:
            found = checked(chosen(graph, model, given, choices), graph, choices)
        else:
            found = cached_table(cache, chosen, graph, model, given, choices)
    return from_main(lambda: found)  # their devices may round differently
