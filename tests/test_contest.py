"""The planned network beside uniform ones."""

from contextlib import contextmanager

import pytest
import torch

import ompq
from nets import TinyMobileNet, scenes, seeded
from ompq.demo import Contest, contend, keeps, line_up

SAMPLES = scenes(32)
MODEL = seeded(TinyMobileNet())
QUICK = ompq.ReconstructConfig(rounding=ompq.RoundingConfig(iterations=2))


@pytest.fixture(scope="module")
def plan():
    return ompq.plan(MODEL, SAMPLES, "4.5bits")


def test_uniform_widths_enclose_the_budget(plan):
    contenders = line_up(plan)
    assert list(contenders) == ["uniform 4 bits", "mixed", "uniform 5 bits"]
    assert contenders["mixed"] is plan
    for width in (4, 5):
        bits = contenders[f"uniform {width} bits"].allocation.values()
        assert {choice.weight for choice in bits} == {width}
    assert [keeps(one) for one in contenders.values()] == [True, True, False]


def test_sizes_of_uniform_networks_are_those_of_their_bits(plan):
    weights = sum(parameter.numel() for parameter in weights_of(MODEL))
    for name, one in line_up(plan).items():
        if name != "mixed":
            width = int(name.split()[1])
            assert one.totals["weight_bits"] == width * weights


def weights_of(model):
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    return [m.weight for m in model.modules() if isinstance(m, kinds)]


def test_nothing_is_larger_than_a_budget_for_everything(plan):
    loose = plan.with_budget("8bits")
    assert list(line_up(loose)) == ["uniform 8 bits", "mixed"]
    assert line_up(loose)["uniform 8 bits"].allocation == loose.allocation


def test_contenders_are_measured_rounded_and_reconstructed(plan):
    seen, told = [], []

    @contextmanager
    def stage(name):
        seen.append(name)
        yield lambda done, total, message: told.append((name, done, total))

    targets = torch.zeros(len(SAMPLES), dtype=torch.long)
    contest = Contest(MODEL, SAMPLES, {"same": [(SAMPLES, targets)]}, QUICK)
    small, mixed, large = contend(contest, plan, stage)
    assert seen == ["quantizing", "reconstructing", "evaluating"]
    assert (small.within, mixed.within, large.within) == (True, True, False)
    for one in (small, mixed, large):
        assert ompq.quantization_of(one.network).allocation == one.plan.allocation
        # The float network's answers are what agreement is measured by.
        with torch.no_grad():
            same = one.network(SAMPLES).argmax(1) == MODEL(SAMPLES).argmax(1)
        assert one.final["same"].agreement == pytest.approx(same.double().mean())
    rounded = ompq.evaluate(
        ompq.finalize(ompq.quantize(MODEL, plan, SAMPLES), SAMPLES),
        contest.tests["same"],
        reference=MODEL,
    )
    assert mixed.rounded["same"].divergence == rounded.divergence
    # One bar for all three: it rises, and ends where it should.
    steps = [done for name, done, _ in told if name == "reconstructing"]
    assert steps == sorted(steps)
    assert told[-1][0] == "evaluating"
    assert (
        steps[-1] == [total for name, _, total in told if name == "reconstructing"][-1]
    )
