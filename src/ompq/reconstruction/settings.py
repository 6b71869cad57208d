"""RoundingConfig: how the rounding of a block is learned, step by step."""

from dataclasses import dataclass

import torch
from torch import Tensor

_FASTEST = 0.005  # of a grid's step, in one step of learning
_FEWEST_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class RoundingConfig:
    """How the rounding of one block is learned.

    Attributes:
        iterations: Steps of Adam.
        batch_size: Samples a step, at most.
        step_elements: Elements of the block's output a step, about: where outputs are
            large, fewer samples will do, but never fewer than eight.
        travel: How far a weight may move in all, in steps of its grid; the learning
            rate is this over the iterations, so that fewer iterations still decide.
        activation_learning_rate: Of the steps of activations below 8 bits; 0 keeps
            them.
        scale_learning_rate: Of the logarithm of the weights' scales; 0 keeps them.
        bias_learning_rate: Of the biases; 0 keeps them.
        warmup: Fraction of the iterations before weights are driven to a side.
        tail: Fraction of the iterations, at the end, in which each weight is at its
            side and only scales, steps and biases still learn.
        drive: How much faster than by its learning rate a weight is driven to its side
            at the end. It grows from 0, apart from Adam, as weight decay does in AdamW:
            weights that matter much and weights that matter little decide alike.
        exponent: The middle is driven less the higher this is; after the warm-up, and
            at the end.
        drop: Probability with which an activation passes unrounded (QDrop); 0 is off.
        float_inputs: Probability with which an element of the block's input is the one
            that the float network has, while learning. The errors of the blocks before
            on these few samples are then not learned by heart.
        seed: Seed of the order of samples.
    """

    iterations: int = 1_000
    batch_size: int = 64
    step_elements: int = 1 << 19
    travel: float = 5.0
    activation_learning_rate: float = 4e-5
    scale_learning_rate: float = 2e-3
    bias_learning_rate: float = 3e-3
    warmup: float = 0.2
    tail: float = 0.1
    drive: float = 20.0
    exponent: tuple[float, float] = (8.0, 2.0)
    drop: float = 0.0
    float_inputs: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: A count or a fraction is out of its range.
        """
        for name in ("iterations", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup", "tail", "drop", "float_inputs"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to 1")


def first_decided(config: RoundingConfig) -> int:
    """Return the step from which on each weight is at its side."""
    return int(config.iterations * (1 - config.tail))


def schedule(config: RoundingConfig) -> Tensor:
    """Return what each step reads, (iterations, 6).

    The columns are the rates of weights, steps of activations, scales and biases, and
    exponent and size of what drives weights to their sides.
    """
    count = config.iterations
    step = torch.arange(count, dtype=torch.float32)
    left = 1 - step / count
    soft = (step < first_decided(config)).float()
    learning = max(1 - config.warmup - config.tail, 1 / count)
    phase = ((1 - left - config.warmup) / learning).clamp(0, 1)
    rate = min(config.travel / count, _FASTEST) * soft
    start, end = config.exponent
    columns = (
        rate,
        config.activation_learning_rate * left,
        config.scale_learning_rate * left,
        config.bias_learning_rate * left,
        start + (end - start) * phase,
        config.drive * phase * rate,
    )
    return torch.stack(columns, dim=1)


def sample_order(targets: Tensor, config: RoundingConfig) -> Tensor:
    """Return which samples each step sees, (iterations, batch size)."""
    count = len(targets)
    fitting = config.step_elements // targets[0].numel()
    size = min(max(fitting, _FEWEST_SAMPLES), config.batch_size, count)
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randint(count, (config.iterations, size), generator=generator)
