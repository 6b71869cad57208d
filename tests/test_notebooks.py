"""The notebooks run, and what they show stands in them."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted(
    (Path(__file__).parent.parent / "examples/notebooks").glob("*.ipynb")
)
NEEDED = {
    "classifier": ("sklearn", "onnxruntime"),
    "segmentation": ("onnxruntime",),
    "language_model": ("transformers", "gguf", "xllamacpp"),
}


def cells(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    return [one for one in data["cells"] if one["cell_type"] == "code"]


def quick(code: str) -> str:
    """Return the code with fewer samples and steps."""
    code = code.replace(".samples(256)", ".samples(64)")
    code = re.sub(r"iterations=\d+", "iterations=2", code)
    return code.replace("range(6)", "range(1)").replace("range(1, 5)", "range(1, 2)")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    for name in NEEDED[path.stem]:
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for cell in cells(path):
        exec(compile(quick("".join(cell["source"])), path.name, "exec"), scope)
    limit = {"classifier": 36, "language_model": 80}.get(path.stem)
    file = {"classifier": "digits.ompq.safetensors", "language_model": "tiny.gguf"}
    if limit:
        assert (tmp_path / file[path.stem]).stat().st_size <= limit * 1024
    else:
        assert scope["found"].metrics.keys() == {"IoU"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_show_results_and_no_errors_or_paths(path):
    shown = [output for cell in cells(path) for output in cell["outputs"]]
    assert len(shown) >= 3
    assert {output["output_type"] for output in shown} <= {"execute_result", "stream"}
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|work|root|tmp)/", text)
    assert "stderr" not in text
