"""Stages: their names, progress and times."""

from contextlib import contextmanager

import pytest

from ompq import stages
from ompq.stages import Stages


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = [0.0]
    monkeypatch.setattr(stages, "perf_counter", lambda: now[0])
    return now


def test_times_of_one_name_add_up(clock):
    job = Stages()
    for seconds in (2, 3):
        with job.stage("reading") as progress:
            progress(1, 2, "half")
            clock[0] += seconds
    assert job.seconds == {"reading": 5}


def test_messages_can_name_the_stages(clock):
    shown = []

    @contextmanager
    def bar(name):
        yield lambda *told: shown.append((name, *told))

    job = Stages(bar)
    with job.named_by_messages("planning") as progress:
        clock[0] += 7  # before the first message: nobody's time
        progress(0, 2, "tracing")
        clock[0] += 1
        progress(1, 10, "tracing")
        progress(1, 2, "scoring")
        clock[0] += 4
        progress(2, 2, "done")
        clock[0] += 9
    assert job.seconds == {"tracing": 1, "scoring": 4}
    assert shown == [
        ("planning", 0, None, "tracing"),
        ("planning", 1, 10, "tracing"),
        ("planning", 0, None, "scoring"),
    ]


def test_a_stage_that_fails_has_no_time():
    job = Stages()
    with pytest.raises(ValueError, match="broken"), job.stage("reading"):
        raise ValueError("broken")
    assert job.seconds == {}
