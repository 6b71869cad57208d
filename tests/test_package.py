"""The wheel and the sdist hold what an installed ompq needs."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "ompq").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == files
    assert {"ompq/py.typed", "ompq/models/data/demo.safetensors"} <= names


def test_the_sdist_can_be_tested(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "scripts/check"} <= names
    assert "tests/test_package.py" in names
    assert not [name for name in names if name.startswith(".venv")]
