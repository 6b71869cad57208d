"""Spans: weights as rows of channels, the ends of their ranges, and what grid has them.

A span is a lower end of at most 0 and an upper end of at least 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# What a scale is at least, so that nothing is divided by 0.
TINY = 1e-30


class Rule(NamedTuple):
    """What a kind means at some width.

    Attributes:
        bits: Width of a code.
        top: The highest code.
        zero: The zero of all channels; NaN where each has its own.
    """

    bits: int
    top: int
    zero: float

    @property
    def free(self) -> bool:
        """Whether each channel has its own zero."""
        return math.isnan(self.zero)


def elements_at_once(device: torch.device) -> int:
    """Return how many elements to work on: what a core caches, or what fills a GPU."""
    return 1 << 24 if device.type == "cuda" else 1 << 18


def channel_rows(weight: Tensor, channel_dim: int) -> Tensor:
    """Return the weight as float32 of shape (channels, weights of a channel).

    Raises:
        ValueError: The weight is empty.
    """
    if weight.numel() == 0:
        raise ValueError(f"weight of shape {tuple(weight.shape)} is empty")
    rows = weight.detach().movedim(channel_dim, 0)
    return rows.reshape(len(rows), -1).float()


def thinned(rows: Tensor, most: int) -> Tensor:
    """Return at most so many columns, evenly spread, of no common stride with rows."""
    width = rows.shape[1]
    if width <= most:
        return rows
    while math.gcd(most, width) > 1:
        most -= 1
    places = torch.arange(most, device=rows.device) * width // most
    return rows.index_select(1, places)


def row_span(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends, each (C, 1), of a range with all the values and 0 in it."""
    low = rows.amin(1, keepdim=True).clamp(max=0)
    return low, rows.amax(1, keepdim=True).clamp(min=0)


def even_span(low: Tensor, high: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the least range around another whose zero is the rule's, if it has one."""
    if rule.free:
        return low, high
    below, above = rule.zero, rule.top - rule.zero
    scale = torch.maximum(high / above, -low / below)
    return -below * scale, above * scale


def span_grid(low: Tensor, high: Tensor, top: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return scale and zero, a multiple of 0.5, of ranges that contain 0."""
    scale = ((high - low) / top).clamp(min=TINY)
    return scale, (low / scale * 2).round().abs() / 2
