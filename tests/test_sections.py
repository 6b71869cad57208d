import json
import math

import pytest

from ompq.report import render_report
from ompq.report.sections import (
    Accuracy,
    BlockError,
    Histogram,
    audit_sections,
    sections_from_json,
    sections_to_json,
)
from reports import every_section, toy_audit, toy_plan


def test_sections_survive_json():
    sections = every_section()
    text = json.dumps(sections_to_json(sections))
    assert sections_from_json(json.loads(text)) == sections


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"section": "Chart"}, "section='Chart' is unknown; use Accuracy"),
        ({"name": "x"}, "section=None is unknown"),
        (
            {"section": "StageTime", "name": "x"},
            "an invalid StageTime section: .*seconds",
        ),
    ],
)
def test_what_is_no_section_is_named(entry, words):
    with pytest.raises(ValueError, match=words):
        sections_from_json([entry])


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="float: top1=80.0 .* must be ascending"):
        Accuracy("float", 80.0, 75.0, 84.0, 10)
    with pytest.raises(ValueError, match="b1: errors nan and 1.0 must be finite"):
        BlockError("b1", math.nan, 1.0)
    with pytest.raises(ValueError, match="w: 2 counts and 2 edges; .* one edge more"):
        Histogram("w", (0.0, 1.0), (1, 2))
    with pytest.raises(ValueError, match="w: the edges must be ascending"):
        Histogram("w", (0.0, 1.0, 1.0), (1, 2))


def test_an_audit_shows_its_scores_and_what_chance_gives():
    found = audit_sections(toy_audit())
    assert [type(one).__name__ for one in found] == ["AuditedScore", "Remark"]
    assert found[0].points == ((1.0, 0.3), (2.0, 0.1))
    assert found[0].spearman == (-1.0, -1.0, -1.0)
    assert found[1].text == ("random scores: Spearman 0.40 ± 0.10 (standard deviation)")
    assert sections_from_json(sections_to_json(found)) == found
    page = render_report(toy_plan(), found)
    assert "Audit of scores" in page
    assert '<circle cx="0.0" cy="0.0" r="2"/>' in page  # least predicted, worst true
    assert '<circle cx="100.0" cy="100.0" r="2"/>' in page
