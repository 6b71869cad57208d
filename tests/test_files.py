import errno
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from safetensors import SafetensorError

from ompq.errors import DataError, FileError, ModelError
from ompq.files import read_tensors, replacing, shown, write_tensors, write_text
from ompq.schema import (
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
from ompq.user_functions import call_user_function, is_user_function, reason

KIND = "ompq-things/1"


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_text_arrives_whole_and_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_text(path, "käse")
    assert path.read_text(encoding="utf-8") == "käse"
    assert names(path.parent) == ["b.json"]


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="stop"), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["plan.json"]


def test_a_full_disk_is_called_one_and_leaves_nothing(tmp_path, monkeypatch):
    def fill(self, _text, **_settings):
        self.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_text", fill)
    with pytest.raises(
        FileError, match="a.json cannot be written: the disk is full. Free some space"
    ):
        write_text(tmp_path / "a.json", "whole")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("No space left on device (os error 28)", "the disk is full. Free some space"),
        ("File too large (os error 27)", "File too large. Use another path"),
    ],
)
def test_tensors_that_the_disk_does_not_take(tmp_path, monkeypatch, said, words):
    def fill(_tensors, _file, _metadata):  # as safetensors tells it
        raise SafetensorError(f"Error while serializing: I/O error: {said}")

    monkeypatch.setattr("safetensors.torch.save_file", fill)
    with pytest.raises(FileError, match=f"cannot be written: {words}"):
        write_tensors(tmp_path / "a", {"format": KIND}, {"a": torch.ones(3)})
    assert names(tmp_path) == []


def test_names_may_be_as_long_as_the_system_allows(tmp_path):
    write_text(tmp_path / f"{'n' * 250}.json", "whole")
    assert names(tmp_path) == [f"{'n' * 250}.json"]
    write_text(tmp_path / f"x.{'n' * 250}", "whole")
    for name in ("n" * 300, "ü" * 200):
        began = []
        with (
            pytest.raises(
                FileError, match="cannot be written: File name too long. Use"
            ),
            replacing(tmp_path / name),
        ):
            began.append(name)
        assert not began  # it is told before the work is done
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("file/a.json", "File exists"),
        ("file/b/a.json", "Not a directory"),
        ("folder", "Is a directory"),
    ],
)
def test_places_that_cannot_be_written_are_named(tmp_path, place, words):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match=f"{place} cannot be written: {words}"):
        write_text(tmp_path / place, "text")
    assert sorted(names(tmp_path)) == ["file", "folder"]


def test_a_relative_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="^folder cannot be written: Is a directory"):
        write_text("folder", "text")
    assert names(tmp_path) == ["folder"]


def test_errors_about_other_files_stay_what_they_are(tmp_path):
    other = tmp_path / "elsewhere" / "x"
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "here" / "a"):
        other.read_text()


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


def test_reading_json_does_not_import_torch():
    code = "import sys, ompq.files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


TENSORS = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
}


def test_tensors_and_header_are_read_as_written(tmp_path):
    first, second = tmp_path / "run" / "a.st", tmp_path / "b.st"
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {**TENSORS, "a": shared, "b": shared.T, "c": shared, "d": shared[1]}
    header = {"format": KIND, "step": 7, "deep": {"x": [1.5, "ü"]}}
    write_tensors(first, header, tensors)
    write_tensors(second, header, tensors)
    assert first.read_bytes() == second.read_bytes()
    found, read = read_tensors(first, KIND)
    assert found == header
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert names(first.parent) == ["a.st"]


def test_files_of_another_kind_are_told_apart(tmp_path):
    path = tmp_path / "a.st"
    for found, words in (
        ("ompq-things/2", "its format is ompq-things/2; ompq .* reads"),
        (
            "ompq-others/1",
            "it is a safetensors file, but not of the kind ompq-things/1",
        ),
    ):
        write_tensors(path, {"format": found}, {})
        with pytest.raises(ValueError, match=words):
            read_tensors(path, KIND)
    for content in (b"", b"something else", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="it is damaged, cut short, or not a safe"):
            read_tensors(path, KIND)
    with pytest.raises(ValueError, match="there is no such file"):
        read_tensors(tmp_path / "none", KIND)
    with pytest.raises(ValueError, match="it is a folder"):
        read_tensors(tmp_path, KIND)


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


