"""One width everywhere, and as many channels as the budget takes (OneBitwidth)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ompq.allocation.solver import Budget
from ompq.errors import InfeasibleBudgetError
from ompq.plans import Plan, PlanConfig, plan
from ompq.samples import Samples, SamplesLike, call, model_device, to_device

_STEPS = 16  # multipliers are multiples of 1/16 ...
_MOST = 64  # ... up to 4
_BATCH = 64


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
    """Return the widest network that takes a budget with the same bits everywhere.

    Instead of choosing bits layer by layer, the number of channels of all layers is
    multiplied by one number. The network has random weights: quantize and train it with
    ``TRAIN_PROTOCOLS["one-bitwidth"]``. How the published networks were rounded and
    trained is not known in full.

    Args:
        build: Multiplier of channels → network, for example
            ``lambda m: CifarResNet(20, width=m)``.
        samples: A few inputs; the norms' first statistics are taken from them.
        bits: Width of all weights that are not pinned.
        config: Activation widths and pins; its choices and score are not used.
        seed: Of the weights.

    Raises:
        InfeasibleBudgetError: Even the narrowest network takes more.

    Example:
        At 2 bits a network of the same bytes has about twice the weights of one at 4
        bits, and so about 1.4 times the channels.
    """
    samples, budget = Samples.of(samples), Budget.of(budget)
    same = replace(config, choices=(bits,), score="smallest_first")

    def tried(steps: int) -> Widened:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = build(steps / _STEPS)
        _calibrate_norms(model, samples)
        return Widened(steps / _STEPS, model, plan(model, samples, budget, same))

    best, too_many = tried(1), _MOST + 1
    fits = 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        try:
            best, fits = tried(middle), middle
        except InfeasibleBudgetError:
            too_many = middle
    return best


@torch.no_grad()
def _calibrate_norms(model: nn.Module, samples: Samples) -> None:
    """Give the norms of a new network, in place, the statistics of some samples."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean of all batches
    model.train()
    for batch in samples.batches(_BATCH):
        call(model, to_device(batch, model_device(model)))
    model.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
