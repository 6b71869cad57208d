"""The version of the package."""

import tomllib
from importlib import metadata
from pathlib import Path

import ompq
from ompq.files import library_version

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def test_the_version_is_that_of_the_project_file():
    stated = tomllib.loads(PROJECT.read_text())["project"]["version"]
    assert library_version() == stated


def test_a_source_folder_has_no_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert library_version() == "source"


def test_the_package_knows_its_version():
    assert ompq.__version__ == library_version()
