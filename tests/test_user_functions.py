import sys

from cli_tools import write
from ompq.errors import ModelError
from ompq.user_functions import call_user_function, is_user_function, reason


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


def test_reason_is_one_line_of_bounded_length():
    assert reason(ValueError("one\ntwo")) == "ValueError: one"
    assert reason(ValueError()) == "ValueError"
    assert reason(ValueError("x" * 500)).endswith("x...")
    assert len(reason(ValueError("x" * 500))) == 120
