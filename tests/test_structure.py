"""The structure of a packed file is refused before it can do harm."""

import json
import zlib

import pytest

from ompq.packed import structure
from ompq.packed.structure import read_structure, reason_of


def deflated(data):
    return zlib.compress(json.dumps(data).encode())


def test_a_structure_is_read_as_written():
    data = {"units": [{"name": "käse", "bits": 4}], "version": 3}
    assert read_structure(deflated(data)) == data


def test_a_structure_that_fills_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(structure, "_LARGEST", 1000)
    assert read_structure(deflated({"a": "x" * 900}))["a"] == "x" * 900
    with pytest.raises(ValueError, match=r"a structure of more than 1,000 bytes"):
        read_structure(deflated({"a": "x" * 1000}))


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "\u202e"])
@pytest.mark.parametrize("place", [lambda t: {t: 1}, lambda t: {"a": [{"b": t}]}])
def test_texts_that_terminals_obey_are_refused(place, text):
    with pytest.raises(ValueError, match="a text is not printable, or too long"):
        read_structure(deflated(place(text)))


def test_reasons_are_short_and_plain():
    assert reason_of(KeyError("käse\x1b")) == r"KeyError: 'k\xe4se\\x1b'"
    assert len(reason_of(ValueError("x" * 999))) == 300
