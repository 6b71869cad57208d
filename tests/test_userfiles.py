import sys

import pytest

from ompq.errors import DataError, ModelError
from ompq.userfiles import call_user_function, is_user_function, reason


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
