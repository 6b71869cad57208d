from dataclasses import dataclass

import pytest

from ompq.files import write_text
from ompq.untrusted_json import (
    Count,
    Index,
    Number,
    convert_json,
    number_table,
    parse_json,
    read_json,
    read_limited,
    record_type,
    row_type,
    whole_number,
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ("folder", "it is a folder"),
        (
            b"{bad",
            r"it is not JSON \(object keys must be strings at line 1, column 2\)",
        ),
        (b"", r"it is not JSON \(Input data was truncated\)"),
        ('{"käse":\n ä}'.encode(), r"it is not JSON \(.* at line 2, column 2\)"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b'{"a":' * 100_000, "it is nested too deeply"),
        (b"[-" + b"9" * 5000 + b"]", r"it is not JSON \(Integer value out of range .*"),
        (b"[NaN]", r"it is not JSON \(invalid character at line 1, column 2\)"),
        (b"[-Infinity]", r"it is not JSON \(.*\)"),
        (b"[1e999]", r"it is not JSON \(Number out of range - at `\$\[0\]`\)"),
        (b'["\\ud800 is half"]', r"it is not JSON \(.* surrogate .*\)"),
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
    ("kind", "value", "words"),
    [
        (dict, [1, 2], "x must be an object, not a list of 2 entries"),
        (list, {"a": 1}, "x must be a list, not an object of 1 entries"),
        (str, 3, "x must be text, not 3"),
        (Count, True, "x must be a whole number, not True"),
        (Count, -1, "x must be a whole number of at least 0, not -1"),
        (whole_number(2, 8), 9, "x must be a whole number of at most 8, not 9"),
        (
            Count,
            int("9" * 400),
            r"x must be .* at most 9223372036854775807, not 9{36}\.\.\.",
        ),
        (Number, "1", "x must be a finite number, not '1'"),
        (Number, float("inf"), "x must be a finite number of at most .*, not inf"),
        (Number, int("9" * 400), "x: Number out of range"),
        (str | None, 3, "x must be text or null, not 3"),
        (
            number_table(2, 1),
            [[1]],
            "x must be a list of length at least 2, not a list of 1 entries",
        ),
        (number_table(1, 1), [["1"]], r"x\[0\]\[0\] must be a finite number, not '1'"),
        (
            row_type(str, int),
            ["a"],
            "x must be a list of length 2, not a list of 1 entries",
        ),
        (row_type(int, ...), [1, "a"], r"x\[1\] must be a whole number, not 'a'"),
        (dict[str, int], {"a": "b"}, "an entry of x must be a whole number"),
        (record_type(a=int), {"b": 1}, "x lacks a"),
        (
            record_type(a=list[int]),
            {"a": [1, None]},
            r"x\.a\[1\] must be a whole number, not None",
        ),
    ],
)
def test_values_of_other_types_are_refused(kind, value, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        convert_json(value, kind, "x")


def test_values_of_the_right_types_are_returned():
    assert convert_json([[1, 2.5]], number_table(1, 2), "x") == [[1.0, 2.5]]
    assert convert_json(2**53, Count, "x") == 2**53
    assert convert_json(-1, Index, "x") == -1
    assert convert_json({"a": 1}, dict, "x") == {"a": 1}
    record = record_type(a=int, b=(str, "default"))
    found = convert_json({"a": 1, "other": 2}, record, "x")
    assert (found.a, found.b) == (1, "default")


@dataclass(frozen=True)
class Inner:
    """A record inside another."""

    text: str


@dataclass(frozen=True)
class Outer:
    """A record with fields of all kinds."""

    count: Index
    share: Number
    flag: bool
    sizes: tuple[Count, ...]
    inner: tuple[Inner, ...] = ()


GOOD = {"count": 1, "share": 2, "flag": True, "sizes": [3, 4], "inner": [{"text": "x"}]}


def test_records_are_made_of_plain_data():
    made = convert_json(GOOD, Outer, "it")
    assert made == Outer(1, 2, True, (3, 4), (Inner("x"),))
    assert convert_json({**GOOD, "share": 0.5}, Outer, "it").share == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 1.0}, r"it\.count must be a whole number, not 1\.0"),
        ({"count": -2}, r"it\.count must be a whole number of at least -1, not -2"),
        ({"share": "2"}, r"it\.share must be a finite number, not '2'"),
        ({"flag": 1}, r"it\.flag must be true or false, not 1"),
        ({"sizes": "34"}, r"it\.sizes must be a list, not '34'"),
        ({"sizes": [1, None]}, r"it\.sizes\[1\] must be a whole number, not None"),
        ({"inner": [{"text": 1}]}, r"it\.inner\[0\]\.text must be text, not 1"),
        ({"inner": [[]]}, r"it\.inner\[0\] must be an object, not a list of 0 entries"),
        ({"extra": 1}, "it has no field extra"),
        ({"inner": [{"text": "", "b": 1}]}, r"it\.inner\[0\] has no field b"),
    ],
)
def test_other_data_is_refused(change, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        convert_json({**GOOD, **change}, Outer, "it")
    with pytest.raises(ValueError, match="^it lacks flag$"):
        convert_json({"count": 1, "share": 1.0}, Outer, "it")


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
