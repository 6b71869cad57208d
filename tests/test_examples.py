"""Every example runs as it stands, and prints what it is about."""

import re
import runpy
from contextlib import chdir, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SAID = {
    "own_network_two_budgets": ("head W8A8", "1.00 MBOPs cannot be met"),
    "own_score": ("the default", "our own", "bits"),
    "plan_and_explain": ("classifier ", "> W2A8", "3.2bits: 3.20 bits on average"),
    "quantize_and_reconstruct": ("rounded", "divergence", "blocks.5", " planned"),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What an example prints; it runs once."""

    @cache
    def run(path: Path) -> str:
        text = StringIO()
        with chdir(tmp_path_factory.mktemp("example")), redirect_stdout(text):
            runpy.run_path(str(path), run_name="__main__")
        return text.getvalue()

    return run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, printed):
    text = printed(path)
    assert all(word in text for word in SAID[path.stem]), text
    for found in re.findall(r"([\d,]+) bytes, ([\d,]+) planned", text):
        size, planned = (int(number.replace(",", "")) for number in found)
        assert 0.95 * planned < size <= planned <= 37 * 1024


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_shows(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert text.startswith('"""')
    assert "Takes " in text.split('"""')[1]


def test_budgets_of_an_example_are_met(printed):
    path = next(one for one in EXAMPLES if one.stem == "own_network_two_budgets")
    found = re.findall(r"([\d,]+) bytes, ([\d.]+) MBOPs", printed(path))
    size = [int(one.replace(",", "")) for one, _ in found]
    operations = [float(one) for _, one in found]
    assert size[0] <= 7 * 1024 and size[1] <= 7 * 1024
    assert size[2] <= 0.01 * 2**20
    assert operations[0] > 60  # one budget alone
    assert operations[1] <= 60 and operations[2] <= 60
