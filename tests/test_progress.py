import pytest

from ompq import progress as told, progress_bar
from ompq.progress import TimeLeft


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(told, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress_bar, "perf_counter", lambda: now[0])
    return now


def test_without_a_forecast_only_the_stage_itself_is_predicted(clock):
    left = TimeLeft()
    left.begin("learning")
    assert left.predict(0, 10) is None
    clock[0] = 4.0
    assert left.predict(2, 10) == 4.0 / 2 * 8


def test_later_stages_are_expected_to_take_what_was_forecast(clock):
    left = TimeLeft()
    left.expect({"rounding": 20.0, "learning": 100.0, "judging": 40.0})
    left.begin("rounding")
    assert left.predict(0, 4) == 160
    clock[0] = 10.0
    # A quarter took 10 seconds, so that three more take 30, and the rest what it may.
    assert left.predict(1, 4) == 30 + 140


def test_a_forecast_that_was_too_short_is_corrected_for_what_is_to_come(clock):
    left = TimeLeft()
    left.expect({"rounding": 20.0, "learning": 100.0, "judging": 40.0})
    left.begin("rounding")
    clock[0] = 40.0
    left.begin("learning")
    assert left.predict(0, None) == 2 * 140
    clock[0] = 1040.0
    left.begin("judging")  # no pace beyond three
    assert left.predict(0, None) == 3 * 40
    assert left.elapsed == 1040


def test_a_stage_that_takes_longer_than_forecast_never_has_less_than_no_time(clock):
    left = TimeLeft()
    left.expect({"rounding": 20.0, "judging": 5.0})
    left.begin("rounding")
    clock[0] = 90.0
    assert left.predict(0, None) == 5
