"""Errors that name what was probably meant."""

import pytest

from ompq.errors import check_known, suggestion


def test_suggestion_ignores_the_library_and_may_be_empty():
    known = ["torchvision:resnet18", "torchvision:vgg11"]
    assert suggestion("resnet81", known) == " (did you mean torchvision:resnet18?)"
    assert suggestion("VGG1", known) == " (did you mean torchvision:vgg11?)"
    assert suggestion("zzz", known) == ""


@pytest.mark.parametrize(
    ("value", "known", "message"),
    [
        (
            "square",
            ("squared", "fisher"),
            r"\(did you mean squared\?\); use squared or f",
        ),
        ("odd", ("one",), "size='odd' is unknown; use one$"),
        (None, ("a", "b", "c"), "size=None is unknown; use a, b or c$"),
    ],
)
def test_an_unknown_value_is_told_with_what_is_known(value, known, message):
    with pytest.raises(ValueError, match=message):
        check_known("size", value, known)
    check_known("size", known[0], known)


def test_a_callable_may_be_used_too():
    with pytest.raises(ValueError, match="use a, b or a callable$"):
        check_known("score", "z", ("a", "b"), "a callable")
