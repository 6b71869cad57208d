"""HAQ's agent: its budget, memory and learning."""

import numpy as np
import pytest
import torch

import ompq
from nets import TinyResNet, scenes, seeded
from ompq import lab
from ompq.errors import PlanError, ScoreError
from ompq.lab.rivals.reinforcement import (
    ReinforceConfig,
    _Agent,
    _Judge,
    _Ladder,
    _Steps,
)
from ompq.weight_ranges import search_weight

QUICK = ReinforceConfig(episodes=12, warmup=4)


@pytest.fixture(scope="module")
def made():
    model, samples = seeded(TinyResNet()), scenes(16)
    config = ompq.PlanConfig(choices=(2, 3, 4, 6), score="smallest_first")
    return ompq.plan(model, samples, "3.3bits", config), model, samples


def test_the_best_allocation_is_returned_within_the_budget(made):
    plan, model, samples = made
    told = []
    found = lab.reinforce(
        plan, model, samples, QUICK, progress=lambda *x: told.append(x)
    )
    again = lab.reinforce(plan, model, samples, QUICK)
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
            grid = search_weight(weight, plan.allocation[unit.name].weight)
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
        lab.reinforce(plan, TinyResNet(width=4), samples, QUICK)
    config = ompq.PlanConfig(activation_choices=(4, 8), score="smallest_first")
    both = ompq.plan(model, samples, "4bits", config)
    with pytest.raises(ScoreError, match="reinforce judges only weights"):
        lab.reinforce(both, model, samples, QUICK)
