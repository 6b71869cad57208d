"""OneBitwidth: as many channels as a budget holds, all of one width."""

from dataclasses import replace

import pytest
import torch

import ompq
from nets import TinyResNet, scenes
from ompq import lab
from ompq.errors import BudgetError, InfeasibleBudgetError
from ompq.models.builtin_networks import CifarResNet, demo_data


def build(multiplier):
    return TinyResNet(width=max(1, round(8 * multiplier)))


def size(multiplier, samples, bits):
    config = ompq.PlanConfig(choices=(bits,), score="smallest_first")
    return ompq.plan(build(multiplier), samples, "32bits", config).totals["bytes"]


@pytest.mark.parametrize("bits", [2, 8])
def test_no_wider_network_fits(bits):
    samples = scenes(8)
    found = lab.one_bitwidth(build, samples, "12KiB", bits)
    fitting = [k / 16 for k in range(1, 65) if size(k / 16, samples, bits) <= 12 * 1024]
    assert found.multiplier == max(fitting)
    assert found.plan.totals["bytes"] <= 12 * 1024
    assert {choice.weight for choice in found.plan.allocation.values()} == {bits}


def test_fewer_bits_are_more_channels():
    samples = scenes(8)
    two, eight = (lab.one_bitwidth(build, samples, "12KiB", b) for b in (2, 8))
    assert two.multiplier > 1.5 * eight.multiplier


def test_pins_stay_and_norms_know_the_samples():
    samples = scenes(32)
    config = ompq.PlanConfig(pinned={"@first": 8})
    found = lab.one_bitwidth(build, samples, "8KiB", 4, config, seed=3)
    assert found.plan.allocation["stem"].weight == 8
    with torch.no_grad():
        inputs = found.model.stem(samples)
    mean = inputs.mean((0, 2, 3))
    assert torch.allclose(found.model.norm.running_mean, mean, atol=1e-5)
    assert not found.model.training
    again = lab.one_bitwidth(build, samples, "8KiB", 4, config, seed=3)
    assert torch.equal(again.model.stem.weight, found.model.stem.weight)


def test_a_budget_below_the_narrowest_is_refused():
    with pytest.raises(InfeasibleBudgetError):
        lab.one_bitwidth(build, scenes(8), "100B")


def test_per_cent_are_of_the_network_as_it_is():
    samples = scenes(8)
    whole = 4 * sum(p.numel() for p in build(1).parameters())  # bytes of floats
    config = ompq.PlanConfig(accounting="paper")
    found = lab.one_bitwidth(build, samples, "20%, 1MiB", 4, config)
    sizes = {
        k / 16: sum(p.numel() for p in build(k / 16).parameters()) / 2
        for k in range(1, 65)
    }
    assert found.multiplier == max(k for k in sizes if sizes[k] <= 0.2 * whole)
    assert found.plan.totals["bytes"] == sizes[found.multiplier]
    again = lab.one_bitwidth(build, samples, "99%, 1KiB", 4, config)
    assert again.multiplier == max(k for k in sizes if sizes[k] <= 1024)


def test_a_budget_of_average_bits_is_refused():
    with pytest.raises(BudgetError, match="average_bits=3 does not limit the number"):
        lab.one_bitwidth(build, scenes(8), "3bits")


def test_training_from_scratch_reads_digits():
    pytest.importorskip("accelerate")
    pytest.importorskip("sklearn")
    data = demo_data()
    images, test = (
        each.repeat(1, 3, 1, 1) for each in (data.train_images, data.test_images)
    )
    config = ompq.PlanConfig(activation_choices=(4,), pinned={"@first": 8, "@last": 8})
    found = lab.one_bitwidth(
        lambda m: CifarResNet(8, width=m), images[:64], "14KiB", 2, config
    )
    network = ompq.quantize(found.model, found.plan, images[:64])
    recipe = ompq.TrainConfig.from_protocol("one-bitwidth")
    assert recipe.freeze_norm_epoch == recipe.epochs  # frozen norms undo the training
    batches = list(zip(images.split(64), data.train_targets.split(64), strict=True))
    short = replace(recipe, epochs=2)
    trained = ompq.train(network, batches, short, teacher=found.model)
    with torch.no_grad():
        right = trained(test).argmax(1) == data.test_targets
    assert right.float().mean() > 0.8


@pytest.mark.parametrize("width", [0.3125, 1.0, 1.4375])
def test_cifar_networks_of_other_widths_run(width):
    network = CifarResNet(8, width=width).eval()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert network.conv1.out_channels == round(16 * width)
