"""Names of scores, solvers and the like, and what extensions add to them."""

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from ompq import registry
from ompq.errors import ExtensionError
from ompq.registry import Names, extensions, load_value


@pytest.fixture
def offers(monkeypatch):
    """Replace all extensions by tables, as entry points would offer them."""

    def offer(**tables):
        points = [EntryPoint(n, f"{n}:EXTENSIONS", registry.GROUP) for n in tables]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)
        monkeypatch.setattr(registry, "_subpackages", lambda: ())
        for name, table in tables.items():
            monkeypatch.setitem(sys.modules, name, type(sys)(name))
            sys.modules[name].EXTENSIONS = table
        extensions.cache_clear()

    yield offer
    extensions.cache_clear()


def test_own_names_come_first_and_are_not_replaced(offers):
    offers(other={"shade": {"red": 7, "blue": "math:pi"}})
    shades = Names("shade", {"red": 1, "green": 2})
    assert [*shades] == ["red", "green", "blue"]
    assert shades["red"] == 1 and len(shades) == 3
    assert 3.14 < shades["blue"] < 3.15
    assert "blue" in shades and "grey" not in shades
    assert repr(shades) == "Names('shade', red, green, blue)"
    with pytest.raises(KeyError, match="grey"):
        shades["grey"]


def test_unknown_name_is_answered_with_similar_ones(offers):
    offers(other={"shade": {"blue": 3}})
    with pytest.raises(
        ValueError,
        match=r"^shade='bleu' is unknown \(did you mean blue\?\); use red, blue or a "
        r"callable$",
    ):
        Names("shade", {"red": 1}).find("bleu", "a callable")


def test_extensions_are_read_when_a_foreign_name_is_asked_for(offers, monkeypatch):
    offers(other={})

    def fail():
        raise AssertionError("extensions were read")

    monkeypatch.setattr(registry, "extensions", fail)
    shades = Names("shade", {"red": 1})
    assert shades["red"] == 1 and "red" in shades and shades.find("red") == 1
    with pytest.raises(AssertionError, match="extensions were read"):
        shades.get("blue")


def test_text_that_names_nothing_is_an_error_that_says_so():
    with pytest.raises(
        ExtensionError, match="offers 'math:tau_2', which cannot be imported"
    ):
        load_value("math:tau_2")
    with pytest.raises(ExtensionError, match="offers 'nowhere_at_all:x'"):
        load_value("nowhere_at_all:x")


def test_broken_extension_is_left_out_with_a_warning(offers, caplog):
    offers(broken=3, good={"shade": {"blue": 3}})
    with caplog.at_level(logging.WARNING, "ompq.registry"):
        assert Names("shade", {})["blue"] == 3
    assert "broken:EXTENSIONS is left out: it is int, not a table" in caplog.text


def test_name_offered_twice_keeps_its_first_meaning(offers, caplog):
    offers(first={"shade": {"blue": 1}}, second={"shade": {"blue": 2}})
    with caplog.at_level(logging.WARNING, "ompq.registry"):
        assert Names("shade", {})["blue"] == 1
    assert "second offers the shade blue again: ignored" in caplog.text


def test_our_own_extension_is_found_in_the_source_tree():
    assert "hessian" in extensions()["score"]


def test_reading_extensions_does_not_import_torch():
    code = (
        "import sys, ompq.registry; ompq.registry.extensions(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
