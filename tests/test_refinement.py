"""Measuring finds better bits for a budget, and the smallest network for a goal."""

import json
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
import torch

import ompq
from nets import TinyMobileNet, TinyResNet, demo_network, images, seeded
from ompq import refinement
from ompq.errors import CheckpointError, PlanError, SampleError
from ompq.measurement import Meter
from ompq.models.builtin_networks import demo_data
from ompq.plans import refinement_summary

BRIEF = ompq.RefineConfig(count=5, scores=("weight_noise",))


def misleading(given):
    """Say that later units matter far more than they do."""
    powers = range(len(given.graph))
    return np.array([[10.0**p * 4.0**-c.weight for c in given.choices] for p in powers])


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


@pytest.fixture(scope="module")
def plan(network):
    config = ompq.PlanConfig(score=misleading)
    return ompq.plan(network, images(16), "3bits", config)


@pytest.fixture(scope="module")
def refined(network, plan):
    return ompq.refine(plan, network, images(32), BRIEF)


def test_a_misleading_score_is_corrected():
    network, samples = demo_network(), demo_data().train_images[:128]
    config = ompq.PlanConfig(score=misleading)
    plan = ompq.plan(network, samples[:32], "3bits", config)
    alone = replace(BRIEF, scores=(), count=10)
    for config, part in ((BRIEF, 0.2), (alone, 0.9)):
        found = ompq.refine(plan, network, samples, config)
        start, best = found.measured[0], min(m.divergence for m in found.measured)
        assert start.allocation == plan.allocation
        assert best < part * start.divergence
        assert found.totals["average_bits"] <= 3
        assert len(found.measured) == config.count


def test_optima_of_scores_are_measured_first(plan, refined):
    names = [one.name for one in refined.measured]
    assert names == ["misleading", "weight_noise", "refit 2", "refit 3", "refit 4"]
    assert refined.measured[0].allocation == plan.allocation


def divergences_of(network, allocation):
    # Measured another way: the last half of the samples judges, the first calibrates.
    halves = images(32)[:16], images(32)[16:]
    quantized = ompq.quantize(network, allocation, halves[0])
    with torch.no_grad():
        log_p = network.eval()(halves[1]).double().log_softmax(1)
        log_q = quantized(halves[1]).double().log_softmax(1)
    return [sum(p.exp() * (p - q)).item() for p, q in zip(log_p, log_q, strict=True)]


def test_errors_are_those_of_differences_between_samples(network, refined):
    first, *others = refined.measured
    assert first.error == 0
    start = divergences_of(network, first.allocation)
    assert first.divergence == pytest.approx(mean(start), rel=1e-5)
    for one in others:
        values = divergences_of(network, one.allocation)
        assert one.divergence == pytest.approx(mean(values), rel=1e-5)
        differences = [a - b for a, b in zip(values, start, strict=True)]
        assert one.error == pytest.approx(stdev(differences) / 16**0.5, rel=1e-3)


def test_bits_are_replaced_only_by_better_ones_beyond_chance(network, plan, refined):
    first, best = (
        refined.measured[0],
        min(refined.measured, key=lambda one: one.divergence),
    )
    errors = (first.divergence - best.divergence) / best.error
    others = [
        (first.divergence - one.divergence) / one.error for one in refined.measured[1:]
    ]
    assert errors > 0.5
    for margin in (0.0, 0.9 * errors, 1.1 * max(others)):
        config = replace(BRIEF, margin=margin)
        found = ompq.refine(plan, network, images(32), config)
        replaced = margin < errors
        assert found.allocation == (best if replaced else first).allocation
        # The correction of the score does not depend on it.
        assert np.array_equal(found.scores.damage, refined.scores.damage)
        chance = "the difference may be chance, so the bits stay"
        assert (chance in refinement_summary(found)) == (not replaced)
        assert f"at best ({best.name})" in refinement_summary(found)


