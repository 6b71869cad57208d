"""Scores: the damage expected of each choice of bits, unit by unit."""

from typing import TYPE_CHECKING

from ompq.lazy_names import lazy_names

if TYPE_CHECKING:
    from ompq.configs import OrmSettings as OrmSettings
    from ompq.score_tables import ScoreTable as ScoreTable
    from ompq.scores.baselines import Random as Random, SmallestFirst as SmallestFirst
    from ompq.scores.catalogue import (
        SCORES as SCORES,
        named_score as named_score,
        score_name as score_name,
        score_table as score_table,
    )
    from ompq.scores.computation import Score as Score, ScoreInputs as ScoreInputs
    from ompq.scores.orthogonality import (
        Orm as Orm,
        OrmDistortion as OrmDistortion,
        measure_orm as measure_orm,
    )
    from ompq.scores.output_divergence import OutputDivergence as OutputDivergence
    from ompq.scores.sensitivity import Sensitivity as Sensitivity
    from ompq.scores.weight_noise import WeightNoise as WeightNoise

__getattr__, __dir__, __all__ = lazy_names(__name__)
