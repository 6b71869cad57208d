"""Declared fields: one check, one sentence, for every configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any, Literal

import numpy as np
import pytest

from ompq.configuration_checks import (
    BELOW_ONE,
    COUNT,
    FRACTION,
    INNER,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Config,
    SettingError,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class Walk(Config):
    """How to walk."""

    steps: int = setting(3, "Number of steps.", COUNT)
    pace: Literal["slow", "fast"] = setting("slow", "How fast to go.")
    rest: float | None = setting(None, "Seconds between steps.", POSITIVE)
    stops: tuple[int, ...] = setting((1, 2), "Where to stop.", NOT_NEGATIVE)
    ends: tuple[float, float] = setting((0.0, 1.0), "Where it begins and ends.")
    map: str | Callable[[], str] = setting("own", "Which map.", names={"own", "city"})
    alone: bool = setting(True, "Whether nobody comes along.")
    names: Mapping[str, str] = setting({}, "Names of places.")
    goal: Any = setting(None, "Anything.", check=lambda v: "" if v else "something")


@pytest.mark.parametrize(
    ("field", "value", "requirement"),
    [
        ("steps", 0, "at least 1"),
        ("steps", 1.5, "a whole number"),
        ("steps", True, "a whole number"),
        ("steps", inf, "a whole number"),
        ("pace", "quick", "one of 'slow', 'fast'"),
        ("rest", 0.0, "above 0 or None"),
        ("rest", nan, "a number or None"),
        ("rest", "1", "a number or None"),
        ("rest", inf, "above 0 or None"),
        ("stops", (1, -1), "values that are each at least 0"),
        ("stops", 3, "a list of values"),
        ("ends", (1.0,), "2 values"),
        ("map", "town", "one of .* or a function"),
        ("map", 3, "text or a function"),
        ("alone", 1, "True or False"),
        ("names", [], "a mapping"),
        ("goal", 0, "something"),
    ],
)
def test_a_value_that_a_field_cannot_have_is_refused(field, value, requirement):
    sentence = rf"^The '{field}' of Walk must be {requirement}\. Got "
    with pytest.raises(SettingError, match=sentence) as caught:
        Walk(**{field: value})
    assert caught.value.field == field and caught.value.config == "Walk"
    assert str(caught.value).endswith(f"Got {caught.value.value!r}.")
    with pytest.raises(SettingError, match=sentence):
        replace(Walk(), **{field: value})


def test_values_that_suit_are_kept_and_lists_become_tuples():
    walk = Walk(steps=np.int64(4), rest=2, stops=[3, 4], ends=[1, 2], map=str)
    assert (walk.steps, walk.rest, walk.stops, walk.ends) == (4, 2, (3, 4), (1, 2))
    assert walk.map is str
    assert Walk() == Walk() and Walk.steps == 3


def test_fields_are_listed_in_the_documentation():
    assert "Attributes:\n    steps: Number of steps.\n" in (Walk.__doc__ or "")
    assert (Walk.__doc__ or "").startswith("How to walk.")


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "text"),
    [
        (COUNT, [1, 9], [0, inf, nan], "at least 1"),
        (NOT_NEGATIVE, [0, 2.5], [-1e-9, inf], "at least 0"),
        (POSITIVE, [1e-9], [0, -1, inf], "above 0"),
        (FRACTION, [0, 0.5, 1], [-0.1, 1.1], "from 0 to 1"),
        (BELOW_ONE, [0, 0.99], [1, -1], "at least 0 and below 1"),
        (INNER, [0.5], [0, 1], "above 0 and below 1"),
        (Bounds(0, inf, low_open=True, high_open=False), [inf, 1], [0], "above 0"),
        (Bounds(0, 8, low_open=True, high_open=False), [8], [0, 9], "above 0 and at"),
    ],
)
def test_bounds_say_what_they_hold(bounds, inside, outside, text):
    assert all(value in bounds for value in inside)
    assert not any(value in bounds for value in outside)
    assert str(bounds).startswith(text)