def test_one_sample_proves_nothing(network, plan):
    config = replace(BRIEF, margin=1.0)
    found = ompq.refine(plan, network, images(2), config)
    assert found.allocation == plan.allocation
    first = found.measured[0].divergence
    for one in found.measured:
        assert one.error == pytest.approx(abs(first - one.divergence))


def test_uncertain_measurements_correct_less(plan, refined):
    def factors(error):
        measured = [replace(one, error=error) for one in refined.measured]
        chooser = refinement._Chooser(plan, BRIEF, {"misleading": plan.scores.damage})
        ratio = chooser.corrected(measured) / chooser._positive(measured)
        return ratio[:, 0] / ratio[:, 0].mean()

    spreads = [factors(error).std() for error in (0.0, 1e-4, 1e-2)]
    assert spreads[0] > 1.2 * spreads[1] > 1.2 * spreads[2]


def test_no_allocation_is_measured_twice(refined):
    assert len({m.allocation for m in refined.measured}) == len(refined.measured)


def test_one_measurement_is_the_plan_itself(network, plan):
    found = ompq.refine(plan, network, images(32), replace(BRIEF, count=1))
    assert found.allocation == plan.allocation
    assert len(found.measured) == 1


def test_patience_ends_the_search(network, plan):
    alone = replace(BRIEF, scores=())
    longer = ompq.refine(plan, network, images(32), alone)
    values = [one.divergence for one in longer.measured]
    first_worse = next(i for i in range(1, 5) if values[i] >= min(values[:i]))
    found = ompq.refine(plan, network, images(32), replace(alone, patience=1))
    assert len(found.measured) == first_worse + 1


def test_seconds_end_the_search(network, plan):
    found = ompq.refine(plan, network, images(32), replace(BRIEF, seconds=1e-9))
    assert len(found.measured) == 1


def test_the_same_count_gives_the_same_plan(network, plan, refined):
    again = ompq.refine(plan, network, images(32), BRIEF)
    assert again.hash == refined.hash


def test_an_interrupted_run_resumes_to_the_same_plan(
    network, plan, refined, tmp_path, monkeypatch
):
    path = tmp_path / "refinement.json"
    ompq.refine(plan, network, images(32), replace(BRIEF, count=3), checkpoint=path)
    measured = []
    original = Meter.quantized
    monkeypatch.setattr(
        Meter,
        "quantized",
        lambda self, bits: measured.append(bits) or original(self, bits),
    )
    told = []
    resumed = ompq.refine(
        plan,
        network,
        images(32),
        BRIEF,
        checkpoint=path,
        progress=lambda *step: told.append(step),
    )
    assert len(measured) == 2
    assert resumed.hash == refined.hash
    assert [(done, total) for done, total, _ in told] == [(n, 5) for n in range(1, 6)]
    assert told[-1][2].startswith("measuring allocations: best divergence ")


def test_scores_of_ones_own_resume_in_another_process(network, plan, tmp_path):
    def score(given):
        return [[4.0**-choice.weight for choice in given.choices]] * len(given.graph)

    path = tmp_path / "refinement.json"
    config = replace(BRIEF, count=2, scores=(score,))
    first = ompq.refine(plan, network, images(32), config, checkpoint=path)

    def again(*arguments):
        return score(*arguments)

    again.__qualname__ = score.__qualname__
    longer = replace(config, scores=(again,), patience=9)
    second = ompq.refine(plan, network, images(32), longer, checkpoint=path)
    assert second.measured == first.measured
    assert repr(score) not in path.read_text()


def test_checkpoints_of_other_runs_are_refused(network, plan, tmp_path):
    path = tmp_path / "refinement.json"
    one = replace(BRIEF, count=1)
    ompq.refine(plan, network, images(32), one, checkpoint=path)
    with pytest.raises(CheckpointError, match="belongs to another refinement"):
        ompq.refine(plan, network, images(34), one, checkpoint=path)
    good = json.loads(path.read_text())
    damaged = [{**good, "kept": value} for value in ([3], {"a": "b"}, {"a": ["b"]})]
    for text in ("{", "[]", "{}", *map(json.dumps, damaged)):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="cannot be resumed: "):
            ompq.refine(plan, network, images(32), one, checkpoint=path)


