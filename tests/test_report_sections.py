import json
import math

import pytest

from files_cases import WRONG, changed_anywhere
from ompq.lab.audit_command import audit_sections
from ompq.report.page import render_report
from ompq.report_sections import (
    Accuracy,
    BlockErrorSection,
    Histogram,
    sections_from_json,
    sections_to_json,
)
from reports import every_section, toy_audit, toy_plan


def test_sections_survive_json():
    sections = every_section()
    text = json.dumps(sections_to_json(sections))
    assert sections_from_json(json.loads(text)) == sections


def test_kinds_of_sections_keep_their_names_in_files():
    kinds = {entry["section"] for entry in sections_to_json(every_section())}
    assert kinds >= {"Accuracy", "Agreement", "BlockError", "Histogram", "StageTime"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"section": "Chart"}, "section='Chart' is unknown; use Accuracy"),
        ({"name": "x"}, "section=None is unknown"),
        (
            {"section": "StageTime", "name": "x"},
            "StageTime lacks seconds",
        ),
    ],
)
def test_what_is_no_section_is_named(entry, words):
    with pytest.raises(ValueError, match=words):
        sections_from_json([entry])


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_at_any_place_of_sections_is_one_clear_error(value):
    refused = 0
    for data in changed_anywhere(sections_to_json(every_section()), value):
        try:
            sections_from_json(json.loads(json.dumps(data)))
        except ValueError:
            refused += 1
    assert refused


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="float: top1=80.0 .* must be ascending"):
        Accuracy("float", 80.0, 75.0, 84.0, 10)
    with pytest.raises(ValueError, match="b1: errors nan and 1.0 must be finite"):
        BlockErrorSection("b1", math.nan, 1.0)
    with pytest.raises(ValueError, match="w: 2 counts and 2 edges; .* one edge more"):
        Histogram("w", (0.0, 1.0), (1, 2))
    with pytest.raises(ValueError, match="w: the edges must be ascending"):
        Histogram("w", (0.0, 1.0, 1.0), (1, 2))


def test_an_audit_shows_its_scores_and_what_chance_gives():
    found = audit_sections(toy_audit())
    kinds = [(type(one).__name__, one.name) for one in found]
    assert kinds == [
        ("AuditedBits", "published"),
        ("AuditedBits", "wrong"),
        ("AuditedRanks", "wrong"),
        ("AuditedRanks", "chance"),
        ("AuditedRanks", "divergence by orthogonality"),
    ]
    published, wrong, ranks, chance, claim = found
    assert ranks.points == ((1.0, 0.3), (2.0, 0.1))
    assert wrong.spearman == wrong.kendall == (-1.0, -1.0, -1.0)
    assert wrong.regret == pytest.approx(2.0) and wrong.fits
    assert published.spearman is published.seconds is None and not published.fits
    assert chance.text == "Spearman 0.40 ± 0.10 (standard deviation) by random scores"
    assert claim.points == ((0.5, 0.3), (0.4, 0.1))
    assert sections_from_json(sections_to_json(found)) == found
    page = render_report(toy_plan(), found)
    assert "Audit of scores" in page
    assert page.count("-1.00 (-1.00 to -1.00)</td>") == 2
    assert '50.00%</td><td class="n">7.5</td>' in page  # top-1 and a metric
    assert "20 B (over the budget)" in page
    assert "Spearman 1.00 (1.00 to 1.00), Kendall 1.00 (1.00 to 1.00)</p>" in page
    assert '<circle cx="0.0" cy="0.0" r="2"/>' in page  # least predicted, worst true
    assert '<circle cx="100.0" cy="100.0" r="2"/>' in page
