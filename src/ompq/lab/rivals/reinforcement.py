"""HAQ: an agent chooses bits by trial and error."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from math import inf, log2
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ompq.allocation.problem import Allocation, Columns, Program
from ompq.amounts import digits
from ompq.configs import QuantizeConfig
from ompq.measurement import Meter
from ompq.network.attention import with_layers
from ompq.network.graph import trace
from ompq.network.observation import copy_network
from ompq.network.units import Choice
from ompq.plans import Plan, check_plan
from ompq.progress import Progress
from ompq.samples import Samples, SamplesLike
from ompq.scores.weight_noise import check_weights_only, rounded_weights

# As HAQ's released code has them; the paper is silent.
_FOLLOWING = 0.01  # how far target networks follow in a step
_BASELINE = 0.95  # momentum of the mean reward, which is subtracted


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """How an agent learns to propose bits.

    Defaults are HAQ's, as published or, where the paper is silent, as released.

    Attributes:
        episodes: Number of allocations that it proposes.
        warmup: How many of these are random, at the beginning.
        hidden: Units of each of the two hidden layers of actor and critic.
        batch_size: Transitions per learning step.
        memory: Largest number of transitions remembered.
        noise: Standard deviation of an action after the warm-up.
        noise_decay: Factor on the noise after each episode.
    """

    episodes: int = 600
    warmup: int = 20
    hidden: int = 300
    actor_learning_rate: float = 1e-4
    critic_learning_rate: float = 1e-3
    batch_size: int = 64
    memory: int = 2000
    noise: float = 0.5
    noise_decay: float = 0.99
    seed: int = 0

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ValueError(f"episodes={self.episodes} must be at least 1")


def reinforce(
    plan: Plan,
    model: nn.Module,
    samples: SamplesLike,
    config: ReinforceConfig = ReinforceConfig(),
    *,
    progress: Progress | None = None,
) -> Plan:
    """Return a plan whose bits an agent found by trial and error (HAQ).

    Layer by layer the agent (DDPG) sees the layer's shape and size and its own last
    action, and proposes a width. If the budget is exceeded, layers lose bits in turn.
    The less the outputs diverge from the float network's, the higher the reward of an
    episode. The best allocation is returned.

    HAQ rewards accuracy after an epoch of fine-tuning, and rounds to k-means codebooks.
    Here weights are rounded to uniform grids without fine-tuning, so that an episode
    takes one pass over the samples. Activations stay float. The agent sees less of a
    layer: place, channels, weights, multiplications and kind, but neither the stride
    nor the size of the feature map. Actions from 0 to 1 are divided evenly among the
    widths. Rates and noise that the publication leaves out are those of its code.

    Args:
        plan: Budget, choices and pins.
        samples: A few hundred unlabelled inputs on which allocations are judged.
        progress: Called after each episode.

    Raises:
        PlanError: The plan was made for another network.
        ScoreError: There are several widths of activations to choose from.
    """
    check_plan(plan)
    check_weights_only(plan.choices, "reinforce")
    given = Samples.of(samples)
    plan.check_network(trace(model, given))
    judge = _Judge(with_layers(model, given), plan, given)
    limits = plan.budget.limits(plan.problem.costs)
    agent = _Agent(_Ladder(plan, plan.problem.program(limits)), config)
    # The plan's own bits are not a candidate: the agent's are returned.
    best, least = plan.allocation, inf
    for episode in range(config.episodes):
        steps, columns = agent.propose(episode)
        bits = plan.problem.allocation(columns)
        found = judge.divergence(bits)
        agent.learn(steps, -found)
        if found < least and plan.meets_budget(bits):
            best, least = bits, found
        if progress is not None:
            message = f"proposing bits: best divergence {digits(least)}"
            progress(episode + 1, config.episodes, message)
    worse = plan.problem.damage_of(best) - plan.damage
    return replace(plan, allocation=replace(best, gap=max(worse + plan.gap, 0.0)))


class _Judge:
    """Measures allocations; weights are rounded once for each width."""

    def __init__(self, model: nn.Module, plan: Plan, samples: Samples) -> None:
        self.model, self.units = model, plan.graph.units
        self.network = copy_network(model)
        self.meter = Meter(
            model, samples, samples, config=QuantizeConfig(output=plan.output)
        )
        self.rounded: dict[tuple[str, Choice], Tensor] = {}

    def divergence(self, bits: Allocation) -> float:
        with torch.no_grad():
            for unit in self.units:
                key = unit.name, bits[unit.name]
                if key not in self.rounded:
                    [rounded] = rounded_weights(self.model, unit, [bits[unit.name]])
                    self.rounded[key] = rounded
                weight = self.network.get_parameter(unit.parameter)
                weight.copy_(self.rounded[key])
        return self.meter.divergence(self.network)


class _Ladder:
    """The groups of units, and the columns each may get, from few bits to many."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.program = program
        firsts = [members[0] for members in plan.problem.members]
        self.units = [plan.graph.units[first] for first in firsts]
        self.columns = [
            sorted(np.flatnonzero(row), key=lambda at: plan.choices[at].weight)
            for row in program.allowed
        ]

    def place(self, group: int, action: float) -> int:
        """Return the step of a group's ladder for an action from 0 to 1."""
        return min(int(action * len(self.columns[group])), len(self.columns[group]) - 1)

    def within(self, places: Sequence[int]) -> tuple[list[int], Columns]:
        """Lower places in turn until the budget is met; return them and the columns."""
        low = list(places)
        turns = cycle(range(len(low)))
        while True:
            pairs = zip(self.columns, low, strict=True)
            columns = np.array([each[place] for each, place in pairs])
            fits = (self.program.used(columns) <= self.program.limits).all()
            if fits or not any(low):
                return low, columns
            low[next(at for at in turns if low[at] > 0)] -= 1

    def states(self) -> Tensor:
        """Return what the agent sees of each group, (groups, features), 0 to 1."""
        seen: list[list[float]] = []
        for place, unit in enumerate(self.units):
            inputs = unit.weights / unit.out_channels
            sizes = (unit.out_channels, inputs, unit.weights, unit.macs)
            kinds = [unit.kind == one for one in ("depthwise", "pointwise", "linear")]
            seen.append([place, *(log2(1 + size) for size in sizes), *kinds])
        rows = torch.tensor(seen, dtype=torch.float32)
        low, high = rows.amin(0), rows.amax(0)
        return (rows - low) / (high - low).clamp(min=1e-6)


