import pytest

from ompq.files import read_json, replacing, write_text


def test_text_arrives_whole_and_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_text(path, "käse")
    assert path.read_text(encoding="utf-8") == "käse"
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="stop"), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop")
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file"),
        ("folder", "it is a folder"),
        (b"{bad", r"it is no JSON \(Expecting property name .* at line 1, column 2\)"),
        (b"\xff\xfe", "it is no text"),
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

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(ValueError, match=r"it cannot be read \(Permission denied\)"):
        read_json(tmp_path / "a.json")


def test_json_is_read_as_utf8(tmp_path):
    write_text(tmp_path / "a.json", '{"käse": [1, 2]}')
    assert read_json(tmp_path / "a.json") == {"käse": [1, 2]}
