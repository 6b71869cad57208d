import errno
import os
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from cli_tools import write
from ompq.errors import DataError, FileError, ModelError
from ompq.files import read_tensors, replacing, shown, write_tensors, write_text
from ompq.user_functions import call_user_function

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
