"""OneBitwidth: more channels at one width, instead of a width for each layer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.bit_widths import FLOAT_BITS
from ompq.budgets import Budget
from ompq.configs import PlanConfig
from ompq.errors import BudgetError, InfeasibleBudgetError
from ompq.planning import plan
from ompq.plans import Plan
from ompq.samples import Samples, SamplesLike, run_batch

_STEPS_TO_ONE = 16  # multipliers are multiples of 1/16 ...
_MOST_STEPS = 64  # ... up to 4
_NORM_BATCH = 64  # images from which batch norms are estimated at a time


@dataclass(frozen=True, eq=False)
class Widened:
    """A network whose channels were multiplied, to be trained from scratch."""

    multiplier: float  # of the channels
    model: nn.Module  # the float network, with random weights
    plan: Plan  # the same bits for every unit that is not pinned


def one_bitwidth(
    build: Callable[[float], nn.Module],
    samples: SamplesLike,
    budget: Budget | str,
    bits: int = 4,
    config: PlanConfig = PlanConfig(),
    *,
    seed: int = 0,
) -> Widened:
    """Return the widest network within a budget that has the same bits everywhere.

    Instead of choosing bits layer by layer, the channels of all layers are multiplied
    by one number. The network has random weights: quantize and train it with
    ``TRAIN_PROTOCOLS["one-bitwidth"]``. How the published networks were rounded and
    trained is not fully known; that recipe has PACT's rounding and schedule. Multiples
    of 1/16 up to 4 are our choice of multipliers.

    Args:
        build: Multiplier of channels → network, for example
            ``lambda m: CifarResNet(20, width=m)``.
        samples: A few inputs; the norms' first statistics are taken from them.
        budget: A percentage refers to the network with a multiplier of 1.
        bits: Bits of all weights that are not pinned.
        config: Activation widths and pins; its choices and score are not used.
        seed: Seed of the random weights.

    Raises:
        BudgetError: The budget limits the average bits instead of the size.
        InfeasibleBudgetError: Even the narrowest network takes more.

    Example:
        At 2 bits a network of the same bytes has about twice the weights of one at 4
        bits, and so about 1.4 times the channels.
    """
    samples, budget = Samples.of(samples), Budget.of(budget)
    same = replace(config, choices=(bits,), score="smallest_first")
    if budget.average_bits is not None:
        raise BudgetError(
            f"average_bits={budget.average_bits:g} does not limit the number of "
            "channels; limit the size, as in '100KiB' or '10%'"
        )

    def tried(steps: int, budget: Budget) -> Widened:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = build(steps / _STEPS_TO_ONE)
        _calibrate_norms(model, samples)
        return Widened(steps / _STEPS_TO_ONE, model, plan(model, samples, budget, same))

    if budget.percent is not None:
        unlimited = Budget(average_bits=FLOAT_BITS)
        sizes = Budget(
            percent=budget.percent, size_mib=budget.size_mib, size_mb=budget.size_mb
        )
        costs = tried(_STEPS_TO_ONE, unlimited).plan.problem.costs
        size_mib = sizes.limits(costs)["bytes"] / 2**20
        budget = replace(budget, percent=None, size_mb=None, size_mib=size_mib)
    best, too_many = tried(1, budget), _MOST_STEPS + 1
    fits = 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        try:
            best, fits = tried(middle, budget), middle
        except InfeasibleBudgetError:
            too_many = middle
    return best


@torch.no_grad()
def _calibrate_norms(model: nn.Module, samples: Samples) -> None:
    """Set the statistics of a new network's norms from samples, in place."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean of all batches
    model.train()
    for batch in samples.batches(_NORM_BATCH):
        run_batch(model, batch)
    model.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