def test_measurements_are_saved_and_serve_another_budget(network, refined, tmp_path):
    path = tmp_path / "plan.json"
    refined.save(path)
    loaded = ompq.Plan.load(path)
    assert loaded.measured == refined.measured
    assert loaded.hash == refined.hash
    smaller = loaded.with_budget("2.9bits")
    assert smaller.totals["average_bits"] <= 2.9
    more = ompq.refine(smaller, network, images(32), replace(BRIEF, count=2))
    assert more.measured[:5] == refined.measured
    assert more.totals["average_bits"] <= 2.9
    assert more.score_name == refined.score_name == "misleading, refined"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"columns": [0]}, "columns must be 7 numbers below 6"),
        ({"columns": [0] * 6 + [99]}, "columns must be 7 numbers below 6"),
        ({"divergence": "small"}, "divergence must be a finite number"),
        ({"error": "small"}, "error must be a finite number"),
        ({"judge": None}, "judge must be text"),
        ({"name": 3}, "name must be text"),
    ],
)
def test_broken_measurements_are_refused(refined, tmp_path, changes, words):
    path = tmp_path / "plan.json"
    refined.save(path)
    data = json.loads(path.read_text())
    data["measured"][0] |= changes
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=words):
        ompq.Plan.load(path)


def test_reconstruction_may_be_what_is_measured(network, plan):
    config = replace(BRIEF, count=1, by="reconstruct", iterations=5)
    found = ompq.refine(plan, network, images(16), config)
    rounded = ompq.refine(plan, network, images(16), replace(config, by="round"))
    assert found.measured[0].judge != rounded.measured[0].judge
    assert found.measured[0].divergence != rounded.measured[0].divergence


def test_bits_stay_where_rounding_says_little(network, plan, refined, caplog):
    starts = refined.measured[:2]
    least = min(one.divergence for one in starts)
    wary = replace(BRIEF, trusted=0.99 * least)
    found = ompq.refine(plan, network, images(32), wary)
    assert found.allocation == plan.allocation
    assert found.measured == starts
    assert "the bits stay as planned: before reconstruction" in caplog.text
    assert f"diverges by {least:.3g} nats; above {0.99 * least:.3g} that" in caplog.text
    # Not where all that is measured was reconstructed, or rounding is trusted.
    reconstructed = replace(wary, by="reconstruct", iterations=1, count=3)
    assert len(ompq.refine(plan, network, images(32), reconstructed).measured) == 3
    always = replace(BRIEF, trusted=float("inf"))
    assert ompq.refine(plan, network, images(32), always).hash == refined.hash


def test_wrong_arguments_say_what_would_be_right(network, plan):
    with pytest.raises(ValueError, match="'margin' of RefineConfig must be at least 0"):
        ompq.RefineConfig(margin=-1.0)
    with pytest.raises(ValueError, match="'trusted' of RefineConfig must be above 0"):
        ompq.RefineConfig(trusted=0.0)
    with pytest.raises(ValueError, match="must be one of 'round', 'reconstruct'"):
        ompq.RefineConfig(by="guess")
    with pytest.raises(ValueError, match="'count' of RefineConfig must be at least 1"):
        ompq.RefineConfig(count=0)
    with pytest.raises(ValueError, match="'held_back' .* must be above 0 and below 1"):
        ompq.RefineConfig(held_back=1.0)
    with pytest.raises(SampleError, match="1 samples are too few to hold some back"):
        ompq.refine(plan, network, images(1))
    other = seeded(TinyMobileNet())
    with pytest.raises(PlanError, match="made for another network"):
        ompq.refine(plan, other, images(8))
