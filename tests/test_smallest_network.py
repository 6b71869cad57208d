"""The smallest network that meets a goal."""

import json
from itertools import pairwise

import pytest
import torch

import ompq
from cli_tools import network_file, run, run_json
from nets import Chain, TinyResNet, scenes, seeded
from ompq import smallest_network
from ompq.errors import CheckpointError, GoalError
from ompq.reconstruction import block_loop


@pytest.fixture(scope="module")
def network():
    return seeded(TinyResNet())


MODEL, SAMPLES = seeded(Chain()), scenes(48)


BITS = ompq.PlanConfig(choices=(2, 3, 4, 8), score="weight_noise")


ROUNDED = ompq.SmallestConfig(reconstruct=None, rounded=20, tolerance=0.0)


LEARNED = ompq.SmallestConfig(
    reconstruct=ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2)),
    rounded=3,
    reconstructed=2,
)


@pytest.fixture(scope="module")
def large_plan():
    return ompq.plan(MODEL, SAMPLES, "32bits", BITS)


def divergence(network):
    judges = ompq.Samples.of(SAMPLES[24:])
    return ompq.evaluate(network, judges, reference=MODEL).divergence


def test_nothing_smaller_on_the_curve_keeps_to_the_goal(large_plan):
    # Every size of the curve, measured one by one.
    curve = {
        int(point.cost): divergence(
            ompq.finalize(
                ompq.quantize(MODEL, point.allocation, SAMPLES[:24]), SAMPLES[:24]
            )
        )
        for point in large_plan.pareto(points=12)
    }
    limit = sorted(curve.values())[len(curve) // 2] * 1.01
    found = ompq.find_smallest(
        large_plan, MODEL, SAMPLES, ompq.Goal(max_divergence=limit), ROUNDED
    )
    size = found.plan.totals["bytes"]
    assert divergence(found.network) <= limit
    assert size <= min(size for size, value in curve.items() if value <= limit)
    kept = [one for one in found.trials if one.kept]
    assert size == min(one.size_bytes for one in kept)
    assert all(
        one.evaluation.divergence > limit for one in found.trials if not one.kept
    )


def test_labels_and_a_metric_are_goals_too(large_plan):
    with torch.no_grad():
        targets = MODEL(SAMPLES).argmax(1)
    batches = [(SAMPLES, targets)]
    found = ompq.find_smallest(
        large_plan,
        MODEL,
        SAMPLES,
        ompq.Goal(max_drop=20),
        ROUNDED,
        batches=iter(batches),
    )
    result = ompq.evaluate(found.network, batches, reference=MODEL)
    assert 100 * result.drop <= 20
    # The same in another unit, by a function.
    goal = ompq.Goal(
        max_drop=0.2, metric=lambda out, given: (out.argmax(1) == given).double().mean()
    )
    same = ompq.find_smallest(
        large_plan, MODEL, SAMPLES, goal, ROUNDED, batches=batches
    )
    assert same.plan.allocation == found.plan.allocation


def test_a_stopped_search_continues_with_the_same_result(
    large_plan, tmp_path, monkeypatch
):
    goal = ompq.Goal(min_agreement=0.6)
    whole = ompq.find_smallest(large_plan, MODEL, SAMPLES, goal, LEARNED)
    assert [one.reconstructed for one in whole.trials] == [False] * 3 + [True] * 2
    measure, calls = smallest_network.evaluate, []

    def stopped(*args, **settings):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return measure(*args, **settings)

    monkeypatch.setattr(smallest_network, "evaluate", stopped)
    with pytest.raises(KeyboardInterrupt):
        ompq.find_smallest(large_plan, MODEL, SAMPLES, goal, LEARNED, folder=tmp_path)
    learn, learned = block_loop.learn_rounding, []
    monkeypatch.setattr(
        block_loop,
        "learn_rounding",
        lambda *a, **k: learned.append(a) or learn(*a, **k),
    )
    again = ompq.find_smallest(
        large_plan, MODEL, SAMPLES, goal, LEARNED, folder=tmp_path
    )
    assert (len(calls), len(learned)) == (6, 0)  # one more measurement, no learning
    assert [str(one) for one in again.trials] == [str(one) for one in whole.trials]
    assert torch.equal(again.network(SAMPLES), whole.network(SAMPLES))
    with pytest.raises(CheckpointError, match="belongs to another search"):
        ompq.find_smallest(
            large_plan, MODEL, SAMPLES[:40], goal, LEARNED, folder=tmp_path
        )
    kept = json.loads((tmp_path / "measured.json").read_text())
    kept["kept"] = {"rounding 1": {"top1": 1}}
    (tmp_path / "measured.json").write_text(json.dumps(kept))
    with pytest.raises(CheckpointError, match="rounding 1 lacks top5"):
        ompq.find_smallest(large_plan, MODEL, SAMPLES, goal, LEARNED, folder=tmp_path)


def test_a_search_resumes_on_the_images_it_began_with(large_plan, tmp_path):
    goal = ompq.Goal(max_drop=100)
    rows = torch.arange(48)
    targets = rows % 4
    given = {"config": ROUNDED, "folder": tmp_path}

    def search(rows, goal=goal, labels=targets):
        batches = [(SAMPLES[part], labels[part]) for part in rows.split(16)]
        return ompq.find_smallest(
            large_plan, MODEL, SAMPLES, goal, batches=batches, **given
        )

    first = search(rows)
    assert len(search(rows.flip(0)).trials) == len(first.trials)  # in another order
    permuted = targets.flip(0)
    assert permuted.sum() == targets.sum() and not permuted.equal(targets)
    with pytest.raises(CheckpointError, match="belongs to another search"):
        search(rows, labels=permuted)
    with pytest.raises(CheckpointError, match="belongs to another search"):
        search(rows[:40])
    with pytest.raises(CheckpointError, match="belongs to another search"):
        search(rows, ompq.Goal(max_drop=1.0, metric=lambda out, given: 1.0))


def test_metrics_of_one_name_are_told_apart_in_a_search(large_plan, tmp_path):
    batches = [(SAMPLES[:16], torch.arange(16) % 4)]
    metrics = [lambda out, given: 1.0, lambda out, given: 2.0, ompq.Perplexity(), None]

    def search(metric):
        goal = ompq.Goal(max_divergence=100.0, metric=metric)
        given = {"config": ROUNDED, "folder": tmp_path, "batches": batches}
        return ompq.find_smallest(large_plan, MODEL, SAMPLES, goal, **given)

    for before, after in pairwise(metrics):
        if isinstance(before, ompq.Perplexity):  # takes tokens, so none was measured
            continue
        search(before)
        with pytest.raises(CheckpointError, match="belongs to another search"):
            search(after)
        (tmp_path / "measured.json").unlink()
    search(None)
    with pytest.raises(CheckpointError, match="belongs to another search"):
        search(ompq.Perplexity())


def test_goals_that_cannot_be_met_or_measured(large_plan):
    config = ompq.SmallestConfig(reconstruct=None, rounded=2)
    with pytest.raises(
        GoalError, match=r"divergence at most 1e-12\): the largest gives"
    ):
        ompq.find_smallest(
            large_plan, MODEL, SAMPLES, ompq.Goal(max_divergence=1e-12), config
        )
    with pytest.raises(
        GoalError,
        match=r"max_drop=1 cannot be measured: give batches with class labels or a",
    ):
        ompq.find_smallest(large_plan, MODEL, SAMPLES, ompq.Goal(max_drop=1), config)
    one = seeded(Chain(classes=1))
    small = ompq.plan(one, SAMPLES, "32bits", ompq.PlanConfig(score="weight_noise"))
    with pytest.raises(GoalError, match="returns no logits of several classes"):
        ompq.find_smallest(small, one, SAMPLES, ompq.Goal(min_agreement=0.9), config)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "the goal is empty"),
        (
            {"min_agreement": 99},
            "'min_agreement' of Goal must be above 0 and at most 1",
        ),
        ({"max_divergence": 0}, "'max_divergence' of Goal must be above 0"),
    ],
)
def test_goals_must_make_sense(given, words):
    with pytest.raises(ValueError, match=words):
        ompq.Goal(**given)


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return (network_file(tmp_path_factory.mktemp("net")), "--data", "random")


