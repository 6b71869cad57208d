"""OneBitwidth: the widest network of a size, and its training from scratch."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import ompq
from nets import TinyResNet, scenes
from ompq.errors import InfeasibleBudgetError
from ompq.models.cifar import CifarResNet


def build(multiplier):
    return TinyResNet(width=max(1, round(8 * multiplier)))


def size(multiplier, samples, bits):
    config = ompq.PlanConfig(choices=(bits,), score="smallest_first")
    return ompq.plan(build(multiplier), samples, "32bits", config).totals["bytes"]


@pytest.mark.parametrize("bits", [2, 8])
def test_no_wider_network_fits(bits):
    samples = scenes(8)
    found = ompq.one_bitwidth(build, samples, "12KiB", bits)
    fitting = [k / 16 for k in range(1, 65) if size(k / 16, samples, bits) <= 12 * 1024]
    assert found.multiplier == max(fitting)
    assert found.plan.totals["bytes"] <= 12 * 1024
    assert {choice.weight for choice in found.plan.allocation.values()} == {bits}


def test_fewer_bits_are_more_channels():
    samples = scenes(8)
    two, eight = (ompq.one_bitwidth(build, samples, "12KiB", b) for b in (2, 8))
    assert two.multiplier > 1.5 * eight.multiplier


def test_pins_stay_and_norms_know_the_samples():
    samples = scenes(32)
    config = ompq.PlanConfig(pinned={"@first": 8})
    found = ompq.one_bitwidth(build, samples, "8KiB", 4, config, seed=3)
    assert found.plan.allocation["stem"].weight == 8
    with torch.no_grad():
        inputs = found.model.stem(samples)
    mean = inputs.mean((0, 2, 3))
    assert torch.allclose(found.model.norm.running_mean, mean, atol=1e-5)
    assert not found.model.training
    again = ompq.one_bitwidth(build, samples, "8KiB", 4, config, seed=3)
    assert torch.equal(again.model.stem.weight, found.model.stem.weight)


def test_a_budget_below_the_narrowest_is_refused():
    with pytest.raises(InfeasibleBudgetError):
        ompq.one_bitwidth(build, scenes(8), "100B")


def test_training_from_scratch_learns():
    samples = scenes(64)
    targets = (samples.mean((1, 2, 3)) > 0.5).long()
    found = ompq.one_bitwidth(build, samples, "4KiB")
    network = ompq.quantize(found.model, found.plan, samples)
    recipe = ompq.TRAIN_PROTOCOLS["one-bitwidth"]
    config = replace(recipe, epochs=6, learning_rate=0.05, freeze_norm_epoch=5)
    batches = [(samples[i::4], targets[i::4]) for i in range(4)]
    trained = ompq.train(network, batches, config, teacher=found.model)
    with torch.no_grad():
        before = F.cross_entropy(network(samples), targets)
        after = F.cross_entropy(trained(samples), targets)
    assert after < before


@pytest.mark.parametrize("width", [0.3125, 1.0, 1.4375])
def test_cifar_networks_of_other_widths_run(width):
    network = CifarResNet(8, width=width).eval()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert network.conv1.out_channels == round(16 * width)
