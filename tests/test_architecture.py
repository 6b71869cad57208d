"""docs/architecture.md describes the tree as it is."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from test_layering import MODULES, PLACES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script():
    place = ROOT / "scripts" / "architecture.py"
    spec = importlib.util.spec_from_file_location("architecture", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_a_row_for_each_module(script):
    assert script.page(PLACES) == PAGE, "run python scripts/architecture.py"
    rows = re.findall(
        r"^\| `([\w.]+)` \| (.+) \|$", PAGE.split("## The rooms")[1], re.M
    )
    assert [name for name, _ in rows] == PLACES
    assert all(len(subject) > 10 for _, subject in rows)


def test_changes_begin_at_names_that_exist():
    table = PAGE.split("## Where do I change")[1].split("## The rooms")[0]
    rows = re.findall(r"^\| .+? \| `([\w.]+)`.*? \| (`.+`) \|$", table, re.M)
    assert len(rows) >= 10
    for room, names in rows:
        assert room in MODULES
        module = importlib.import_module(f"ompq.{room}")
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(module, name), f"{room} has no {name}"
