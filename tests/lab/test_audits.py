"""Audits against their definitions."""

import copy
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

import ompq
from nets import TinyMobileNet, TinyResNet, images, seeded
from ompq import lab
from ompq.errors import CheckpointError
from ompq.lab.audits import kendall, random_allocation, spearman
from ompq.measurement import Meter
from ompq.network.units import Choice
from ompq.samples import Samples


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_refinement_and_audit_run_on_cuda():
    here = seeded(TinyResNet())
    there = copy.deepcopy(here).cuda()
    plan = ompq.plan(here, images(16), "3bits")
    config = ompq.RefineConfig(count=2, by="reconstruct", iterations=5)
    refined = ompq.refine(plan, there, images(32).cuda(), config)
    assert len(refined.measured) == 2
    labels = torch.arange(8, device="cuda") % 5
    settings = lab.AuditConfig(allocations=3, null_scores=1, resamples=5)
    batches = [(images(8).cuda(), labels)]
    given = (there, images(16).cuda(), "3bits", images(8, seed=5).cuda(), settings)
    found = lab.audit(*given, batches=batches)
    for one in found.random:
        meter = Meter(here, Samples.of(images(16)), Samples.of(images(8, seed=5)))
        divergence = meter.divergence(meter.quantized(found.allocation(one)))
        assert one.divergence == pytest.approx(divergence, rel=0.05)


BUDGET = "3.5bits"


QUICK_AUDIT = lab.AuditConfig(
    allocations=8,
    null_scores=3,
    resamples=20,
    scores=("weight_noise", "smallest_first"),
    plan=ompq.PlanConfig(choices=(2, 3, 4, 8)),
)


@pytest.fixture(scope="module")
def audited():
    return seeded(TinyMobileNet())


@pytest.fixture(scope="module")
def found(audited):
    return lab.audit(audited, images(16), BUDGET, images(12, seed=5), QUICK_AUDIT)


def test_random_allocations_meet_the_budget_and_no_single_step_more_does(audited):
    config = ompq.PlanConfig(choices=(2, 3, 4, 8), pinned={"@first": 8})
    plan = ompq.plan(audited, images(), BUDGET, config)
    rng = np.random.default_rng(0)
    drawn = [random_allocation(plan, rng) for _ in range(5)]
    assert len({tuple(bits.values()) for bits in drawn}) > 1
    for bits in drawn:
        totals = replace(plan, allocation=bits).totals
        assert totals["average_bits"] <= 3.5
        assert bits[plan.graph.names[0]].weight == 8
        for rows in plan.graph.groups.values():
            names = [plan.graph.names[row] for row in rows]
            assert len({bits[name] for name in names}) == 1
            at = plan.choices.index(bits[names[0]])
            if at + 1 == len(plan.choices) or plan.graph.names[0] in names:
                continue
            more = {**bits, **dict.fromkeys(names, plan.choices[at + 1])}
            larger = replace(plan, allocation=ompq.Allocation(more)).totals
            assert larger["average_bits"] > 3.5


def test_divergence_is_that_of_the_quantized_network(audited, found):
    one = found.measured[3]
    quantized = ompq.quantize(audited, found.allocation(one), images(16))
    with torch.no_grad():
        p = audited(images(12, seed=5)).double().softmax(1)
        q = quantized(images(12, seed=5)).double().softmax(1)
    expected = float((p * (p / q).log()).sum(1).mean())
    assert one.divergence == pytest.approx(expected, rel=1e-5)


def test_spearman_is_the_correlation_of_ranks(audited, found):
    random = found.random
    assert len(random) == 8
    config = replace(QUICK_AUDIT.plan, score="weight_noise")
    plan = ompq.plan(audited, images(16), BUDGET, config)
    damage = [replace(plan, allocation=found.allocation(one)).damage for one in random]
    ranks = (
        np.argsort(np.argsort(damage)),
        np.argsort(np.argsort([one.divergence for one in random])),
    )
    entry = next(one for one in found.scores if one.name == "weight_noise")
    assert entry.predicted == pytest.approx(damage)
    assert entry.spearman.value == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert entry.spearman.low <= entry.spearman.value <= entry.spearman.high


def test_by_default_scores_are_audited_that_can_choose_activations_too(audited):
    plan = ompq.PlanConfig(choices=(2, 4, 8), activation_choices=(4, 8))
    config = lab.AuditConfig(allocations=1, resamples=5, orm_samples=0, plan=plan)
    found = lab.audit(audited, images(), BUDGET, images(4, seed=5), config)
    assert {one.name for one in found.scores} == set(lab.AuditConfig.scores)


