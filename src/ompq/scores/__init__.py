"""Scores: the damage expected of each choice of bits, unit by unit."""

from ompq.configs import OrmSettings
from ompq.scores.catalogue import SCORES, named_score, score_name, score_table
from ompq.scores.derivatives import Fisher, Gradient, Hessian
from ompq.scores.orthogonality import (
    Orm,
    OrmDistortion,
    OrmShift,
    measure_orm,
)
from ompq.scores.output_divergence import Blend, OutputDivergence
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.table import Random, Score, ScoreInputs, ScoreTable, SmallestFirst
from ompq.scores.weight_noise import WeightNoise

__all__ = [
    "SCORES",
    "Blend",
    "Fisher",
    "Gradient",
    "Hessian",
    "Orm",
    "OrmDistortion",
    "OrmSettings",
    "OrmShift",
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
