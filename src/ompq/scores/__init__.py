"""Scores: the damage expected of each choice of bits, unit by unit."""

from collections.abc import Sequence

from torch import nn

from ompq.graph import Choice, LayerGraph
from ompq.samples import Samples, SamplesLike
from ompq.scores.baselines import Random, SmallestFirst
from ompq.scores.orm import Orm, OrmDistortion, OrmSettings, measure_orm
from ompq.scores.output_divergence import OutputDivergence
from ompq.scores.table import Score, ScoreTable, checked
from ompq.scores.weight_noise import WeightNoise

__all__ = [
    "SCORES",
    "Orm",
    "OrmDistortion",
    "OrmSettings",
    "OutputDivergence",
    "Random",
    "Score",
    "ScoreTable",
    "SmallestFirst",
    "WeightNoise",
    "measure_orm",
    "score_name",
    "score_table",
]


SCORES: dict[str, Score] = {
    "orm": Orm(),
    "orm_distortion": OrmDistortion(),
    "output_divergence": OutputDivergence(),
    "random": Random(),
    "smallest_first": SmallestFirst(),
    "weight_noise": WeightNoise(),
}


def score_name(score: Score | str) -> str:
    """Return the name that a score goes by, or what it calls itself."""
    if isinstance(score, str):
        return score
    known = (name for name, one in SCORES.items() if one == score)
    return next(known, getattr(score, "__qualname__", None) or repr(score))


def score_table(
    score: Score | str,
    graph: LayerGraph,
    model: nn.Module,
    samples: SamplesLike,
    choices: Sequence[Choice],
) -> ScoreTable:
    """Compute a score, given as a callable or by name.

    Raises:
        ValueError: The name is unknown.
        ScoreError: The result is no finite table of units × choices.
    """
    if isinstance(score, str):
        if score not in SCORES:
            raise ValueError(
                f"score={score!r} is unknown; use {', '.join(SCORES)} or a callable"
            )
        score = SCORES[score]
    return checked(score(graph, model, Samples.of(samples), choices), graph, choices)
