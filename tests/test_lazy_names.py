"""Names that are imported when they are first used."""

import subprocess
import sys

import pytest

PACKAGE = """
from typing import TYPE_CHECKING

from ompq.lazy_names import lazy_names

if TYPE_CHECKING:
    from shades import dark as dark
    from shades.light import BRIGHT as BRIGHT, glow as glow

__getattr__, __dir__, __all__ = lazy_names(__name__)
"""


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "shades"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "light.py").write_text("BRIGHT = 7\ndef glow(): return 'glows'\n")
    (package / "dark.py").write_text("night = True\n")
    return tmp_path


def ran(folder, code):
    command = [sys.executable, "-c", f"import sys, shades\n{code}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_modules_are_imported_with_the_first_of_their_names(folder):
    code = (
        "print('shades.light' in sys.modules, shades.glow(), shades.BRIGHT)\n"
        "print('glow' in vars(shades), 'shades.dark' in sys.modules)\n"
        "print(shades.dark.night)"
    )
    assert ran(folder, code) == ["False", "glows", "7", "True", "False", "True"]


def test_names_are_listed_and_others_are_refused(folder):
    code = (
        "print(*shades.__all__, *dir(shades))\n"
        "try:\n    shades.dusk\nexcept AttributeError as error:\n    print(error)"
    )
    *names, _module, package, has, no, _attribute, dusk = ran(folder, code)
    assert names == ["BRIGHT", "dark", "glow"] * 2
    assert (package, has, no, dusk) == ("'shades'", "has", "no", "'dusk'")