def test_repr_says_how_much_was_measured(found):
    least = min(one.divergence for one in found.measured)
    counts = f"{len(found.measured)} allocations, {len(found.scores)} scores"
    assert repr(found) == (
        f"Audit({found.budget}: {counts}; least divergence {least:.4g})"
    )


def test_regret_is_against_the_best_seen(found):
    least = min(one.divergence for one in found.measured)
    assert found.best.divergence == least
    for entry in found.scores:
        own = next(one for one in found.measured if one.name == entry.name)
        assert entry.regret == pytest.approx(own.divergence / least - 1)
    names = [one.name for one in found.measured]
    assert "uniform W3A8" in names
    assert len(found.null_spearman) == 3
    assert all(-1 <= rho <= 1 for rho in found.null_spearman)


def test_a_score_of_a_single_allocation_has_no_correlation(audited):
    config = replace(QUICK_AUDIT, allocations=1, orm_samples=0)
    found = lab.audit(audited, images(), BUDGET, images(4, seed=5), config)
    assert found.scores[0].spearman is None
    assert found.orthogonality == {}
    json.dumps(found.to_json(), allow_nan=False)


def test_labels_and_other_allocations_are_measured_beside(audited):
    batches = [(images(6, seed=7), torch.arange(6) % 4)]
    wide = ompq.Allocation(
        dict.fromkeys(ompq.trace(audited, images(1)).names, ompq.Choice(8, 8))
    )

    def mean(output, _targets):
        return output.mean()

    config = replace(QUICK_AUDIT, allocations=1, orm_samples=0, metrics={"mean": mean})
    found = lab.audit(
        audited,
        images(),
        BUDGET,
        images(4, seed=5),
        config,
        others={"8 bits": wide},
        batches=batches,
    )
    last = found.measured[-1]
    assert last.name == "8 bits"
    quantized = ompq.quantize(audited, wide, images())
    assert last.top1 == ompq.evaluate(quantized, batches).top1
    with torch.no_grad():
        outputs = quantized(images(6, seed=7))
    assert last.metrics == {"mean": pytest.approx(float(outputs.mean()))}
    # It is over the budget, so that no regret is measured against it.
    assert not last.fits and all(one.fits for one in found.measured[:-1])
    assert last.divergence < found.best.divergence
    assert found.regret(last) < 0
    assert next(one.name for one, _ in found.named) == "8 bits"
    assert "8 bits " in str(found)


