"""Scores: what each choice of bits is expected to damage, unit by unit.

A score is any callable ``(graph, model, samples, choices)`` that returns a table of
shape (units, choices), lower is better. Adding one is one small file and a line in
:data:`ompq.scores.named.SCORES`; a user's own function needs neither.
"""

from ompq.scores.divergence import OutputDivergence
from ompq.scores.measure import OrmSettings, measure_orm
from ompq.scores.named import SCORES, score_name, score_table
from ompq.scores.noise import WeightNoise
from ompq.scores.orm import Orm, OrmDistortion
from ompq.scores.simple import Random, SmallestFirst
from ompq.scores.table import Score, ScoreTable

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
