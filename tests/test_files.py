import pytest

from ompq.files import replacing, write_text


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
