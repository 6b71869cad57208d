"""Pages with measurements say what the data say."""

import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
pages = pytest.importorskip("pages")


@pytest.mark.parametrize("template", pages.PAGES)
def test_pages_are_those_of_the_data(template):
    page = pages.PAGES[template]
    assert page.read_text(encoding="utf-8") == pages.rendered(template), (
        "run python benchmarks/pages.py"
    )


def test_a_changed_number_is_seen(monkeypatch):
    before = pages.rendered("results.md.j2")
    rows = pages.rows_of("which-bits")
    changed = [{**row, "divergence": 2 * row["divergence"]} for row in rows]
    kept = pages.rows_of
    monkeypatch.setattr(
        pages,
        "rows_of",
        lambda topic: changed if topic == "which-bits" else kept(topic),
    )
    assert pages.rendered("results.md.j2") != before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0263, ".0263"),
        (0.09, ".0900"),
        (1.0996, "1.10"),
        (0.9996, "1.000"),
        (12.34, "12.3"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert pages.number(value) == text


def test_rows_are_averaged_over_seeds():
    rows = [{"divergence": 0.1, "drop": -0.26, "drop_error": 0.4}] * 2
    assert pages.divergence(rows) == ".100"
    assert pages.loss(rows) == "−0.3 ± 0.4"
    assert pages.loss([{**rows[0], "drop": -0.04}]) == "0.0 ± 0.4"
    assert pages.divergence([]) == pages.loss([]) == "-"


def test_pages_are_of_a_length_that_is_read():
    lines = {
        page.name: len(page.read_text().splitlines()) for page in pages.PAGES.values()
    }
    assert lines["README.md"] <= 130
    assert lines["results.md"] <= 300


def test_every_row_names_its_commit_and_machine():
    for path in (BENCHMARKS / "results").glob("*.json"):
        if f'"{path.stem}"' not in "".join(
            template.read_text() for template in pages.TEMPLATES.glob("*.j2")
        ):
            continue
        for row in pages.rows_of(path.stem):
            assert re.fullmatch(r"[\w.+]+(, [\w.+]+)*", str(row["commit"])), path.name
            assert row["device"], path.name


def test_the_readme_of_benchmarks_names_every_script():
    text = (BENCHMARKS / "README.md").read_text()
    named = set(re.findall(r"`(\w+\.py)`", text))
    scripts = {path.name for path in BENCHMARKS.glob("*.py")} - {"common.py"}
    assert named == scripts
