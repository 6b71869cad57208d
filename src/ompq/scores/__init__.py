"""Scores: the damage expected of each choice of bits, unit by unit."""

from ompq.configs import OrmSettings
from ompq.scores.catalogue import SCORES, named_score, score_name, score_table
from ompq.scores.orthogonality import (
    Orm,
    OrmDistortion,
    measure_orm,
)
from ompq.scores.output_divergence import OutputDivergence
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.table import Random, Score, ScoreInputs, ScoreTable, SmallestFirst
from ompq.scores.weight_noise import WeightNoise

__all__ = [
    "SCORES",
    "Orm",
    "OrmDistortion",
    "OrmSettings",
    "OutputDivergence",
    "Random",
    "Score",
    "ScoreInputs",
    "ScoreTable",
    "Sensitivity",
    "SmallestFirst",
    "WeightNoise",
    "measure_orm",
    "named_score",
    "score_name",
    "score_table",
]