def test_the_command_line_searches(net, tmp_path):
    words = ("quantize", *net, "--samples", "16", "--effort", "fast")
    shown = run(*words, "--min-agreement", "60%", "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "agreement at least 60.00%" in shown.stdout
    assert "rounded: " in shown.stdout
    data = json.loads((tmp_path / "out" / "result.json").read_text())
    kept = [one for one in data["search"]["trials"] if one["kept"]]
    assert data["plan"]["totals"]["bytes"] == min(one["bytes"] for one in kept)
    assert not (tmp_path / "out" / "search").exists()
    told = [one for one in data["sections"] if one["section"] == "Remark"]
    assert [one["text"] for one in told] == data["search"]["tried"]


def test_the_command_line_searches_with_labels(net, tmp_path):
    data = run_json(
        *(
            "quantize",
            *net,
            "--samples",
            "16",
            "--iterations",
            "2",
            "-o",
            tmp_path / "o",
        ),
        *("--eval-data", "random", "--limit", "32", "--max-drop", "5"),
    )
    assert 100 * data["evaluation"]["drop"] <= 5
    assert data["search"]["trials"][-1]["reconstructed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-drop", "1"], "--max-drop needs labelled data: give --eval-data"),
        (["--min-agreement", "most"], "--min-agreement most is not a fraction; write"),
        (
            ["--max-divergence", "1", "--budget", "70%"],
            "--budget and a goal (divergence at most 1) both decide the size",
        ),
        (
            ["--max-divergence", "1", "--views", "2"],
            "--views cannot be combined with a goal (divergence at most 1)",
        ),
    ],
)
def test_goals_on_the_command_line_must_make_sense(net, tmp_path, words, message):
    result = run("quantize", *net, "-o", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert message in result.stderr
