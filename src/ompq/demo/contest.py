"""A contest: the planned network beside networks with the same bits everywhere."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor, nn

from ompq.allocation.solving import Allocation
from ompq.evaluation import Evaluation, evaluate
from ompq.graph.units import Choice
from ompq.integer.settling import settle
from ompq.plans import Plan
from ompq.quantization.quantizing import quantize
from ompq.reconstruction.reconstructing import ReconstructConfig, reconstruct
from ompq.samples import Progress

# Called with a stage's name; gives what the stage tells its progress to.
Stage: TypeAlias = Callable[[str], AbstractContextManager[Progress]]
# Name of a test → its images (N, C, H, W) and targets (N,), in batches.
Tests: TypeAlias = Mapping[str, list[tuple[Tensor, Tensor]]]
Measured: TypeAlias = Mapping[str, Evaluation]

MIXED = "mixed"


@dataclass(frozen=True)
class Contender:
    """One of the networks that are compared.

    Attributes:
        name: ``mixed``, or for example ``uniform 2 bits``.
        plan: Its bits; those of a uniform one may exceed the budget.
        within: Whether it keeps to the budget.
        network: The quantized network, reconstructed and settled.
        rounded: How it did when its weights were rounded to nearest, by test.
        final: How it does after reconstruction, by test.
    """

    name: str
    plan: Plan
    within: bool
    network: nn.Module
    rounded: Measured
    final: Measured


@dataclass(frozen=True)
class Contest:
    """What all contenders share.

    Attributes:
        model: The float network.
        samples: Unlabelled inputs that calibrate, (N, C, H, W).
        tests: What they are measured by.
        config: How they are reconstructed.
    """

    model: nn.Module
    samples: Tensor
    tests: Tests
    config: ReconstructConfig

    def measured(self, network: nn.Module) -> Measured:
        """Return how a network does, beside the float one."""
        return {
            name: evaluate(network, batches, reference=self.model)
            for name, batches in self.tests.items()
        }


def contend(contest: Contest, plan: Plan, stage: Stage) -> tuple[Contender, ...]:
    """Quantize, reconstruct and measure the planned network and its uniform rivals.

    Args:
        contest: What all contenders share.
        plan: The plan.
        stage: Opened around each stage.

    Returns:
        The largest uniform width within the budget, the plan, and the next uniform
        width, which exceeds the budget, where there is one.
    """
    plans = line_up(plan)
    with stage("quantizing") as progress:
        rounded = {}
        for number, (name, one) in enumerate(plans.items()):
            progress(number, len(plans), f"quantizing: {name}")
            rounded[name] = quantize(contest.model, one, contest.samples)
    with stage("reconstructing") as progress:
        final = {
            name: reconstruct(
                network,
                contest.model,
                contest.samples,
                contest.config,
                progress=_part(progress, number, len(plans), name),
            )
            for number, (name, network) in enumerate(rounded.items())
        }
    with stage("evaluating") as progress:
        contenders = []
        for number, (name, one) in enumerate(plans.items()):
            progress(number, len(plans), f"evaluating: {name}")
            # What is measured is what its files compute.
            network = settle(final[name], contest.samples)
            nearest = settle(rounded[name], contest.samples)
            contenders.append(
                Contender(
                    name=name,
                    plan=one,
                    within=keeps(one),
                    network=network,
                    rounded=contest.measured(nearest),
                    final=contest.measured(network),
                )
            )
    return tuple(contenders)


def line_up(plan: Plan) -> dict[str, Plan]:
    """Return the contenders' bits by name: a uniform one, the plan, a larger uniform.

    Example:
        At 2.5 bits a weight: ``uniform 2 bits``, ``mixed``, ``uniform 3 bits``.
    """
    uniform = [_uniform(plan, choice) for choice in plan.choices]
    within = [one for one in uniform if keeps(one)]
    # Choices rise, so the last within the budget is the best, and the next the first
    # that is too large. The smallest choice for all is within any budget that is met.
    named = [within[-1], plan, *uniform[len(within) :][:1]]
    return {_name(one, plan): one for one in named}


def keeps(plan: Plan) -> bool:
    """Return whether a plan's bits keep to its budget."""
    limits = plan.budget.limits(plan.problem.costs)
    return all(plan.totals[cost] <= limit for cost, limit in limits.items())


def _uniform(plan: Plan, choice: Choice) -> Plan:
    return replace(plan, allocation=Allocation(dict.fromkeys(plan.graph.names, choice)))


def _name(one: Plan, plan: Plan) -> str:
    if one is plan:
        return MIXED
    return f"uniform {next(iter(one.allocation.values())).weight} bits"


def _part(progress: Progress, number: int, parts: int, name: str) -> Progress:
    """Return the progress of one part of several that take about as long."""

    def report(done: int, total: int | None, _message: str) -> None:
        whole = total or 1
        progress(number * whole + done, parts * whole, f"reconstructing {name}")

    return report