class _Steps(NamedTuple):
    """One episode: what the agent saw and did, group by group."""

    states: Tensor  # (groups, features)
    actions: Tensor  # (groups, 1)

    def transitions(self, reward: float) -> list[tuple[Tensor, ...]]:
        """Return state, action, reward of the episode, next state, and whether last."""
        after = torch.cat([self.states[1:], torch.zeros_like(self.states[:1])])
        ends = torch.zeros(len(after), 1)
        ends[-1] = 1.0
        rewards = torch.full((len(after), 1), reward)
        return [*zip(*self, rewards, after, ends, strict=True)]


class _Agent:
    """Deep deterministic policy gradients (DDPG)."""

    def __init__(self, ladder: _Ladder, config: ReinforceConfig) -> None:
        self.ladder, self.config, self.seen = ladder, config, ladder.states()
        width = self.seen.shape[1] + 1  # and the last action
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            self.actor = _network(width, config.hidden, nn.Sigmoid())
            self.critic = _network(width + 1, config.hidden, nn.Identity())
        self.targets = copy.deepcopy((self.actor, self.critic))
        self.actor_steps, self.critic_steps = (
            torch.optim.Adam(network.parameters(), lr=rate)
            for network, rate in (
                (self.actor, config.actor_learning_rate),
                (self.critic, config.critic_learning_rate),
            )
        )
        self.generator = np.random.default_rng(config.seed)
        self.memory: list[tuple[Tensor, ...]] = []
        self.mean = 0.0

    def propose(self, episode: int) -> tuple[_Steps, Columns]:
        """Return an episode and the columns, within the budget, of its groups."""
        last, actions, states = 1.0, [], []
        for row in self.seen:
            states.append(torch.cat([row, row.new_tensor([last])]))
            last = self._action(states[-1], episode - self.config.warmup)
            actions.append(last)
        wanted = [self.ladder.place(at, one) for at, one in enumerate(actions)]
        places, columns = self.ladder.within(wanted)
        counts = [len(each) for each in self.ladder.columns]
        pairs = zip(places, counts, strict=True)
        done = [[(place + 0.5) / count] for place, count in pairs]
        return _Steps(torch.stack(states), torch.tensor(done)), columns

    def _action(self, state: Tensor, since_warmup: int) -> float:
        if since_warmup < 0:
            return float(self.generator.random())
        spread = self.config.noise * self.config.noise_decay**since_warmup
        with torch.no_grad():
            mean = self.actor(state).item()
        while not 0 <= (found := self.generator.normal(mean, spread)) <= 1:
            pass  # a truncated normal distribution
        return float(found)

    def learn(self, steps: _Steps, reward: float) -> None:
        """Keep an episode and, after the warm-up, learn from this and earlier ones."""
        mean = _BASELINE * self.mean + 0.05 * reward
        self.mean = mean if self.memory else reward
        self.memory += steps.transitions(reward)
        del self.memory[: -self.config.memory]
        if len(self.memory) >= self.config.warmup * len(steps.states):
            for _ in range(len(steps.states)):
                self._learn_once()

    def _learn_once(self) -> None:
        drawn = self.generator.integers(len(self.memory), size=self.config.batch_size)
        columns = zip(*(self.memory[at] for at in drawn), strict=True)
        state, action, reward, after, end = map(torch.stack, columns)
        actor, critic = self.targets
        with torch.no_grad():
            future = critic(torch.cat([after, actor(after)], 1))
            value = reward - self.mean + (1 - end) * future
        error = self.critic(torch.cat([state, action], 1)) - value
        _descend(self.critic_steps, error.square().mean())
        own = self.critic(torch.cat([state, self.actor(state)], 1))
        _descend(self.actor_steps, -own.mean())
        with torch.no_grad():
            followed = chain(self.actor.parameters(), self.critic.parameters())
            following = chain(actor.parameters(), critic.parameters())
            for old, new in zip(following, followed, strict=True):
                old.lerp_(new, _FOLLOWING)


def _network(inputs: int, hidden: int, end: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 1),
        end,
    )


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
