"""HAQ's agent: its budget, memory and learning; OneBitwidth's channels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import ompq
from nets import TinyResNet, scenes, seeded
from ompq.errors import BudgetError, InfeasibleBudgetError, PlanError, ScoreError
from ompq.lab.rivals import ReinforceConfig, _Agent, _Judge, _Ladder, _Steps
from ompq.models.builtin_networks import CifarResNet, demo_data

QUICK = ReinforceConfig(episodes=12, warmup=4)


@pytest.fixture(scope="module")
def made():
    model, samples = seeded(TinyResNet()), scenes(16)
    config = ompq.PlanConfig(choices=(2, 3, 4, 6), score="smallest_first")
    return ompq.plan(model, samples, "3.3bits", config), model, samples


def test_the_best_allocation_is_returned_within_the_budget(made):
    plan, model, samples = made
    told = []
    found = ompq.reinforce(
        plan, model, samples, QUICK, progress=lambda *x: told.append(x)
    )
    again = ompq.reinforce(plan, model, samples, QUICK)
    assert found.allocation == again.allocation
    assert found.totals["average_bits"] <= 3.3
    judge = _Judge(model, plan, ompq.Samples.of(samples))
    least = judge.divergence(found.allocation)
    assert least <= judge.divergence(plan.allocation)
    assert [done for done, _, _ in told] == list(range(1, 13))
    assert told[-1][2] == f"proposing bits: best divergence {least:.3g}"
    assert found.gap >= 0


def test_the_judge_rounds_weights_and_nothing_else(made):
    plan, model, samples = made
    judge = _Judge(model, plan, ompq.Samples.of(samples))
    found = judge.divergence(plan.allocation)
    other = seeded(TinyResNet())
    with torch.no_grad():
        for unit in plan.graph.units:
            weight = other.get_parameter(unit.parameter)
            grid = ompq.weight_ranges.search_weight(
                weight, plan.allocation[unit.name].weight
            )
            weight.copy_(grid.fake(weight))
        p, q = model(samples).softmax(1).double(), other(samples).softmax(1).double()
    expected = (p * (p / q).log()).sum(1).mean()
    assert found == pytest.approx(expected.item(), rel=1e-4)


def test_layers_lose_bits_in_turn_until_the_budget_is_met(made):
    plan, _, _ = made
    program = plan.problem.program(plan.budget.limits(plan.problem.costs))
    ladder = _Ladder(plan, program)
    most = [len(each) - 1 for each in ladder.columns]
    places, columns = ladder.within(most)
    assert (program.used(columns) <= program.limits).all()
    assert all(0 <= place <= top for place, top in zip(places, most, strict=True))
    gaps = [top - place for place, top in zip(places, most, strict=True)]
    assert max(gaps) - min(gaps) <= 1
    assert ladder.within([0] * len(most))[0] == [0] * len(most)
    assert ladder.place(0, 0.0) == 0 and ladder.place(0, 1.0) == most[0]


def test_every_step_of_an_episode_has_its_reward():
    steps = _Steps(torch.eye(3), torch.full((3, 1), 0.5))
    states, _, rewards, after, ends = (
        torch.stack(column) for column in zip(*steps.transitions(-2.0), strict=True)
    )
    assert rewards.flatten().tolist() == [-2.0] * 3
    assert ends.flatten().tolist() == [0.0, 0.0, 1.0]
    assert torch.equal(after[:2], states[1:])


def test_the_agent_learns_what_is_rewarded(made):
    plan, _, _ = made
    loose = plan.with_budget("6bits")
    program = loose.problem.program(loose.budget.limits(loose.problem.costs))
    agent = _Agent(_Ladder(loose, program), ReinforceConfig(warmup=10))
    rewards = []
    for episode in range(40):
        steps, _ = agent.propose(episode)
        rewards.append(float(steps.actions.mean()))  # the more bits the better
        agent.learn(steps, rewards[-1])
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.05


def test_what_cannot_be_searched_is_refused(made):
    plan, model, samples = made
    with pytest.raises(ValueError, match="episodes=0 must be at least 1"):
        ReinforceConfig(episodes=0)
    with pytest.raises(PlanError, match="the plan was made for another network"):
        ompq.reinforce(plan, TinyResNet(width=4), samples, QUICK)
    config = ompq.PlanConfig(activation_choices=(4, 8), score="smallest_first")
    both = ompq.plan(model, samples, "4bits", config)
    with pytest.raises(ScoreError, match="reinforce judges only weights"):
        ompq.reinforce(both, model, samples, QUICK)


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


def test_per_cent_are_of_the_network_as_it_is():
    samples = scenes(8)
    whole = 4 * sum(p.numel() for p in build(1).parameters())  # bytes of floats
    config = ompq.PlanConfig(accounting="paper")
    found = ompq.one_bitwidth(build, samples, "20%, 1MiB", 4, config)
    sizes = {
        k / 16: sum(p.numel() for p in build(k / 16).parameters()) / 2
        for k in range(1, 65)
    }
    assert found.multiplier == max(k for k in sizes if sizes[k] <= 0.2 * whole)
    assert found.plan.totals["bytes"] == sizes[found.multiplier]
    again = ompq.one_bitwidth(build, samples, "99%, 1KiB", 4, config)
    assert again.multiplier == max(k for k in sizes if sizes[k] <= 1024)


def test_a_budget_of_average_bits_is_refused():
    with pytest.raises(BudgetError, match="average_bits=3 does not limit the number"):
        ompq.one_bitwidth(build, scenes(8), "3bits")


def test_training_from_scratch_reads_digits():
    pytest.importorskip("accelerate")
    pytest.importorskip("sklearn")
    data = demo_data()
    images, test = (
        each.repeat(1, 3, 1, 1) for each in (data.train_images, data.test_images)
    )
    config = ompq.PlanConfig(activation_choices=(4,), pinned={"@first": 8, "@last": 8})
    found = ompq.one_bitwidth(
        lambda m: CifarResNet(8, width=m), images[:64], "14KiB", 2, config
    )
    network = ompq.quantize(found.model, found.plan, images[:64])
    recipe = ompq.TRAIN_PROTOCOLS["one-bitwidth"]
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
