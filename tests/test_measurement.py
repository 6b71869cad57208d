"""Measured allocations, and scores that measure."""

import pytest
import torch

import ompq
from nets import Chain, images, seeded, tokens
from ompq.errors import SampleError
from ompq.measurement import Meter, split
from ompq.samples import Samples


def test_samples_are_split_in_order_over_shapes():
    runs = Samples.of([torch.arange(6.0).reshape(6, 1), torch.zeros(2, 2)])
    first, last = split(runs, 0.5)
    assert [run[:, 0].tolist() for run in first.runs] == [[0, 1, 2, 3]]
    assert [run[:, 0].tolist() for run in last.runs] == [[4, 5], [0, 0]]


def test_what_all_samples_share_is_not_split():
    mask = torch.arange(3.0)
    first, last = split(Samples.of((torch.zeros(8, 3), mask)), 0.25)
    assert [len(part) for part in (first, last)] == [6, 2]
    assert all(torch.equal(part.runs[0][1], mask) for part in (first, last))
    with pytest.raises(SampleError, match="1 samples are too few to hold some back"):
        split(Samples.of(torch.zeros(1, 3)), 0.5)


def test_judges_differ_by_what_divergences_depend_on():
    model, samples = seeded(Chain()), Samples.of(images(4))
    first = Meter(model, samples, samples)
    others = [
        Meter(model, samples, samples, iterations=3),
        Meter(model, samples.first(3), samples),
        Meter(model, samples, samples.first(3)),
        Meter(seeded(Chain(), 1), samples, samples),
        Meter(model, samples, samples, config=ompq.QuantizeConfig(group_size=32)),
    ]
    assert Meter(model, samples, samples).judge == first.judge
    assert len({first.judge, *(other.judge for other in others)}) == 6
    bits = dict.fromkeys(ompq.trace(model, samples).names, ompq.Choice(32, 32))
    unchanged = first.quantized(ompq.Allocation(bits))
    assert first.divergence(unchanged) == pytest.approx(0, abs=1e-6)


def test_networks_are_measured_with_the_groups_of_their_plan():
    model, samples = tokens(), Samples.of(images(4))
    bits = dict.fromkeys(ompq.trace(model, samples).names, ompq.Choice(3, 32))
    made = Meter(
        model, samples, samples, config=ompq.QuantizeConfig(group_size=32)
    ).quantized(ompq.Allocation(bits))
    assert made.up.group_size == 32 and made.up.weight_scale.shape == (72, 2)
