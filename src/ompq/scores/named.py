"""The scores that have a name."""

from collections.abc import Sequence

from torch import nn

from ompq.graph.units import Choice, LayerGraph
from ompq.samples import Samples
from ompq.scores.divergence import OutputDivergence
from ompq.scores.noise import WeightNoise
from ompq.scores.orm import Orm, OrmDistortion
from ompq.scores.simple import Random, SmallestFirst
from ompq.scores.table import Score, ScoreTable, checked

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
    samples: Samples,
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
    return checked(score(graph, model, samples, choices), graph, choices)
