from dataclasses import dataclass

import pytest

from ompq.files import write_text
from ompq.untrusted_json import (
    json_list,
    json_number,
    json_object,
    json_record,
    json_table,
    json_text,
    json_whole,
    parse_json,
    read_json,
    read_limited,
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ("folder", "it is a folder"),
        (b"{bad", r"it is not JSON \(Expecting property name .* at line 1, column 2\)"),
        (b"", r"it is not JSON \(Expecting value at line 1, column 1\)"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b"[" + b"9" * 400 + b"]", r"it holds an integer of 400 digits \(limit: 19\)"),
        (
            b"[-" + b"9" * 5000 + b"]",
            r"it holds an integer of 5000 digits \(limit: 19\)",
        ),
        (b"[NaN]", "it holds the number NaN, which is not finite"),
        (b"[-Infinity]", "it holds the number -Infinity, which is not finite"),
        (b"[1e999]", "it holds the number 1e999, which is not finite"),
        (b'["\\ud800"]', "it holds text that is not Unicode"),
    ],
)
def test_json_that_cannot_be_read_is_told_in_words(tmp_path, content, words):
    path = tmp_path / "a.json"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{words}$"):
        read_json(path)


def test_json_of_an_unreadable_file_says_why(tmp_path, monkeypatch):
    def refuse(*_args, **_settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(ValueError, match=r"it cannot be read \(Permission denied\)"):
        read_json(tmp_path / "a.json")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"it cannot be read \(File name too long\)"):
        read_json(tmp_path / ("n" * 300))


def test_json_is_read_as_utf8(tmp_path):
    write_text(tmp_path / "a.json", '\ufeff{"käse": [1, 2.5, -3, "\\ud83d\\ude00"]}')
    assert read_json(tmp_path / "a.json") == {"käse": [1, 2.5, -3, "😀"]}
    assert parse_json(str(2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        (json_object, [1, 2], "x must be an object, not a list of 2 entries"),
        (json_list, {"a": 1}, "x must be a list .*, not an object of 1 entries"),
        (json_text, 3, "x must be text, not 3"),
        (json_whole, True, "x must be a whole number from 0 to .*, not True"),
        (json_whole, int("9" * 400), r"not 9{36}\.\.\."),
        (json_number, "1", "x must be a finite number, not '1'"),
        (json_number, float("inf"), "x must be a finite number, not inf"),
        (lambda v, w: json_table(v, w, (2, 1)), [[1]], "x must have 2 entries, not 1"),
        (lambda v, w: json_table(v, w, (1, 1)), [["1"]], "x must be a finite number"),
    ],
)
def test_values_of_other_types_are_refused(check, value, words):
    with pytest.raises(ValueError, match=words):
        check(value, "x")


def test_values_of_the_right_types_are_returned():
    assert json_table([[1, 2.5]], "x", (1, 2)) == [[1.0, 2.5]]
    assert json_whole(2**53, "x") == 2**53
    assert json_object({"a": 1}, "x") == {"a": 1}


@dataclass(frozen=True)
class Inner:
    """A record inside another."""

    text: str


@dataclass(frozen=True)
class Outer:
    """A record with fields of all kinds."""

    count: int
    share: float
    flag: bool
    sizes: tuple[int, ...]
    inner: tuple[Inner, ...] = ()


GOOD = {"count": 1, "share": 2, "flag": True, "sizes": [3, 4], "inner": [{"text": "x"}]}


def test_records_are_made_of_plain_data():
    assert json_record(Outer, GOOD) == Outer(1, 2, True, (3, 4), (Inner("x"),))
    assert json_record(Outer, {**GOOD, "share": 0.5}).share == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 1.0}, "count must be a whole number from -1 to .*, not 1.0"),
        ({"count": True}, "count must be a whole number from -1 to .*, not True"),
        ({"share": "2"}, "share must be a finite number, not '2'"),
        ({"flag": 1}, "flag must be true or false, not 1"),
        ({"sizes": "34"}, "sizes must be a list of .*, not '34'"),
        ({"sizes": [1, None]}, "sizes must be a whole number .*, not None"),
        ({"inner": [{"text": 1}]}, "text must be text, not 1"),
        ({"inner": [[]]}, "Inner must be an object, not a list of 0 entries"),
        ({"extra": 1}, "Outer has no field extra"),
    ],
)
def test_other_data_is_refused(change, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        json_record(Outer, {**GOOD, **change})
    with pytest.raises(ValueError, match="^Outer lacks flag, sizes$"):
        json_record(Outer, {"count": 1, "share": 1.0})


def test_files_that_have_no_end_or_too_many_values_are_not_read(tmp_path):
    with pytest.raises(ValueError, match="it is not an ordinary file"):
        read_json("/dev/zero")
    (tmp_path / "a").write_bytes(b"x" * 9)
    assert read_limited(tmp_path / "a", 9) == b"x" * 9
    with pytest.raises(ValueError, match="it has more than 8 bytes"):
        read_limited(tmp_path / "a", 8)
    assert parse_json("[1, {}]", 4) == [1, {}]
    with pytest.raises(ValueError, match="it holds more than 3 values"):
        parse_json("[1, {}, 2]", 3)