def test_an_audit_continues_from_its_checkpoint(audited, found, tmp_path):
    path = tmp_path / "audit.json"

    class StopError(Exception):
        pass

    def stop(done, _total, message):
        if "measuring" in message and done == 4:
            raise StopError

    given = (audited, images(16), BUDGET, images(12, seed=5), QUICK_AUDIT)
    with pytest.raises(StopError):
        lab.audit(*given, checkpoint=path, progress=stop)
    assert len(json.loads(path.read_text())["kept"]) == 4
    again = lab.audit(*given, checkpoint=path)
    assert again.measured == found.measured
    with pytest.raises(CheckpointError, match="belongs to another audit"):
        lab.audit(*given[:4], replace(QUICK_AUDIT, seed=1), checkpoint=path)
    with pytest.raises(CheckpointError, match="belongs to another audit"):
        lab.audit(*given[:3], images(12, seed=6), QUICK_AUDIT, checkpoint=path)
    path.write_text(path.read_text().replace('"bits"', '"wits"'))
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        lab.audit(*given, checkpoint=path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        lab.audit(*given, checkpoint=path)


def test_others_are_kept_in_the_order_of_the_network(audited):
    names = ompq.trace(audited, images(1)).names
    bits = {name: Choice((2, 3, 4)[at % 3], 8) for at, name in enumerate(names)}
    backwards = ompq.Allocation(dict(reversed(bits.items())))
    config = replace(QUICK_AUDIT, allocations=1, resamples=2, orm_samples=0)
    given = (audited, images(), BUDGET, images(4, seed=5), config)
    found = lab.audit(*given, others={"mine": backwards})
    assert dict(found.allocation(found.measured[-1])) == bits


def test_others_that_cannot_be_measured_or_told_apart_are_refused(audited):
    names = ompq.trace(audited, images(1)).names
    config = replace(QUICK_AUDIT, allocations=1)
    given = (audited, images(), BUDGET, images(4, seed=5), config)
    for bits, message in (
        (dict.fromkeys(names[1:], Choice(4, 8)), "mine: no bits for 1 of"),
        (dict.fromkeys(names, Choice(7, 8)), "mine: the allocation's bits for .* are"),
    ):
        with pytest.raises(ompq.errors.PlanError, match=message):
            lab.audit(*given, others={"mine": ompq.Allocation(bits)})
    wide = ompq.Allocation(dict.fromkeys(names, Choice(8, 8)))
    for name in ("weight_noise", "uniform W3A8", "random allocation 3"):
        with pytest.raises(ValueError, match=f"others.'{name}'. has the name of anoth"):
            lab.audit(*given, others={name: wide})


def test_the_papers_claim_is_tested_on_every_measure_of_quality(audited):
    batches = [(images(24, seed=7), torch.arange(24) % 4)]

    def margin(output, _targets):
        return output.max()

    config = replace(QUICK_AUDIT, metrics={"margin": margin}, resamples=50)
    given = (audited, images(16), BUDGET, images(12, seed=5), config)
    found = lab.audit(*given, batches=batches)
    orm = [one.orthogonality for one in found.random]
    measured = {
        "divergence": [one.divergence for one in found.random],
        "margin": [one.metrics["margin"] for one in found.random],
    }
    pairs = list(itertools.combinations(range(len(orm)), 2))
    for name, values in measured.items():
        ranks = [np.argsort(np.argsort(column)) for column in (orm, values)]
        spearman = np.corrcoef(*ranks)[0, 1]
        # Without ties tau is the share of pairs in one order less that in the other.
        signs = [np.sign((orm[i] - orm[j]) * (values[i] - values[j])) for i, j in pairs]
        one = found.orthogonality[name]
        assert one.spearman.value == pytest.approx(spearman)
        assert one.kendall.value == pytest.approx(np.mean(signs))
        assert one.kendall.low <= one.kendall.value <= one.kendall.high
        assert f"{name} by orthogonality: mean ORM of the" in str(found)
    differ = len({one.top1 for one in found.random}) > 1
    assert ("top-1" in found.orthogonality) == differ
    again = json.loads(json.dumps(found.to_json()))["orthogonality"]
    assert again["divergence"]["kendall"] == [
        *found.orthogonality["divergence"].kendall
    ]


def test_random_allocations_do_not_depend_on_the_granularity_of_a_score(audited, found):
    whole = ompq.scores.Orm(ompq.scores.OrmSettings(granularity="net"))
    config = replace(QUICK_AUDIT, scores=(whole, "weight_noise"), orm_samples=0)
    other = lab.audit(audited, images(16), BUDGET, images(12, seed=5), config)
    assert [one.bits for one in other.random] == [one.bits for one in found.random]
    (own,) = (m for m in other.measured if m.name == "orm(granularity='net')")
    assert len(set(own.bits)) == 1


def test_scores_tell_their_progress_and_are_computed_once(
    audited, tmp_path, monkeypatch
):
    calls, told = [], []
    noise = ompq.scores.WeightNoise.__call__

    def counted(self, given):
        calls.append(self)
        given.progress(1, 2, "halfway")
        return noise(self, given)

    monkeypatch.setattr(ompq.scores.WeightNoise, "__call__", counted)
    config = replace(QUICK_AUDIT, allocations=3, resamples=2, orm_samples=0)
    given = (audited, images(), BUDGET, images(4, seed=5), config)
    first = lab.audit(*given, cache=tmp_path, progress=lambda *step: told.append(step))
    assert (1, 2, "weight_noise: scoring the choices") in told
    again = lab.audit(*given, cache=tmp_path)
    assert len(calls) == 1
    assert again.measured == first.measured
    (kept,) = tmp_path.glob("WeightNoise-*.json")
    known = json.loads(kept.read_text())["kept"]["seconds"]
    (entry,) = (one for one in again.scores if one.name == "weight_noise")
    assert entry.seconds == known


def test_other_labels_and_metrics_belong_to_another_audit(audited, tmp_path):
    config = replace(QUICK_AUDIT, allocations=1, resamples=2, orm_samples=0)
    given = (audited, images(), BUDGET, images(4, seed=5))
    batches = [(images(6, seed=7), torch.arange(6) % 4)]
    more = {"checkpoint": tmp_path / "audit.json"}
    lab.audit(*given, config, batches=batches, **more)
    lab.audit(*given, config, batches=batches, **more)
    others = [(images(6, seed=7), torch.arange(6) % 3)]
    measuring = replace(config, metrics={"zero": lambda *_: 0.0})
    for settings, labelled in ((config, others), (config, []), (measuring, batches)):
        with pytest.raises(CheckpointError, match="belongs to another audit"):
            lab.audit(*given, settings, batches=labelled, **more)


def test_rank_correlations_are_those_of_scipy():
    generator = np.random.default_rng(0)
    one, other = generator.integers(0, 5, (2, 6, 12)).astype(float)  # with ties
    for ours, theirs in ((spearman, spearmanr), (kendall, kendalltau)):
        wanted = [theirs(a, b)[0] for a, b in zip(one, other, strict=True)]
        np.testing.assert_allclose(ours(one, other), wanted, rtol=1e-12)
