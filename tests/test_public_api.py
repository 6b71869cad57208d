import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ompq

SOURCE = Path(ompq.__file__).parent


def test_exports_are_sorted_complete_and_importable():
    assert ompq.__all__ == sorted(ompq.__all__, key=lambda n: (not n.isupper(), n))
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    for_checkers = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("ompq")
        for alias in node.names
    }
    for_checkers -= {"lazy_names", "__version__"}
    assert for_checkers == set(ompq.__all__) == set(dir(ompq))
    for name in ompq.__all__:
        value = getattr(ompq, name)
        assert name.isupper() or value.__doc__, name


def test_no_name_is_a_module_and_a_function():
    modules = {path.stem for path in SOURCE.rglob("*.py")}
    modules |= {path.parent.name for path in SOURCE.rglob("*.py")}
    rooms = {
        "datasets",
        "errors",
        "lab",
        "packed",
        "report",
        "scores",
    }  # listed as such
    assert modules & set(ompq.__all__) == rooms


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'ompq' has no attribute 'nope'"):
        _ = ompq.nope


def test_importing_the_package_does_not_import_torch():
    code = "import sys, ompq; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
