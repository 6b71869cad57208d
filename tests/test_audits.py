import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import ompq
from nets import TinyMobileNet, images, seeded
from ompq.errors import CheckpointError
from ompq.measurement.audits import random_allocation

BUDGET = "3.5bits"
QUICK = ompq.AuditConfig(
    allocations=8,
    null_scores=3,
    resamples=20,
    scores=("weight_noise", "smallest_first"),
    plan=ompq.PlanConfig(choices=(2, 3, 4, 8)),
)


@pytest.fixture(scope="module")
def network():
    return seeded(TinyMobileNet())


@pytest.fixture(scope="module")
def found(network):
    return ompq.audit(network, images(16), BUDGET, images(12, seed=5), QUICK)


def test_random_allocations_meet_the_budget_and_no_single_step_more_does(network):
    config = ompq.PlanConfig(choices=(2, 3, 4, 8), pinned={"@first": 8})
    plan = ompq.plan(network, images(), BUDGET, config)
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


def test_divergence_is_that_of_the_quantized_network(network, found):
    one = found.measured[3]
    quantized = ompq.quantize(network, found.allocation(one), images(16))
    with torch.no_grad():
        p = network(images(12, seed=5)).double().softmax(1)
        q = quantized(images(12, seed=5)).double().softmax(1)
    expected = float((p * (p / q).log()).sum(1).mean())
    assert one.divergence == pytest.approx(expected, rel=1e-5)


def test_spearman_is_the_correlation_of_ranks(network, found):
    random = found.random
    assert len(random) == 8
    config = replace(QUICK.plan, score="weight_noise")
    plan = ompq.plan(network, images(16), BUDGET, config)
    damage = [replace(plan, allocation=found.allocation(one)).damage for one in random]
    ranks = (
        np.argsort(np.argsort(damage)),
        np.argsort(np.argsort([one.divergence for one in random])),
    )
    entry = next(one for one in found.scores if one.name == "weight_noise")
    assert entry.predicted == pytest.approx(damage)
    assert entry.spearman.value == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert entry.spearman.low <= entry.spearman.value <= entry.spearman.high


def test_by_default_scores_are_audited_that_can_choose_activations_too(network):
    plan = ompq.PlanConfig(choices=(2, 4, 8), activation_choices=(4, 8))
    config = ompq.AuditConfig(allocations=1, resamples=5, orm_samples=0, plan=plan)
    found = ompq.audit(network, images(), BUDGET, images(4, seed=5), config)
    assert {one.name for one in found.scores} == set(ompq.AuditConfig.scores)


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


def test_a_score_that_predicts_the_same_for_all_has_no_correlation(network):
    def flat(given):
        return np.zeros((len(given.graph), len(given.choices)))

    config = replace(QUICK, scores=(flat,), allocations=3, orm_samples=0)
    found = ompq.audit(network, images(), BUDGET, images(4, seed=5), config)
    assert found.scores[0].spearman is None
    assert found.orthogonality is None
    assert "flat" in str(found)
    json.dumps(found.to_json(), allow_nan=False)


def test_labels_and_other_allocations_are_measured_beside(network):
    batches = [(images(6, seed=7), torch.arange(6) % 4)]
    wide = ompq.Allocation(
        dict.fromkeys(ompq.trace(network, images(1)).names, ompq.Choice(8, 8))
    )
    config = replace(QUICK, allocations=1, orm_samples=0)
    found = ompq.audit(
        network,
        images(),
        BUDGET,
        images(4, seed=5),
        config,
        others={"8 bits": wide},
        batches=batches,
    )
    last = found.measured[-1]
    assert last.name == "8 bits"
    quantized = ompq.quantize(network, wide, images())
    assert last.top1 == ompq.evaluate(quantized, batches).top1


def test_an_audit_continues_from_its_checkpoint(network, found, tmp_path):
    path = tmp_path / "audit.json"

    class StopError(Exception):
        pass

    def stop(done, _total, message):
        if "measuring" in message and done == 4:
            raise StopError

    given = (network, images(16), BUDGET, images(12, seed=5), QUICK)
    with pytest.raises(StopError):
        ompq.audit(*given, checkpoint=path, progress=stop)
    assert len(json.loads(path.read_text())["measured"]) == 4
    again = ompq.audit(*given, checkpoint=path)
    assert again.measured == found.measured
    with pytest.raises(CheckpointError, match="belongs to another audit"):
        ompq.audit(*given[:4], replace(QUICK, seed=1), checkpoint=path)
    with pytest.raises(CheckpointError, match="belongs to another audit"):
        ompq.audit(*given[:3], images(12, seed=6), QUICK, checkpoint=path)
    path.write_text(path.read_text().replace('"bits"', '"wits"'))
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        ompq.audit(*given, checkpoint=path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        ompq.audit(*given, checkpoint=path)
