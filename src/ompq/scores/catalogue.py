"""The catalogue of scores: names, settings, and the table that each one gives."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from ompq.configs import OrmSettings
from ompq.parallel import from_main
from ompq.registry import Names
from ompq.samples import lock_of
from ompq.score_tables import ScoreTable
from ompq.scores.baselines import Random, SmallestFirst
from ompq.scores.computation import Score, ScoreInputs, cached_table, compute_table
from ompq.scores.orthogonality import Orm, OrmDistortion
from ompq.scores.output_divergence import OutputDivergence
from ompq.scores.sensitivity import Sensitivity
from ompq.scores.weight_noise import WeightNoise

# Each has a `summary` in one line and says what it `needs`.
SCORES: Names[Score] = Names(
    "score",
    {
        "orm": Orm(),
        "orm_distortion": OrmDistortion(),
        "output_divergence": OutputDivergence(),
        "random": Random(),
        "sensitivity": Sensitivity(),
        "smallest_first": SmallestFirst(),
        "weight_noise": WeightNoise(),
    },
)


def named_score(name: str) -> Score:
    """Return the score of a name.

    Raises:
        ValueError: The name is unknown.
    """
    return SCORES.find(name, "a callable")


def with_orm_settings(score: Score | str, settings: OrmSettings) -> Score:
    """Return a score that measures ORM, with other settings of it.

    What differs from the defaults replaces the score's own settings.

    Raises:
        ValueError: The score does not measure ORM.
    """
    found = named_score(score) if isinstance(score, str) else score
    if not isinstance(getattr(found, "settings", None), OrmSettings):
        raise ValueError(
            f"settings of ORM are for scores that measure it, orm or orm_distortion, "
            f"not {score_name(found)}"
        )
    usual = OrmSettings()
    given = {k: v for k, v in vars(settings).items() if v != getattr(usual, k)}
    own = replace(found.settings, **given)  # type: ignore[attr-defined]
    return cast(Score, replace(cast(Any, found), settings=own))


def score_name(score: Score | str) -> str:
    """Return the name that a score goes by, with its settings, or its own name."""
    if isinstance(score, str):
        return score
    for name, known in SCORES.items():
        if type(known) is type(score) and is_dataclass(score):
            changed = ", ".join(_changes(score, known))
            return f"{name}({changed})" if changed else name
    return getattr(score, "__qualname__", None) or repr(score)


def _changes(given: Any, usual: Any) -> Iterator[str]:
    """Yield what differs between two values of a dataclass, as it is written."""
    for name in (field.name for field in fields(given) if field.repr):
        ours, theirs = getattr(given, name), getattr(usual, name)
        if is_dataclass(ours) and type(ours) is type(theirs):
            yield from _changes(ours, theirs)
        elif ours != theirs:
            yield f"{name}={ours!r}"


def score_table(
    score: Score | str, given: ScoreInputs, cache: str | Path | None = None
) -> ScoreTable:
    """Compute a score, given as a callable or by its name in :data:`SCORES`.

    Args:
        cache: A folder that keeps tables, and from which known ones are read.

    Raises:
        ValueError: The name is unknown.
        ScoreError: The result is not a finite table of units × choices.
    """
    chosen = named_score(score) if isinstance(score, str) else score
    # Scores swap weights for rounded ones while the network runs.
    with lock_of(given.model):
        found = (
            compute_table(chosen, given)
            if cache is None
            else cached_table(cache, chosen, given)
        )
    return from_main(lambda: found)  # their devices may round differently
