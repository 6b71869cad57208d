"""The schedule of a training run: the learning rate of each step."""

import math

from ompq.configs import TrainConfig


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then cosine decay.

    Example:
        >>> config = TrainConfig(learning_rate=1.0, warmup=0)
        >>> [round(learning_rate(config, step, 4), 3) for step in range(4)]
        [1.0, 0.854, 0.5, 0.146]
    """
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, steps - config.warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