def write(path, text):
    path.write_text(text)
    return path


def test_only_file_and_function_is_a_user_function():
    assert is_user_function("nets/my.py:make")
    assert not is_user_function("torchvision:resnet18")
    assert not is_user_function("my.py")
    assert not is_user_function("my.py:")


def test_file_can_import_its_neighbours_and_the_path_is_restored(tmp_path):
    write(tmp_path / "neighbour_of_mine.py", "VALUE = 7\n")
    text = "def make():\n    from neighbour_of_mine import VALUE\n    return VALUE\n"
    file = write(tmp_path / "mine.py", text)
    before = list(sys.path)
    assert call_user_function(f"{file}:make", ModelError) == 7
    assert sys.path == before


def test_missing_file_is_named():
    with pytest.raises(DataError, match="there is no file nowhere.py"):
        call_user_function("nowhere.py:f", DataError)


def test_missing_function_gets_a_suggestion(tmp_path):
    file = write(tmp_path / "mine.py", "def make_net():\n    return 1\n")
    with pytest.raises(
        ModelError, match=r"has no function make_ne \(did you mean make_net\?\)"
    ):
        call_user_function(f"{file}:make_ne", ModelError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f():\n    raise KeyError('weight')\n", "failed: KeyError: 'weight'"),
        ("import no_such_module\n", "failed: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(3)\n", "failed: SystemExit: 3"),
        ("def f(:\n", "failed: SyntaxError"),
        ("def f(x):\n    return x\n", "failed: TypeError: f\\(\\) missing 1"),
        (
            "class Net:\n    forward = __call__ = print\n\nf = Net()\n",
            "f is a Net, not a function; name a function that returns f$",
        ),
    ],
)
def test_failing_file_gives_one_line(tmp_path, text, words):
    file = write(tmp_path / "mine.py", text)
    with pytest.raises(ModelError, match=words) as caught:
        call_user_function(f"{file}:f", ModelError)
    assert "\n" not in str(caught.value)


def test_reason_is_one_line_of_bounded_length():
    assert reason(ValueError("one\ntwo")) == "ValueError: one"
    assert reason(ValueError()) == "ValueError"
    assert reason(ValueError("x" * 500)).endswith("x...")
    assert len(reason(ValueError("x" * 500))) == 120


def test_text_that_terminals_show_stays_and_the_rest_is_escaped():
    plain = ["", "dir/net.py:make", "全角\u3000dir", "a\u00a0b", "😀 é"]
    assert [shown(text) for text in plain] == plain
    escaped = {
        "a\nb": "a\\nb", "\x1b[31m": "\\x1b[31m", "x\u202ey": "x\\u202ey",
        "\udc80": "\\udc80", "\u2028": "\\u2028", "\0": "\\x00",
    }  # fmt: skip
    assert {text: shown(text) for text in escaped} == escaped
    for text in ("x" * 1001, "\n" * 600, "x" * 10**6):
        assert len(shown(text)) == 1000 and shown(text).endswith("…")
    assert shown("x" * 1000) == "x" * 1000


def test_files_that_cannot_be_read_again_do_not_appear(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def refuse(temporary):
        raise ValueError(f"{temporary} is broken")

    words = "a.json was not written, since it could not be read again: the new file is"
    with pytest.raises(FileError, match=words):
        write_text(path, "new", check=refuse)
    with pytest.raises(FileError, match=words):
        write_tensors(path, {"format": KIND}, {"a": torch.ones(1)}, check=refuse)
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]
    write_text(path, "\ud800")  # half a character has an escape
    assert path.read_text() == "\\ud800"


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
